import functools
import itertools
import math

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Config
from alibi_jax.losses import token_nll
from alibi_jax.model import abstract_model, initial_params
from alibi_jax.scoring import Protocol, Scorer, Scores

# Neither a power of two nor a size that anything pads to.
VOCAB = 11
WHOLE = Protocol("nonoverlapping")
PROTOCOLS = [WHOLE, Protocol("sliding", 1), Protocol("sliding", 5), Protocol("sliding", 16)]


def tiny(position="alibi", tied=True):
    config = Config()
    config.model.position, config.model.tied_embeddings = position, tied
    config.model.num_layers, config.model.width, config.model.num_heads = 1, 8, 2
    config.train.length = 16
    return config


def fresh_params(config, seed=0):
    return jax.device_get(initial_params(config, VOCAB, jax.random.key(seed)))


def stream(num_tokens, seed=0):
    """Random tokens, each likelier after some than after others."""
    steps = np.random.default_rng(seed).integers(0, 4, num_tokens)
    return (np.cumsum(steps) % VOCAB).astype(np.uint16)


@functools.cache
def make_scorer(batch_tokens, devices=1, **kind):
    """(scorer, a function that places parameters); kept, since most of a test is compiling."""
    mesh = mesh_of(devices, 1, 1)
    graphdef, abstract = abstract_model(tiny(**kind), VOCAB, mesh)

    def place(params):
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract)

    return Scorer(graphdef, mesh, batch_tokens), place


def score(
    params, tokens, protocol=WHOLE, length=16, *, batch_tokens=128, devices=1, sizes=1, **kind
):
    """Scores under parameters; `sizes` are the bytes that each token stands for."""
    scorer, place = make_scorer(batch_tokens, devices, **kind)
    windows = protocol.windows(len(tokens), length)
    sizes = np.broadcast_to(np.int32(sizes), (VOCAB,))
    return scorer(place(params), tokens, windows, sizes, "test")


def bigram_params(config):
    """(parameters under which layers add nothing, the log-probabilities [V, V] they give)."""
    params = fresh_params(config)
    for layer in params["layers"].values():
        for part, name in (("attention", "out"), ("ff", "down")):
            layer[part][name]["kernel"] = np.zeros_like(layer[part][name]["kernel"])
    # Wide enough that the predictions differ.
    params["embedding"] = embedding = params["embedding"] * 3
    x = embedding.astype(np.float64) * math.sqrt(embedding.shape[1])
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    logits = x @ embedding.T.astype(np.float64)
    return params, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def assert_same_scores(one, other):
    np.testing.assert_array_equal(one.targets, other.targets)
    np.testing.assert_allclose(one.nll, other.nll, rtol=1e-6)
    assert one.mean_nll == pytest.approx(other.mean_nll, rel=1e-6)
    assert one.num_bytes == other.num_bytes


