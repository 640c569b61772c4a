import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alibi_jax.config import Data
from alibi_jax.data.streams import token_stream
from alibi_jax.evaluation import (
    check_strides,
    early_token,
    evaluate_run,
    load_run,
    parse_lengths,
    parse_protocols,
    position_curve,
)
from alibi_jax.report import evaluate
from alibi_jax.rescaling import Rescaling
from alibi_jax.scoring import Protocol, Scores
from alibi_jax.training import train

LENGTH = 16
ROW = {
    "protocol",
    "length",
    "stride",
    "nll",
    "perplexity",
    "bits_per_byte",
    "targets",
    "min_context",
    "seconds",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of one document; with its last twentieths validation and test split."""
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
def entry(run):
    """The run's entry of results.json."""
    protocols = parse_protocols("nonoverlapping,sliding:4,sliding:8")
    return evaluate_run(run, [LENGTH, 2 * LENGTH], protocols, "validation", 512)


def test_the_form_of_an_entry(entry, run, workdir):
    assert {
        "workdir",
        "position",
        "rescaling",
        "train_length",
        "step",
        "rows",
        "position_nll",
        "early_token",
    } <= entry.keys()
    assert entry["workdir"] == str(workdir)
    assert (entry["position"], entry["train_length"], entry["step"]) == ("alibi", LENGTH, 5)
    assert [(row["protocol"], row["length"], row["stride"]) for row in entry["rows"]] == [
        ("nonoverlapping", 16, 16),
        ("nonoverlapping", 32, 32),
        ("sliding", 16, 4),
        ("sliding", 32, 4),
        ("sliding", 16, 8),
        ("sliding", 32, 8),
    ]
    assert all(row.keys() >= ROW for row in entry["rows"])
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry


def test_f1_f3_rows_count_every_target_and_its_context(entry, run):
    tokens = token_stream(run.config.data, "validation", run.tokenizer)
    for row in entry["rows"]:
        assert row["targets"] == len(tokens) - 1
        assert row["min_context"] == row["length"] - row["stride"] + 1
        assert row["perplexity"] == math.exp(row["nll"])
        assert row["seconds"] > 0


def test_f8_bits_per_byte_are_of_the_raw_text(entry, run, text):
    tokens = token_stream(run.config.data, "validation", run.tokenizer)
    raw = run.tokenizer.decode(np.asarray(tokens))
    assert raw in text.read_bytes()
    for row in entry["rows"]:
        total = row["nll"] * row["targets"]
        assert row["bits_per_byte"] == pytest.approx(total / (math.log(2) * len(raw)), rel=1e-12)


def test_f9_the_batch_changes_nothing(entry, run):
    for batch_tokens in (1, 100, 10_000):
        other = evaluate_run(run, [LENGTH], [Protocol("sliding", 8)], "validation", batch_tokens)
        expected = entry["rows"][4]
        assert other["rows"][0]["nll"] == pytest.approx(expected["nll"], rel=1e-6)
        assert other["rows"][0]["targets"] == expected["targets"]


def test_the_curves_average_to_the_row(entry):
    assert list(entry["position_nll"]) == ["16", "32"]
    for row in entry["rows"][:2]:
        curve = entry["position_nll"][str(row["length"])]
        total = sum(part["nll"] * part["targets"] for part in curve)
        assert sum(part["targets"] for part in curve) == row["targets"]
        assert total / row["targets"] == pytest.approx(row["nll"], rel=1e-12)


def test_the_cost_of_short_contexts_is_in_the_entry(entry):
    rows = {(row["length"], row["stride"]): row["nll"] for row in entry["rows"]}
    assert entry["early_token"] == {
        "16": {"nats": rows[16, 16] - rows[16, 4], "stride": 4},
        "32": {"nats": rows[32, 32] - rows[32, 4], "stride": 4},
    }


def test_a_length_past_the_split_says_so_and_the_others_go_on(run):
    entry = evaluate_run(run, [100_000, LENGTH], [Protocol("nonoverlapping")], "validation", 512)
    long, short = entry["rows"]
    assert "nll" not in long
    assert "fewer than one window" in long["error"]
    assert "error" not in short
    assert list(entry["position_nll"]) == [str(LENGTH)]


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_loss_that_is_no_number_gives_a_row_that_says_so(value, run):
    params = dict(run.params)
    params["embedding"] = jax.tree.map(lambda x: x * value, params["embedding"])
    broken = type(run)(**{**vars(run), "params": params})
    entry = evaluate_run(broken, [LENGTH], [Protocol("nonoverlapping")], "validation", 512)
    assert "nats" in entry["rows"][0]["error"]
    json.dumps(entry, allow_nan=False)


@pytest.mark.parametrize("split", ["train", "test"])
def test_other_splits(split, run):
    entry = evaluate_run(run, [LENGTH], [Protocol("nonoverlapping")], split, 8192)
    tokens = token_stream(run.config.data, split, run.tokenizer)
    assert entry["split"] == split
    assert entry["rows"][0]["targets"] == len(tokens) - 1


def test_e4_rescaled_lengths_do_not_depend_on_each_other(run, entry):
    """huggingface/transformers#25104: after a long input, short ones stayed rescaled."""
    protocols = [Protocol("nonoverlapping")]

    def losses(lengths, rescaling):
        made = evaluate_run(run, lengths, protocols, "validation", 512, rescaling)
        assert [row["length"] for row in made["rows"]] == lengths
        return {row["length"]: row["nll"] for row in made["rows"]}, made

    growing, made = losses([2 * LENGTH, LENGTH, 4 * LENGTH], Rescaling("linear"))
    assert made["rescaling"] == "linear"
    assert [row["rescaling_factor"] for row in made["rows"]] == [2.0, 1.0, 4.0]
    plain = {row["length"]: row["nll"] for row in entry["rows"][:2]}
    assert growing[LENGTH] == plain[LENGTH]
    assert growing[2 * LENGTH] != plain[2 * LENGTH]
    # A fixed factor, also where the length needs none.
    fixed, _ = losses([LENGTH, 2 * LENGTH], Rescaling("linear", 2.0))
    assert fixed[2 * LENGTH] == growing[2 * LENGTH]
    assert fixed[LENGTH] != plain[LENGTH]


def test_results_are_written_and_load(workdir, tmp_path, capsys):
    given = {"lengths": "1x,100000x", "protocols": "nonoverlapping", "split": "validation"}
    code = evaluate(
        [workdir], **given, rescalings="none", step=None, batch_tokens=512, out=tmp_path
    )
    assert code == 1
    results = json.loads((tmp_path / "results.json").read_text())
    good, bad = results["runs"][0]["rows"]
    assert good.keys() >= ROW
    assert "error" in bad
    assert {"command", "commit", "versions", "devices"} <= results.keys()
    printed = capsys.readouterr().out
    assert f"{good['perplexity']:.3f}" in printed
    assert bad["error"] in printed


@pytest.mark.parametrize(
    "wrong",
    [
        {"workdirs": []},
        {"batch_tokens": 0},
        {"protocols": "sliding:17"},
        {"lengths": "0.3x"},
        {"step": 4},
        {"rescalings": "linar"},
        {"rescalings": "none,yarn"},
    ],
)
def test_nothing_is_written_where_something_cannot_be_meant(wrong, workdir, tmp_path):
    given = {
        "workdirs": [workdir],
        "lengths": "1x",
        "protocols": "nonoverlapping",
        "rescalings": "none",
        "split": "validation",
        "step": None,
        "batch_tokens": 512,
    }
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s")):
        evaluate(**(given | wrong), out=out)
    assert not out.exists()


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
def test_lengths(text, lengths):
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
def test_lengths_that_are_none(part):
    for text in (part, f"1x,{part}"):
        with pytest.raises(ValueError, match=r"--lengths=.*at least 1 token") as caught:
            parse_lengths(text, 128)
        assert repr(part) in str(caught.value)
        assert "128" in str(caught.value)


@given(text=st.text(max_size=12))
def test_any_text_is_lengths_or_one_error(text):
    try:
        lengths = parse_lengths(text, 128)
    except ValueError as error:
        lengths = str(error)
    if isinstance(lengths, str):
        assert lengths.startswith("--lengths=")
    else:
        assert all(length >= 1 for length in lengths)


def test_protocols():
    assert parse_protocols("nonoverlapping") == [Protocol("nonoverlapping")]
    assert parse_protocols("sliding:64, nonoverlapping,sliding:1") == [
        Protocol("sliding", 64),
        Protocol("nonoverlapping"),
        Protocol("sliding", 1),
    ]
    assert [str(p) for p in parse_protocols("nonoverlapping,sliding:64")] == [
        "nonoverlapping",
        "sliding:64",
    ]


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
    ],
)
def test_protocols_that_are_none(part):
    for text in (part, f"nonoverlapping,{part}"):
        with pytest.raises(ValueError, match=r"--protocols=.*sliding:STRIDE") as caught:
            parse_protocols(text)
        assert repr(part) in str(caught.value)


