import itertools
import warnings
import xml.etree.ElementTree as ET

import made_up
import matplotlib.image
import numpy as np
import pytest
from made_up import bare_row, bare_run

from alibi_jax import report
from alibi_jax.report import figures
from alibi_jax.report.figures import style


@pytest.fixture
def six():
    """Six methods at three lengths; `learned` has errors at the two lengths past its table."""
    return made_up.six_bare_runs()


def lines_of(figure):
    """The lines with a legend entry."""
    (axes,) = figure.axes
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def texts_of(figure):
    """Each visible text of a figure, with the box that it covers."""
    figure.draw_without_rendering()
    found = list(figure.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [
                tick.label1
                for tick in axis.get_major_ticks()
                if low <= tick.get_loc() <= high and tick.label1.get_visible()
            ]
    return [
        (text.get_text(), text.get_window_extent())
        for text in found
        if text.get_text() and text.get_visible()
    ]


def test_the_figure_of_several_runs(six, tmp_path):
    report.write(made_up.results(six), tmp_path)
    picture = matplotlib.image.imread(tmp_path / "extrapolation.png")
    height, width, _ = picture.shape
    assert height > 500
    assert width > 900
    assert picture[..., :3].std() > 0.02
    assert ET.parse(tmp_path / "extrapolation.svg").getroot().tag.endswith("svg")

    figure = figures.extrapolation(six, "nonoverlapping")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "256", "1,024"]
    assert [text.get_text() for text in axes.texts] == ["trained\nat 128"]
    assert any(list(line.get_xdata()) == [128, 128] for line in axes.lines)
    lines = lines_of(figure)
    assert [line.get_label() for line in lines] == made_up.POSITIONS
    assert list(lines[0].get_ydata()) == [4.5, 5.25, 5.0]
    assert list(lines[2].get_xdata()) == [128]


def test_the_lines_differ_without_colour(six):
    lines = lines_of(figures.extrapolation(six, "nonoverlapping"))
    assert len({line.get_marker() for line in lines}) == len(lines)
    assert len({str(dashes) for dashes in style.DASHES}) == len(style.DASHES)
    assert len({line.get_color() for line in lines}) == len(lines)


def test_more_lines_than_colours_differ():
    runs = [bare_run(f"method{number}", [bare_row(128, 4.0 + number)]) for number in range(17)]
    lines = lines_of(figures.extrapolation(runs, "nonoverlapping"))
    assert len({(x.get_color(), str(x._unscaled_dash_pattern)) for x in lines}) == len(runs)


def test_rescaled_runs_have_names_of_their_own():
    plain = bare_run("rotary", [bare_row(128, 4.0), bare_row(256, 6.0)])
    scaled = bare_run("rotary", [bare_row(128, 4.0), bare_row(256, None)], rescaling="yarn:8")
    lines = lines_of(figures.extrapolation([plain, scaled], "nonoverlapping"))
    assert [line.get_label() for line in lines] == ["rotary", "rotary+yarn:8"]


@pytest.mark.parametrize("most", [4.53, 9.0, 40.0, 300.0, 45_000.0])
def test_the_perplexities_on_the_axis_are_few_and_do_not_overlap(most):
    run = bare_run("alibi", [bare_row(128, 4.455), bare_row(256, most)])
    figure = figures.extrapolation([run], "nonoverlapping")
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


def test_neither_legend_nor_training_length_stands_on_the_lines(six):
    figure = figures.extrapolation(six, "nonoverlapping")
    (axes,) = figure.axes
    (legend,) = figure.legends
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    assert not legend.get_window_extent().overlaps(inside)
    assert axes.texts[0].get_window_extent().y0 >= inside.y1


