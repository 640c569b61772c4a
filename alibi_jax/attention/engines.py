"""Chooses the engine that computes attention, by platform and shape, and runs it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Key

from alibi_jax.attention.blockwise import blockwise
from alibi_jax.attention.dense import dense
from alibi_jax.attention.folded import folded, folded_refusal
from alibi_jax.attention.reach import reach
from alibi_jax.attention.visibility import Visibility, bias_between, token_metadata, visible_pairs
from alibi_jax.biases import Bias, LinearBias

ENGINES = ("dense", "blockwise", "pallas_tpu", "folded")

# Up to this number of scores per head, loops over blocks cost more than they save.
_DENSE_MAX_SCORES = 256 * 256
# Up to this number of queries, as in decoding, "dense" is chosen for any number of keys: the
# queries would fill only a small part of one block.
_DENSE_MAX_QUERIES = 16
# The number of queries, and of keys, in a block. On a CPU the arrays of one block should stay in
# its caches.
_BLOCK_SIZE = {"cpu": 128}
_DEFAULT_BLOCK_SIZE = 512
# With at most this number of key blocks, finding the blocks in reach takes longer than computing
# all of them.
_MAX_BLOCKS_WITHOUT_REACH = 4
# cuDNN's fused kernel takes up to 128 columns on every GPU that it supports. Folding adds 6.
_FOLDED_MAX_HEAD_SIZE = 122


def compute_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None,
    visibility: Visibility,
    query_features: Any,
    key_features: Any,
    tolerance: float,
    implementation: str | None,
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    return_residual: bool,
) -> tuple[Float[Array, "B T N V"], Any]:
    """Computes attention with one of the engines.

    The arguments are `attention`'s arguments after the checks of `attention`. Returns the result
    and the log-sum-exp of each row of scores. The latter may be None without `return_residual`.
    """
    if query.size == 0 or key.size == 0:
        # There is no row, or no row sees a key.
        shape = query.shape[:3]
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        out = jnp.zeros((*shape, value.shape[-1]), query.dtype)
        return out, jnp.full(shape, -jnp.inf, dtype)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    platform = _platform(query)
    block_size = _BLOCK_SIZE.get(platform, _DEFAULT_BLOCK_SIZE)
    if dropout_rate == 0.0:
        dropout_key = None
    if _is_at_most(key.shape[1], _MAX_BLOCKS_WITHOUT_REACH * block_size):
        tolerance = 0.0
    # The reason why the engines for linear biases cannot serve; empty if they can.
    lengths = query.shape[1], key.shape[1]
    refusal = _linear_bias_refusal(bias, visibility, *lengths, dropout_key, return_residual)
    refusals = {"pallas_tpu": refusal, "folded": refusal}
    if not refusal and isinstance(bias, LinearBias):
        if platform == "gpu" or implementation == "folded":
            refusals["folded"] = _folded_refusal(query, key, value, bias, visibility)
        if platform == "tpu" or implementation == "pallas_tpu":
            refusals["pallas_tpu"] = _pallas_tpu_refusal(query, key, value, block_size)
    engine = implementation or _choose_engine(platform, query, key, refusals)
    if refusals.get(engine):
        raise ValueError(f"implementation={engine!r} {refusals[engine]}")
    if engine == "dense":
        queries, keys = token_metadata(
            visibility, query.shape[1], key.shape[1], query_features, key_features
        )
        mask = visibility.mask
        visible = visible_pairs(queries, keys, causal=visibility.causal, window=visibility.window)
        if visible is not None:
            visible = visible if visible.ndim == 4 else visible[None, None]
            mask = visible if mask is None else mask & visible
        return dense(
            query,
            key,
            value,
            bias=bias_between(bias, queries, keys),
            mask=mask,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
        )
    compute: Callable[..., Any] = functools.partial(
        _compute_in_blocks,
        engine=engine,
        platform=platform,
        block_size=block_size,
        tolerance=tolerance,
        dropout_rate=dropout_rate,
    )
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # The loops of these engines name no shardings, so the compiler chooses them.
        *rows, _ = jax.typeof(query).sharding.spec
        compute = _with_auto_axes(compute, (jax.P(*rows, None), jax.P(*rows)))
    return compute(query, key, value, bias, visibility, query_features, key_features, dropout_key)


def _with_auto_axes(function: Callable[..., Any], out_sharding: Any) -> Callable[..., Any]:
    """`function` with all axes of the mesh partitioned by the compiler.

    Arguments that are no JAX arrays stay as they are. An array that a bias closes over is no
    argument: on explicit axes JAX refuses it. A bias that is a `jax.tree_util.Partial` of its
    arrays has them as arguments.
    """

    def call(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def call_with(arrays: dict[int, Array]) -> Any:
            return function(
                *jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
            )

        return jax.sharding.auto_axes(call_with, out_sharding=out_sharding)(arrays)

    return call


def _compute_in_blocks(
    query: Array,
    key: Array,
    value: Array,
    bias: Bias | None,
    visibility: Visibility,
    query_features: Any,
    key_features: Any,
    dropout_key: Array | None,
    *,
    engine: str,
    platform: str,
    block_size: int,
    tolerance: float,
    dropout_rate: float,
) -> tuple[Array, Any]:
    """`compute_attention` by an engine that never has all scores at once."""
    if engine == "pallas_tpu" and isinstance(bias, LinearBias):
        from alibi_jax.attention.tpu.attention import pallas_tpu

        out = pallas_tpu(
            query,
            key,
            value,
            jnp.asarray(bias.slopes),
            reach(query, key, bias, visibility, block_size=block_size, tolerance=tolerance),
            causal=visibility.causal,
            offset=visibility.offset,
            window=visibility.window,
            query_segment_ids=visibility.query_segment_ids,
            key_segment_ids=visibility.key_segment_ids,
            block_size=block_size,
            interpret=platform != "tpu",
        )
        return out, None
    if engine == "folded" and isinstance(bias, LinearBias):
        out = folded(
            query,
            key,
            value,
            bias.slopes,
            window=visibility.window,
            implementation="cudnn" if platform == "gpu" and query.dtype != jnp.float32 else "xla",
        )
        return out, None
    return blockwise(
        query,
        key,
        value,
        bias=bias,
        visibility=visibility,
        query_features=query_features,
        key_features=key_features,
        tolerance=tolerance,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        block_size=block_size,
        # One draw for all heads drops the same weights on every mesh.
        head_by_head=platform == "cpu"
        and (bias is None or isinstance(bias, LinearBias))
        and dropout_key is None
        and not _partitioned_by_compiler(),
    )


def _choose_engine(platform: str, query: Array, key: Array, refusals: dict[str, str]) -> str:
    length, key_length = query.shape[1], key.shape[1]
    if _is_at_most(length, _DENSE_MAX_QUERIES) or _is_at_most(
        length * key_length, _DENSE_MAX_SCORES
    ):
        return "dense"
    if query.dtype == jnp.float64:
        # No other engine computes in more than float32.
        return "dense"
    # The compiler cannot partition the kernel over devices, but it can partition "blockwise".
    if platform == "tpu" and not refusals["pallas_tpu"] and not _partitioned_by_compiler():
        return "pallas_tpu"
    if platform == "gpu" and not refusals["folded"] and query.dtype != jnp.float32:
        return "folded"
    return "blockwise"


def _is_at_most(size: Any, limit: int) -> bool:
    """Whether a size is known and at most `limit`: a symbolic size may be any size."""
    return isinstance(size, int) and size <= limit


def _platform(query: Array) -> str:
    """The platform that will compute: "cpu", "gpu" or "tpu".

    It is the platform of the mesh that is set, whose devices this machine may lack. Without a mesh,
    it is the platform of the array, or JAX's default platform for a traced array.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    if not isinstance(query, jax.core.Tracer):
        return next(iter(query.devices())).platform
    default = jax.config.values["jax_default_device"]
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else default.platform