def test_f4_a_stride_over_a_length_is_refused_before_any_work():
    protocols = parse_protocols("nonoverlapping,sliding:64")
    check_strides(protocols, [64, 128])
    with pytest.raises(ValueError, match=r"sliding:64 with length 32: .*at most 32"):
        check_strides(protocols, [128, 32])


def scores_of(nll, targets):
    return Scores(np.array(nll, float), np.array(targets), sum(targets), 0.0, 0.0)


def test_the_position_curve_has_bins_that_double():
    curve = position_curve(scores_of(range(1, 12), [1] * 11))
    assert [(part["context_from"], part["context_to"]) for part in curve] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 11),
    ]
    assert [part["targets"] for part in curve] == [1, 1, 2, 4, 3]
    assert [part["nll"] for part in curve] == [1, 2, 3.5, 6.5, 10]


def test_the_position_curve_weighs_by_targets_and_skips_what_has_none():
    curve = position_curve(scores_of([8, 0, 6, 2], [4, 0, 3, 1]))
    assert [(part["context_from"], part["nll"], part["targets"]) for part in curve] == [
        (1, 2, 4),
        (3, 2, 4),
    ]


def row(protocol, length, stride, nll=None):
    made = {"protocol": protocol, "length": length, "stride": stride}
    return made | ({"error": "why"} if nll is None else {"nll": nll})


