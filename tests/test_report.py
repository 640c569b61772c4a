import csv
import itertools
import json
import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from alibi_jax import report

METHODS = ["alibi", "sinusoidal", "learned", "rotary", "t5", "none"]


def row(length, perplexity, stride=None):
    made = {
        "protocol": "nonoverlapping" if stride is None else "sliding",
        "length": length,
        "stride": stride or length,
    }
    if perplexity is None:
        return made | {"error": f"no embedding, for a length of {length}"}
    nll = float(np.log(perplexity))
    numbers = {"nll": nll, "perplexity": perplexity, "bits_per_byte": nll / 0.7, "targets": 99}
    return made | numbers | {"min_context": 1, "seconds": 0.5, "compile_seconds": 0.25}


def run(position, rows, train_length=128, name=None, rescaling="none"):
    return {
        "workdir": f"runs/{name or position}",
        "position": position,
        "rescaling": rescaling,
        "train_length": train_length,
        "step": 600,
        "split": "validation",
        "rows": rows,
        "position_nll": {},
        "early_token": {},
    }


@pytest.fixture
def six():
    """Six methods at three lengths, learned past its table at two."""
    return {
        "runs": [
            run(
                position,
                [
                    row(128, 4.5 + number),
                    row(256, None if position == "learned" else 5.25 + number),
                    row(1024, None if position == "learned" else 4.0 + 10.0**number),
                ],
            )
            for number, position in enumerate(METHODS)
        ]
    }


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, as they are drawn."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        saved.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return saved


def lines_of(figure):
    """The lines with a legend entry."""
    (axes,) = figure.axes
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def test_the_table_has_a_line_a_run_and_protocol(six):
    six["runs"][0]["rows"] += [row(128, 4.25, stride=64), row(1024, 4.125, stride=64)]
    lines = report.table(six).splitlines()
    assert lines[0] == "perplexity per token, validation split"
    assert lines[1].split("  ")[0] == "run"
    assert lines[1].split()[-3:] == ["128", "256", "1024"]
    body = [line.split() for line in lines[3:10]]
    assert body[0] == ["runs/alibi", "alibi", "128", "nonoverlapping", "4.500", "5.250", "5.000"]
    assert body[1] == ["runs/alibi", "alibi", "128", "sliding:64", "4.250", "4.125"]
    assert body[3] == ["runs/learned", "learned", "128", "nonoverlapping", "6.500", "—", "—"]
    assert lines[10:] == [
        f"runs/learned, nonoverlapping at {n}: no embedding, for a length of {n}"
        for n in (256, 1024)
    ]


def test_the_columns_of_the_table_stand_below_each_other(six):
    six["runs"][0]["rows"].append(row(128, 4.25, stride=64))
    lines = report.table(six).splitlines()
    ends = {match.end() for match in re.finditer(r"\d+", lines[1])}
    for line in lines[3:10]:
        numbers = {match.end() for match in re.finditer(r"\d+\.\d+|—", line)}
        assert numbers
        assert numbers <= ends


def test_rescaled_runs_have_names_of_their_own(tmp_path, figures):
    plain = run("rotary", [row(128, 4.0), row(256, 6.0)])
    scaled = run("rotary", [row(128, 4.0), row(256, None)], rescaling="yarn:8")
    results = {"runs": [plain, scaled]}
    lines = report.table(results).splitlines()
    assert [line.split()[1] for line in lines[3:5]] == ["rotary", "rotary+yarn:8"]
    assert lines[5].startswith("runs/rotary+yarn:8, nonoverlapping at 256: ")
    report.write(results, tmp_path)
    labels = [line.get_label() for line in lines_of(figures[0])]
    assert labels == ["rotary", "rotary+yarn:8"]


def test_more_lines_than_colours_differ(tmp_path, figures):
    runs = [run(f"method{number}", [row(128, 4.0 + number)]) for number in range(17)]
    report.write({"runs": runs}, tmp_path)
    lines = lines_of(figures[0])
    assert len({(x.get_color(), str(x._unscaled_dash_pattern)) for x in lines}) == len(runs)


def test_what_is_written_appears_whole(six, tmp_path):
    six["runs"][0]["rows"].append(row(128, 4.25, stride=64))
    folder = tmp_path / "deep" / "eval"
    written = report.write(six, folder)
    names = ["results.json", "results.csv"] + [
        f"{name}.{suffix}"
        for name in ("extrapolation", "extrapolation_sliding")
        for suffix in ("png", "svg")
    ]
    assert [path.name for path in written] == names
    # No temporary file is left.
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert json.loads((folder / "results.json").read_text()) == six


