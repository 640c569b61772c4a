import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_jax.data.errors import DataError
from alibi_jax.data.windows import (
    TrainingBatches,
    evaluation_windows,
    fixed_context_windows,
    num_eligible,
    sample_targets,
)

# (N, L, S) with 1 <= S <= L.
SHAPES = st.tuples(st.integers(2, 80), st.integers(1, 20)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(1, shape[1]))
)


def windows_of(num_tokens, length, stride, bos=None):
    """The windows over a stream that is one text."""
    return evaluation_windows(np.array([0, num_tokens]), length, stride, bos)


def test_f1_every_target_once_without_overlap():
    assert windows_of(10, 4, 4).num_scored.tolist() == [4, 4, 1]


@pytest.mark.parametrize(
    ("tokens", "length", "windows", "last"),
    [(217_647, 512, 426, 46), (245_570, 512, 480, 321), (217_647, 3072, 71, 2606)],
)
def test_f1_wikitext_counts(tokens, length, windows, last):
    made = windows_of(tokens, length, length)
    assert len(made) == windows
    stream = np.zeros(tokens, np.uint16)
    assert made.batch(stream, np.array([windows - 1]))["scored"].sum() == last


def test_f2_scored_targets_are_what_is_counted():
    assert windows_of(10, 4, 2).num_scored.tolist() == [4, 2, 2, 1]
    assert windows_of(11, 4, 2).num_scored.tolist() == [4, 2, 2, 2]
    assert len(windows_of(10, 4, 2).targets) == 9
    assert len(windows_of(11, 4, 2).targets) == 10


def test_f3_the_first_window_is_full_and_the_others_see_enough():
    windows = windows_of(1025, 512, 256)
    assert windows.num_scored.tolist() == [512, 256, 256]
    first, later = windows.contexts[:512], windows.contexts[512:]
    assert first.tolist() == list(range(1, 513))
    assert later.min() == windows.min_context == 257
    assert later.max() == 512


@pytest.mark.parametrize(("length", "stride"), [(4, 6), (4, 0), (4, -1), (0, 0), (-1, 1)])
def test_f4_a_stride_that_skips_targets_raises(length, stride):
    with pytest.raises(ValueError, match=rf"length={length}"):
        windows_of(10, length, stride)


def test_f4_the_message_has_both_numbers():
    with pytest.raises(ValueError, match=r"stride=6 .*length=4"):
        windows_of(10, 4, 6)


def test_nothing_to_predict():
    for tokens in (0, 1):
        with pytest.raises(DataError, match=f"{tokens} tokens"):
            windows_of(tokens, 4, 4)


@given(shape=SHAPES)
def test_f1_every_target_once(shape):
    num_tokens, length, stride = shape
    windows = windows_of(*shape)
    assert windows.targets.tolist() == list(range(1, num_tokens))
    groups = windows.groups()
    assert sorted(np.concatenate(list(groups.values()))) == list(range(len(windows)))
    for first, group in groups.items():
        batch = windows.batch(np.arange(num_tokens, dtype=np.uint16), group, first)
        scored = batch["scored"]
        assert scored.any(axis=1).all()
        assert (scored.sum(axis=1) == windows.num_scored[group]).all()
        targets = np.concatenate([np.split(windows.targets, windows.offsets[1:])[w] for w in group])
        assert (batch["targets"][scored] == targets).all()
        # The last input that a target sees is the token before it.
        rows, number = np.nonzero(scored)
        assert (batch["inputs"][rows, first + number] + 1 == targets).all()
        contexts = np.split(windows.contexts, windows.offsets[1:])
        assert (first + number + 1 == np.concatenate([contexts[w] for w in group])).all()
    assert scored.any(axis=1).all()
    assert (windows.contexts <= length).all()

    contexts = np.split(windows.contexts, windows.offsets[1:])
    assert contexts[0].tolist() == list(range(1, min(length, num_tokens - 1) + 1))
    later = np.concatenate([[], *contexts[1:]])
    if len(later):
        assert later.min() == windows.min_context == length - stride + 1
    else:
        assert windows.min_context == 1
    if stride == length:
        assert windows.min_context == 1