def test_early_token_takes_the_finest_stride_of_the_same_length():
    rows = [
        row("sliding", 32, 16, 1.25),
        row("nonoverlapping", 32, 32, 1.5),
        row("sliding", 32, 1, 1.0),
        row("sliding", 64, 1, 0.5),
        row("nonoverlapping", 128, 128, 1.5),
        row("nonoverlapping", 256, 256),
        row("sliding", 256, 1, 0.25),
    ]
    assert early_token(rows) == {"32": {"nats": 0.5, "stride": 1}}
    assert early_token(rows[:1]) == {}


def test_another_text_than_the_one_trained_on_is_not_loaded(workdir, text):
    before = text.read_text()
    text.write_text(before + "one more line\n")
    with pytest.raises(ValueError, match="trained on another text"):
        load_run(workdir)
    text.write_text(before)
    assert load_run(workdir).metadata.step == 5


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
def test_words_of_wikitext_are_trained_on_and_scored(words_run, split, name):
    raw = pathlib.Path(words_run.config.data.path, f"wiki.{name}.tokens").read_bytes()
    entry = evaluate_run(words_run, [LENGTH], parse_protocols("nonoverlapping"), split, 512)
    (row,) = entry["rows"]
    assert row["targets"] == len(raw.split()) + raw.count(b"\n")
    bits = row["nll"] * row["targets"] / math.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / len(raw), rel=1e-12)


def test_f8_separators_are_no_bytes_of_text_where_the_same_token_ends_lines(words_run, tmp_path):
    documents = {"train/a": " line 1 \n", "validation/a": " line 3 , \n" * 9}
    documents |= {f"validation/{i}": f" line {i} \n \n" for i in range(3)}
    for name, document in documents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(document)
    data = Data("text", path=str(tmp_path), data_dir=str(tmp_path / "data"), tokenizer="words")
    run = dataclasses.replace(words_run, config=dataclasses.replace(words_run.config, data=data))
    entry = evaluate_run(run, [LENGTH], parse_protocols("nonoverlapping"), "validation", 512)
    (row,) = entry["rows"]
    held_out = [document for name, document in documents.items() if name.startswith("validation")]
    assert row["targets"] == sum(len(d.split()) + d.count("\n") for d in held_out) + 3
    bits = row["nll"] * row["targets"] / math.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / len("".join(held_out)), rel=1e-12)
