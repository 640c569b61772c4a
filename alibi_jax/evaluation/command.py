"""What eval.py does: from what is asked to the files and the table."""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from alibi_jax.config import Mesh, parse_mesh
from alibi_jax.data.builders import open_documents
from alibi_jax.distributed import processes
from alibi_jax.evaluation.bootstrap import CONFIDENCE
from alibi_jax.evaluation.eval_text import EvaluationText, Sample, read_text
from alibi_jax.evaluation.protocols import check_strides, parse_lengths, parse_protocols
from alibi_jax.evaluation.rescaling import UNSCALED, Rescaling, parse_rescalings
from alibi_jax.evaluation.run_results import EvaluationOptions, RunEvaluation, evaluate_run
from alibi_jax.evaluation.runs import Run, find_workdirs, load_run
from alibi_jax.evaluation.unfinished import Unfinished
from alibi_jax.provenance import provenance

# Of results.json: raised when what is there changes its name or its meaning.
VERSION = 2
# Up to so many times the training length attention is looked at, where nothing else is asked.
_LOOKED_AT = 2


def evaluate(
    workdirs: list[str],
    *,
    lengths: str,
    protocols: str,
    rescalings: str = "none",
    attention: str | None = None,
    judge: str | None = None,
    split: str = "validation",
    step: int | None = None,
    documents: bool = False,
    bos: bool = False,
    targets: int = 512,
    passage: int = 200,
    seed: int = 0,
    batch_tokens: int = 8192,
    mesh: str = "",
    out: pathlib.Path | None = None,
) -> int:
    """Evaluates runs, writes results, figures and report, prints the table and what it says.

    All is as on the command line (eval.py). A rescaling is for the runs that it applies to.
    Broken off, the same call goes on where it was. Returns the exit code: 1 where a row or a look
    at attention that was asked for has no number.

    Raises:
        ValueError: before any work, where something asked for cannot be meant.
        KeyboardInterrupt: where it was asked to stop (SIGTERM, Ctrl-C); what is done is kept.
    """
    given = {name: value for name, value in locals().items() if name not in ("workdirs", "out")}
    for name, value, least in (
        ("batch_tokens", batch_tokens, 1),
        ("targets", targets, 1),
        ("passage", passage, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"--{name}={value} must be at least {least}")
    asked = EvaluationOptions(
        parse_protocols(protocols), split, documents, bos, targets, passage, seed, batch_tokens
    )
    ways = parse_rescalings(rescalings)
    folders = find_workdirs(workdirs)
    sizes = parse_mesh(mesh)
    runs = {folder: load_run(folder, step, sizes) for folder in folders}
    grids = {
        folder: parse_lengths(lengths, run.config.train.length) for folder, run in runs.items()
    }
    looks = {
        folder: _attention_lengths(attention, grids[folder], run.config.train.length)
        for folder, run in runs.items()
    }
    for grid in grids.values():
        check_strides(asked.protocols, grid)
    entries = [
        (folder, way) for folder in folders for way in ways if way.applies_to(runs[folder].config)
    ]
    _check_rescalings(runs, grids, looks, entries, ways, rescalings)
    judging = None if judge is None else _judge(judge, runs, step, sizes)
    texts = _Texts(asked, [length for grid in grids.values() for length in grid])
    out = out or folders[0] / "eval"
    _check_writable(out)
    unfinished = Unfinished(out / "unfinished")
    with processes.StopRequest() as stop:
        batches = itertools.count()

        def subject(run: Run, way: Rescaling) -> RunEvaluation:
            return RunEvaluation(
                run, way, asked, *texts.of(run), unfinished, _polled(stop, batches)
            )

        subjects = {(folder, way): subject(runs[folder], way) for folder, way in entries}
        judge_subject = None
        if judging is not None:
            judge_subject = subjects.get((judging.workdir, UNSCALED)) or subject(judging, UNSCALED)
            _check_judge(judge_subject, list(subjects.values()))
        try:
            evaluated = [
                evaluate_run(one, grids[folder], looks[folder], judge_subject)
                for (folder, _), one in subjects.items()
            ]
        except KeyboardInterrupt:
            processes.say(f"stopped: the same command goes on with what {unfinished.folder} holds")
            raise
    results = {"version": VERSION} | provenance()
    results |= {"asked": given | {"confidence": CONFIDENCE}, "runs": evaluated}
    if jax.process_index() == 0:
        from alibi_jax import report

        written = report.write(results, out)
        print(report.table(results), *(f"wrote {path}" for path in written), sep="\n", flush=True)
    unfinished.discard()
    return int(any("error" in part for part in _parts(results)))


class _Texts:
    """The texts of runs and their samples, each made once: those of one text have one sample."""

    def __init__(self, asked: EvaluationOptions, lengths: list[int]):
        self._asked, self._lengths = asked, lengths
        self._made: dict[tuple[str, str], tuple[EvaluationText, Sample]] = {}

    def of(self, run: Run) -> tuple[EvaluationText, Sample]:
        """The text of a run and the targets sampled from it."""
        asked, data = self._asked, run.config.data
        key = (open_documents(data, asked.split).fingerprint, run.tokenizer.fingerprint)
        if key not in self._made:
            text = read_text(data, asked.split, run.tokenizer, asked.documents)
            self._made[key] = text, text.sample(self._lengths, asked.targets, asked.seed)
        return self._made[key]


def _polled(stop: processes.StopRequest, batches: "itertools.count[int]") -> Callable[[], bool]:
    """Whether to stop, asked once a batch: by number, so that all processes stop at the same."""
    return lambda: stop.at(next(batches))


def _attention_lengths(attention: str | None, grid: list[int], train_length: int) -> list[int]:
    if attention is None:
        return [length for length in grid if length <= _LOOKED_AT * train_length]
    return parse_lengths(attention, train_length, "attention") if attention else []


def _check_writable(out: pathlib.Path) -> None:
    """Raises ValueError where results could not be written in the end."""
    if jax.process_index() != 0:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise ValueError(
            f"--out={out} can't be written to ({error.strerror}): give another folder"
        ) from None


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
    for folder in runs.keys() - {folder for folder, _ in entries}:
        raise ValueError(
            f"--rescalings={given} leaves nothing of {folder}: leave the run out, or add none"
        )


def _judge(judge: str, runs: dict[pathlib.Path, Run], step: int | None, mesh: Mesh) -> Run:
    folder = pathlib.Path(judge)
    try:
        return runs[folder] if folder in runs else load_run(folder, step, mesh)
    except ValueError as error:
        raise ValueError(f"--judge={judge}: {error}") from error


def _check_judge(judge: RunEvaluation, subjects: list[RunEvaluation]) -> None:
    """Raises ValueError for a judge of other targets than a run's."""
    for subject in subjects:
        if subject.text is not judge.text:
            raise ValueError(
                f"--judge={judge.run.workdir} reads another text or other tokens than "
                f"{subject.run.workdir}: give a run with the same data and tokenizer"
            )


def _parts(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for run in results["runs"] for part in (*run["rows"], *run["attention"])]
