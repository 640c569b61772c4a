import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import every_jaxpr, layers_of

from alibi_jax.config import Config, Model
from alibi_jax.model import Transformer, initial_params, layer_stack, make_model
from alibi_jax.model.layer_stack import is_stacked, make_stack, unstack

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 11


class Part(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (2, 3)), axes=("embed", "ff"))
        self.scale = nnx.Param(jnp.ones(3))


def test_a_stack_is_its_modules():
    stack = make_stack(Part, 4, nnx.Rngs(0))
    assert (stack.table.shape, stack.scale.shape) == ((4, 2, 3), (4, 3))
    assert stack.table.get_metadata()["axes"] == ("layers", "embed", "ff")
    assert stack.scale.get_metadata()["axes"] == ("layers",)
    parts = unstack(stack)
    assert len(parts) == 4
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part.table[...], stack.table[number])
    # Each module is drawn from a different key.
    assert len({float(part.table[0, 0]) for part in parts}) == 4


def test_the_gradient_of_a_stack_is_those_of_its_modules():
    graphdef, params = nnx.split(make_stack(Part, 3, nnx.Rngs(0)))

    def loss(params):
        parts = unstack(nnx.merge(graphdef, params))
        return sum(n * (part.table[...] ** 2).sum() for n, part in enumerate(parts))

    gradient = jax.grad(loss)(params)["table"][...]
    expected = 2 * np.arange(3.0)[:, None, None] * params["table"][...]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_only_parameters_of_layers_are_stacked():
    params = initial_params(Config(model=Model(width=16, num_heads=2)), VOCAB, jax.random.key(0))
    stacked = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree.leaves_with_path(params)
        if is_stacked(path)
    }
    assert all(name.startswith("['layers']") for name in stacked)
    assert len(stacked) == len(jax.tree.leaves(params["layers"])) == 10
    assert not is_stacked(())


# The layers of a model.


def make(**changes):
    values = {"width": 8, "num_heads": 2, "num_layers": 9} | changes
    return Transformer(Model(**values), vocab_size=VOCAB, train_length=8, rngs=nnx.Rngs(0))


def some_tokens(batch=2, length=6):
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (batch, length)), jnp.int32)


def outputs_and_gradients(model, training_key=None, last=None):
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    def run(params):
        def loss(params):
            model = nnx.merge(graphdef, params)
            hidden = model.hidden_states(some_tokens(), training_key=training_key, last=last)
            return (hidden**3).sum(), hidden

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, hidden), gradients = run(params)
    return hidden, nnx.to_pure_dict(gradients)


CASES = [
    {},
    {"position": "t5"},
    {"position": "fire", "remat": "full"},
    # The pattern divides the number of layers, or leaves one layer over.
    {"position": "alibi,kerple_log,none", "num_layers": 18},
    {"position": "alibi,none,rotary,fox", "num_layers": 21, "remat": "projections"},
    {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
]


@pytest.mark.parametrize(
    ("case", "last"), [*((case, None) for case in CASES), (CASES[0], 2), (CASES[3], 2)], ids=str
)
@pytest.mark.sample(3)
def test_a_loop_over_layers_is_the_layers_one_by_one(case, last, monkeypatch):
    model, key = make(**case), jax.random.key(1)
    looped = outputs_and_gradients(model, key, last)
    monkeypatch.setattr(layer_stack, "_MAX_UNROLLED", 99)
    unrolled = outputs_and_gradients(model, key, last)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        looped,
        unrolled,
    )


@pytest.mark.parametrize("pattern", ["alibi", "alibi,none,rotary"])
def test_layers_follow_the_pattern_in_order(pattern):
    model = make(position=pattern, num_layers=8)
    names = [type(position).__name__ for _, position in model.unstacked_layers()]
    class_names = {"alibi": "Alibi", "none": "PositionMethod", "rotary": "Rotary"}
    methods = pattern.split(",")
    assert names == [class_names[methods[number % len(methods)]] for number in range(8)]
    # The kernels are those of the parameters, in the same order.
    kernels = [layer.ff.up.kernel[...] for layer, _ in model.unstacked_layers()]
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for kernel, layer in zip(kernels, layers_of(params), strict=True):
        np.testing.assert_array_equal(kernel, layer["ff"]["up"]["kernel"])


def equations(model, gradient):
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden_states(some_tokens(), training_key=jax.random.key(0))
        return hidden.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss) if gradient else loss)(params)
    return sum(len(inner.eqns) for inner in every_jaxpr(jaxpr.jaxpr))


@pytest.mark.parametrize("gradient", [False, True])
def test_a_program_is_as_long_for_many_layers_as_for_few(gradient):
    sizes = [equations(make(num_layers=number), gradient) for number in (6, 32)]
    assert sizes[0] == sizes[1]


def saved_bytes(remat):
    """The bytes that the forward pass keeps for the backward pass, with layers in a loop."""
    graphdef, params = nnx.split(make(remat=remat, width=32), nnx.Param)
    tokens = some_tokens(4, 32)

    def loss(params):
        return nnx.merge(graphdef, params).hidden_states(tokens).sum()

    _, backward = jax.eval_shape(lambda params: jax.vjp(loss, params), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


def test_each_remat_keeps_less_than_the_one_before():
    kept = [saved_bytes(remat) for remat in ("none", "projections", "full")]
    assert kept[0] > 1.2 * kept[1] > 1.5 * kept[2]


def test_initial_parameters_do_not_depend_on_the_loop(monkeypatch):
    config = Config(model=Model(width=8, num_heads=2, num_layers=6))
    before = nnx.state(make_model(config, VOCAB, nnx.Rngs(0)), nnx.Param)
    monkeypatch.setattr(layer_stack, "_MAX_UNROLLED", 0)
    after = nnx.state(make_model(config, VOCAB, nnx.Rngs(0)), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, before, after)