def _partitioned_by_compiler() -> bool:
    """Whether a mesh is set and the compiler partitions the computation over its devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind == AxisType.Auto for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
    )


def _linear_bias_refusal(
    bias: Bias | None,
    visibility: Visibility,
    length: Any,
    key_length: Any,
    dropout_key: Array | None,
    return_residual: bool,
) -> str:
    """The reason why no engine for linear biases can serve; empty if one may."""
    if not isinstance(bias, LinearBias):
        return "serves linear biases only: give a LinearBias, or use 'blockwise'"
    if bias.future_slopes is not None and not visibility.causal:
        return "has no slopes for future keys: use 'blockwise'"
    if visibility.query_positions is not None or visibility.key_positions is not None:
        return "takes indices as positions: give no positions, or use 'blockwise'"
    if not isinstance(length, int) or not isinstance(key_length, int):
        return "needs lengths that are numbers, not symbols: use 'blockwise'"
    if visibility.mask is not None or dropout_key is not None or return_residual:
        return "has no mask, no dropout and no return_residual: use 'blockwise'"
    return ""


def _pallas_tpu_refusal(query: Array, key: Array, value: Array, block_size: int) -> str:
    """The reason why the TPU kernel cannot serve these arrays; empty if it can."""
    # The import is in the function, because importing Pallas takes as long as importing the rest of
    # the package.
    from alibi_jax.attention.tpu.attention import pallas_refusal

    if jax.typeof(query).mat.varying:
        return "needs check_vma=False of jax.shard_map: set it, or use 'blockwise'"
    return pallas_refusal(query, key, value, block_size)


def _folded_refusal(
    query: Array, key: Array, value: Array, bias: LinearBias, visibility: Visibility
) -> str:
    """The reason why the folded engine cannot serve; empty if it can."""
    offset = visibility.offset
    self_attention = query.shape[1] == key.shape[1] and isinstance(offset, int) and offset == 0
    if not visibility.causal or not self_attention or visibility.query_segment_ids is not None:
        return "serves causal self-attention of one segment only: use 'blockwise'"
    if not query.dtype == key.dtype == value.dtype:
        return (
            f"takes arrays of one dtype, not {query.dtype}, {key.dtype} and {value.dtype}: "
            "convert them, or use 'blockwise'"
        )
    if query.shape[-1] > _FOLDED_MAX_HEAD_SIZE:
        return (
            f"serves head sizes up to {_FOLDED_MAX_HEAD_SIZE}, not {query.shape[-1]}: "
            "use 'blockwise'"
        )
    return folded_refusal(bias.slopes, query.shape[1], query.dtype)
