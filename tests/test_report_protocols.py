"""Rows of a protocol that the report does not know, and of the protocols that it knows."""

import csv

import made_up
import pytest

from alibi_jax import report
from alibi_jax.report import figures, protocols
from alibi_jax.report.html import page


def strided_rows(strides, lengths=(128, 256)):
    """Rows of a made-up protocol; a longer stride has a higher loss."""
    return [
        made_up.row("strided", length, stride, 1.0 + stride / 1000)
        for stride in strides
        for length in lengths
    ]


@pytest.fixture
def strided():
    """Results with two strides of a made-up protocol beside non-overlapping windows."""
    run = made_up.bare_run("alibi", [made_up.bare_row(128, 4.5), *strided_rows([64, 32])])
    return made_up.results([run])


def test_an_unknown_protocol_has_a_line_for_each_stride_in_the_table(strided):
    lines = [line.split()[3:] for line in report.table(strided).splitlines()[3:6]]
    assert lines == [
        ["nonoverlapping", "4.500"],
        ["strided:64", "2.898", "2.898"],
        ["strided:32", "2.807", "2.807"],
    ]


def test_an_unknown_protocol_has_rows_in_the_csv(strided, tmp_path):
    report.write(strided, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "nll"]
    assert [(row["protocol"], row["stride"], row["length"]) for row in rows[1:]] == [
        ("strided", "64", "128"),
        ("strided", "64", "256"),
        ("strided", "32", "128"),
        ("strided", "32", "256"),
    ]


def test_an_unknown_protocol_has_a_figure_with_a_line_for_each_stride(strided, tmp_path):
    written = [path.name for path in report.write(strided, tmp_path)]
    assert {"extrapolation_strided.png", "extrapolation_strided.svg"} <= set(written)
    drawn = figures.draw(strided)
    assert list(drawn) == ["extrapolation", "extrapolation_strided", *made_up.BARE_FIGURES[1:]]
    (axes,) = drawn["extrapolation_strided"].axes
    lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
    assert list(lines) == ["alibi, stride 32", "alibi, stride 64"]
    assert list(lines["alibi, stride 32"].get_xdata()) == [128, 256]
    assert axes.get_title() == "Train short, test long: protocol strided"


def test_an_unknown_protocol_has_a_caption_and_a_table_for_each_stride_on_the_page(strided):
    html = page(strided, figures.draw(strided))
    assert '<figure id="figure-extrapolation_strided">' in html
    assert protocols.describe("strided").caption in html
    assert "<caption>strided:64</caption>" in html
    assert "<caption>strided:32</caption>" in html


def test_an_unknown_protocol_without_overlap_is_named_without_its_stride():
    rows = [made_up.row("tiled", length, length, 1.0) for length in (128, 256)]
    assert [protocols.protocol_name(row) for row in rows] == ["tiled", "tiled"]
    (axes,) = figures.extrapolation([made_up.bare_run("alibi", rows)], "tiled").axes
    (line,) = [line for line in axes.lines if line.get_label() == "alibi"]
    assert list(line.get_xdata()) == [128, 256]


def test_the_name_of_an_unknown_protocol_cannot_break_out(tmp_path):
    name = '../<b>"$x$'
    rows = [row | {"protocol": name} for row in strided_rows([64])]
    results = made_up.results([made_up.bare_run("alibi", rows)])
    figure = "extrapolation__b_x_"
    assert (tmp_path / f"{figure}.png") in report.write(results, tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert name not in html
    assert f'<figure id="figure-{figure}">' in html


@pytest.mark.parametrize(
    ("protocol", "stride", "name"),
    [
        ("nonoverlapping", 128, "nonoverlapping"),
        ("sliding", 64, "sliding:64"),
        ("sliding", 128, "sliding:128"),
        ("fixed", 1, "fixed"),
    ],
)
def test_known_protocols_have_the_names_of_the_flag(protocol, stride, name):
    assert protocols.protocol_name(made_up.row(protocol, 128, stride, 1.0)) == name


def test_known_protocols_stand_before_unknown_ones_in_a_fixed_order(strided):
    (run,) = strided["runs"]
    run["rows"] = [*strided_rows([64]), made_up.row("fixed", 128, 1, 1.0), *run["rows"]]
    assert protocols.protocols_of([run]) == ["nonoverlapping", "fixed", "strided"]


def test_figures_of_unknown_protocols_of_an_earlier_evaluation_are_removed(strided, tmp_path):
    report.write(strided, tmp_path)
    (tmp_path / "extrapolation_mine.png").write_bytes(b"")
    names = [path.name for path in report.write(made_up.results(1), tmp_path)]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*names, "extrapolation_mine.png"])


@pytest.mark.parametrize("earlier", ["", "[]", '{"runs": [{}]}', '{"runs": 1}'])
@pytest.mark.sample(2)
def test_unreadable_earlier_results_are_replaced(strided, earlier, tmp_path):
    (tmp_path / "results.json").write_text(earlier)
    (tmp_path / "split.png").write_bytes(b"")
    names = [path.name for path in report.write(strided, tmp_path)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
