"""Builds the model of a configuration, and checks that its parameters fit a mesh."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key

from alibi_jax import config as configs
from alibi_jax.distributed.sharding import LOGICAL_AXIS_RULES, axis_size, named_sharding
from alibi_jax.model.adaptive_softmax import band_width
from alibi_jax.model.transformer import Transformer
from alibi_jax.model.vocabulary import ROW_MULTIPLE


def make_model(config: configs.Config, vocab_size: int, rngs: nnx.Rngs) -> Transformer:
    """The model of a configuration; a learned position table has `train.length` rows."""
    return Transformer(
        config.model, vocab_size=vocab_size, train_length=config.train.length, rngs=rngs
    )


def abstract_model(
    config: configs.Config, vocab_size: int, mesh: jax.sharding.Mesh
) -> tuple[Any, dict[str, Any]]:
    """Returns (graphdef, parameters) of a model, without allocating memory.

    The parameters are `ShapeDtypeStruct`s that are sharded over `mesh`, in plain nested dicts.
    `nnx.merge(graphdef, params)` is the model.
    """
    model = nnx.eval_shape(lambda: make_model(config, vocab_size, nnx.Rngs(0)))
    graphdef, state = nnx.split(model, nnx.Param)

    def sharded_struct(param: nnx.Variable) -> jax.ShapeDtypeStruct:
        axes = param.get_metadata().get("axes", ())
        value = param.get_value()
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=named_sharding(mesh, *axes))

    structs = jax.tree.map(
        sharded_struct, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return graphdef, nnx.to_pure_dict(structs)


def initial_params(config: configs.Config, vocab_size: int, key: Key[Array, ""]) -> dict[str, Any]:
    """Random initial parameters in the layout of `abstract_model`; to be called under `jax.jit`."""
    model = make_model(config, vocab_size, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def check_model_fits(model: configs.Model, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError if a dimension of the model does not divide evenly over the mesh."""
    kv_heads = model.num_kv_heads or model.num_heads
    ff = model.ff_width or 4 * model.width
    check_divides(f"model.width={model.width}", model.width, "embed", mesh)
    check_divides(f"model.num_heads={model.num_heads}", model.num_heads, "heads", mesh)
    check_divides(f"model.num_kv_heads={kv_heads}", kv_heads, "kv_heads", mesh)
    check_divides(f"model.ff_width={ff}", ff, "ff", mesh)
    check_divides(f"the vocabulary in multiples of {ROW_MULTIPLE}", ROW_MULTIPLE, "vocab", mesh)
    for number in range(1, len(model.cutoffs) + 1):
        width = band_width(model, number)
        what = f"the width {width} of band {number} of model.adaptive_cutoffs"
        check_divides(what, width, "embed", mesh)


def check_divides(what: str, size: int, logical: str, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError, naming `what`, if `size` does not divide evenly over the mesh.

    `logical` is the logical axis of the dimension.
    """
    devices = axis_size(mesh, logical)
    if size % devices:
        axes = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in LOGICAL_AXIS_RULES[logical])
        raise configs.ConfigError(
            f"{what} is not divisible by the {devices} devices of {axes}: "
            f"choose a multiple of {devices}, or another mesh"
        )
