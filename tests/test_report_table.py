import re

import made_up
import pytest
from made_up import bare_row, bare_run

from alibi_jax.report import table


@pytest.fixture
def six():
    """Six methods at three lengths; `learned` has errors at the two lengths past its table."""
    return made_up.results(made_up.six_bare_runs())


def test_the_table_has_a_line_a_run_and_protocol(six):
    six["runs"][0]["rows"] += [bare_row(128, 4.25, stride=64), bare_row(1024, 4.125, stride=64)]
    lines = table(six).splitlines()
    assert lines[0] == "perplexity per token, validation split"
    assert lines[1].split("  ")[0] == "run"
    assert lines[1].split()[-3:] == ["128", "256", "1024"]
    body = [line.split() for line in lines[3:10]]
    assert body[0] == ["runs/alibi", "alibi", "128", "nonoverlapping", "4.500*", "5.250*", "5.000*"]
    assert body[1] == ["runs/alibi", "alibi", "128", "sliding:64", "4.250*", "4.125*"]
    assert body[3] == ["runs/learned", "learned", "128", "nonoverlapping", "6.500", "—", "—"]
    assert lines[10] == "* the lowest perplexity of its protocol and length"
    assert lines[11:14] == [
        f"runs/learned, nonoverlapping at {n:,}: no embedding, for a length of {n}"
        for n in (256, 1024)
    ] + [""]


def test_the_columns_of_the_table_stand_below_each_other(six):
    six["runs"][0]["rows"].append(bare_row(128, 4.25, stride=64))
    lines = table(six).splitlines()
    ends = {match.end() for match in re.finditer(r"\d+", lines[1])}
    for line in lines[3:10]:
        numbers = {match.end() for match in re.finditer(r"\d+\.\d+|—", line)}
        assert numbers
        assert numbers <= ends


def test_the_lowest_of_each_column_is_marked_and_no_other():
    runs = [
        bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.4)]),
        bare_run("rotary", [bare_row(128, 4.0), bare_row(256, None)]),
        bare_run("none", [bare_row(128, 4.0), bare_row(256, 9.0)]),
    ]
    body = [line.split()[4:] for line in table(made_up.results(runs)).splitlines()[3:6]]
    assert body == [["4.500", "4.400*"], ["4.000*", "—"], ["4.000*", "9.000"]]


def test_one_run_alone_has_no_mark():
    run = bare_run("alibi", [bare_row(128, 4.5)])
    assert "*" not in table(made_up.results([run]))


def test_a_rescaled_run_has_its_own_name():
    plain = bare_run("rotary", [bare_row(128, 4.0), bare_row(256, 6.0)])
    scaled = bare_run("rotary", [bare_row(128, 4.0), bare_row(256, None)], rescaling="yarn:8")
    lines = table(made_up.results([plain, scaled])).splitlines()
    assert [line.split()[1] for line in lines[3:5]] == ["rotary", "rotary+yarn:8"]
    assert lines[6].startswith("runs/rotary+yarn:8, nonoverlapping at 256: ")


def test_the_parts_of_the_gain_have_a_table_of_their_own():
    results = made_up.results(2)
    perplexities, parts, *_ = table(results).split("\n\n")
    assert "runs/alibi   alibi     128         fixed" in perplexities
    assert "decomposition" not in perplexities
    lines = [re.split(r"  +", line) for line in parts.splitlines()[2:]]
    assert lines[0] == [
        "run",
        "position",
        "from",
        "to",
        "gain",
        "early tokens",
        "context",
        "targets",
    ]
    assert lines[2] == [
        "runs/alibi",
        "alibi",
        "128",
        "256",
        "0.0310 [0.0280, 0.0340]",
        "0.0300 [0.0270, 0.0330]",
        "0.0010 [−0.0020, 0.0040]",
        "512",
    ]
    assert lines[-1][:5] == ["runs/rotary", "rotary", "128", "4096", "−2.0419 [−2.0449, −2.0389]"]
    # The base has no gain.
    assert len(lines) == 2 + 2 * 5


def test_parts_without_intervals_are_numbers_alone():
    results = made_up.results(1)
    for entry in results["runs"][0]["decomposition"]["lengths"]:
        for part in ("gain", "early_tokens", "context"):
            entry[part] |= {"low": None, "high": None}
    _, parts, *_ = table(results).split("\n\n")
    assert "[" not in parts
    assert "bracket" not in parts
    assert parts.splitlines()[3].split()[-4:] == ["0.0310", "0.0300", "0.0010", "512"]


def test_each_run_has_a_paragraph_below_the_tables():
    sentences = table(made_up.results(2)).split("\n\n")[2:]
    assert [text.partition(":")[0] for text in sentences] == ["runs/alibi", "runs/rotary"]
    assert all(len(line) <= 100 for text in sentences for line in text.splitlines())


def test_no_line_ends_between_a_number_and_its_sign():
    results = made_up.results(1)
    for length in range(1, 100):
        # Names of other lengths break the lines at other words.
        results["runs"][0]["workdir"] = "x" * length
        lines = table(results).splitlines()
        assert any(" % of" in line for line in lines)
        assert not any(line.lstrip().startswith("%") for line in lines)


def test_the_mark_compares_runs_with_the_same_tokens_only():
    runs = [bare_run(name, [bare_row(128, ppl)]) for name, ppl in (("alibi", 4.5), ("none", 4.0))]
    runs += [bare_run("rotary", [bare_row(128, 9.0)]), bare_run("t5", [bare_row(128, 8.0)])]
    for run in runs[2:]:
        run["corpus"] = run["corpus"] | {"tokens": 250_000}
    lines = table(made_up.results(runs)).splitlines()
    assert [line.split()[4] for line in lines[3:7]] == ["4.500", "4.000*", "9.000", "8.000*"]
    assert lines[7] == (
        "* the lowest perplexity of its protocol and length among runs with the same text and "
        "tokenizer"
    )
    alone = table(made_up.results(runs[1:3]))
    assert "*" not in alone


def test_attention_without_a_number_is_a_note():
    run = bare_run("alibi", [bare_row(128, 4.5)])
    run["attention"] = [{"length": 1024, "error": "no memory"}]
    assert "runs/alibi, attention at 1,024: no memory" in table(made_up.results([run]))


def test_a_context_that_hurts_is_noted_below_the_parts():
    run = made_up.run("rotary")
    assert "does not measure" not in table(made_up.results([run]))
    run["decomposition"]["lengths"][-1]["curse"] = made_up.interval(-0.5, 0.1)
    lines = table(made_up.results([run])).split("\n\n")[1].splitlines()
    assert lines[-1] == (
        'runs/rotary at 4,096: the column "early tokens" does not measure early tokens. The loss '
        "with the whole context is higher than in non-overlapping windows, where most targets see "
        "less context."
    )


def test_a_length_below_the_base_has_no_line():
    run = made_up.run("alibi")
    run["decomposition"]["base"] = 4096
    assert "gain from longer inputs" not in table(made_up.results([run]))
