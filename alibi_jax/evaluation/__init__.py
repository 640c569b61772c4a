"""Trained runs scored by protocol and length: from what is asked to the files and the table."""

import pathlib
from typing import Any

import jax

from alibi_jax import processes
from alibi_jax.evaluation.bootstrap import CONFIDENCE
from alibi_jax.evaluation.entries import Asked, Subject, evaluate_run
from alibi_jax.evaluation.protocols import (
    Protocol,
    check_strides,
    parse_lengths,
    parse_protocols,
)
from alibi_jax.evaluation.runs import Run, find_workdirs, load_run
from alibi_jax.evaluation.texts import Text, read_text
from alibi_jax.evaluation.unfinished import Unfinished
from alibi_jax.provenance import provenance
from alibi_jax.rescaling import UNSCALED, Rescaling, parse_rescalings

# Of results.json: raised when what is there changes its name or its meaning.
VERSION = 2


def evaluate(
    workdirs: list[str],
    *,
    lengths: str,
    protocols: str,
    rescalings: str = "none",
    attention: str = "",
    judge: str | None = None,
    split: str = "validation",
    step: int | None = None,
    documents: bool = False,
    bos: bool = False,
    targets: int = 512,
    passage: int = 200,
    seed: int = 0,
    batch_tokens: int = 8192,
    out: pathlib.Path | None = None,
) -> int:
    """Evaluates runs, writes results, figures and report, prints the table and what it says.

    All is as on the command line (eval.py). A rescaling is for the runs that it applies to.
    Broken off, the same call goes on where it was. Returns the exit code: 1 where a number that
    was asked for is missing.

    Raises:
        ValueError: before any work, where something asked for cannot be meant.
    """
    for name, value, least in (
        ("batch_tokens", batch_tokens, 1),
        ("targets", targets, 1),
        ("passage", passage, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"--{name}={value} must be at least {least}")
    asked = Asked(
        parse_protocols(protocols),
        split,
        documents,
        bos,
        targets,
        passage,
        seed,
        batch_tokens,
    )
    ways = parse_rescalings(rescalings)
    folders = find_workdirs(workdirs)
    out = out or folders[0] / "eval"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={out} is a file: give a folder, or a new name")
    runs = {folder: load_run(folder, step) for folder in folders}
    grids = {
        folder: parse_lengths(lengths, run.config.train.length) for folder, run in runs.items()
    }
    looks = {
        folder: parse_lengths(attention, run.config.train.length, "attention") if attention else []
        for folder, run in runs.items()
    }
    for grid in grids.values():
        check_strides(asked.protocols, grid)
    entries = [
        (folder, way) for folder in folders for way in ways if way.applies_to(runs[folder].config)
    ]
    _check_rescalings(runs, grids, looks, entries, ways, rescalings)
    judging = None if judge is None else _judge(judge, runs, step)
    texts = _Texts(asked, [length for grid in grids.values() for length in grid])
    unfinished = Unfinished(out / "unfinished")
    subjects = {
        (folder, way): Subject(runs[folder], way, asked, *texts.of(runs[folder]), unfinished)
        for folder, way in entries
    }
    judge_subject = None
    if judging is not None:
        judge_subject = subjects.get((judging.workdir, UNSCALED)) or Subject(
            judging, UNSCALED, asked, *texts.of(judging), unfinished
        )
        _check_judge(judge_subject, list(subjects.values()))
    if unfinished.folder.is_dir():
        processes.say(f"going on with what {unfinished.folder} holds")
    results = (
        {"version": VERSION}
        | provenance()
        | {
            "asked": {
                "split": split,
                "documents": documents,
                "bos": bos,
                "targets": targets,
                "seed": seed,
                "confidence": CONFIDENCE,
            },
            "runs": [
                evaluate_run(subject, grids[folder], looks[folder], judge_subject)
                for (folder, _), subject in subjects.items()
            ],
        }
    )
    if jax.process_index() == 0:
        from alibi_jax import report

        written = report.write(results, out)
        print(report.table(results), *(f"wrote {path}" for path in written), sep="\n", flush=True)
    unfinished.discard()
    return int(any("error" in part for part in _parts(results)))


class _Texts:
    """The texts of runs and their samples, each made once: those of one text have one sample."""

    def __init__(self, asked: Asked, lengths: list[int]):
        self._asked, self._lengths = asked, lengths
        self._made: dict[Any, tuple[Text, Any]] = {}

    def of(self, run: Run) -> tuple[Text, Any]:
        """The text of a run and the targets sampled from it."""
        asked = self._asked
        data = run.config.data
        key = (data.dataset, data.path, data.data_dir, run.tokenizer.fingerprint)
        if key not in self._made:
            text = read_text(data, asked.split, run.tokenizer, asked.documents)
            self._made[key] = text, text.sample(self._lengths, asked.targets, asked.seed)
        return self._made[key]


def _check_rescalings(
    runs: dict[pathlib.Path, Run],
    grids: dict[pathlib.Path, list[int]],
    looks: dict[pathlib.Path, list[int]],
    entries: list[tuple[pathlib.Path, Rescaling]],
    ways: list[Rescaling],
    given: str,
) -> None:
    """Raises ValueError for a rescaling that no run can have, or one that a run can't."""
    for folder, way in entries:
        way.at(runs[folder].config, max(grids[folder] + looks[folder]))
    for way in ways:
        if not any(way.applies_to(run.config) for run in runs.values()):
            positions = ", ".join(sorted({run.config.model.position for run in runs.values()}))
            raise ValueError(
                f"--rescalings={given}: {way.name} is not for {positions}: leave it out"
            )


def _judge(judge: str, runs: dict[pathlib.Path, Run], step: int | None) -> Run:
    folder = pathlib.Path(judge)
    return runs[folder] if folder in runs else load_run(folder, step)


def _check_judge(judge: Subject, subjects: list[Subject]) -> None:
    """Raises ValueError for a judge of other targets than a run's."""
    for subject in subjects:
        if subject.text is not judge.text:
            raise ValueError(
                f"--judge={judge.run.workdir} reads another text or other tokens than "
                f"{subject.run.workdir}: give a run with the same data and tokenizer"
            )


def _parts(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for run in results["runs"] for part in (*run["rows"], *run["attention"])]


__all__ = [
    "Asked",
    "Protocol",
    "Run",
    "Subject",
    "evaluate",
    "evaluate_run",
    "load_run",
    "parse_lengths",
    "parse_protocols",
    "read_text",
]