@given(shape=SHAPES)
def test_padding_is_zero_and_not_scored(shape):
    num_tokens, length, stride = shape
    windows = windows_of(*shape)
    tokens = np.arange(100, 100 + num_tokens, dtype=np.uint16)
    first = int(windows.first_scored[-1])
    batch = windows.batch(tokens, np.array([len(windows) - 1, -1]), first)
    exists = windows.starts[-1] + np.arange(length) < num_tokens - 1
    assert ((batch["inputs"][0] != 0) == exists).all()
    assert (batch["scored"][0] == exists[first:]).all()
    assert ((batch["targets"][0] != 0) == exists[first:]).all()
    # For windows that score only their last targets, only those are computed.
    assert batch["targets"].shape[1] == (stride if first else length)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    assert not any(values[1].any() for values in batch.values())


@pytest.mark.parametrize(("windows", "hosts"), [(23, 4), (1, 4), (5, 2)])
def test_i1_the_union_over_hosts_is_every_target_once(windows, hosts):
    length = 3
    made = windows_of(windows * length + 1, length, length)
    assert len(made) == windows
    tokens = np.arange(windows * length + 1, dtype=np.uint16)
    padded = np.full(-(-windows // hosts) * hosts, -1)
    padded[:windows] = np.arange(windows)
    seen = []
    for host in range(hosts):
        batch = made.batch(tokens, padded[host::hosts])
        seen += batch["targets"][batch["scored"]].tolist()
    assert sorted(seen) == list(range(1, windows * length + 1))


TEXTS = st.lists(st.integers(1, 30), min_size=1, max_size=8).filter(lambda sizes: max(sizes) > 1)


@given(sizes=TEXTS, length=st.integers(1, 12), data=st.data())
def test_f1_windows_of_documents_are_those_of_each_alone(sizes, length, data):
    stride = data.draw(st.integers(1, length))
    bounds = np.cumsum([0, *sizes])
    together = evaluation_windows(bounds, length, stride)
    alone = [
        (start + windows.targets, windows.contexts)
        for start, size in zip(bounds, sizes)
        if size > 1
        for windows in [windows_of(size, length, stride)]
    ]
    assert together.targets.tolist() == np.concatenate([t for t, _ in alone]).tolist()
    assert together.contexts.tolist() == np.concatenate([c for _, c in alone]).tolist()
    # No window crosses a bound.
    text = np.searchsorted(bounds, together.starts, side="right")
    assert (together.starts + together.sizes < bounds[text]).all()


@given(shape=SHAPES)
def test_f6_every_window_begins_with_the_beginning_of_sequence(shape):
    tokens = np.arange(100, 100 + shape[0], dtype=np.uint16)
    plain, begun = windows_of(*shape), windows_of(*shape, bos=7)
    one, other = (w.batch(tokens, np.arange(-1, len(w))) for w in (plain, begun))
    assert (other["inputs"][1:, 0] == 7).all()
    # Nothing else differs: bos is never a target, and a padding window has no bos.
    assert (other["targets"] == one["targets"]).all()
    assert (other["inputs"][:, 1:] == one["inputs"][:, 1:]).all()
    assert not other["inputs"][0].any()
    assert begun.contexts.tolist() == plain.contexts.tolist()


@given(sizes=TEXTS, context=st.integers(1, 20), count=st.integers(1, 40), seed=st.integers(0, 9))
def test_fixed_context_gives_each_sampled_target_exactly_so_much(sizes, context, count, seed):
    bounds = np.cumsum([0, *sizes])
    # The whole windows of that length that are not the first of their text.
    windows = evaluation_windows(bounds, context, context)
    whole = (windows.num_scored == context) & ~np.isin(windows.starts, bounds)
    eligible = windows.targets[np.repeat(whole, windows.num_scored)]
    assert num_eligible(bounds, context).sum() == len(eligible)
    targets = sample_targets(bounds, context, count, seed)
    assert len(targets) == min(count, len(eligible))
    assert set(targets.tolist()) <= set(eligible.tolist())
    assert (np.diff(targets) > 0).all()
    # One target in each of `count` equal stretches.
    ranks = np.searchsorted(eligible, targets)
    assert (ranks * len(targets) // max(len(eligible), 1) <= np.arange(len(targets))).all()

    for less in range(1, context + 1):
        windows = fixed_context_windows(targets, less)
        assert windows.targets.tolist() == targets.tolist()
        assert (windows.contexts == less).all()
        assert (windows.starts >= 0).all()
        if len(targets):
            assert windows.min_context == less
            tokens = np.arange(bounds[-1], dtype=np.uint16)
            batch = windows.batch(tokens, np.arange(len(windows)), less - 1)
            assert batch["targets"][:, 0].tolist() == targets.tolist()
            assert (batch["inputs"][:, -1] + 1 == targets).all()
            assert (np.diff(batch["inputs"]) == 1).all()


def test_the_seed_decides_the_sample():
    bounds = np.array([0, 10_000])
    first, again, other = (sample_targets(bounds, 64, 100, seed) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert sample_targets(bounds, 10_000, 5, 0).tolist() == []


@pytest.mark.parametrize("sizes", [[1250] * 60, [4500], [300, 1500, 700] * 50])
def test_a_sample_stands_anywhere_in_windows_alike(sizes):
    """Otherwise targets near a window's start would be too many, and exaggerate early tokens."""
    bounds = np.cumsum([0, *sizes])
    context = 512
    targets = sample_targets(bounds, context, 400, 0)
    starts = bounds[np.searchsorted(bounds, targets, side="right") - 1]
    for length in (context, 256, 64):
        inside = (targets - starts - 1) % length + 1
        assert inside.mean() == pytest.approx((length + 1) / 2, rel=0.1)


def training(num_tokens=101, length=4, batch_size=6, seed=3):
    return TrainingBatches(np.arange(num_tokens, dtype=np.uint16), length, batch_size, seed)


def examples(batches, count):
    """The first token of each of the first `count` windows."""
    rows = (row[0] for step in itertools.count() for row in batches.batch_at(step)["inputs"])
    return [int(row) for row in itertools.islice(rows, count)]


def test_a_batch_is_windows_and_what_follows():
    batches = training()
    batch = batches.batch_at(0)
    assert batch["inputs"].shape == batch["targets"].shape == (6, 4)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    assert (batch["inputs"][:, 0] % 4 == 0).all()
    np.testing.assert_array_equal(batch["inputs"][:, :1] + np.arange(1, 5), batch["targets"])


@pytest.mark.parametrize("num_tokens", [101, 102, 104, 105])
def test_i5_no_token_twice_in_an_epoch(num_tokens):
    batches = training(num_tokens)
    assert batches.num_windows == (num_tokens - 1) // 4
    epoch = examples(batches, batches.num_windows)
    assert sorted(epoch) == [4 * window for window in range(batches.num_windows)]


def test_each_epoch_has_its_own_order():
    batches = training()
    count = batches.num_windows
    seen = examples(batches, 4 * count)
    epochs = [seen[i * count : (i + 1) * count] for i in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != sorted(epochs[0])


def test_the_seed_decides():
    count = training().num_windows
    assert examples(training(), count) == examples(training(), count)
    orders = {tuple(examples(training(seed=seed), count)) for seed in range(5)}
    assert len(orders) == 5
    # The order of a seed's second epoch is not the first order of another seed.
    second = {tuple(examples(training(seed=seed), 2 * count)[count:]) for seed in range(5)}
    assert not orders & second


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
def test_i1_hosts_share_the_global_batch(hosts):
    batches = training()
    for step in (0, 4, 1000):
        whole = batches.batch_at(step)
        for name in ("inputs", "targets"):
            parts = [
                batches.batch_at(step, slice(host * 6 // hosts, (host + 1) * 6 // hosts))[name]
                for host in range(hosts)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole[name])
    rows = np.array([5, 0])
    np.testing.assert_array_equal(
        batches.batch_at(2, rows)["inputs"], batches.batch_at(2)["inputs"][rows]
    )


@pytest.mark.parametrize("rows", [None, slice(2, 4)])
def test_g5_resuming_at_any_step_gives_the_same_batches(rows):
    whole = list(training().iterate(0, 12, rows))
    assert len(whole) == 12
    for start in (0, 1, 5, 11, 12):
        resumed = list(training().iterate(start, 12 - start, rows))
        assert len(resumed) == 12 - start
        for step, batch in enumerate(resumed, start):
            for name, values in training().batch_at(step, rows).items():
                np.testing.assert_array_equal(batch[name], values)
                np.testing.assert_array_equal(batch[name], whole[step][name])


def test_fewer_windows_than_a_batch():
    batches = training(num_tokens=9, batch_size=5)
    assert batches.num_windows == 2
    starts = batches.batch_at(0)["inputs"][:, 0].tolist()
    assert sorted(starts[:2]) == sorted(starts[2:4]) == [0, 4]


def test_no_window_at_all():
    assert training(num_tokens=5).num_windows == 1
    with pytest.raises(DataError, match=r"train\.length=4 .*5 tokens.* 4: .*shorter"):
        training(num_tokens=4)
