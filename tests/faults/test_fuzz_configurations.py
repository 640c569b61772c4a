"""Random configurations: each is refused with one line that names a key, or its step is traced."""

import dataclasses
import json
import math
import types
import typing

import jax
import numpy as np
from fuzz import fuzz, inputs, one_line
from hypothesis import strategies as st

from alibi_jax.config import POSITIONS, Config, ConfigError, flatten, from_dict
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.flops import step_flops
from alibi_jax.plan.planner import planned_vocab_size
from alibi_jax.training.step import Trainer

FIELDS = {
    f"{section.name}.{field.name}": field
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.type)
}
# Values of another type than a key has, and values of classes that behave like the type.
STRANGE = [None, True, "8", "", 8.0, b"x", [1], {}, 1j, object, np.int64(3), np.float32(0.5)]
HUGE = [2**31 - 1, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 10**400]
FLOATS = [math.nan, math.inf, -math.inf, 1e39, -1e39, 1e38, 1e-38, 1e-46, 5e-324, 1e308, -0.0]
WORDS = st.text(max_size=8) | st.text(max_size=8).map(lambda text: f"{text}\n{text}")


def is_a(field, kind):
    return field.type is kind or (
        isinstance(field.type, types.UnionType) and kind in typing.get_args(field.type)
    )


def around(bound):
    """A bound, and the numbers directly below and above it."""
    if isinstance(bound, int):
        return [bound - 1, bound, bound + 1]
    return [bound, float(np.nextafter(bound, -np.inf)), float(np.nextafter(bound, np.inf))]


def likely_numbers(field):
    """Numbers within the bounds of a key, of which most are small."""
    bounds = {"least": None, "above": None, "most": None, "below": None, **field.metadata["bounds"]}
    least = bounds["least"] if bounds["least"] is not None else bounds["above"] or 0
    most = bounds["most"] if bounds["most"] is not None else bounds["below"]
    if is_a(field, int):
        return st.sampled_from([least, least + 1]) | st.integers(least, least + 64)
    return st.floats(float(least), 1e6 if most is None else float(most))


def misspelt(words):
    """A word with one letter doubled, left out or in another case."""
    return st.tuples(st.sampled_from(list(words)), st.integers(0, 20), st.integers(0, 2)).map(
        lambda x: (
            x[0][: x[1]] + x[0][max(0, x[1] - 1) :],
            x[0][: x[1]] + x[0][x[1] + 1 :],
            x[0].title(),
        )[x[2]]
    )


PATTERNS = st.lists(
    st.sampled_from(list(POSITIONS)) | misspelt(POSITIONS) | st.just(""), min_size=1, max_size=5
).map(",".join)
CUTOFFS = st.lists(st.integers(-1, 300).map(str) | WORDS, max_size=4).map(",".join)
RISING = st.lists(st.integers(1, 255), max_size=4).map(lambda x: ",".join(map(str, sorted(x))))


def likely(key, field):
    """Values that the key often accepts by itself; together they may contradict each other."""
    if key == "model.position":
        return st.sampled_from(list(POSITIONS)) | PATTERNS
    if key == "model.adaptive_cutoffs":
        return st.just("") | RISING
    if key == "model.width":
        return st.sampled_from([1, 2, 3, 8, 16, 24, 32, 64, 96, 128, 130])
    if key.startswith("mesh."):
        return st.sampled_from([-1, 1, 2, 4, 8])
    if "choices" in field.metadata:
        return st.sampled_from(field.metadata["choices"])
    if "bounds" in field.metadata:
        return likely_numbers(field)
    if field.type is bool:
        return st.booleans()
    return st.sampled_from(["", "text", "sotu", "wikitext", "words", "/nonexistent"])


def unlikely(key, field):
    """Values at and beyond the bounds, near misses, other types, and numbers without sense."""
    kinds = [st.sampled_from([*STRANGE, *HUGE, *(-x for x in HUGE), *FLOATS]), WORDS]
    if "choices" in field.metadata:
        kinds.append(misspelt(field.metadata["choices"]))
    if "bounds" in field.metadata:
        bounds = [x for x in field.metadata["bounds"].values() if x is not None]
        kinds.append(st.sampled_from([near for bound in bounds for near in around(bound)]))
    if key == "model.adaptive_cutoffs":
        kinds.append(CUTOFFS)
    if is_a(field, int):
        kinds.append(st.integers())
    if is_a(field, float):
        kinds.append(st.floats() | st.integers())
    return st.one_of(kinds)


LIKELY = {key: likely(key, field) for key, field in FIELDS.items()}
UNLIKELY = {key: unlikely(key, field) for key, field in FIELDS.items()}


@st.composite
def changes(draw):
    """Values for some keys; in half of the inputs none of them is unlikely."""
    keys = draw(st.lists(st.sampled_from(list(FIELDS)), unique=True, max_size=12))
    chosen = {key: draw(LIKELY[key]) for key in keys}
    if draw(st.booleans()):
        key = draw(st.sampled_from(list(FIELDS)))
        chosen[key] = draw(UNLIKELY[key])
    return chosen


def refused_key(error):
    """The key that a refusal names, which is one line."""
    message = one_line(error)
    named = [key for key in FIELDS if key in message]
    assert named, message
    return min(named, key=message.index)


def configured(values):
    """The configuration with these values, of which each is assigned as on a command line."""
    config = Config()
    for key, value in values.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    config.check()
    return config


@inputs(few=200, many=10_000)
def test_configurations_are_refused_by_key_or_survive(count):
    def answer(values):
        try:
            config = configured(values)
        except ConfigError as error:
            return f"refused: {refused_key(error)}"
        stored = json.loads(json.dumps(dataclasses.asdict(config)))
        assert from_dict(stored) == config
        assert all(flatten(config)[key] == value for key, value in values.items())
        assert all(x >= 0 for x in step_flops(config, planned_vocab_size(config)))
        return "accepted"

    fuzz(changes(), answer, count)


@inputs(few=5, many=1_000)
def test_accepted_configurations_have_a_training_step(count):
    def answer(values):
        try:
            config = configured(values)
        except ConfigError:
            return "refused"
        try:
            trainer = Trainer(config, planned_vocab_size(config), make_mesh(config.mesh))
        except ValueError as error:
            return f"refused for 8 devices: {refused_key(error)}"
        batch = jax.ShapeDtypeStruct(
            (config.train.batch_size, config.train.length),
            np.int32,
            sharding=trainer.batch_sharding,
        )
        with jax.set_mesh(trainer.mesh):
            state, metrics = jax.eval_shape(
                trainer.train_step,
                trainer.abstract_state,
                {"inputs": batch, "targets": batch},
                np.int32(0),
            )
        assert metrics.nll.shape == metrics.grad_norm.shape == ()
        assert jax.tree.structure(state) == jax.tree.structure(trainer.abstract_state)
        for after, before in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.abstract_state)):
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
        return "traced"

    # With a likely value for each key, most inputs get as far as the trace.
    fuzz(st.fixed_dictionaries({}, optional=LIKELY), answer, count)