@pytest.mark.parametrize("perplexity", [4.5, None])
def test_the_figure_of_one_run_and_one_length(perplexity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = figures.extrapolation(
            [bare_run("alibi", [bare_row(128, perplexity)])], "nonoverlapping"
        )
        figure.draw_without_rendering()
    assert len(lines_of(figure)) == (perplexity is not None)


def test_runs_of_one_method_have_different_names():
    runs = [
        bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.4, stride=64)], 128, "short"),
        bare_run(
            "alibi",
            [bare_row(256, 4.4), bare_row(256, 4.3, stride=64), bare_row(256, 4.2, stride=1)],
            256,
            "long",
        ),
    ]
    whole = figures.extrapolation(runs, "nonoverlapping")
    sliding = figures.extrapolation(runs, "sliding")
    assert [line.get_label() for line in lines_of(whole)] == [
        "alibi (short) trained at 128",
        "alibi (long) trained at 256",
    ]
    assert [line.get_label() for line in lines_of(sliding)] == [
        "alibi (short) trained at 128, stride 64",
        "alibi (long) trained at 256, stride 1",
        "alibi (long) trained at 256, stride 64",
    ]
    assert len(whole.axes[0].texts) == 2


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.sample(2)
def test_no_texts_overlap(count):
    for name, figure in figures.draw(made_up.results(count)).items():
        page = figure.bbox
        for (one, box), (other, second) in itertools.combinations(texts_of(figure), 2):
            assert not box.overlaps(second), (name, one, other)
        for text, box in texts_of(figure):
            assert page.x0 <= box.x0, (name, text)
            assert page.x1 >= box.x1, (name, text)
            assert page.y0 <= box.y0, (name, text)
            assert page.y1 >= box.y1, (name, text)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_every_question_that_has_numbers_has_its_figure(count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = figures.draw(made_up.results(count))
        for figure in drawn.values():
            figure.draw_without_rendering()
    assert list(drawn) == made_up.FIGURES


def test_what_was_not_measured_is_left_out(six):
    errors = [{"length": 128, "error": "no memory"}]
    one_length = made_up.run("alibi", lengths=(128,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(figures.draw(made_up.results(six))) == made_up.BARE_FIGURES
        assert figures.resolution([six[0] | {"attention": errors}]) is None
        assert figures.decomposition([one_length]) is None
        for figure in figures.draw(made_up.results([one_length, six[1]])).values():
            figure.draw_without_rendering()


def test_the_bars_of_a_gain_are_its_parts():
    run = made_up.run("none")
    figure = figures.decomposition([run])
    (axes,) = figure.axes
    entries = run["decomposition"]["lengths"][1:]
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers if len(bars) == 1]
    assert np.ravel(heights).tolist() == [
        entry[part]["nats"] for entry in entries for part in ("early_tokens", "context")
    ]
    # One part lowers the loss and the other raises it, so both bars start at 0.
    assert {bar.get_y() for bars in axes.containers if len(bars) == 1 for bar in bars} == {0.0}
    totals = [bars.lines[0].get_ydata()[0] for bars in axes.containers if len(bars) == 3]
    assert totals == [entry["gain"]["nats"] for entry in entries]


def test_parts_of_one_sign_stand_on_each_other():
    run = made_up.run("alibi")
    (axes,) = figures.decomposition([run]).axes
    early, context = [bars[0] for bars in axes.containers if len(bars) == 1][:2]
    assert (early.get_y(), context.get_y()) == (0.0, early.get_height())


def test_a_gain_without_an_interval_is_drawn():
    run = made_up.run("alibi")
    for entry in run["decomposition"]["lengths"]:
        entry["gain"] |= {"low": None, "high": None}
    figures.decomposition([run]).draw_without_rendering()


def test_a_run_that_explodes_leaves_the_others_visible_and_says_so():
    figure = figures.decomposition([made_up.run("alibi"), made_up.run("rotary")])
    alibi, rotary = figure.axes
    low, high = alibi.get_ylim()
    assert high - low < 0.5
    low, high = rotary.get_ylim()
    assert low < -2.1
    assert "its own y axis" in figure.get_suptitle()


def test_similar_runs_share_their_y_axis():
    figure = figures.decomposition([made_up.run("rotary"), made_up.run("sinusoidal")])
    assert "its own" not in figure.get_suptitle()
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_the_position_curve_has_a_line_a_length_and_a_panel_a_run():
    runs = [made_up.run("alibi"), made_up.run("learned")]
    alibi, learned = figures.position_curve(runs).axes
    point = runs[0]["position_nll"]["256"][3]
    curves = [line for line in alibi.lines if len(line.get_xdata()) > 2]
    assert len(curves) == 6
    assert curves[1].get_xdata()[3] == pytest.approx(40**0.5)
    assert curves[1].get_ydata()[3] == point["nll"]
    assert sum(len(line.get_xdata()) > 2 for line in learned.lines) == 1
    # The training length.
    assert any(list(line.get_xdata()) == [128, 128] for line in alibi.lines)


def test_resolution_has_a_thick_line_a_run_and_a_thin_one_a_layer():
    run = made_up.run("rotary")
    figure = figures.resolution([run])
    (line,) = lines_of(figure)
    assert list(line.get_ydata()) == [entry["resolution"] for entry in run["attention"]]
    thin = [list(line.get_ydata()) for line in figure.axes[0].lines if line.get_linewidth() == 0.6]
    assert thin == [
        [entry["layers"][layer]["resolution"] for entry in run["attention"]] for layer in (0, 1)
    ]


def test_dollars_in_a_name_are_no_mathematics():
    runs = [bare_run("alibi", [bare_row(128, 4.0)], name=name) for name in (r"$\frac$", "$x$")]
    figure = figures.extrapolation(runs, "nonoverlapping")
    figure.draw_without_rendering()
    drawn = [text for text, _ in texts_of(figure)]
    assert r"alibi (\$x\$)" in drawn


@pytest.mark.parametrize("extra", [20, 60, 200])
def test_long_names_leave_the_axes_their_room(extra):
    runs = made_up.results(3)["runs"]
    runs += [run | {"workdir": "x/" + run["workdir"] + extra * "y"} for run in runs]
    for draw in (lambda runs: figures.extrapolation(runs, "sliding"), figures.resolution):
        figure = draw(runs)
        written = texts_of(figure)
        (axes,) = figure.axes
        inside = axes.get_window_extent()
        assert inside.width > 0.75 * figure.bbox.width
        assert inside.height > 200
        for (one, box), (other, second) in itertools.combinations(written, 2):
            assert not box.overlaps(second), (one, other)
        for text, box in written:
            assert figure.bbox.x0 <= box.x0, text
            assert figure.bbox.x1 >= box.x1, text


def test_a_length_below_the_base_has_no_bars():
    run = made_up.run("alibi")
    run["decomposition"]["base"] = 1024
    (axes,) = figures.decomposition([run]).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2,048", "4,096"]
    run["decomposition"]["base"] = 4096
    assert figures.decomposition([run]) is None
