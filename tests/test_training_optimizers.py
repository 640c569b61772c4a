import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alibi_jax.config import OPTIMIZERS, SCHEDULES, Config, Model, Optimizer
from alibi_jax.model import initial_params
from alibi_jax.training.optimizers import make_optimizer, make_schedule

STEPS = 110


def params():
    random = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(random.normal(size=(3, 4)), jnp.float32),
        "cube": jnp.asarray(random.normal(size=(2, 2, 2)), jnp.float32),
        "scale": jnp.asarray(random.normal(size=4), jnp.float32),
    }


def gradient(step, params):
    """An arbitrary gradient that differs between steps."""
    return jax.tree.map(lambda leaf: jnp.sin(leaf * (step + 2)) + 0.1, params)


def updates_of(tx, steps=4, gradient=gradient, current=None):
    """The updates of the first steps, which begin at `current` or at `params()`."""
    current = params() if current is None else current
    state = tx.init(current)
    all_updates = []
    for step in range(steps):
        updates, state = tx.update(gradient(step, current), state, current)
        current = optax.apply_updates(current, updates)
        all_updates.append(updates)
    return all_updates


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), one, other)


def constant(**values):
    """An optimizer with a constant rate and without decay or clipping, except for `values`."""
    bare = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip_norm": 0.0}
    return Optimizer(**(bare | {"learning_rate": 0.1} | values))


def stacked(tree, count=3):
    """`tree` as the stacked parameters of `count` layers with different values."""
    scales = 1.0 + np.arange(count)
    return {"layers": jax.tree.map(lambda x: jnp.stack([n * x for n in scales]), tree)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(1)
def test_biases_of_heads_do_not_decay(name):
    """They have two axes, as matrices do."""
    config = Config(model=Model(num_layers=2, width=8, num_heads=2, use_bias=True))
    params = initial_params(config, 5, jax.random.key(0))
    assert params["layers"]["stacks"][0]["attention"]["query"]["bias"].shape == (2, 2, 4)
    ones = jax.tree.map(jnp.ones_like, params)
    tx = make_optimizer(constant(name=name, weight_decay=0.1), 10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, ones), tx.init(ones), ones)
    for path, update in jax.tree.leaves_with_path(updates):
        *_, last = (key.key for key in path)
        decays = last in ("kernel", "embedding")
        np.testing.assert_allclose(update, -0.01 if decays else 0.0, rtol=1e-6, err_msg=str(path))


# Schedules with 10 steps of warm-up and 100 of decay.


