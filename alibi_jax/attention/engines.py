"""Which engine computes an attention: decided here, by platform and shape, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Key

from alibi_jax.attention.blockwise import blockwise
from alibi_jax.attention.dense import dense
from alibi_jax.attention.folded import folded, folded_refusal
from alibi_jax.attention.reach import reach
from alibi_jax.attention.visibility import Visibility, bias_between, token_metadata, visible_pairs
from alibi_jax.biases import Bias, LinearBias

ENGINES = ("dense", "blockwise", "pallas_tpu", "folded")

# Up to so many scores a head, blocks are not worth their loops.
_DENSE_SCORES = 256 * 256
# Few queries over many keys, as in decoding, are a block of their own.
_DENSE_QUERIES = 16
# Queries and keys a block: on a CPU what a block computes should stay in its caches.
_BLOCK = {"cpu": 128}
_OTHER_BLOCK = 512
# Of so few blocks of keys, to look which of them matter takes longer than to compute them all.
_TOO_FEW_BLOCKS = 4
# cuDNN's fused kernel takes 128 columns on every GPU that it takes, 6 of which are positions.
_FOLDED_SIZE = 122


def compute(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: Bias | None,
    sight: Visibility,
    tolerance: float,
    implementation: str | None = None,
    query_features: Any = None,
    key_features: Any = None,
    mask: Bool[Array, "#B #N T S"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    residual: bool = False,
) -> tuple[Float[Array, "B T N V"], Any]:
    """Arguments as `attention` has them; `implementation` names an engine, or None.

    The result, and the log-sum-exp of each row of scores: `residual` asks for it, and without
    it may be None.
    """
    if query.size == 0 or key.size == 0:
        # No row, or none that sees anything.
        shape = query.shape[:3]
        return jnp.zeros((*shape, value.shape[-1]), query.dtype), jnp.full(shape, -jnp.inf)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    platform = _platform(query)
    block = _BLOCK.get(platform, _OTHER_BLOCK)
    if dropout_rate == 0.0:
        dropout_key = None
    if key.shape[1] <= _TOO_FEW_BLOCKS * block:
        tolerance = 0.0
    # What an engine for linear biases lacks, if anything.
    lack = _beyond_kernel(bias, sight, mask, dropout_key, residual)
    missing = {"pallas_tpu": lack, "folded": lack}
    if not lack and isinstance(bias, LinearBias):
        missing["folded"] = _beyond_folding(query, key, value, bias, sight)
        if platform == "tpu" or implementation == "pallas_tpu":
            missing["pallas_tpu"] = _beyond_pallas(query, key, value, block)
    engine = implementation or _choice(platform, query, key, missing)
    if missing.get(engine):
        raise ValueError(f"implementation={engine!r} {missing[engine]}")
    if engine == "pallas_tpu" and isinstance(bias, LinearBias):
        from alibi_jax.attention.tpu.attention import pallas_tpu

        out = pallas_tpu(
            query,
            key,
            value,
            jnp.asarray(bias.slopes),
            reach(query, key, bias, sight, block=block, tolerance=tolerance),
            causal=sight.causal,
            offset=sight.offset,
            window=sight.window,
            query_segment_ids=sight.query_segment_ids,
            key_segment_ids=sight.key_segment_ids,
            block=block,
            interpret=platform != "tpu",
        )
        return out, None
    if engine == "folded" and isinstance(bias, LinearBias):
        out = folded(
            query,
            key,
            value,
            bias.slopes,
            window=sight.window,
            implementation="cudnn" if platform == "gpu" and query.dtype != jnp.float32 else "xla",
        )
        return out, None
    if engine == "blockwise":
        return blockwise(
            query,
            key,
            value,
            bias=bias,
            sight=sight,
            query_features=query_features,
            key_features=key_features,
            mask=mask,
            tolerance=tolerance,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            block=block,
            # Dropout draws for all heads at once, so that it draws the same on every mesh.
            head_by_head=platform == "cpu"
            and (bias is None or isinstance(bias, LinearBias))
            and dropout_key is None
            and not _partitioned(),
        )
    rows, columns = token_metadata(
        sight, query.shape[1], key.shape[1], query_features, key_features
    )
    visible = visible_pairs(rows, columns, causal=sight.causal, window=sight.window)
    if visible is not None:
        visible = visible if visible.ndim == 4 else visible[None, None]
        mask = visible if mask is None else mask & visible
    return dense(
        query,
        key,
        value,
        bias=bias_between(bias, rows, columns),
        mask=mask,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )


def _choice(platform: str, query: Array, key: Array, missing: dict[str, str]) -> str:
    length, key_length = query.shape[1], key.shape[1]
    if length <= _DENSE_QUERIES or length * key_length <= _DENSE_SCORES:
        return "dense"
    if query.dtype == jnp.float64:
        # The only one that computes in more than float32.
        return "dense"
    # The compiler cannot split the kernel over devices by itself; what it can split comes after.
    if platform == "tpu" and not missing["pallas_tpu"] and not _partitioned():
        return "pallas_tpu"
    if platform == "gpu" and not missing["folded"] and query.dtype != jnp.float32:
        return "folded"
    return "blockwise"


def _platform(query: Array) -> str:
    """Of the mesh that is set, which may be another than this machine's; else of the array.

    While it is traced without a mesh, the default.
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


def _partitioned() -> bool:
    """Whether the compiler is to split what it is given over several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        size > 1 and kind == AxisType.Auto for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
    )


def _beyond_kernel(
    bias: Bias | None,
    sight: Visibility,
    mask: Array | None,
    dropout_key: Array | None,
    residual: bool,
) -> str:
    """Why an engine that has linear biases built in cannot serve; nothing where it can."""
    if not isinstance(bias, LinearBias):
        return "serves linear biases only: give a LinearBias, or use 'blockwise'"
    if bias.future_slopes is not None and not sight.causal:
        return "has no slopes for future keys: use 'blockwise'"
    if sight.query_positions is not None or sight.key_positions is not None:
        return "takes indices for positions: give none, or use 'blockwise'"
    if mask is not None or dropout_key is not None or residual:
        return "has no mask, no dropout and no residual: use 'blockwise'"
    return ""


def _beyond_pallas(query: Array, key: Array, value: Array, block: int) -> str:
    """Why the kernel cannot serve arrays for which it has the bias."""
    # Imported where it is used: Pallas alone takes as long as all of this package.
    from alibi_jax.attention.tpu.attention import pallas_refusal

    if jax.typeof(query).mat.varying:
        return "needs check_vma=False of jax.shard_map: use that, or 'blockwise'"
    return pallas_refusal(query, key, value, block)


def _beyond_folding(
    query: Array, key: Array, value: Array, bias: LinearBias, sight: Visibility
) -> str:
    """Why the folded engine cannot serve what another engine for linear biases can."""
    square = query.shape[1] == key.shape[1] and isinstance(sight.offset, int) and sight.offset == 0
    if not sight.causal or not square or sight.query_segment_ids is not None:
        return "serves causal attention of one segment over itself: use 'blockwise'"
    if not query.dtype == key.dtype == value.dtype:
        return f"takes one dtype, not {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] > _FOLDED_SIZE:
        return f"serves head sizes up to {_FOLDED_SIZE}: use 'blockwise'"
    return folded_refusal(bias.slopes, query.shape[1], query.dtype)
