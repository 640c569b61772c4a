"""The plan of a run: whether it fits its devices, and what a step costs.

The training and evaluation steps of the run are compiled for the target devices, which need not be
attached. The plan lists the compiler's numbers and the estimates separately.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from alibi_jax.config import Config, ConfigError
from alibi_jax.data.tokenizers import ByteTokenizer
from alibi_jax.plan.program import Program, compile_for_target, estimate_time
from alibi_jax.plan.report import report
from alibi_jax.plan.search import search_meshes
from alibi_jax.plan.targets import Target, open_target


def plan(config: Config, request: str) -> int:
    """Prints the plan of a run, or a ranking of meshes if `request` ends with ",search".

    `request` names the devices, for example "v5e:16x16" or "v5e:16x16,search". Returns the exit
    code, 0 if the run fits and 1 if not. Raises ConfigError if the request or the configuration is
    invalid.
    """
    devices, _, option = request.partition(",")
    if option not in ("", "search"):
        raise ConfigError(f"--plan={request}: after the devices only ,search can follow")
    config.check()
    target = open_target(devices)
    vocab_size = planned_vocab_size(config)
    if option:
        return 0 if search_meshes(config, vocab_size, target) else 1
    program = compile_for_target(config, vocab_size, target)
    _print_report(config, vocab_size, target, program)
    if program.fits(target):
        return 0
    for flags, changed in memory_saving_changes(config, program):
        print(f"trying {flags}", flush=True)
        try:
            program = compile_for_target(changed, vocab_size, target)
        except ValueError as error:
            print(f"  not possible: {error}", flush=True)
            continue
        if program.fits(target):
            print(f"it fits with {flags}:\n", flush=True)
            _print_report(changed, vocab_size, target, program)
            return 1
    print(
        "none of these changes makes the run fit: use more devices, or devices with more memory",
        flush=True,
    )
    return 1


def _print_report(config: Config, vocab_size: int, target: Target, program: Program) -> None:
    estimate = estimate_time(config, vocab_size, target, program)
    print(report(config, vocab_size, target, program, estimate), flush=True)


def planned_vocab_size(config: Config) -> int:
    """The vocabulary size that the plan assumes, since a plan reads no text.

    The size is `data.vocab_size` for the tokenizers `bpe` and `words`.
    """
    return ByteTokenizer.vocab_size if config.data.tokenizer == "bytes" else config.data.vocab_size


def memory_saving_changes(config: Config, program: Program) -> Iterator[tuple[str, Config]]:
    """Yields (flags, changed configuration) for changes that save memory, the cheapest first.

    All changes rematerialise whole layers. Later changes also use more micro-batches, shard
    parameters over all devices that hold rows, or do both.
    """
    data, fsdp = program.mesh.data, program.mesh.fsdp
    remat = {} if config.model.remat == "full" else {"model.remat": "full"}
    rows = config.train.batch_size // (data * fsdp)
    accumulations: list[dict[str, Any]] = [
        {"train.accumulation": count}
        for count in range(config.train.accumulation + 1, rows + 1)
        if rows % count == 0
    ]
    meshes: list[dict[str, Any]] = [{}]
    if data > 1:
        meshes.append({"mesh.data": 1, "mesh.fsdp": data * fsdp})
    for mesh in meshes:
        for accumulation in ({}, *accumulations):
            values = mesh | remat | accumulation
            if values:
                flags = " ".join(f"--config.{key}={value}" for key, value in values.items())
                yield flags, _replace_values(config, values)


def _replace_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy of `config` with new values for keys such as "mesh.data"."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for key, value in values.items():
        section, name = key.split(".")
        sections[section] = dataclasses.replace(sections[section], **{name: value})
    return Config(**sections)
