"""A search over meshes: compiles a run on several meshes and ranks them by estimated time."""

import contextlib
import dataclasses
import itertools
import math

from alibi_jax.config import Config, ConfigError, Mesh
from alibi_jax.distributed import sharding
from alibi_jax.plan.program import compile_for_target, estimate_time
from alibi_jax.plan.report import ranking
from alibi_jax.plan.targets import Target
from alibi_jax.progress import Progress
from alibi_jax.training.step import check_fits

# The most meshes that a search compiles; each takes up to a minute on two cores.
_MAX_COMPILED = 7


def search_meshes(config: Config, vocab_size: int, target: Target) -> bool:
    """Prints a ranking of meshes for a run. Returns whether the run fits on any of them.

    Raises ConfigError if the device's peaks are unknown or no mesh divides the run's sizes.
    """
    if target.device is None:
        raise ConfigError(
            f"--plan={target.text},search: the peaks of a CPU are not known, so that its meshes "
            "can't be ranked: give a TPU"
        )
    meshes = candidate_meshes(config, target)
    if not meshes:
        raise ConfigError(
            f"--plan={target.text},search: no mesh of {len(target.devices)} devices divides the "
            "rows of a micro-batch (train.batch_size/train.accumulation), train.length and the "
            "model's width, heads and ff_width: change one of them"
        )
    compiled = []
    to_compile = meshes[:_MAX_COMPILED]
    with Progress(len(to_compile), "compiling", unit="mesh") as progress:
        for mesh in to_compile:
            with_mesh = dataclasses.replace(config, mesh=mesh)
            program = compile_for_target(with_mesh, vocab_size, target, evaluation=False)
            compiled.append((program, estimate_time(with_mesh, vocab_size, target, program)))
            progress.update()
    print(ranking(target, compiled, len(meshes)), flush=True)
    return any(program.fits(target) for program, _ in compiled)


def candidate_meshes(config: Config, target: Target) -> list[Mesh]:
    """The meshes that divide the run's sizes, without unpromising ones; most promising first.

    The meshes are sorted by log2(tensor · context) + |log2(fsdp / data)| / 2. So a mesh that shards
    only rows and parameters comes early if `data` and `fsdp` have similar sizes. A mesh with tensor
    parallelism comes later, because each layer waits for its communication. `context` is above 1
    only where the rows of a micro-batch are not divisible by the number of devices / `tensor`.
    """
    devices = len(target.devices)
    slices = len({getattr(device, "slice_index", 0) for device in target.devices})
    rows = config.train.batch_size // config.train.accumulation
    meshes = []
    for tensor, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        rest = devices // (tensor * context)
        if rest * tensor * context != devices or (context > 1 and rows % (rest * context) == 0):
            continue
        for fsdp in (size for size in range(1, rest + 1) if rest % size == 0):
            data = rest // fsdp
            if data % slices:
                continue
            mesh = Mesh(data=data, fsdp=fsdp, context=context, tensor=tensor)
            with contextlib.suppress(ConfigError):
                check_fits(config, sharding.make_mesh(mesh, devices=target.devices))
                meshes.append(mesh)
    return sorted(
        meshes,
        key=lambda mesh: (
            math.log2(mesh.tensor * mesh.context) + abs(math.log2(mesh.fsdp / mesh.data)) / 2
        ),
    )
