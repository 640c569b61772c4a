"""One paragraph about all runs of an evaluation."""

from typing import Any

from alibi_jax.report.formatting import Entry, count_noun, format_perplexity, join_with_and
from alibi_jax.report.gain_sentences import nonoverlapping_rows
from alibi_jax.report.runs import comparable_runs, run_names
from alibi_jax.report.sentences import run_sentences


def summary(results: dict[str, Any]) -> str:
    """Runs, lengths, text, and which run is best at the shortest and at the longest length.

    The best run has the lowest perplexity. The summary of a single run has all sentences about it.
    """
    runs = results["runs"]
    lengths = sorted({row["length"] for run in runs for row in run["rows"] if "error" not in row})
    shortest_and_longest = list(dict.fromkeys([*lengths[:1], *lengths[-1:]]))
    sentences = [_what_was_evaluated(runs, shortest_and_longest)]
    if not lengths:
        sentences.append("No length has a result.")
    if len(runs) == 1:
        return " ".join(sentences + run_sentences(runs[0], results["asked"]["confidence"]))
    groups: list[list[Entry]] = []
    for run in runs:
        if comparable_runs(runs, run) not in groups:
            groups.append(comparable_runs(runs, run))
    if len(groups) > 1:
        sentences.append(
            "The runs differ in text or tokenizer: perplexities per token are comparable only "
            "between runs with the same text and tokenizer, bits per byte between all runs with "
            "the same text."
        )
    for group in groups:
        names = [name for name, run in zip(run_names(runs), runs) if run in group]
        among = f"among {join_with_and(names)}, " if len(groups) > 1 else ""
        for length in shortest_and_longest:
            scored = [
                (row["perplexity"], name)
                for name, run in zip(names, group)
                for row in nonoverlapping_rows(run)
                if row["length"] == length
            ]
            if len(scored) > 1:
                perplexity, name = min(scored)
                sentences.append(
                    f"At {length:,} tokens, {among}{name} has the lowest perplexity in "
                    f"non-overlapping windows: {format_perplexity(perplexity)}."
                )
    return " ".join(sentences)


def _what_was_evaluated(runs: list[Entry], lengths: list[int]) -> str:
    train_lengths = {run["train_length"] for run in runs}
    # Runs with different training lengths have them in their names.
    trained = f", trained at {train_lengths.pop():,} tokens," if len(train_lengths) == 1 else ""
    was = "was" if len(runs) == 1 else "were"
    at = f" at {' to '.join(f'{length:,}' for length in lengths)} tokens" if lengths else ""
    texts = list(dict.fromkeys(f"the {run['split']} split{_corpus(run)}" for run in runs))
    return (
        f"{join_with_and(run_names(runs))}{trained} {was} evaluated{at} on {join_with_and(texts)}."
    )


def _corpus(run: Entry) -> str:
    corpus = run["corpus"]
    documents = count_noun(corpus["documents"], "document")
    return f" of {corpus['dataset']} ({count_noun(corpus['tokens'], 'token')}, {documents})"
