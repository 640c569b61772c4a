import math

import numpy as np
import pytest

from alibi_jax.data.tokenizers import ByteTokenizer
from alibi_jax.evaluation.bootstrap import Clusters
from alibi_jax.evaluation.eval_text import EvaluationText
from alibi_jax.evaluation.gains import gain_report, key_targets, largest_gains, long_ppl, passage

GROUPS = Clusters(np.arange(100) // 10, "documents", 0)


def text_of(raw):
    """A text that is one document of bytes."""
    tokens = np.array([0, *raw.encode()], np.uint16)
    ones = np.ones(len(tokens), np.int32)
    return EvaluationText(
        tokens, np.array([0, len(tokens)]), np.array([0]), ByteTokenizer(), ones, ones
    )


def test_the_concentration_of_the_gain():
    """One target of a hundred gains 9 nats, nine gain 1/9 nats each, and ten lose 2 nats each."""
    long = np.full(100, 1.0)
    gains = np.zeros(100)
    gains[7], gains[20:29], gains[50:60] = 9.0, 1 / 9, -2.0
    report = gain_report(long + gains, long, GROUPS)
    assert report["targets"] == 100
    assert report["improved"] == 0.1
    assert report["nats"]["nats"] == pytest.approx((9 + 1 - 20) / 100)
    shares = {part["targets"]: part["gain"] for part in report["concentration"]}
    assert shares == pytest.approx({0.01: 0.9, 0.05: 0.9 + 4 / 90, 0.1: 1.0, 0.25: 1.0, 0.5: 1.0})
    quantiles = {part["share"]: part["nats"] for part in report["quantiles"]}
    assert quantiles[0.05] == -2.0
    assert quantiles[0.5] == 0.0
    assert quantiles == pytest.approx({share: np.quantile(gains, share) for share in quantiles})


def test_without_positive_gains_there_is_no_concentration():
    report = gain_report(np.ones(100), np.full(100, 2.0), GROUPS)
    assert report["concentration"] == []
    assert report["improved"] == 0.0
    assert report["nats"] == {"nats": -1.0, "low": -1.0, "high": -1.0}


def test_long_ppl_counts_targets_that_long_context_makes_likely():
    """arXiv 2410.23771: log-probabilities rise by more than 2 and exceed -2."""
    short = np.array([5.0, 5.0, 4.0, 3.5, 2.5, 9.0, 3.0])
    long = np.array([0.5, 1.9, 1.9, 1.5, 0.1, 2.1, 1.0])
    key = key_targets(short, long)
    # Rises of 2.1 and 2.4 count; a rise of exactly 2 and a rise to -2.1 do not.
    assert key.tolist() == [True, True, True, False, True, False, False]
    scored = long_ppl(np.array([1.0, 2.0, 3.0, 9.0, 0.0, 9.0, 9.0]), key, "runs/a")
    assert scored == {
        "judge": "runs/a",
        "alpha": 2.0,
        "beta": -2.0,
        "key_targets": 4,
        "perplexity": pytest.approx(math.exp(1.5)),
    }


def test_a_judge_without_finite_losses_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        key_targets(np.array([1.0, np.nan]), np.ones(2))


def test_long_ppl_without_a_key_target_has_an_error():
    scored = long_ppl(np.ones(3), np.zeros(3, bool), "runs/a")
    assert scored["key_targets"] == 0
    assert "no key target" in scored["error"]
    assert "perplexity" not in scored


def test_the_largest_gains_come_with_their_text():
    text = text_of("one two three four five six seven")
    targets = np.array([5, 9, 20])
    found = largest_gains(text, targets, np.array([1.0, 5.0, 2.0]), np.array([1.5, 1.0, 1.0]))
    # The first target has a loss instead of a gain.
    assert [part["target"] for part in found] == [9, 20]
    assert [part["gain"] for part in found] == [4.0, 1.0]
    first = found[0]
    assert (
        first["before"] + first["text"] + first["after"]
        == text.tokenizer.decode(text.tokens).decode()
    )
    assert first["text"] == "t"
    assert first["before"] == "one two "


def test_a_passage_is_in_whole_characters_with_the_sums_of_their_tokens():
    raw = "aé\n€!"
    text = text_of(raw)
    targets = np.arange(1, len(text.tokens))
    short = np.arange(1, len(text.tokens), dtype=np.float64)
    made = passage(text, targets, short, short / 2)
    assert made["first"] == 1
    assert [piece["text"] for piece in made["pieces"]] == ["a", "é", "\n", "€", "!"]
    assert [piece["nll_short"] for piece in made["pieces"]] == [1, 2 + 3, 4, 5 + 6 + 7, 8]
    assert [piece["gain"] for piece in made["pieces"]] == [0.5, 2.5, 2, 9, 4]


def test_a_passage_that_begins_or_ends_inside_a_character():
    text = text_of("a€b€")
    losses = np.ones(len(text.tokens))
    cut = passage(text, np.array([3, 4, 5, 6, 7]), losses[:5], losses[:5])
    assert "b" in [piece["text"] for piece in cut["pieces"]]
    assert sum(piece["nll_short"] for piece in cut["pieces"]) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_passage_without_finite_losses_is_refused(bad):
    text = text_of("abc")
    losses = np.array([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="losses of the passage are not finite"):
        passage(text, np.array([1, 2, 3]), losses, np.array([1.0, bad, 1.0]))
    with pytest.raises(ValueError, match="losses of the passage are not finite"):
        passage(text, np.array([1, 2, 3]), np.array([bad, 1.0, 1.0]), losses)


def test_long_ppl_that_float64_cannot_hold_has_an_error():
    nll = np.array([900.0, 1.0])
    assert long_ppl(nll, np.array([True, True]), "judge")["perplexity"] == np.exp(450.5)
    result = long_ppl(nll, np.array([True, False]), "judge")
    assert result["error"] == "the mean loss of the key targets is 900.0 nats"
    assert "perplexity" not in result
