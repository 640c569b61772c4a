import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Config
from alibi_jax.data.windows import evaluation_windows, fixed_context_windows, sample_targets
from alibi_jax.distributed import memory
from alibi_jax.evaluation.scoring import Scorer, Scores
from alibi_jax.model import abstract_model, initial_params
from alibi_jax.model.losses import token_nll

# Not a power of two, and not a size that any padding gives.
VOCAB = 11
# None stands for windows that do not overlap.
STRIDES = [None, 1, 5, 16]


def tiny(position="alibi", tied=True):
    config = Config()
    config.model.position, config.model.tied_embeddings = position, tied
    config.model.num_layers, config.model.width, config.model.num_heads = 1, 8, 2
    config.train.length = 16
    return config


def fresh_params(config, seed=0):
    return jax.device_get(initial_params(config, VOCAB, jax.random.key(seed)))


def stream(num_tokens, seed=0):
    """Random tokens whose probability depends on the token before."""
    steps = np.random.default_rng(seed).integers(0, 4, num_tokens)
    return (np.cumsum(steps) % VOCAB).astype(np.uint16)


@functools.cache
def make_scorer(batch_tokens, devices=1, **kind):
    """(scorer, a function that shards parameters); cached, since compiling takes long."""
    mesh = mesh_of(devices, 1, 1, 1)
    graphdef, abstract = abstract_model(tiny(**kind), VOCAB, mesh)

    def shard(params):
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract)

    return Scorer(graphdef, mesh, batch_tokens), shard


def windows_over(tokens, length, stride=None, bos=None):
    return evaluation_windows(np.array([0, len(tokens)]), length, stride or length, bos)


def score(params, tokens, stride=None, length=16, *, batch_tokens=128, devices=1, **kind):
    scorer, shard = make_scorer(batch_tokens, devices, **kind)
    return scorer(shard(params), tokens, windows_over(tokens, length, stride), "test")


def bigram_params(config):
    """(parameters under which layers add nothing, the log-probabilities [V, V] they give)."""
    params = fresh_params(config)
    for layer in params["layers"]["stacks"].values():
        for part, name in (("attention", "out"), ("ff", "down")):
            layer[part][name]["kernel"] = np.zeros_like(layer[part][name]["kernel"])
    # Large enough that the predictions differ.
    tables = params["vocabulary"]
    tables["embedding"] = embedding = tables["embedding"] * 3
    embedding = embedding[:VOCAB]
    x = embedding.astype(np.float64) * math.sqrt(embedding.shape[1])
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    logits = x @ embedding.T.astype(np.float64)
    return params, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def assert_same_scores(one, other):
    np.testing.assert_array_equal(one.targets, other.targets)
    np.testing.assert_array_equal(one.contexts, other.contexts)
    # A small loss is a difference of numbers near 4, where float32 has steps of 5e-7.
    np.testing.assert_allclose(one.nll, other.nll, rtol=2e-6, atol=5e-7)
    assert one.mean_nll == pytest.approx(other.mean_nll, rel=1e-6)


@pytest.mark.parametrize(
    ("stride", "length"),
    [(s, length) for s in STRIDES for length in (1, 16, 300) if (s or 0) <= length],
)
@pytest.mark.sample(4)
def test_f5_a_uniform_model_has_the_perplexity_of_its_vocabulary(stride, length):
    tokens = stream(200)
    zeros = jax.tree.map(np.zeros_like, fresh_params(tiny()))
    scores = score(zeros, tokens, stride, length, batch_tokens=1024)
    assert math.exp(scores.mean_nll) == pytest.approx(VOCAB, rel=1e-6)
    assert scores.targets.tolist() == list(range(1, 200))


@pytest.mark.parametrize("stride", STRIDES)
def test_f5_a_bigram_oracle_gives_the_analytic_loss(stride):
    tokens = stream(333)
    params, log_probs = bigram_params(tiny())
    scores = score(params, tokens, stride)
    expected = -log_probs[tokens[:-1], tokens[1:]]
    assert expected.std() > 0.1
    # Losses near 0 are differences of larger numbers.
    np.testing.assert_allclose(scores.nll, expected, rtol=1e-5, atol=2e-6)
    assert scores.total_nll == pytest.approx(expected.sum(), rel=1e-6)


class CopyLast(nnx.Module):
    """Predicts that the last token is repeated, with odds of e³ to 1 over each other token."""

    def __init__(self):
        self.table = nnx.Param(jnp.eye(VOCAB))

    def token_nll(self, hidden, targets):
        return token_nll(hidden, self.table[...], targets)

    def hidden_states(self, tokens, last):
        return 3.0 * jax.nn.one_hot(tokens[:, -last:], VOCAB)