def test_a_write_that_fails_leaves_the_old_file(six, tmp_path):
    report.write(six, tmp_path)
    path = tmp_path / "results.json"

    def half(fresh):
        fresh.write_text("half of it")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        report._whole(path, half)
    assert json.loads(path.read_text()) == six


def test_the_csv_is_tidy(six, tmp_path):
    report.write(six, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    first, error = rows[0], rows[7]
    assert list(first) == [
        "workdir",
        "position",
        "rescaling",
        "train_length",
        "step",
        "split",
        "protocol",
        "length",
        "stride",
        "nll",
        "perplexity",
        "bits_per_byte",
        "targets",
        "min_context",
        "seconds",
        "compile_seconds",
        "error",
    ]
    expected = six["runs"][0]["rows"][0]
    assert (first["workdir"], first["position"]) == ("runs/alibi", "alibi")
    assert float(first["nll"]) == expected["nll"]
    assert first["error"] == ""
    # A comma in it included.
    assert error["error"] == "no embedding, for a length of 256"
    assert error["nll"] == ""


def test_the_figure_of_several_runs(six, tmp_path, figures):
    report.write(six, tmp_path)
    picture = matplotlib.image.imread(tmp_path / "extrapolation.png")
    height, width, _ = picture.shape
    assert height > 500
    assert width > 900
    assert picture[..., :3].std() > 0.02
    assert ET.parse(tmp_path / "extrapolation.svg").getroot().tag.endswith("svg")

    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "256", "1,024"]
    assert [text.get_text() for text in axes.texts] == ["trained\nat 128"]
    assert any(list(line.get_xdata()) == [128, 128] for line in axes.lines)
    lines = lines_of(figures[0])
    assert [line.get_label() for line in lines] == METHODS
    assert list(lines[0].get_ydata()) == [4.5, 5.25, 5.0]
    assert list(lines[2].get_xdata()) == [128]


def test_the_lines_differ_without_colour(six, tmp_path, figures):
    report.write(six, tmp_path)
    lines = lines_of(figures[0])
    assert len({line.get_marker() for line in lines}) == len(lines)
    assert len({str(dashes) for dashes in report._DASHES}) == len(report._DASHES)
    assert len({line.get_color() for line in lines}) == len(lines)


@pytest.mark.parametrize("most", [4.53, 9.0, 40.0, 300.0, 45_000.0])
def test_the_perplexities_on_the_axis_are_few_and_do_not_overlap(most, tmp_path, figures):
    report.write({"runs": [run("alibi", [row(128, 4.455), row(256, most)])]}, tmp_path)
    figure = figures[0]
    (axes,) = figure.axes
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    boxes = sorted(
        (
            label.get_window_extent()
            for label, tick in zip(axes.get_yticklabels(), axes.get_yticks())
            if low <= tick <= high
        ),
        key=lambda box: box.y0,
    )
    assert 2 <= len(boxes) <= 15
    assert all(lower.y1 < upper.y0 for lower, upper in itertools.pairwise(boxes))
    assert axes.get_yticklabels(minor=True) == []


def test_neither_legend_nor_training_length_stands_on_the_lines(six, tmp_path, figures):
    report.write(six, tmp_path)
    figure = figures[0]
    (axes,) = figure.axes
    (legend,) = figure.legends
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    assert not legend.get_window_extent().overlaps(inside)
    assert axes.texts[0].get_window_extent().y0 >= inside.y1


@pytest.mark.parametrize("perplexity", [4.5, None])
def test_the_figure_of_one_run_and_one_length(perplexity, tmp_path, figures):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report.write({"runs": [run("alibi", [row(128, perplexity)])]}, tmp_path)
    assert matplotlib.image.imread(tmp_path / "extrapolation.png").size
    assert len(lines_of(figures[0])) == (perplexity is not None)


def test_runs_of_one_method_are_told_apart(tmp_path, figures):
    runs = [
        run("alibi", [row(128, 4.5), row(256, 4.4, stride=64)], 128, "short"),
        run(
            "alibi", [row(256, 4.4), row(256, 4.3, stride=64), row(256, 4.2, stride=1)], 256, "long"
        ),
    ]
    report.write({"runs": runs}, tmp_path)
    whole, _, sliding, _ = figures
    assert [line.get_label() for line in lines_of(whole)] == [
        "alibi (short), trained at 128",
        "alibi (long), trained at 256",
    ]
    assert [line.get_label() for line in lines_of(sliding)] == [
        "alibi (short), trained at 128, stride 64",
        "alibi (long), trained at 256, stride 1",
        "alibi (long), trained at 256, stride 64",
    ]
    assert len(whole.axes[0].texts) == 2
