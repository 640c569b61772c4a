"""The decomposition of a gain, on models with known parts: early tokens, context, or both."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from hypothesis import given
from hypothesis import strategies as st

from alibi_jax.data.windows import evaluation_windows, fixed_context_windows, sample_targets
from alibi_jax.evaluation.bootstrap import Clusters, make_clusters
from alibi_jax.evaluation.decomposition import decompose
from alibi_jax.evaluation.scoring import Scorer
from alibi_jax.model.losses import token_nll

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 5
LENGTHS = (8, 16, 64)


class Planted(nnx.Module):
    """Gives token 0, the only token of the text, the loss `loss(tokens seen, window length)`."""

    def __init__(self, loss):
        self.loss = loss
        self.table = nnx.Param(jnp.eye(VOCAB))

    def token_nll(self, hidden, targets):
        return token_nll(hidden, self.table[...], targets)

    def hidden_states(self, tokens, last):
        length = tokens.shape[1]
        likely = -self.loss(jnp.arange(1, length + 1, dtype=jnp.float32), length)
        others = jnp.log(-jnp.expm1(likely)) - math.log(VOCAB - 1)
        logits = jnp.stack([likely] + [others] * (VOCAB - 1), axis=-1)
        return jnp.broadcast_to(logits, (*tokens.shape, VOCAB))[:, -last:]


# Losses in nats by tokens seen and window length. `early`: the first 4 targets of a window cost 2
# more. `context`: each doubling of the window length gains 0.1, at every number of tokens seen.
def early(seen, length):
    return jnp.where(seen <= 4, 3.0, 1.0)


def context(seen, length):
    return jnp.full_like(seen, 2.0 - 0.1 * math.log2(length))


def both(seen, length):
    return early(seen, length) + context(seen, length) - 1.0


def score(loss, windows, tokens, devices=1):
    graphdef, params = nnx.split(Planted(loss), nnx.Param)
    mesh = mesh_of(devices, 1, 1, 1)
    params = jax.device_put(nnx.to_pure_dict(params), jax.NamedSharding(mesh, jax.P()))
    return Scorer(graphdef, mesh, 256)(params, tokens, windows, "test")


@functools.cache
def decomposed(loss, devices=1):
    """The parts for all targets after the first window of 64, in 8 documents and 513 tokens."""
    bounds = np.array([0, 513])
    tokens = np.zeros(513, np.uint16)
    sample = sample_targets(bounds, max(LENGTHS), 10**6, 0)
    nonoverlapping, contexts, fixed = {}, {}, {}
    for length in LENGTHS:
        windows = evaluation_windows(bounds, length, length)
        nonoverlapping[length] = score(loss, windows, tokens, devices).nll[sample - 1]
        contexts[length] = windows.contexts[sample - 1]
        fixed[length] = score(loss, fixed_context_windows(sample, length), tokens, devices).nll
    groups = make_clusters(sample, np.arange(8) * 64, 0)
    entries = decompose(nonoverlapping, contexts, fixed, 8, groups)["lengths"]
    return sample, {entry.pop("length"): entry for entry in entries}


def curse(sample, length):
    """The mean extra loss from `early` of the targets in windows of that length."""
    return 2.0 * ((sample - 1) % length < 4).mean()


@pytest.mark.parametrize("loss", [early, context, both])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.sample(2)
def test_the_decomposition_recovers_the_planted_parts(loss, devices):
    sample, entries = decomposed(loss, devices)
    assert sample.tolist() == list(range(65, 513))
    planted = 0 if loss is context else 1
    gained = 0 if loss is early else 1
    for length, entry in entries.items():
        doublings = math.log2(length / 8)
        expected = {
            "curse": planted * curse(sample, length),
            "early_tokens": planted * (curse(sample, 8) - curse(sample, length)),
            "context": gained * 0.1 * doublings,
        }
        expected["gain"] = expected["early_tokens"] + expected["context"]
        contexts = [entry[f"{which}_context"] for which in ("smallest", "mean", "largest")]
        assert contexts == [1, (length + 1) / 2, length]
        for name, value in expected.items():
            assert entry[name]["nats"] == pytest.approx(value, abs=2e-6), (length, name)


def test_what_all_targets_have_in_common_is_not_noise():
    _, entries = decomposed(both)
    for entry in entries.values():
        context = entry["context"]
        assert context["low"] == pytest.approx(context["high"], abs=1e-6)
        # The position of targets in their windows differs between draws, so the curse has noise.
        if entry["early_tokens"]["nats"]:
            assert entry["early_tokens"]["low"] <= entry["early_tokens"]["high"]


losses = st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed).gamma(1, 1, (6, 40)))


@given(values=losses)
def test_the_parts_add_up_to_rounding(values):
    nonoverlapping = dict(zip((1, 2, 3), np.float32(values[:3])))
    fixed = dict(zip((1, 2, 3), np.float32(values[3:])))
    groups = Clusters(np.arange(40) // 4, "documents", 0)
    seen = dict.fromkeys((1, 2, 3), np.arange(1, 41))
    made = decompose(nonoverlapping, seen, fixed, 1, groups)
    assert made["targets"] == 40
    assert made["resampled"] == "10 documents"
    for entry in made["lengths"]:
        nats = {name: part["nats"] for name, part in entry.items() if isinstance(part, dict)}
        assert nats["early_tokens"] + nats["context"] == pytest.approx(nats["gain"], abs=1e-14)
        assert nats["nonoverlapping"] - nats["fixed"] == pytest.approx(nats["curse"], abs=1e-14)
        for part in (entry[name] for name in nats):
            assert part["low"] <= part["nats"] <= part["high"]
    assert all(made["lengths"][0][name]["nats"] == 0 for name in ("gain", "early_tokens"))


def test_the_example_of_the_paper():
    """Press et al. 2021, tables 5 and 13: trained at 512, evaluated at 3072 on WikiText-103."""

    def losses(perplexities):
        return {length: np.full(4, math.log(p)) for length, p in perplexities.items()}

    groups = Clusters(np.arange(4), "documents", 0)
    nonoverlapping, stride_1 = losses({512: 19.73, 3072: 18.40}), losses({512: 17.98, 3072: 18.30})
    seen = dict.fromkeys(nonoverlapping, np.arange(1, 5))
    made = decompose(nonoverlapping, seen, stride_1, 512, groups)
    entry = made["lengths"][1]
    # So few groups have no interval.
    assert entry["gain"]["low"] is entry["gain"]["high"] is None
    assert entry["gain"]["nats"] == pytest.approx(0.0698, abs=5e-5)
    assert entry["context"]["nats"] == pytest.approx(-0.0176, abs=5e-5)
    assert entry["early_tokens"]["nats"] == pytest.approx(0.0874, abs=5e-5)


def test_lengths_without_both_losses_are_left_out():
    losses = {length: np.ones(3) for length in (8, 16, 32)}
    groups = Clusters(np.arange(3), "documents", 0)
    seen = dict.fromkeys(losses, np.arange(1, 4))
    made = decompose(losses, seen, {8: np.ones(3), 32: np.ones(3)}, 8, groups)
    assert [entry["length"] for entry in made["lengths"]] == [8, 32]