@pytest.mark.parametrize(
    ("protocol", "length"),
    [(p, length) for p in PROTOCOLS for length in (1, 16, 300) if (p.stride or 0) <= length],
)
def test_f5_a_uniform_model_has_the_perplexity_of_its_vocabulary(protocol, length):
    tokens = stream(200)
    zeros = jax.tree.map(np.zeros_like, fresh_params(tiny()))
    scores = score(zeros, tokens, protocol, length, batch_tokens=1024)
    assert math.exp(scores.mean_nll) == pytest.approx(VOCAB, rel=1e-6)
    assert scores.targets.sum() == 199


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_f5_a_bigram_oracle_gives_the_analytic_loss(protocol):
    tokens = stream(333)
    params, log_probs = bigram_params(tiny())
    scores = score(params, tokens, protocol)
    expected = -log_probs[tokens[:-1], tokens[1:]]
    assert expected.std() > 0.1
    assert scores.targets.sum() == 332
    assert scores.nll.sum() == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride"), [(10, 4, 4), (10, 4, 2), (11, 4, 2), (1025, 512, 256)]
)
def test_f2_the_mean_weighs_by_scored_targets(num_tokens, length, stride):
    tokens = stream(num_tokens)
    params, log_probs = bigram_params(tiny())
    scores = score(params, tokens, Protocol("sliding", stride), length, batch_tokens=length)
    expected = -log_probs[tokens[:-1], tokens[1:]].mean()
    assert scores.mean_nll == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("position", ["alibi", "sinusoidal"])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_f3_f4_windows_equal_each_target_alone_with_its_context(position, stride):
    """Stride 1 is a window of constant length: Press et al. 2021, Appendix B."""
    length, tokens = 8, stream(30)
    params = fresh_params(tiny(position))
    scores = score(params, tokens, Protocol("sliding", stride), length, position=position)

    # Row t - 1 ends with target t: its context starts with the first window to reach it.
    ends = np.arange(1, len(tokens))
    starts = np.array(
        [next(s for s in itertools.count(0, stride) if s + length >= end) for end in ends]
    )
    last = ends - starts - 1
    inputs = np.zeros((len(ends), length), np.int32)
    targets = np.zeros_like(inputs)
    for row, (start, end) in enumerate(zip(starts, ends)):
        inputs[row, : end - start] = tokens[start:end]
        targets[row, : end - start] = tokens[start + 1 : end + 1]

    @jax.jit
    def losses(params, inputs, targets):
        model = nnx.merge(graphdef, params)
        return token_nll(model.hidden_states(inputs), model.unembedding, targets)

    graphdef, _ = abstract_model(tiny(position), VOCAB, mesh_of(1, 1, 1))
    alone = np.asarray(losses(params, inputs, targets))[np.arange(len(ends)), last]
    np.testing.assert_array_equal(scores.targets, np.bincount(last, minlength=length))
    np.testing.assert_allclose(scores.nll, np.bincount(last, alone, length), rtol=1e-5)
    # Of the targets that see little, there are the first window's only.
    assert (last < length - stride).sum() == length - stride


def test_f4_a_stride_of_the_length_is_no_overlap():
    tokens = stream(150)
    params = fresh_params(tiny())
    assert_same_scores(score(params, tokens), score(params, tokens, Protocol("sliding", 16)))


def test_f4_a_stride_over_the_length_raises():
    with pytest.raises(ValueError, match=r"stride=6 with length=4"):
        Protocol("sliding", 6).windows(10, 4)


@pytest.mark.parametrize("num_tokens", [2, 9, 17])
def test_f6_a_text_of_one_window_is_the_same_for_every_stride(num_tokens):
    tokens = stream(num_tokens)
    params = fresh_params(tiny())
    whole = score(params, tokens)
    for stride in (1, 3, 16):
        assert_same_scores(whole, score(params, tokens, Protocol("sliding", stride)))


def test_f8_units():
    scores = Scores(np.array([200.0]), np.array([100]), 400, 0.0, 0.0)
    assert math.exp(scores.mean_nll) == pytest.approx(7.389056, rel=1e-6)
    assert scores.bits_per_byte == pytest.approx(0.721348, rel=1e-6)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=str)
def test_f8_bytes_are_those_of_the_targets(protocol):
    tokens = stream(100)
    sizes = np.arange(VOCAB, dtype=np.int32)
    scores = score(fresh_params(tiny()), tokens, protocol, sizes=sizes)
    assert scores.num_bytes == sizes[tokens[1:]].sum()


@pytest.fixture(scope="module")
def reference():
    """(parameters, 64 windows and a bit, their scores one window at a time) by protocol."""
    params, tokens = fresh_params(tiny()), stream(64 * 16 + 7)
    protocols = [WHOLE, Protocol("sliding", 5)]
    return params, tokens, {p: score(params, tokens, p, batch_tokens=16) for p in protocols}