@pytest.mark.parametrize("bos", [None, 4])
@pytest.mark.parametrize("devices", [1, 4])
def test_f5_a_model_that_copies_the_last_token_has_known_losses_by_every_protocol(bos, devices):
    tokens = np.random.default_rng(0).integers(0, 3, 201).astype(np.uint16)
    graphdef, params = nnx.split(CopyLast(), nnx.Param)
    mesh = mesh_of(devices, 1, 1, 1)
    params = jax.device_put(nnx.to_pure_dict(params), jax.NamedSharding(mesh, jax.P()))
    scorer = Scorer(graphdef, mesh, 64)
    stream, documents = np.array([0, 201]), np.array([0, 50, 57, 201])
    sample = sample_targets(documents, 16, 30, 0)
    for windows in (
        evaluation_windows(stream, 16, 16, bos),
        evaluation_windows(stream, 16, 1, bos),
        evaluation_windows(documents, 16, 5, bos),
        fixed_context_windows(sample, 1, bos),
        fixed_context_windows(sample, 16, bos),
    ):
        scores = scorer(params, tokens, windows, "test")
        last = tokens[scores.targets - 1]
        if bos is not None:
            last = np.where(scores.contexts == 1, bos, last)
        copied = last == tokens[scores.targets]
        assert copied.any() or (bos is not None and windows.length == 1)
        expected = math.log(math.exp(3) + VOCAB - 1) - 3 * copied
        np.testing.assert_allclose(scores.nll, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride"), [(10, 4, 4), (10, 4, 2), (11, 4, 2), (1025, 512, 256)]
)
def test_f2_the_mean_weighs_by_scored_targets(num_tokens, length, stride):
    tokens = stream(num_tokens)
    params, log_probs = bigram_params(tiny())
    scores = score(params, tokens, stride, length, batch_tokens=length)
    expected = -log_probs[tokens[:-1], tokens[1:]].mean()
    assert scores.mean_nll == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("position", ["alibi", "sinusoidal"])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.sample(2)
def test_f3_f4_windows_equal_each_target_alone_with_its_context(position, stride):
    """Stride 1 is a window of constant length: Press et al. 2021, Appendix B."""
    length, tokens = 8, stream(30)
    params = fresh_params(tiny(position))
    scores = score(params, tokens, stride, length, position=position)

    # Row t - 1 ends with target t; its context starts where the first window with it starts.
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
        return model.token_nll(model.hidden_states(inputs), targets)

    graphdef, _ = abstract_model(tiny(position), VOCAB, mesh_of(1, 1, 1, 1))
    alone = np.asarray(losses(params, inputs, targets))[np.arange(len(ends)), last]
    np.testing.assert_array_equal(scores.contexts, last + 1)
    np.testing.assert_allclose(scores.nll, alone, rtol=1e-5)
    # Only the first window has targets with less context.
    assert (last < length - stride).sum() == length - stride


def test_f4_a_stride_of_the_length_is_no_overlap():
    tokens = stream(150)
    params = fresh_params(tiny())
    assert_same_scores(score(params, tokens), score(params, tokens, 16))


def test_fixed_contexts_are_those_of_stride_1():
    """A target with exactly c tokens of context is the last target of a window of c tokens."""
    tokens, params = stream(80), fresh_params(tiny())
    targets = np.array([16, 17, 40, 79])
    scorer, shard = make_scorer(128)
    for context in (1, 5, 16):
        fixed = scorer(shard(params), tokens, fixed_context_windows(targets, context), "test")
        assert fixed.contexts.tolist() == [context] * 4
        slid = score(params, tokens, 1, context)
        np.testing.assert_allclose(fixed.nll, slid.nll[targets - 1], rtol=1e-5)


@pytest.mark.parametrize("stride", [None, 3, 1])
def test_f6_with_a_beginning_of_sequence_the_first_input_is_it(stride):
    tokens, params = stream(70), fresh_params(tiny())
    scorer, shard = make_scorer(128)
    scores = scorer(shard(params), tokens, windows_over(tokens, 8, stride, bos=5), "test")
    np.testing.assert_array_equal(scores.targets, np.arange(1, 70))
    # Some of the targets, scored one by one.
    for target in (1, 2, 8, 9, 33, 69):
        context = int(scores.contexts[target - 1])
        alone = np.array([5, *tokens[target - context + 1 : target + 1]], np.uint16)
        assert len(alone) == context + 1
        expected = score(params, alone, None, 8).nll[-1]
        assert scores.nll[target - 1] == pytest.approx(expected, rel=1e-5)


