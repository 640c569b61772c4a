import re
from html.parser import HTMLParser

import made_up
import pytest
from made_up import bare_row, bare_run

from alibi_jax.report.figures import draw
from alibi_jax.report.html import page

HOSTILE = "runs/<script>alert('$x$')</script>\"&amp;"
VOID = {"meta", "br", "img", "link", "input", "hr"}
SHAPES = {"path", "use", "rect", "circle", "line", "polyline", "polygon", "image"}


class Page(HTMLParser):
    """Every element with its attributes, the text, and whether each element is closed."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.open = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def made(results):
    html = page(results, draw(results))
    return html, Page(html)


@pytest.fixture(scope="module", params=[1, 2, 6])
def written(request):
    results = made_up.results(request.param)
    return results, *made(results)


@pytest.mark.sample(1)
def test_the_page_asks_for_nothing(written):
    _, html, parsed = written
    bare = html
    for namespace in ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"):
        bare = bare.replace(f'="{namespace}"', "")
    assert "http://" not in bare
    assert "https://" not in bare
    assert "@import" not in bare
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in parsed.elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))


def test_every_id_is_unique_and_every_reference_leads_to_one(written):
    _, html, parsed = written
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [
        attributes[name][1:]
        for _, attributes in parsed.elements
        for name in ("href", "xlink:href")
        if name in attributes
    ]
    assert links
    assert set(links) | set(re.findall(r"url\(#(.*?)\)", html)) <= set(ids)


def test_every_run_and_every_number_of_the_table_is_there(written):
    results, _, parsed = written
    text = " ".join(parsed.text)
    for run in results["runs"]:
        assert run["workdir"] in text
        for row in run["rows"]:
            if "error" in row:
                assert row["error"] in text
                continue
            assert f"{row['perplexity']:.3f}" in text
            assert f"{row['nll']:.4f}" in text
            assert f"{row['targets']:,}" in text
        for entry in run["decomposition"]["lengths"]:
            for part in ("nonoverlapping", "fixed", "curse", "gain", "early_tokens", "context"):
                assert f"{entry[part]['nats']:.4f}".replace("-", "−") in text
        for curve in run["position_nll"].values():
            for point in curve:
                assert f"{point['nll']:.4f}" in text
                assert f"{point['targets']:,}" in text
        assert run["trained_by"]["command"] in text
        assert str(run["config"]["train"]["seed"]) in text
    assert results["command"] in text
    assert results["commit"] in text


def test_figures_stand_inline_with_a_caption_each(written):
    _, _, parsed = written
    tags = [tag for tag, _ in parsed.elements]
    assert (
        tags.count("figure")
        == tags.count("svg")
        == tags.count("figcaption")
        == len(made_up.FIGURES)
    )
    # Text in the figures stays text.
    assert "evaluation length (tokens)" in parsed.text


def test_names_and_texts_cannot_break_out():
    run, other = made_up.run("alibi"), made_up.run("alibi")
    other["workdir"] = other["trained_by"]["command"] = HOSTILE
    other["corpus"] = other["corpus"] | {"dataset": HOSTILE}
    other["config"]["data"]["path"] = HOSTILE
    other["gain"]["passage"]["pieces"] = [
        {"text": HOSTILE, "gain": 0.5, "nll_short": 1.0, "nll_long": 0.5}
    ]
    other["gain"]["largest"][0]["before"] = other["gain"]["largest"][0]["text"] = HOSTILE
    other["attention"][0] = {"length": 128, "error": HOSTILE}
    other["rows"][0] = made_up.error_row("nonoverlapping", 128, 128, HOSTILE)
    html, parsed = made(made_up.results([run, other]))
    assert "<script" not in html
    assert not any(tag == "script" for tag, _ in parsed.elements)
    # Unchanged in the folder, the command, the text, the passage and the largest gain.
    text = " ".join(parsed.text)
    assert text.count(HOSTILE) >= 8
    # The made-up passage contains a tag, and the page has such a tag of its own.
    assert ("b", {}) in parsed.elements
    assert "<b>Peace" not in html


def test_the_lowest_of_each_column_is_bold():
    runs = [
        bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.4)]),
        bare_run("rotary", [bare_row(128, 4.0), bare_row(256, None)]),
    ]
    html, _ = made(made_up.results(runs))
    assert re.findall(r"<b>([\d.]+)</b>", html) == ["4.400", "4.000"]
    html, _ = made(made_up.results(runs[:1]))
    assert re.findall(r"<b>([\d.]+)</b>", html) == []


def test_a_passage_is_coloured_by_gain_and_keeps_its_white_space():
    run = made_up.run("alibi")
    run["gain"]["passage"]["pieces"] = [
        {"text": text, "gain": gain, "nll_short": 2.0, "nll_long": 2.0 - gain}
        for text, gain in (("a  b", 0.5), ("\n", -0.5), ("", 0.0), ("c", 0.25))
    ]
    html, _ = made(made_up.results([run]))
    pieces = re.search(r'<div class="passage".*?>(.*?)</div>', html, re.DOTALL)[1]
    assert re.findall(r"<span(.*?)>(.*?)</span>", pieces, re.DOTALL) == [
        (' class="g8" title="gain 0.5000 nats: 2.0000, then 1.5000"', "a  b"),
        (' class="l8" title="gain −0.5000 nats: 2.0000, then 2.5000"', "<i>↵</i>\n"),
        (' title="gain 0.0000 nats: 2.0000, then 2.0000"', "<i>∅</i>"),
        (' class="g4" title="gain 0.2500 nats: 2.0000, then 1.7500"', "c"),
    ]
    # The passage is nothing but the pieces: it would show white space between them.
    assert re.sub(r"<span.*?</span>", "", pieces, flags=re.DOTALL) == ""


def test_what_was_not_measured_has_no_section():
    run = bare_run("alibi", [bare_row(128, None)])
    _, parsed = made(made_up.results([run]))
    ids = [attributes["id"] for tag, attributes in parsed.elements if tag == "h2"]
    assert ids == ["perplexities", "figures", "units", "runs", "limits"]


def test_tables_scroll_in_boxes_of_their_own(written):
    _, html, _ = written
    assert html.count("<table>") == len(re.findall(r'<div class="scroll">\s*<table>', html)) > 3


def text_of(results):
    _, parsed = made(results)
    return " ".join(" ".join(parsed.text).split())


def test_what_may_be_missing_is_a_dash_or_left_out():
    results = made_up.results([made_up.without_optional_parts(made_up.run("alibi"))])
    html, parsed = made(results)
    text = " ".join(parsed.text)
    assert "None" not in text
    assert "largest gain" not in text
    assert "No passage: the split is shorter" in text
    assert "<td>—</td><td>—</td>" in html
    assert "bootstrap" not in text


def test_each_resampling_is_a_limit():
    runs = made_up.results(2)["runs"]
    for row in runs[1]["rows"]:
        row["resampled"] = "40 blocks of text"
    runs[0]["decomposition"]["resampled"] = "9 documents"
    assert (
        "The intervals of perplexities resample 12 documents and 40 blocks of text. The intervals "
        "of gains and their parts resample 9 documents and 12 documents."
        in text_of(made_up.results(runs))
    )


def test_bold_compares_the_same_tokens_only():
    runs = [bare_run(name, [bare_row(128, ppl)]) for name, ppl in (("alibi", 4.5), ("none", 4.0))]
    runs.append(bare_run("rotary", [bare_row(128, 3.0)]))
    runs[2]["config"]["data"] = {"tokenizer": "bpe"}
    html, _ = made(made_up.results(runs))
    assert re.findall(r"<b>([\d.]+)</b>", html) == ["4.000"]
    assert "among runs with the same text and tokenizer" in " ".join(html.split())


def test_the_windows_of_attention_are_counted_once_if_all_lengths_have_as_many():
    run = made_up.run("alibi")
    assert "Measured on 8 windows of each length." in text_of(made_up.results([run]))
    run["attention"] = run["attention"][:2]
    run["attention"][1]["windows"] = 1
    assert "Measured on 8 windows of 128 tokens and 1 window of 256 tokens." in text_of(
        made_up.results([run])
    )


def test_a_length_below_the_base_has_no_part_of_a_gain():
    run = made_up.run("alibi")
    run["decomposition"]["base"] = 1024
    html, _ = made(made_up.results([run]))
    section = html[html.index('id="gain"') : html.index('id="tokens"')]
    assert re.findall(r"</th><td>([\d,]+)", section) == ["1,024", "2,048", "4,096"]
    assert "A negative curse means" in section
    assert "mean context 1,024.5" in section


@pytest.mark.parametrize(("count", "title"), [(1, "The largest gain"), (3, "The 3 largest gains")])
def test_the_largest_gains_are_as_many_as_there_are(count, title):
    run = made_up.run("alibi")
    run["gain"]["largest"] = run["gain"]["largest"][:count]
    html, _ = made(made_up.results([run]))
    assert f"<summary>{title}</summary>" in html
    assert "</mark> after</span>" in html


def test_the_page_leads_to_each_run():
    assert 'href="#reading"' in made(made_up.results(2))[0]
    assert 'href="#reading"' not in made(made_up.results(1))[0]


def test_figures_scroll_and_print_opens_nothing(written):
    _, html, _ = written
    assert html.count('<div class="scroll"><svg') == len(made_up.FIGURES)
    assert "details-content" not in html
    assert '<span class="screen"> Hover over a token' in html
