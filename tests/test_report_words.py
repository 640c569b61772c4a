import math

import made_up
import pytest
from made_up import bare_row, bare_run, interval

from alibi_jax.report.words import reading, summary


def exact(value):
    return {"nats": value, "low": None, "high": None}


def decomposed(gain, early, context, short=512, long=3072, train_length=512, perplexity=19.73):
    """A run of which only this decomposition was measured."""
    start = math.log(perplexity)
    still = exact(0.0)
    base = {"length": short, "nonoverlapping": exact(start), "fixed": exact(start - 0.1)}
    last = {"length": long, "nonoverlapping": exact(start - gain["nats"])}
    last["fixed"] = exact(start - 0.1 - context["nats"])
    return bare_run("alibi", [], train_length) | {
        "decomposition": {
            "base": short,
            "targets": 1000,
            "resampled": "12 documents",
            "lengths": [
                base
                | {"curse": exact(0.1), "gain": still, "early_tokens": still, "context": still},
                last
                | {
                    "curse": exact(0.1 - early["nats"]),
                    "gain": gain,
                    "early_tokens": early,
                    "context": context,
                },
            ],
        }
    }


def test_the_papers_gain_is_more_than_all_of_it_early_tokens():
    """Press et al. 2021, tables 5 and 13: trained at 512, evaluated at 3072."""
    short, long = math.log(19.73), math.log(18.40)
    fixed_short, fixed_long = math.log(17.98), math.log(18.30)
    run = decomposed(
        exact(short - long),
        exact((short - fixed_short) - (long - fixed_long)),
        exact(fixed_short - fixed_long),
    )
    assert reading(run) == [
        "From 512 to 3,072 tokens, perplexity in non-overlapping windows falls from 19.73 to "
        "18.40: a gain of 0.0698 nats a token over 1,000 targets.",
        "Fewer early tokens explain 0.0874 nats, more than all of it.",
        "Longer context itself lost 0.0176 nats.",
    ]


def test_shares_of_a_gain_that_both_parts_make():
    run = decomposed(interval(0.08, 0.01), interval(0.06, 0.01), interval(0.02, 0.01))
    assert reading(run) == [
        "From 512 to 3,072 tokens, perplexity in non-overlapping windows falls from 19.73 to "
        "18.21: a gain of 0.0800 nats (0.0700 to 0.0900) a token over 1,000 targets.",
        "Fewer early tokens explain 0.0600 nats (0.0500 to 0.0700), 75 % of it.",
        "Longer context itself gave 0.0200 nats (0.0100 to 0.0300), 25 % of it.",
    ]


def test_an_interval_with_0_in_it_is_not_told_apart_from_nothing():
    run = decomposed(interval(0.01, 0.02), interval(0.012, 0.001), interval(-0.002, 0.003))
    gain, early, context = reading(run)
    assert gain.endswith("over 1,000 targets, not told apart from nothing.")
    # No share of what may be nothing.
    assert early == "Fewer early tokens alone gave 0.0120 nats (0.0110 to 0.0130)."
    assert context == (
        "Longer context itself lost 0.0020 nats (−0.0010 to 0.0050), not told apart from nothing."
    )


def test_a_loss_is_called_a_loss():
    run = decomposed(interval(-0.4, 0.01), interval(0.05, 0.01), interval(-0.45, 0.01))
    gain, early, context = reading(run)
    assert "rises from 19.73 to 29.43: a loss of 0.4000 nats (0.3900 to 0.4100) a token" in gain
    assert early == "Fewer early tokens alone gave 0.0500 nats (0.0400 to 0.0600)."
    assert context == "Longer context itself lost 0.4500 nats (0.4400 to 0.4600)."


def test_early_tokens_that_cost_more():
    run = decomposed(exact(0.01), exact(-0.02), exact(0.03))
    _, early, context = reading(run)
    assert early == "Early tokens cost another 0.0200 nats."
    assert context == "Longer context itself gave 0.0300 nats, more than all of it."