@pytest.mark.parametrize("batch", [3, 8, 64, 1000])
def test_f9_the_batch_size_changes_nothing(reference, batch):
    params, tokens, expected = reference
    for protocol, scores in expected.items():
        assert scores.targets.sum() == len(tokens) - 1
        assert_same_scores(score(params, tokens, protocol, batch_tokens=16 * batch), scores)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_f9_the_number_of_devices_changes_nothing(reference, devices, batch):
    params, tokens, expected = reference
    for protocol, scores in expected.items():
        several = score(params, tokens, protocol, devices=devices, batch_tokens=16 * batch)
        assert_same_scores(several, scores)


def test_f9_unequal_batches_are_not_averaged():
    scores = Scores(np.array([2.0 + 4.0, 2.0, 2.0]), np.array([2, 1, 1]), 4, 0.0, 0.0)
    assert scores.mean_nll == 2.5
    assert math.exp(scores.mean_nll) == pytest.approx(12.1825, rel=1e-5)


def test_f11_counts_and_sums_past_2_to_the_24_are_exact():
    """In float32, 16777216 + 1 == 16777216."""
    scores = Scores(np.array([2.0**24, 1.0]), np.array([2**24, 1]), 2**24 + 1, 0.0, 0.0)
    assert scores.targets.sum() == 2**24 + 1
    assert scores.nll.sum() == 2.0**24 + 1
    assert scores.mean_nll == 1.0


def test_f11_sums_over_batches_are_float64():
    # Token 0 predicts all alike; after token 1, token 0 costs 2^29 nats and more, of which
    # float32 holds no less than 32.
    kind = {"position": "none", "tied": False}
    params, _ = bigram_params(tiny(**kind))
    params["embedding"] = np.zeros_like(params["embedding"])
    params["embedding"][1] = [1, -1] * 4
    params["output"] = np.zeros_like(params["output"])
    params["output"][1] = [2.0**27, -(2.0**27)] * 4
    huge = score(params, np.array([1, 0], np.uint16), length=1, **kind)
    assert huge.mean_nll > 2**29
    tokens = np.array([1] + [0] * 1000, np.uint16)
    scores = score(params, tokens, length=1, **kind, batch_tokens=8)
    assert scores.nll.dtype == np.float64
    assert scores.targets.dtype == np.int64
    assert scores.nll.sum() - huge.nll.sum() == pytest.approx(999 * math.log(VOCAB), rel=1e-6)


def test_one_compilation_a_shape():
    scorer, place = make_scorer.__wrapped__(128, devices=2)
    tokens = stream(400)
    sizes = np.ones(VOCAB, np.int32)
    compiled = []

    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    def run(seed, protocol, length, tokens):
        params = place(fresh_params(tiny(), seed))
        windows = protocol.windows(len(tokens), length)
        before = len(compiled)
        scorer(params, tokens, windows, sizes, "test")
        return len(compiled) - before

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        assert run(0, WHOLE, 16, tokens) == 1
        # Other parameters, another protocol, another text of as many tokens a batch.
        assert run(1, WHOLE, 16, tokens) == 0
        assert run(1, Protocol("sliding", 4), 16, tokens) == 0
        assert run(1, WHOLE, 16, stream(1000)) == 0
        assert run(1, WHOLE, 32, tokens) == 1
        assert run(1, WHOLE, 32, tokens) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@settings(max_examples=50, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 4, 8]),
    batch_tokens=st.integers(1, 10_000),
    windows=st.integers(1, 500),
    length=st.integers(1, 4096),
)
def test_the_batch_is_as_asked_where_windows_and_devices_allow(
    devices, batch_tokens, windows, length
):
    scorer, _ = make_scorer(batch_tokens, devices)
    batch = scorer.batch_size(windows, length)
    assert batch % devices == 0
    assert batch == devices or batch * length <= batch_tokens
    # No more padding windows than the devices need.
    assert batch < windows + devices
    # No smaller than it has to be.
    assert (batch + devices) * length > batch_tokens or batch >= windows
