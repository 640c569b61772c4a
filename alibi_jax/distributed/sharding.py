"""The device mesh, and the one table from logical axes to mesh axes.

All other code names logical axes. The names of the mesh's own axes are the keys of the
configuration's section `mesh`, and the table below says what each of them splits.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from alibi_jax.config import Mesh, fields_of

MESH_AXES = tuple(fields_of(Mesh))
# The axis that spans slices of a pod: only gradients are exchanged along it, once a step.
_SLICE_AXIS = "data"

# A logical axis that is not here is not sharded.
LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    # Positions that are computed independently, each with all heads and features.
    "tokens": ("context", "tensor"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ff": ("tensor",),
    "vocab": ("tensor",),
}


def use_cpu_cores(batch_size: int, sizes: Sequence[int] = (-1,), processes: int = 1) -> None:
    """On a CPU, makes each core one device, as far as that divides the work.

    `batch_size` rows must split evenly over the devices of all `processes`, and those over a
    mesh of these `sizes` (-1: what the others leave); a mesh without a -1 gets the devices it
    asks for. Has no effect on accelerators, nor where the number of CPU devices is already
    chosen. Must come before anything asks JAX for its devices.
    """
    chosen = jax.config.values["jax_num_cpu_devices"] > 0
    if chosen or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    fixed = math.prod(size for size in sizes if size > 0)
    least = -(-fixed // processes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fitting = [
        n
        for n in range(1, (cores or 1) + 1)
        if n * processes % fixed == 0 and batch_size % (n * processes) == 0
    ]
    devices = max(fitting, default=least) if -1 in sizes else least
    jax.config.update("jax_num_cpu_devices", devices)


def make_mesh(
    config: Mesh | None = None, *, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh of the configured sizes over `devices`, by default all devices of all processes.

    One size may be -1: that axis gets all devices that the other axes leave. The network between
    slices of a pod is slow, so only the axis `data` spans several slices. Raises ValueError
    unless the sizes multiply to the number of devices and the number of slices divides `data`.
    """
    sizes = dataclasses.asdict(config or Mesh())
    devices = jax.devices() if devices is None else devices
    asked = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(f"{asked}: only one of them can be -1")
    if free:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"{asked} does not cover {len(devices)} devices: they must multiply to that"
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    replicas = sizes[_SLICE_AXIS]
    if replicas % slices:
        raise ValueError(
            f"{asked}: mesh.{_SLICE_AXIS}={replicas} does not divide by the {slices} slices, "
            "which are replicas: choose a multiple"
        )
    over_slices = {axis: slices if axis == _SLICE_AXIS else 1 for axis in sizes}
    in_a_slice = [size // over_slices[axis] for axis, size in sizes.items()]
    grid = (
        mesh_utils.create_device_mesh(in_a_slice, devices, allow_split_physical_axes=True)
        if slices == 1
        else mesh_utils.create_hybrid_device_mesh(
            in_a_slice, list(over_slices.values()), devices, allow_split_physical_axes=True
        )
    )
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def axis_size(mesh: jax.sharding.Mesh, logical: str) -> int:
    """Devices over which a logical axis is split."""
    return math.prod(mesh.shape[axis] for axis in LOGICAL_AXIS_RULES.get(logical, ()))


def num_shards(logical: str | None) -> int:
    """Parts into which arrays are split along a logical axis: 1 outside `jax.set_mesh`.

    Inside `jax.shard_map` an array is a part already, and not split any further.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = LOGICAL_AXIS_RULES.get(logical or "", ())
    each = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
    return math.prod(n for axis, n, kind in each if axis in axes and kind != AxisType.Manual)


def divides_evenly(x: Array | np.ndarray, *logical: str | None) -> bool:
    """Whether each dimension of `x` divides by the devices along the axis that it is."""
    return all(length % num_shards(name) == 0 for length, name in zip(x.shape, logical))


def partition_spec(*logical: str | None) -> PartitionSpec:
    """The mesh axes of an array whose dimensions carry these logical names."""
    return PartitionSpec(*(LOGICAL_AXIS_RULES.get(name) if name else None for name in logical))


def named_sharding(mesh: jax.sharding.Mesh, *logical: str | None) -> NamedSharding:
    """The placement on `mesh` of an array whose dimensions carry these logical names."""
    return NamedSharding(mesh, partition_spec(*logical))


def sharding_like(array: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> NamedSharding:
    """The placement of what belongs to a placed array: of its shape, or of that less one axis.

    Anything else, as a number that belongs to it all, is on every device.
    """
    mesh, spec = array.sharding.mesh, array.sharding.spec
    axes = (*spec, *(None,) * (len(array.shape) - len(spec)))
    if shape == array.shape:
        return array.sharding
    for axis in range(len(array.shape)):
        if array.shape[:axis] + array.shape[axis + 1 :] == shape:
            return NamedSharding(mesh, PartitionSpec(*axes[:axis], *axes[axis + 1 :]))
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: Array, *logical: str | None) -> Array:
    """Asks the compiler for that placement; nothing outside `jax.set_mesh`.

    An axis that does not divide by its devices is whole on each of them.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    names = [name if n % num_shards(name) == 0 else None for n, name in zip(x.shape, logical)]
    return jax.lax.with_sharding_constraint(x, partition_spec(*names))


def map_over_shards(
    function: Callable[..., Array],
    axes: Sequence[tuple[str | None, ...]],
    out: tuple[str | None, ...],
) -> Callable[..., Array]:
    """`function` of arrays with these logical axes, run by each device on its part of them.

    For what the compiler cannot split by itself: loops over rows or heads, and kernels. Just
    `function` where there is one device, or where sizes do not divide. An argument may be None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(kind != AxisType.Auto for kind in mesh.axis_types) or mesh.size == 1:
        return function

    def run(*arrays: Array | np.ndarray | None) -> Array:
        if not all(x is None or divides_evenly(x, *names) for x, names in zip(arrays, axes)):
            return function(*arrays)
        return jax.shard_map(
            function,
            in_specs=tuple(partition_spec(*names) for names in axes),
            out_specs=partition_spec(*out),
            check_vma=False,
        )(*arrays)

    return run


def manual_axes(logical: str) -> tuple[str, ...]:
    """The axes of the mesh along which the parts that `split` gives out are parts of `logical`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    return tuple(axis for axis in LOGICAL_AXIS_RULES[logical] if kinds.get(axis) == AxisType.Manual)


def local_rows(sharding: NamedSharding, num_rows: int) -> Int[np.ndarray, "b"]:
    """The rows (first dimension) of a global array of which this process holds a part."""
    slices = {
        index[0].indices(num_rows)
        for index in sharding.addressable_devices_indices_map((num_rows,)).values()
        if index is not None
    }
    return np.array(sorted({row for bounds in slices for row in range(*bounds)}))


def global_array(sharding: NamedSharding, local: Any, num_rows: int) -> jax.Array:
    """The global array of `num_rows` rows from each process's own, in `local_rows` order."""
    return jax.make_array_from_process_local_data(
        sharding, local, global_shape=(num_rows, *local.shape[1:])
    )