@pytest.mark.parametrize(
    ("last", "verb"), [(4.4, None), (4.5, None), (4.6, "gets a little worse"), (5.0, "breaks down")]
)
def test_a_model_that_breaks_down_past_its_training_length(last, verb):
    run = bare_run("alibi", [bare_row(64, 5.0), bare_row(128, 4.5), bare_row(1024, last)])
    (*_, sentence) = reading(run)
    if verb is None:
        assert "Past its training length" not in sentence
    else:
        assert sentence == (
            f"Past its training length of 128 tokens the model {verb}: perplexity 4.500 at 128, "
            f"{last:.3f} at 1,024."
        )


def test_a_rise_that_may_be_noise_is_no_breakdown():
    run = decomposed(interval(-0.01, 0.02), exact(0.01), exact(-0.02))
    run["rows"] = [bare_row(512, 19.73), bare_row(3072, 19.93)]
    assert not any("Past its training" in sentence for sentence in reading(run))
    run["decomposition"]["lengths"][1]["gain"] = interval(-0.01, 0.005)
    assert any("gets a little worse" in sentence for sentence in reading(run))


def test_without_a_decomposition_nothing_is_said_of_context():
    run = bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.25), bare_row(512, None)])
    assert reading(run) == [
        "From 128 to 256 tokens, perplexity in non-overlapping windows falls from 4.500 to 4.250: "
        "a gain of 0.0572 nats a token.",
        "How much of that is due to longer context was not measured.",
    ]


@pytest.mark.parametrize("rows", [[], [bare_row(128, 4.5)], [bare_row(128, None)]])
def test_a_run_with_one_length_or_none_says_nothing(rows):
    assert reading(bare_run("alibi", rows)) == []


@pytest.mark.parametrize(
    ("past", "verb"), [(0.4, "falls"), (0.73, "holds"), (0.8, "holds"), (0.9, "rises")]
)
def test_attention_resolution(past, verb):
    run = bare_run("alibi", []) | {
        "attention": [
            {"length": 128, "resolution": 0.8},
            {"length": 1024, "resolution": past},
            {"length": 4096, "error": "no memory"},
        ]
    }
    assert reading(run) == [
        f"Attention resolution {verb} past the training length: 0.8 at 128 tokens, {past} at 1,024."
    ]


def test_the_gains_of_tokens_and_long_ppl():
    run = bare_run("alibi", []) | {"gain": made_up.run("alibi")["gain"]}
    assert reading(run) == [
        "With exactly 4,096 tokens of context in place of 128, the mean gain is 0.0050 nats "
        "(0.0020 to 0.0080) a token; 52 % of 512 targets gain.",
        "The top 1 % of targets carry 31 % of all gains.",
        "LongPPL, the perplexity of the 12 targets that runs/alibi finds to need long context, "
        "is 2.312, too few to say much.",
    ]
    run["gain"]["long_ppl"]["key_targets"] = 30
    assert reading(run)[-1].endswith("need long context, is 2.312.")
    run["gain"]["long_ppl"] = {"judge": "runs/alibi", "key_targets": 0, "error": "no key target"}
    assert reading(run)[-1] == "LongPPL has no number: no key target."


def test_a_mean_that_the_decomposition_has_is_said_once():
    sentences = reading(made_up.run("alibi"))
    assert sentences[2].startswith("Longer context itself gave 0.0050 nats (0.0020 to 0.0080)")
    assert sentences[4] == (
        "With exactly 4,096 tokens of context in place of 128, 52 % of 512 targets gain."
    )
    assert sum("0.0050" in sentence for sentence in sentences) == 1


def test_the_summary_names_runs_lengths_text_and_the_lowest():
    text = summary(made_up.results(6))
    assert text.startswith(
        "alibi, rotary, sinusoidal, t5, none and learned, trained at 128 tokens, were"
    )
    assert "128 to 4,096 tokens on the validation split of sotu (504,694 tokens" in text
    assert "At 128 tokens, rotary has the lowest perplexity" in text
    assert "At 4,096 tokens, alibi has the lowest perplexity" in text


def test_the_summary_of_one_run_is_its_reading():
    results = made_up.results(1)
    assert summary(results).endswith(" ".join(reading(results["runs"][0])))
