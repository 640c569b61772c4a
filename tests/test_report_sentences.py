import math

import made_up
import pytest
from made_up import bare_row, bare_run, interval

from alibi_jax.report.sentences import run_sentences

CONFIDENCE = 0.95
NOT_SIGNIFICANT = ", not significant (the 95 % interval includes 0)"
UNKNOWN_PARTS = "The evaluation did not measure how much of this change is due to longer context."


def sentences_of(run):
    return run_sentences(run, CONFIDENCE)


def exact(value):
    """An estimate without an interval."""
    return {"nats": value, "low": None, "high": None}


def decomposed(gain, early, context, short=512, long=3072, train_length=512, perplexity=19.73):
    """A run with this decomposition and no other part measured."""
    start = math.log(perplexity)
    zero = exact(0.0)
    base = {"length": short, "nonoverlapping": exact(start), "fixed": exact(start - 0.1)}
    last = {"length": long, "nonoverlapping": exact(start - gain["nats"])}
    last["fixed"] = exact(start - 0.1 - context["nats"])
    return bare_run("alibi", [], train_length) | {
        "decomposition": {
            "base": short,
            "targets": 1000,
            "resampled": "12 documents",
            "lengths": [
                base | {"curse": exact(0.1), "gain": zero, "early_tokens": zero, "context": zero},
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


def test_in_the_paper_early_tokens_explain_more_than_the_whole_gain():
    """Press et al. 2021, tables 5 and 13: trained at 512, evaluated at 3072."""
    short, long = math.log(19.73), math.log(18.40)
    fixed_short, fixed_long = math.log(17.98), math.log(18.30)
    run = decomposed(
        exact(short - long),
        exact((short - fixed_short) - (long - fixed_long)),
        exact(fixed_short - fixed_long),
    )
    assert sentences_of(run) == [
        "From 512 to 3,072 tokens, perplexity in non-overlapping windows falls from 19.73 to "
        "18.40 over 1,000 sampled targets: a gain of 0.0698 nats per token.",
        "Fewer early tokens alone lower the loss by 0.0874 nats, more than the whole gain.",
        "Longer context alone raises the loss by 0.0176 nats.",
    ]


def test_shares_of_a_gain_that_both_parts_make():
    run = decomposed(interval(0.08, 0.01), interval(0.06, 0.01), interval(0.02, 0.01))
    assert sentences_of(run) == [
        "From 512 to 3,072 tokens, perplexity in non-overlapping windows falls from 19.73 to "
        "18.21 over 1,000 sampled targets: a gain of 0.0800 nats per token (0.0700 to 0.0900).",
        "Fewer early tokens alone lower the loss by 0.0600 nats (0.0500 to 0.0700), 75 % of the "
        "gain.",
        "Longer context alone lowers the loss by 0.0200 nats (0.0100 to 0.0300), 25 % of the gain.",
    ]


def test_an_interval_that_includes_0_is_not_significant():
    run = decomposed(interval(0.01, 0.02), interval(0.012, 0.001), interval(-0.002, 0.003))
    gain, early, context = sentences_of(run)
    assert gain.endswith(f"0.0100 nats per token (−0.0100 to 0.0300){NOT_SIGNIFICANT}.")
    # No share of a gain that is not significant.
    assert early == "Fewer early tokens alone lower the loss by 0.0120 nats (0.0110 to 0.0130)."
    assert context == (
        f"Longer context alone raises the loss by 0.0020 nats (−0.0010 to 0.0050){NOT_SIGNIFICANT}."
    )
    assert "(the 97.5 % interval includes 0)" in run_sentences(run, 0.975)[0]


def test_a_loss_is_called_a_loss():
    run = decomposed(interval(-0.4, 0.01), interval(0.05, 0.01), interval(-0.45, 0.01))
    gain, early, context = sentences_of(run)
    assert "rises from 19.73 to 29.43 over 1,000 sampled targets: a loss of 0.4000 nats per" in gain
    assert early == "Fewer early tokens alone lower the loss by 0.0500 nats (0.0400 to 0.0600)."
    assert context == "Longer context alone raises the loss by 0.4500 nats (0.4400 to 0.4600)."


def test_early_tokens_that_cost_more():
    run = decomposed(exact(0.01), exact(-0.02), exact(0.03))
    _, early, context = sentences_of(run)
    assert early == "Early tokens raise the loss by 0.0200 nats more at 3,072 tokens than at 512."
    assert (
        context == "Longer context alone lowers the loss by 0.0300 nats, more than the whole gain."
    )
    assert sentences_of(decomposed(exact(-0.05), exact(-0.02), exact(-0.03)))[1:] == [
        "Early tokens raise the loss by 0.0200 nats more at 3,072 tokens than at 512.",
        "Longer context alone raises the loss by 0.0300 nats.",
    ]


def test_where_the_whole_context_hurts_windows_hide_some_of_the_harm():
    run = decomposed(interval(-2.37, 0.02), interval(0.57, 0.02), interval(-2.94, 0.02))
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.47, 0.02)
    assert sentences_of(run)[1:] == [
        "Longer context alone raises the loss by 2.9400 nats (2.9200 to 2.9600).",
        "Non-overlapping windows, where most targets see less than the whole context, hide 0.5700 "
        "nats (0.5500 to 0.5900) of this increase.",
    ]
    assert "early tokens" not in " ".join(sentences_of(run)).lower()
    # Windows that hide more than the whole increase do not hide a part of it.
    run = decomposed(interval(0.1, 0.02), interval(0.2, 0.02), interval(-0.1, 0.02))
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.1, 0.02)
    assert sentences_of(run)[1:] == [
        "Longer context alone raises the loss by 0.1000 nats (0.0800 to 0.1200).",
        "The rest, a gain of 0.2000 nats (0.1800 to 0.2200), does not come from fewer early "
        "tokens: at 3,072 tokens, the loss with the whole context is higher than in "
        "non-overlapping windows, where most targets see less context.",
    ]
    # A curse that is not significant does not show that the context hurts.
    run["decomposition"]["lengths"][1]["curse"] = interval(-0.01, 0.02)
    assert sentences_of(run)[1].startswith("Fewer early tokens alone lower the loss by 0.2000 nats")


def test_a_length_below_the_base_has_no_sentence():
    run = decomposed(exact(0.08), exact(0.06), exact(0.02), short=512, long=64)
    assert sentences_of(run) == []
    run["decomposition"]["lengths"] += decomposed(exact(0.08), exact(0.06), exact(0.02))[
        "decomposition"
    ]["lengths"][1:]
    assert sentences_of(run)[0].startswith("From 512 to 3,072 tokens")


def test_a_base_alone_is_no_split():
    run = decomposed(exact(0.08), exact(0.06), exact(0.02))
    run["rows"] = [bare_row(512, 19.73), bare_row(3072, 18.4)]
    del run["decomposition"]["lengths"][1]
    gain, unknown = sentences_of(run)
    assert gain.startswith("From 512 to 3,072 tokens, perplexity in non-overlapping windows falls")
    assert unknown == UNKNOWN_PARTS


def test_all_targets_and_the_sampled_ones_are_both_named():
    run = decomposed(exact(0.0529), exact(0.03), exact(0.0229), 128, 1024, 128, 3.521)
    run["rows"] = [bare_row(128, 3.315), bare_row(1024, 3.248)]
    assert sentences_of(run)[:2] == [
        "From 128 to 1,024 tokens, perplexity in non-overlapping windows falls from 3.315 to 3.248 "
        "over all 504,693 targets, and from 3.521 to 3.340 over the 1,000 sampled targets.",
        "The sampled targets gain 0.0529 nats per token.",
    ]
    run["rows"] = [bare_row(128, 3.315), bare_row(1024, 3.4)]
    first, second, *_, past = sentences_of(run)
    assert (
        "rises from 3.315 to 3.400 over all 504,693 targets, but falls from 3.521 to 3.340" in first
    )
    assert second == "The sampled targets gain 0.0529 nats per token."
    assert past.startswith(
        "Past its training length of 128 tokens the model gets worse: perplexity"
    )
    # If every target is sampled, both changes are the same one.
    run["decomposition"]["targets"] = 504_693
    assert (
        "3.340 over all 504,693 targets: a gain of 0.0529 nats per token." in sentences_of(run)[0]
    )


def test_perplexities_that_are_equal_as_written_stay():
    run = bare_run("alibi", [bare_row(128, 20.7701), bare_row(256, 20.7699)])
    assert sentences_of(run)[0] == (
        "From 128 to 256 tokens, perplexity in non-overlapping windows stays at 20.77 over all "
        "504,693 targets: a gain of less than 0.0001 nats per token."
    )


def test_a_run_without_a_number_past_its_training_length_says_so():
    run = bare_run("learned", [bare_row(32, 4.5), bare_row(64, None), bare_row(128, None)], 32)
    assert sentences_of(run) == [
        "learned has no result past 32 tokens: no embedding, for a length of 64."
    ]
    run["rows"][2] = bare_row(128, 4.5)
    assert not any("no result" in sentence for sentence in sentences_of(run))


@pytest.mark.parametrize(
    ("last", "verb"), [(4.4, None), (4.54, None), (4.6, "gets worse"), (5.0, "breaks down")]
)
def test_a_model_that_breaks_down_past_its_training_length(last, verb):
    run = bare_run("alibi", [bare_row(64, 5.0), bare_row(128, 4.5), bare_row(1024, last)])
    (*_, sentence) = sentences_of(run)
    if verb is None:
        assert "Past its training length" not in sentence
    else:
        assert sentence == (
            f"Past its training length of 128 tokens the model {verb}: perplexity over all targets "
            f"rises from 4.500 at 128 tokens to {last:.3f} at 1,024."
        )


def test_without_a_decomposition_the_part_of_longer_context_is_unknown():
    run = bare_run("alibi", [bare_row(128, 4.5), bare_row(256, 4.25), bare_row(512, None)])
    assert sentences_of(run) == [
        "From 128 to 256 tokens, perplexity in non-overlapping windows falls from 4.500 to 4.250 "
        "over all 504,693 targets: a gain of 0.0572 nats per token.",
        UNKNOWN_PARTS,
    ]


@pytest.mark.parametrize("rows", [[], [bare_row(128, 4.5)]])
def test_a_run_with_one_length_or_none_has_no_sentence(rows):
    assert sentences_of(bare_run("alibi", rows)) == []


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
    assert sentences_of(run) == [
        f"Attention resolution {verb} past the training length: 0.8 at 128 tokens, {past} at 1,024."
    ]


def test_the_gains_of_tokens_and_long_ppl():
    run = bare_run("alibi", []) | {"gain": made_up.run("alibi")["gain"]}
    assert sentences_of(run) == [
        "With exactly 4,096 instead of 128 tokens of context, the mean loss falls by 0.0050 nats "
        "(0.0020 to 0.0080); 52 % of 512 targets have a lower loss.",
        "The 6 targets (1 %) with the largest gains make up 31 % of all positive gains.",
        "LongPPL, the perplexity of the 12 targets that need long context according to runs/alibi, "
        "is 2.312 (too few targets to conclude much).",
    ]
    run["gain"]["nats"] = interval(-0.09, 0.01)
    assert "the mean loss rises by 0.0900 nats (0.0800 to 0.1000); 52 % of" in sentences_of(run)[0]
    run["gain"]["nats"] = interval(0.001, 0.003)
    assert f"by 0.0010 nats (−0.0020 to 0.0040){NOT_SIGNIFICANT}; 52 % of" in sentences_of(run)[0]
    assert sentences_of(run)[1] == (
        "The 6 targets (1 %) with the largest gains make up 31 % of all positive gains (individual "
        "targets gain and lose even if the mean gain is zero)."
    )
    run["gain"]["targets"] = 100
    assert sentences_of(run)[1].startswith(
        "The 1 target (1 %) with the largest gain makes up 31 % of"
    )
    run["gain"]["targets"] = 99
    assert sentences_of(run)[1].startswith("LongPPL")
    run["gain"]["long_ppl"]["key_targets"] = 30
    assert sentences_of(run)[-1].endswith(
        "30 targets that need long context according to runs/alibi, is 2.312."
    )
    run["gain"]["long_ppl"] = {"judge": "runs/alibi", "key_targets": 0, "error": "no key target"}
    assert sentences_of(run)[-1] == "LongPPL has no result: no key target."


def test_the_mean_gain_has_one_sentence():
    sentences = sentences_of(made_up.run("alibi"))
    assert sentences[3].startswith(
        "Longer context alone lowers the loss by 0.0050 nats (0.0020 to 0.0080)"
    )
    assert sentences[5] == (
        "With exactly 4,096 instead of 128 tokens of context, 52 % of 512 targets have a lower "
        "loss."
    )
    assert sum("0.0050" in sentence for sentence in sentences) == 1


def test_sentences_without_intervals_have_no_parentheses():
    run = made_up.run("alibi")
    for entry in run["decomposition"]["lengths"]:
        for part in ("gain", "early_tokens", "context", "curse"):
            entry[part] |= {"low": None, "high": None}
    run["gain"]["nats"] |= {"low": None, "high": None}
    assert "(" not in " ".join(sentences_of(run)[:4])