def test_documents_are_scored_as_each_alone():
    tokens, params = stream(90), fresh_params(tiny())
    bounds = np.array([0, 30, 31, 60, 90])
    scorer, shard = make_scorer(128)
    for stride in (16, 4):
        together = scorer(shard(params), tokens, evaluation_windows(bounds, 16, stride), "test")
        parts = [score(params, tokens[a:b], stride) for a, b in ((0, 30), (31, 60), (60, 90))]
        np.testing.assert_allclose(together.nll, np.concatenate([p.nll for p in parts]), rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 9, 17])
def test_f6_a_text_of_one_window_is_the_same_for_every_stride(num_tokens):
    tokens = stream(num_tokens)
    params = fresh_params(tiny())
    whole = score(params, tokens)
    for stride in (1, 3, 16):
        assert_same_scores(whole, score(params, tokens, stride))


@pytest.fixture(scope="module")
def reference():
    """(parameters, 64 windows and a bit, their scores one window at a time) by stride."""
    params, tokens = fresh_params(tiny()), stream(64 * 16 + 7)
    return params, tokens, {s: score(params, tokens, s, batch_tokens=16) for s in (None, 5)}


@pytest.mark.parametrize("batch", [3, 8, 64, 1000])
@pytest.mark.sample(2)
def test_f9_the_batch_size_changes_nothing(reference, batch):
    params, tokens, expected = reference
    for stride, scores in expected.items():
        assert len(scores.nll) == len(tokens) - 1
        assert_same_scores(score(params, tokens, stride, batch_tokens=16 * batch), scores)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.sample(2)
def test_f9_the_number_of_devices_changes_nothing(reference, devices, batch):
    params, tokens, expected = reference
    for stride, scores in expected.items():
        several = score(params, tokens, stride, devices=devices, batch_tokens=16 * batch)
        assert_same_scores(several, scores)


def scores_of(nll):
    nll = np.array(nll, np.float32)
    return Scores(nll, np.arange(1, len(nll) + 1), np.arange(1, len(nll) + 1), 0.0, 0.0)


def test_f9_unequal_batches_are_not_averaged():
    scores = scores_of([2.0, 2.0, 2.0, 4.0])
    assert scores.mean_nll == 2.5
    assert math.exp(scores.mean_nll) == pytest.approx(12.1825, rel=1e-5)


def test_f11_sums_past_2_to_the_24_are_exact():
    """In float32, 16777216 + 1 == 16777216."""
    scores = scores_of([2.0**24, 1.0])
    assert scores.total_nll == 2.0**24 + 1
    assert scores.by_context(scores.nll).tolist() == [2.0**24, 1.0]
    assert scores.by_context().tolist() == [1.0, 1.0]
    many = np.ones(2**24 + 8, np.float32)
    assert Scores(many, np.arange(len(many)), many.astype(int), 0.0, 0.0).mean_nll == 1.0


def test_f11_sums_over_batches_are_float64():
    # After token 0 all tokens are equally likely. After token 1, token 0 costs more than 2^29 nats,
    # where float32 has steps of 32.
    kind = {"position": "none", "tied": False}
    params, _ = bigram_params(tiny(**kind))
    tables = params["vocabulary"]
    tables["embedding"] = np.zeros_like(tables["embedding"])
    tables["embedding"][1] = [1, -1] * 4
    tables["output"] = np.zeros_like(tables["output"])
    tables["output"][1] = [2.0**27, -(2.0**27)] * 4
    huge = score(params, np.array([1, 0], np.uint16), length=1, **kind)
    assert huge.mean_nll > 2**29
    tokens = np.array([1] + [0] * 1000, np.uint16)
    scores = score(params, tokens, length=1, **kind, batch_tokens=8)
    assert scores.total_nll - huge.total_nll == pytest.approx(999 * math.log(VOCAB), rel=1e-6)


def test_one_compilation_per_shape(compiled):
    scorer, shard = make_scorer.__wrapped__(128, devices=2)
    tokens = stream(400)

    def run(seed, stride, length, tokens):
        params = shard(fresh_params(tiny(), seed))
        before = len(compiled)
        scorer(params, tokens, windows_over(tokens, length, stride), "test")
        return compiled[before:].count("nll")

    assert run(0, None, 16, tokens) == 1
    # Other parameters and another text, with the same shape of a batch.
    assert run(1, None, 16, tokens) == 0
    assert run(1, None, 16, stream(1000)) == 0
    # Sliding windows have two shapes: the first window, and the ends of the others.
    assert run(1, 4, 16, tokens) == 2
    assert run(0, 4, 16, stream(1000)) == 0
    assert run(1, None, 32, tokens) == 1
    assert run(1, None, 32, tokens) == 0