def cosine(share):
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("cosine", {10: 1.0, 35: cosine(0.25), 60: 0.55, 109: cosine(0.99), 110: 0.1}),
        ("linear", {10: 1.0, 35: 0.775, 60: 0.55, 109: 0.109, 110: 0.1}),
        ("constant", {10: 1.0, 35: 1.0, 60: 1.0, 109: 1.0, 110: 1.0}),
    ],
)
def test_a_schedule_has_exact_rates_during_and_after_the_warm_up(schedule, after):
    config = Optimizer(learning_rate=0.02, schedule=schedule, warmup_steps=10, final_fraction=0.1)
    rate = make_schedule(config, STEPS)
    # The rate rises by equal amounts, and the first rate is not 0.
    shares = {0: 1 / 11, 1: 2 / 11, 5: 6 / 11, 9: 10 / 11} | after
    for step, share in shares.items():
        assert float(rate(step)) == pytest.approx(0.02 * share, rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_without_warm_up_starts_at_its_peak(schedule):
    config = Optimizer(learning_rate=0.02, schedule=schedule, warmup_steps=0, final_fraction=0.0)
    rate = make_schedule(config, STEPS)
    assert float(rate(0)) == pytest.approx(0.02, rel=1e-6)
    assert float(rate(STEPS)) == pytest.approx(0.02 if schedule == "constant" else 0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_never_rises_after_its_warm_up(schedule):
    rate = make_schedule(Optimizer(schedule=schedule, warmup_steps=10), STEPS)
    rates = np.array([rate(step) for step in range(STEPS + 20)])
    assert (np.diff(rates[:11]) > 0).all()
    assert (np.diff(rates[10:]) <= 0).all()
    assert (rates > 0).all()


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_warm_up_is_no_longer_than_a_run_that_decays(schedule, steps):
    config = Optimizer(learning_rate=0.02, schedule=schedule, warmup_steps=10)
    rate = make_schedule(config, steps)
    for step in range(steps):
        assert float(rate(step)) == pytest.approx(0.02 * (step + 1) / (steps + 1), rel=1e-6)


def test_a_constant_schedule_keeps_its_warm_up_for_a_resumption_with_more_steps():
    config = Optimizer(learning_rate=0.02, schedule="constant", warmup_steps=10)
    few, many = make_schedule(config, 2), make_schedule(config, 20)
    assert [float(few(step)) for step in range(2)] == [float(many(step)) for step in range(2)]


# Optimizers.


def test_adamw_is_that_of_optax():
    config = Optimizer(learning_rate=0.1, warmup_steps=2, weight_decay=0.3, clip_norm=0.5)
    mask = {"kernel": True, "cube": True, "scale": False}
    expected = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(make_schedule(config, 9), b1=0.9, b2=0.95, weight_decay=0.3, mask=mask),
    )
    assert_same(updates_of(make_optimizer(config, 9)), updates_of(expected))


def test_sgd_is_nesterov():
    """v = momentum · v + g, and the step is momentum · v + g (Sutskever et al. 2013)."""
    velocity = jax.tree.map(jnp.zeros_like, params())
    current, expected = params(), []
    for step in range(4):
        grads = gradient(step, current)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        updates = jax.tree.map(lambda v, g: -0.1 * (0.9 * v + g), velocity, grads)
        current = jax.tree.map(jnp.add, current, updates)
        expected.append(updates)
    tx = make_optimizer(constant(name="sgd", momentum=0.9), STEPS)
    assert_same(updates_of(tx), expected)


def test_adafactor_factors_and_learns():
    target = jnp.asarray(np.random.default_rng(0).normal(size=(128, 256)), jnp.float32)
    tx = make_optimizer(constant(name="adafactor", learning_rate=0.05), STEPS)
    current = jnp.zeros_like(target)
    state = tx.init(current)
    # Shazeer & Stern 2018: a row and a column replace the matrix of second moments.
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 2 * (128 + 256)

    @jax.jit
    def step(current, state):
        updates, state = tx.update(current - target, state, current)
        return optax.apply_updates(current, updates), state

    for _ in range(30):
        current, state = step(current, state)
    assert jnp.square(current - target).mean() < 0.2 * jnp.square(target).mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_of_matrices_only_and_scaled_by_the_rate(name):
    tx = make_optimizer(constant(name=name, weight_decay=0.3), STEPS)
    still = updates_of(tx, steps=1, gradient=lambda _, tree: jax.tree.map(jnp.zeros_like, tree))
    expected = {
        key: -0.1 * 0.3 * leaf if leaf.ndim > 1 else jnp.zeros_like(leaf)
        for key, leaf in params().items()
    }
    assert_same(still[0], expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rate_follows_the_schedule(name):
    """Step n has the n-th value of the schedule."""
    config = constant(name=name, schedule="linear", final_fraction=0.0, warmup_steps=2)
    slow, fast = (updates_of(make_optimizer(c, 9), 1) for c in (config, constant(name=name)))
    assert_same(slow, jax.tree.map(lambda leaf: leaf / 3, fast))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(1)
def test_stacked_layers_are_updated_as_each_alone(name):
    """Weight decay applies to each layer's matrices, and Adafactor clips each layer's updates."""
    # Adafactor factors the moments of dimensions from 128 on.
    large = np.asarray(np.random.default_rng(0).normal(size=(128, 130)), np.float32)
    tree = params() | {"large": jnp.asarray(large)}
    tx = make_optimizer(constant(name=name, weight_decay=0.3), STEPS)

    # So large that Adafactor clips, each layer by a different factor.
    def large_gradient(step, tree):
        return jax.tree.map(lambda x: jnp.sin(x * (step + 2)) * 10.0**step, tree)

    together = updates_of(tx, 3, large_gradient, stacked(tree))
    for number in range(3):
        nth = operator.itemgetter(number)
        layer = jax.tree.map(nth, stacked(tree)["layers"])
        for one, other in zip(updates_of(tx, 3, large_gradient, layer), together):
            assert_same(jax.tree.map(nth, other["layers"]), one)


def test_gradients_are_clipped_to_their_global_norm():
    tx = make_optimizer(constant(name="sgd", momentum=0.0, clip_norm=0.5), STEPS)
    (update,) = updates_of(tx, 1, lambda step, tree: jax.tree.map(lambda x: 100 * x, tree))
    norm = optax.tree.norm(params())
    assert_same(update, jax.tree.map(lambda x: -0.1 * 0.5 * x / norm, params()))
    # Gradients with a smaller norm are not changed.
    (update,) = updates_of(tx, 1, lambda step, tree: jax.tree.map(lambda x: 0.01 * x, tree))
    assert_same(update, jax.tree.map(lambda x: -0.1 * 0.01 * x, params()))


def test_no_clipping_when_it_is_zero():
    tx = make_optimizer(constant(name="sgd", momentum=0.0, clip_norm=0.0), STEPS)
    (update,) = updates_of(tx, 1, lambda step, tree: jax.tree.map(lambda x: 100 * x, tree))
    assert_same(update, jax.tree.map(lambda x: -0.1 * 100 * x, params()))
