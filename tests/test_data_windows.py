import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_jax.data.errors import DataError
from alibi_jax.data.windows import TrainingBatches, evaluation_windows

# (N, L, S) with 1 <= S <= L.
SHAPES = st.tuples(st.integers(2, 80), st.integers(1, 20)).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(1, shape[1]))
)


def batch_of_all(num_tokens, length, stride):
    windows = evaluation_windows(num_tokens, length, stride)
    tokens = np.arange(num_tokens, dtype=np.uint16)
    return windows, windows.batch(tokens, np.arange(len(windows)))


def scored_per_window(num_tokens, length, stride):
    _, batch = batch_of_all(num_tokens, length, stride)
    return batch["weights"].sum(axis=1).tolist()


def test_f1_every_target_once_without_overlap():
    assert scored_per_window(10, 4, 4) == [4, 4, 1]


@pytest.mark.parametrize(
    ("tokens", "length", "windows", "last"),
    [(217_647, 512, 426, 46), (245_570, 512, 480, 321), (217_647, 3072, 71, 2606)],
)
def test_f1_wikitext_counts(tokens, length, windows, last):
    made = evaluation_windows(tokens, length, length)
    assert len(made) == windows
    stream = np.zeros(tokens, np.uint16)
    assert made.batch(stream, np.array([windows - 1]))["weights"].sum() == last


def test_f2_scored_targets_are_what_is_counted():
    assert scored_per_window(10, 4, 2) == [4, 2, 2, 1]
    assert scored_per_window(11, 4, 2) == [4, 2, 2, 2]
    assert evaluation_windows(10, 4, 2).num_targets == 9
    assert evaluation_windows(11, 4, 2).num_targets == 10


def test_f3_the_first_window_is_full_and_the_others_see_enough():
    windows, batch = batch_of_all(1025, 512, 256)
    assert batch["weights"].sum(axis=1).tolist() == [512, 256, 256]
    contexts = [np.flatnonzero(weights) + 1 for weights in batch["weights"]]
    assert contexts[0].min() == 1
    assert min(context.min() for context in contexts[1:]) == windows.min_context == 257


@pytest.mark.parametrize(("length", "stride"), [(4, 6), (4, 0), (4, -1), (0, 0), (-1, 1)])
def test_f4_a_stride_that_skips_targets_raises(length, stride):
    with pytest.raises(ValueError, match=rf"length={length}"):
        evaluation_windows(10, length, stride)


def test_f4_the_message_has_both_numbers():
    with pytest.raises(ValueError, match=r"stride=6 .*length=4"):
        evaluation_windows(10, 4, 6)


def test_nothing_to_predict():
    for tokens in (0, 1):
        with pytest.raises(DataError, match=f"{tokens} tokens"):
            evaluation_windows(tokens, 4, 4)


@given(shape=SHAPES)
def test_f1_every_target_once(shape):
    num_tokens, length, stride = shape
    windows, batch = batch_of_all(*shape)
    scored = batch["weights"] == 1
    assert batch["targets"][scored].tolist() == list(range(1, num_tokens))
    assert (batch["inputs"][scored] + 1 == batch["targets"][scored]).all()
    assert set(np.unique(batch["weights"])) <= {0, 1}
    assert windows.num_targets == num_tokens - 1
    assert scored.any(axis=1).all()

    contexts = [np.flatnonzero(row) + 1 for row in scored]
    assert contexts[0].tolist() == list(range(1, min(length, num_tokens - 1) + 1))
    later = np.concatenate([[], *contexts[1:]])
    if len(later):
        assert later.min() == windows.min_context == length - stride + 1
    else:
        assert windows.min_context == 1
    if stride == length:
        assert windows.min_context == 1


@given(shape=SHAPES)
def test_padding_is_zero(shape):
    num_tokens, length, _ = shape
    windows = evaluation_windows(*shape)
    tokens = np.arange(100, 100 + num_tokens, dtype=np.uint16)
    batch = windows.batch(tokens, np.array([len(windows) - 1, -1]))
    exists = windows.starts[-1] + np.arange(length) < num_tokens - 1
    for name in ("inputs", "targets"):
        assert ((batch[name][0] != 0) == exists).all()
        assert batch[name].dtype == np.int32
    assert not batch["weights"][0][~exists].any()
    assert batch["weights"].dtype == np.float32
    assert not any(values[1].any() for values in batch.values())


@pytest.mark.parametrize(("windows", "hosts"), [(23, 4), (1, 4), (5, 2)])
def test_i1_the_union_over_hosts_is_every_target_once(windows, hosts):
    length = 3
    made = evaluation_windows(windows * length + 1, length, length)
    assert len(made) == windows
    tokens = np.arange(windows * length + 1, dtype=np.uint16)
    padded = np.full(-(-windows // hosts) * hosts, -1)
    padded[:windows] = np.arange(windows)
    seen = []
    for host in range(hosts):
        batch = made.batch(tokens, padded[host::hosts])
        seen += batch["targets"][batch["weights"] == 1].tolist()
    assert sorted(seen) == list(range(1, windows * length + 1))


def training(num_tokens=101, length=4, batch_size=6, seed=3):
    return TrainingBatches(np.arange(num_tokens, dtype=np.uint16), length, batch_size, seed)


def examples(batches, count):
    """The first `count` windows, by the number of their first token."""
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
    # No seed is another one an epoch later.
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
