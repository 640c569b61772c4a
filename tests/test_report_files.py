import csv
import json
import math
import re
from pathlib import Path

import made_up
import pandas
import pytest
from helpers import file_size_limit, left_by_a_kill
from made_up import bare_row, bare_run

from alibi_jax import report
from alibi_jax.report import figures, files
from alibi_jax.report.tidy import COLUMNS


@pytest.fixture
def bare():
    """Six methods at three lengths with perplexities alone; `learned` has errors at two lengths."""
    return made_up.results(made_up.six_bare_runs())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Complete results of two runs, and the folder with their files."""
    results = made_up.results([made_up.run("alibi"), made_up.run("learned")])
    folder = tmp_path_factory.mktemp("eval")
    report.write(results, folder)
    return results, folder


def test_files_appear_complete(written, tmp_path):
    results, _ = written
    folder = tmp_path / "deep" / "eval"
    paths = report.write(results, folder)
    drawn = [f"{name}.{suffix}" for name in made_up.FIGURES for suffix in ("png", "svg")]
    names = ["results.json", "results.csv", *drawn, "report.html"]
    assert [path.name for path in paths] == names
    # No temporary file is left.
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert json.loads((folder / "results.json").read_text()) == results


def test_what_was_not_measured_has_no_figure(bare, tmp_path):
    names = [path.name for path in report.write(bare, tmp_path)]
    drawn = [f"{name}.{suffix}" for name in made_up.BARE_FIGURES for suffix in ("png", "svg")]
    assert names == ["results.json", "results.csv", *drawn, "report.html"]


def test_a_write_that_fails_leaves_the_old_file(bare, tmp_path):
    report.write(bare, tmp_path)
    path = tmp_path / "results.json"

    def half(fresh):
        fresh.write_text("half of it")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        files._write_whole(path, half)
    assert json.loads(path.read_text()) == bare


def test_a_full_disk_is_named_and_leaves_the_old_files(bare, tmp_path):
    report.write(bare, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = f"{tmp_path}/results.json: File too large while it was written: make room there"
    with file_size_limit(1000), pytest.raises(OSError, match=re.escape(said)):
        report.write(bare, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_killed_evaluation_left_goes_at_the_next_start(bare, tmp_path):
    left_by_a_kill(tmp_path / "gone.svg").touch()
    paths = report.write(bare, tmp_path)
    assert set(tmp_path.iterdir()) == set(paths)


def test_the_numbers_are_written_before_anything_is_drawn(bare, tmp_path, monkeypatch):
    def fail(results):
        raise ValueError("cannot be drawn")

    monkeypatch.setattr(files, "draw", fail)
    with pytest.raises(ValueError, match="drawn"):
        report.write(bare, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == bare
    assert (tmp_path / "results.csv").exists()


def test_the_csv_has_one_row_a_number(written):
    _, folder = written
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    for row in rows:
        assert (
            bool(row["quantity"]) == bool(row["value"]) == bool(row["unit"]) != bool(row["error"])
        )
        assert row["workdir"] in ("runs/alibi", "runs/learned")
        for column in ("value", "low", "high"):
            assert row[column] == "" or math.isfinite(float(row[column]))
    keys = [tuple(row[name] for name in COLUMNS if name not in ("value", "low")) for row in rows]
    assert len(set(keys)) == len(keys)


def test_the_csv_has_an_error_in_place_of_a_number(bare, tmp_path):
    report.write(bare, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        errors = [row for row in csv.DictReader(file) if row["error"]]
    # The error of a row has a comma.
    assert [(row["position"], row["length"], row["error"]) for row in errors] == [
        ("learned", length, f"no embedding, for a length of {length}") for length in ("256", "1024")
    ]
    assert {row["quantity"] + row["value"] for row in errors} == {""}


def test_pandas_reads_the_csv_in_one_line(written):
    results, folder = written
    frame = pandas.read_csv(folder / "results.csv")
    assert list(frame.columns) == list(COLUMNS)
    run = results["runs"][0]
    alibi = frame[frame.workdir == "runs/alibi"]

    def the(quantity, **about):
        found = alibi[alibi.quantity == quantity]
        for column, value in about.items():
            found = found[found[column] == value]
        assert len(found) == 1
        return found.iloc[0]

    row = run["rows"][1]
    nll = the("nll", protocol="nonoverlapping", length=256)
    assert (nll.value, nll.low, nll.high) == (row["nll"], row["nll_low"], row["nll_high"])
    perplexity = the("perplexity", protocol="nonoverlapping", length=256)
    assert perplexity.low == pytest.approx(math.exp(row["nll_low"]), rel=1e-12)
    for quantity in ("word_perplexity", "bits_per_byte", "mean_context", "seconds", "words"):
        assert the(quantity, protocol="nonoverlapping", length=256).value == row[quantity]
    point = run["position_nll"]["256"][3]
    assert (point["context_from"], point["context_to"]) == (5, 8)
    found = the("position_nll", length=256, context_from=5, context_to=8)
    assert (found.value, found.targets) == (point["nll"], point["targets"])
    assert the("early_token", length=256).value == run["early_token"]["256"]["nats"]
    entry = run["decomposition"]["lengths"][1]
    for part in ("gain", "early_tokens", "context", "curse"):
        found = the(part, length=256)
        assert found.value == entry[part]["nats"]
        assert (found.low, found.high) == (entry[part]["low"], entry[part]["high"])
    gain = the("gain", length=256)
    assert (gain.context_from, gain.context_to, gain.targets) == (128, 256, 512)
    fixed = the("decomposition_nll", protocol="fixed", length=256)
    assert (fixed.value, fixed.targets) == (entry["fixed"]["nats"], 512)
    head = run["attention"][1]["layers"][1]["heads"][2]
    assert the("resolution", length=256, layer=1, head=2).value == head["resolution"]
    assert the("attention_distance", length=256, layer=1, head=2).value == head["distance"]
    assert the("attention_entropy", length=256, layer=1, head=2).value == head["entropy"]
    assert the("token_gain").value == run["gain"]["nats"]["nats"]
    assert the("token_gain_of_top_0.01").value == 0.31
    long_ppl = the("long_ppl")
    assert (long_ppl.value, long_ppl.targets) == (2.3125, 12)
    learned = frame[frame.workdir == "runs/learned"]
    assert learned.error.str.startswith("attention: ").sum() == 5


def test_pandas_reads_the_json_in_one_line(written):
    results, folder = written
    path = folder / "results.json"
    frame = pandas.json_normalize(json.load(path.open())["runs"], "rows", ["workdir", "position"])
    assert len(frame) == sum(len(run["rows"]) for run in results["runs"])
    assert frame.perplexity[0] == results["runs"][0]["rows"][0]["perplexity"]
    assert set(frame.position) == {"alibi", "learned"}


def test_runs_without_numbers_are_written(tmp_path):
    run = bare_run("learned", [bare_row(256, None)])
    report.write(made_up.results([run]), tmp_path)
    assert (tmp_path / "report.html").exists()


def test_what_renders_needs_no_jax():
    for path in Path(report.__file__).parent.rglob("*.py"):
        if path != Path(report.__file__):
            assert not re.search(
                r"^\s*(import|from) (jax|flax|alibi_jax(?!\.report))", path.read_text()
            )


def test_what_may_be_missing_is_left_out(tmp_path):
    results = made_up.results(
        [made_up.without_optional_parts(made_up.run(name)) for name in ("alibi", "rotary")]
    )
    report.write(results, tmp_path)
    words = " ".join(report.table(results).split())
    assert "LongPPL has no result: no checkpoint." in words
    frame = pandas.read_csv(tmp_path / "results.csv")
    assert not set(made_up.MAY_BE_MISSING) & set(frame.quantity)
    assert frame.low.isna().all()
    errors = set(frame.error.dropna())
    assert errors == {"LongPPL: no checkpoint", "passage: the split is shorter"}


def test_figures_of_an_earlier_evaluation_are_removed(bare, tmp_path):
    report.write(made_up.results(1), tmp_path)
    (tmp_path / "mine.png").write_bytes(b"")
    names = [path.name for path in report.write(bare, tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "mine.png"])


def test_a_folder_without_results_keeps_its_figures(bare, tmp_path):
    """They are the user's own, whatever their names."""
    own = {"split.png", "resolution.svg", "extrapolation_mine.png"}
    for name in own:
        (tmp_path / name).write_bytes(b"own")
    report.write(bare, tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.read_bytes() == b"own"} == own


def test_a_page_that_fails_leaves_the_old_figures(bare, tmp_path, monkeypatch):
    report.write(made_up.results(1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(results, figures):
        raise ValueError("cannot be rendered")

    monkeypatch.setattr(files, "page", fail)
    with pytest.raises(ValueError, match="rendered"):
        report.write(bare, tmp_path)
    changed = {name for name, old in before.items() if (tmp_path / name).read_bytes() != old}
    assert changed == {"results.json", "results.csv"}


def test_the_figures_have_their_known_names():
    assert sorted(figures.NAMES) == sorted(made_up.FIGURES)
    assert set(figures.draw(made_up.results(1))) == set(figures.NAMES)