def test_only_scored_positions_are_projected_to_the_vocabulary():
    scorer, shard = make_scorer(128)
    params = shard(fresh_params(tiny()))

    def flops(first_scored):
        return scorer.program(params, 8, 16, first_scored).cost_analysis()["flops"]

    # 8 windows of 16 tokens have 128 positions, of which 8 are scored. Each position costs the
    # projection to 11 tokens by 8, and in the last (here the only) layer the query, the output and
    # the feed-forward projections.
    per_position = 2 * 8 * (VOCAB + 8 + 8 + 2 * 32)
    assert flops(0) - flops(15) > 0.9 * (8 * 16 - 8) * per_position


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_after", [1, 2, 6])
def test_interrupted_scoring_continues_where_it_stopped(stop_after, monkeypatch):
    tokens, params = stream(200), fresh_params(tiny())
    scorer, shard = make_scorer.__wrapped__(32)
    windows = windows_over(tokens, 16, 8)
    whole = scorer(shard(params), tokens, windows, "test")
    saved, batches, limit = [], [], [stop_after]
    compile_once = scorer.program

    def counting(*shape):
        compiled = compile_once(*shape)

        def call(*arguments):
            if len(batches) == limit[0]:
                raise Stop
            batches.append(shape)
            return compiled(*arguments)

        return call

    monkeypatch.setattr(scorer, "program", counting)
    with pytest.raises(Stop):
        scorer(shard(params), tokens, windows, "test", save=lambda x: saved.append(x.copy()))
    (losses,) = saved
    assert np.isnan(losses).any()
    left = np.isnan(np.split(losses, windows.offsets[1:])[-1]).all()
    assert left
    batches.clear()
    limit[0] = math.inf
    scores = scorer(shard(params), tokens, windows, "test", losses)
    np.testing.assert_array_equal(scores.nll, whole.nll)
    # The first window is one batch, the 23 others are 12; the batch in flight is scored again.
    collected = {1: 1, 2: 1, 6: 5}[stop_after]
    assert len(batches) == 13 - collected
    batches.clear()
    scorer(shard(params), tokens, windows, "test", scores.nll)
    assert not batches


def test_a_length_past_the_memory_is_refused_with_the_amount_that_it_needs(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    scorer, shard = make_scorer.__wrapped__(128)
    tokens, params = stream(200), shard(fresh_params(tiny()))
    with pytest.raises(
        ValueError,
        match=r"8 windows of 16 tokens needs \S+ GiB .* 9.31e-07 GiB are free: .*--batch_tokens",
    ):
        scorer(params, tokens, windows_over(tokens, 16), "test")
    with pytest.raises(ValueError, match=r"1 windows of 190 tokens .*: use more devices"):
        scorer(params, tokens, windows_over(tokens, 190), "test")


@settings(max_examples=50, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 4, 8]),
    batch_tokens=st.integers(1, 10_000),
    windows=st.integers(1, 500),
    length=st.integers(1, 4096),
)
def test_the_batch_size_is_the_requested_one_where_windows_and_devices_allow(
    devices, batch_tokens, windows, length
):
    scorer, _ = make_scorer(batch_tokens, devices)
    batch = scorer.batch_size(windows, length)
    assert batch % devices == 0
    assert batch == devices or batch * length <= batch_tokens
    # The only padding windows are those that fill up the devices.
    assert batch < windows + devices
    # The batch is as large as allowed.
    assert (batch + devices) * length > batch_tokens or batch >= windows


@pytest.mark.parametrize("first_scored", [0, 16383])
@pytest.mark.parametrize("position", ["alibi", "rotary", "t5", "fire", "fox"])
@pytest.mark.sample(4)
def test_no_array_of_the_compiled_program_is_the_square_of_the_length(position, first_scored):
    length = 16384
    config = tiny(position)
    mesh = mesh_of(1, 1, 1, 1)
    graphdef, abstract = abstract_model(config, VOCAB, mesh)
    program = Scorer(graphdef, mesh, 1).program(abstract, 1, length, first_scored)
    shapes = re.findall(r"[a-z]+\d+\[(\d+(?:,\d+)*)\]", program.as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    # The program has arrays per token, but none per pair of tokens.
    assert max(sizes) >= length * config.model.width
    assert max(sizes) < length**2 / 16
    assert program.memory_analysis().temp_size_in_bytes < length**2 / 4
