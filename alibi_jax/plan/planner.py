"""Whether a run fits a pod, what it costs and how best to split it, from any machine.

The real training and evaluation steps are compiled for the real devices, none of which need be
here. What the compiler says is told as that, and what is estimated as that.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from alibi_jax.config import Config, ConfigError, Mesh
from alibi_jax.data.tokenizers import ByteTokenizer
from alibi_jax.distributed import sharding
from alibi_jax.flops import step_flops
from alibi_jax.plan.costs import Roofline, roofline, step_bytes
from alibi_jax.plan.program import Program, compile_step
from alibi_jax.plan.report import ranking, report
from alibi_jax.plan.targets import Target, open_target
from alibi_jax.training.step import check_fits

# Meshes that a search compiles at most: each takes up to a minute on two cores.
_TRIED = 7


def plan(config: Config, asked: str) -> int:
    """Prints the plan of a run for "v5e:16x16", or for "v5e:16x16,search" those of several meshes.

    Returns the exit code: 1 where the run does not fit. Raises ConfigError where the target or the
    configuration can't be meant.
    """
    text, _, option = asked.partition(",")
    if option not in ("", "search"):
        raise ConfigError(f"--plan={asked}: after the devices only ,search can follow")
    config.check()
    target = open_target(text)
    vocab_size = vocabulary_of(config)
    if option:
        return _search(config, vocab_size, target)
    program = _compiled(config, vocab_size, target)
    estimate = estimate_of(config, vocab_size, target, program)
    print(report(config, vocab_size, target, program, estimate), flush=True)
    if fits(program, target):
        return 0
    for change, remedied in remedies(config, program):
        print(f"trying {change}", flush=True)
        try:
            tried = _compiled(remedied, vocab_size, target)
        except ValueError as error:
            print(f"  not on this mesh: {error}", flush=True)
            continue
        if fits(tried, target):
            print(f"it fits with {change}:\n", flush=True)
            estimate = estimate_of(remedied, vocab_size, target, tried)
            print(report(remedied, vocab_size, target, tried, estimate), flush=True)
            return 1
    print("nothing tried makes it fit: take more devices, or ones with more memory", flush=True)
    return 1


def vocabulary_of(config: Config) -> int:
    """Tokens; of words, which only the text has, as many as `data.vocab_size` says."""
    return ByteTokenizer.vocab_size if config.data.tokenizer == "bytes" else config.data.vocab_size


def fits(program: Program, target: Target) -> bool:
    """Whether the compiler took it, and arguments and temporaries are within the memory."""
    room = target.device is None or program.total <= target.device.memory
    return not program.refusal and room


def estimate_of(
    config: Config, vocab_size: int, target: Target, program: Program
) -> Roofline | None:
    """How long a step takes, where it is known what the devices can do and the step fits."""
    if target.device is None or program.refusal:
        return None
    mesh = sharding.make_mesh(program.mesh, devices=target.devices)
    return roofline(
        step_flops(config, vocab_size),
        step_bytes(config, vocab_size, program.num_params, program.optimizer, mesh),
        list(program.exchanges),
        len(target.devices),
        target.device,
    )


def remedies(config: Config, program: Program) -> Iterator[tuple[str, Config]]:
    """What could make a run fit, as flags and as a configuration, from the cheapest on.

    To compute layers again; to take fewer rows at a time; to split parameters over more devices.
    """
    data, fsdp = program.mesh.data, program.mesh.fsdp
    again = {} if config.model.remat == "full" else {"model.remat": "full"}
    rows = config.train.batch_size // (data * fsdp)
    fewer: list[dict[str, Any]] = [
        {"train.accumulation": n}
        for n in range(config.train.accumulation + 1, rows + 1)
        if rows % n == 0
    ]
    meshes: list[dict[str, Any]] = [{}]
    if data > 1:
        meshes.append({"mesh.data": 1, "mesh.fsdp": data * fsdp})
    for mesh in meshes:
        for values in ({}, *fewer):
            flags = mesh | again | values
            if flags:
                text = " ".join(f"--config.{key}={value}" for key, value in flags.items())
                yield text, _with(config, flags)


def _with(config: Config, values: dict[str, Any]) -> Config:
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for key, value in values.items():
        part, name = key.split(".")
        parts[part] = dataclasses.replace(parts[part], **{name: value})
    return Config(**parts)


def _compiled(config: Config, vocab_size: int, target: Target, evaluation: bool = True) -> Program:
    mesh = sharding.make_mesh(config.mesh, devices=target.devices)
    return compile_step(config, vocab_size, mesh, evaluation=evaluation)


def meshes_for(config: Config, target: Target) -> list[Mesh]:
    """Meshes worth a look, the likeliest first: all that the sizes divide by, less the far-fetched.

    Parameters split over some devices and rows over the others come first; then heads over two or
    more, for which each layer waits; a sequence is split only where rows would not divide by the
    devices otherwise.
    """
    devices = len(target.devices)
    slices = len({getattr(device, "slice_index", 0) for device in target.devices})
    rows = config.train.batch_size // config.train.accumulation
    found = []
    for tensor, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        rest = devices // (tensor * context)
        if rest * tensor * context != devices or (context > 1 and rows % (rest * context) == 0):
            continue
        for fsdp in (n for n in range(1, rest + 1) if rest % n == 0):
            data = rest // fsdp
            if data % slices:
                continue
            mesh = Mesh(data, fsdp, context, tensor)
            with contextlib.suppress(ConfigError):
                check_fits(config, sharding.make_mesh(mesh, devices=target.devices))
                found.append(mesh)
    return sorted(
        found,
        key=lambda mesh: (
            math.log2(mesh.tensor * mesh.context) + abs(math.log2(mesh.fsdp / mesh.data)) / 2
        ),
    )


def _search(config: Config, vocab_size: int, target: Target) -> int:
    if target.device is None:
        raise ConfigError(
            f"--plan={target.text},search: what a CPU can do is not known; give a TPU"
        )
    found = meshes_for(config, target)
    if not found:
        raise ConfigError(
            f"--plan={target.text},search: no mesh of {len(target.devices)} devices divides "
            "train.batch_size, model.width and model.num_heads: change one of them"
        )
    tried = []
    for mesh in tqdm(found[:_TRIED], desc="compiling", unit="mesh"):
        meshed = dataclasses.replace(config, mesh=mesh)
        program = _compiled(meshed, vocab_size, target, evaluation=False)
        tried.append((program, estimate_of(meshed, vocab_size, target, program)))
    print(ranking(target, tried, len(found)), flush=True)
    return 0 if any(fits(program, target) for program, _ in tried) else 1
