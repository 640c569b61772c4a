"""The device mesh, and the table from logical axes to mesh axes.

The axes of the mesh have the names of the keys in the section `mesh` of the configuration.
`LOGICAL_AXIS_RULES` says which mesh axes shard each logical axis. All other code refers to logical
axes only, except for plans, which suggest values for the keys of `mesh`.
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
# The axis that spans slices of a pod: only gradients are reduced along it, once a step.
_SLICE_AXIS = "data"
_MOST_CPU_DEVICES = 1024

# A logical axis that is not in the table is not sharded.
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
    """On a CPU, sets the number of devices to the most cores that the batch and the mesh allow.

    `sizes` are the sizes of the mesh's axes; -1 stands for the remaining devices. The number of
    devices of all `processes` together must divide `batch_size` and must be a multiple of the
    product of the fixed sizes. A mesh without a -1 gets exactly the devices that it names. The
    function has no effect on accelerators, or if the number of CPU devices is already configured.
    Call it before anything asks JAX for its devices.
    """
    configured = jax.config.values["jax_num_cpu_devices"] > 0
    if configured or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    fixed_size = math.prod(size for size in sizes if size > 0)
    minimum = -(-fixed_size // processes)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    valid_counts = [
        count
        for count in range(1, (cores or 1) + 1)
        if count * processes % fixed_size == 0 and batch_size % (count * processes) == 0
    ]
    devices = max(valid_counts, default=minimum) if -1 in sizes else minimum
    # XLA starts threads for each device. Too large a mesh then names more devices than there are,
    # which `make_mesh` refuses.
    jax.config.update("jax_num_cpu_devices", min(devices, _MOST_CPU_DEVICES))


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
    requested = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    inferred_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed_size = math.prod(size for size in sizes.values() if size != -1)
    if len(inferred_axes) > 1:
        raise ValueError(f"{requested}: only one of the sizes can be -1")
    if inferred_axes:
        sizes[inferred_axes[0]] = len(devices) // fixed_size
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"{requested} does not cover {len(devices)} devices: the sizes must multiply to "
            f"{len(devices)}"
        )
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    replicas = sizes[_SLICE_AXIS]
    if replicas % slices:
        raise ValueError(
            f"{requested}: mesh.{_SLICE_AXIS}={replicas} is not divisible by the {slices} slices, "
            f"which hold replicas: choose a multiple of {slices}"
        )
    over_slices = {axis: slices if axis == _SLICE_AXIS else 1 for axis in sizes}
    in_a_slice = [size // over_slices[axis] for axis, size in sizes.items()]
    device_array = (
        mesh_utils.create_device_mesh(in_a_slice, devices, allow_split_physical_axes=True)
        if slices == 1
        else mesh_utils.create_hybrid_device_mesh(
            in_a_slice, list(over_slices.values()), devices, allow_split_physical_axes=True
        )
    )
    return jax.sharding.Mesh(device_array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def axis_size(mesh: jax.sharding.Mesh, logical: str) -> int:
    """The number of devices over which a logical axis is sharded."""
    return math.prod(mesh.shape[axis] for axis in LOGICAL_AXIS_RULES.get(logical, ()))


def num_shards(logical: str | None) -> int:
    """The number of shards of an array along a logical axis: 1 outside `jax.set_mesh`.

    Inside `jax.shard_map` an array is already a shard, so the number is 1 there too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = LOGICAL_AXIS_RULES.get(logical or "", ())
    return math.prod(
        size
        for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        if axis in axes and kind != AxisType.Manual
    )


def divides_evenly(x: Array | np.ndarray, *logical: str | None) -> bool:
    """Whether each dimension of `x` is divisible by the number of shards of its logical axis."""
    return all(length % num_shards(name) == 0 for length, name in zip(x.shape, logical))


def partition_spec(*logical: str | None) -> PartitionSpec:
    """The mesh axes of an array whose dimensions are these logical axes."""
    return PartitionSpec(*(LOGICAL_AXIS_RULES.get(name) if name else None for name in logical))


def named_sharding(mesh: jax.sharding.Mesh, *logical: str | None) -> NamedSharding:
    """The sharding on `mesh` of an array whose dimensions are these logical axes."""
    return NamedSharding(mesh, partition_spec(*logical))


def moment_sharding(param: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an optimizer moment of this shape, from the sharding of its parameter.

    A moment with the shape of the parameter has its sharding. A moment that lacks one axis of the
    parameter (a factor of Adafactor) keeps the sharding of the other axes. Any other moment, such
    as a scalar, is replicated.
    """
    mesh, spec = param.sharding.mesh, param.sharding.spec
    axes = (*spec, *(None,) * (len(param.shape) - len(spec)))
    if shape == param.shape:
        return param.sharding
    for axis in range(len(param.shape)):
        if param.shape[:axis] + param.shape[axis + 1 :] == shape:
            return NamedSharding(mesh, PartitionSpec(*axes[:axis], *axes[axis + 1 :]))
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: Array, *logical: str | None) -> Array:
    """Constrains `x` to the sharding of these logical axes. No effect outside `jax.set_mesh`.

    An axis whose size is not divisible by its number of shards is not sharded.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    names = [
        name if length % num_shards(name) == 0 else None for length, name in zip(x.shape, logical)
    ]
    return jax.lax.with_sharding_constraint(x, partition_spec(*names))


def map_over_shards(
    function: Callable[..., Array],
    axes: Sequence[tuple[str | None, ...]],
    out: tuple[str | None, ...],
) -> Callable[..., Array]:
    """Maps `function` over the shards of its arguments, with `jax.shard_map`.

    `axes` has the logical axes of each argument and `out` those of the result; an argument may be
    None. This is for code that the compiler cannot shard by itself: loops over rows or heads, and
    kernels. With one device, outside `jax.set_mesh`, inside another `jax.shard_map`, or if sizes do
    not divide evenly, `function` is called on its arguments as they are.
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
    """The mesh axes that shard `logical` and that `jax.shard_map` has made manual here."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    return tuple(axis for axis in LOGICAL_AXIS_RULES[logical] if kinds.get(axis) == AxisType.Manual)


def addressable_rows(sharding: NamedSharding, num_rows: int) -> Int[np.ndarray, "b"]:
    """Indices of the rows of a global array that the devices of this process hold.

    Rows are along the first dimension. Another process may hold other parts of the same rows.
    """
    slices = {
        index[0].indices(num_rows)
        for index in sharding.addressable_devices_indices_map((num_rows,)).values()
        if index is not None
    }
    return np.array(sorted({row for bounds in slices for row in range(*bounds)}))


def make_global_array(sharding: NamedSharding, local_rows: Any, num_rows: int) -> jax.Array:
    """The global array of `num_rows` rows, from the `addressable_rows` of each process."""
    return jax.make_array_from_process_local_data(
        sharding, local_rows, global_shape=(num_rows, *local_rows.shape[1:])
    )
