"""The evaluation that eval.py runs: it loads the runs, evaluates them and writes the results."""

import dataclasses
import itertools
import pathlib

import jax

from alibi_jax.checkpoints import Checkpoints
from alibi_jax.config import local_path
from alibi_jax.distributed import processes
from alibi_jax.distributed.agreement import agree, digest, process_zero_first
from alibi_jax.distributed.folders import locked_folder
from alibi_jax.evaluation.bootstrap import CONFIDENCE
from alibi_jax.evaluation.eval_text import EvaluationText, Sample, read_text
from alibi_jax.evaluation.options import EvaluationOptions
from alibi_jax.evaluation.protocols import check_strides
from alibi_jax.evaluation.rescaling import UNSCALED, Rescaling
from alibi_jax.evaluation.run_evaluation import RunEvaluation
from alibi_jax.evaluation.run_results import evaluate_run
from alibi_jax.evaluation.runs import Run, find_workdirs, load_run
from alibi_jax.evaluation.unfinished import UnfinishedLosses
from alibi_jax.provenance import installation, provenance

# Version of results.json; a change of a key's name or meaning raises it.
VERSION = 2


def evaluate(
    workdirs: list[str], options: EvaluationOptions, out: pathlib.Path | None = None
) -> int:
    """Evaluates runs, writes results, figures and report, prints tables and a paragraph per run.

    `workdirs` are folders or patterns such as runs/*; `out` is by default eval/ in the first
    folder. Each rescaling is applied to the runs that it is defined for. After an interruption the
    same call continues from the saved losses. Returns the exit code: 1 where a row or an attention
    report has an error in place of its numbers.

    Raises:
        ValueError: before any work, for an option that is invalid, or invalid for one of the runs.
        KeyboardInterrupt: after SIGTERM or Ctrl-C; the losses so far are saved.
    """
    options.check()
    with processes.StopRequest() as stop:
        return _evaluate(workdirs, options, out, stop)


def _evaluate(
    workdirs: list[str],
    options: EvaluationOptions,
    out: pathlib.Path | None,
    stop: processes.StopRequest,
) -> int:
    folders = find_workdirs(workdirs)
    agree(
        lambda: (
            {"program": "evaluation", "--workdir": list(map(str, folders))}
            | {f"--{name}": value for name, value in dataclasses.asdict(options).items()}
            | installation()
        ),
        "start all processes with the same command and the same packages",
    )
    for folder in folders:
        # Before a folder for the results is made in a workdir that holds no run.
        with Checkpoints(folder) as checkpoints:
            checkpoints.check_step(options.step)
    out = out or folders[0] / "eval"
    with locked_folder("out", out):
        return _evaluate_into(out, folders, options, stop)


def _evaluate_into(
    out: pathlib.Path,
    folders: list[pathlib.Path],
    options: EvaluationOptions,
    stop: processes.StopRequest,
) -> int:
    """Evaluates as `evaluate` does, into a folder that this evaluation holds."""
    runs = {folder: _load(folder, options) for folder in folders}
    train_lengths = {folder: run.config.train.length for folder, run in runs.items()}
    lengths = {folder: options.evaluation_lengths(n) for folder, n in train_lengths.items()}
    attention_lengths = {
        folder: options.attention_lengths(n) for folder, n in train_lengths.items()
    }
    for run_lengths in lengths.values():
        check_strides(options.parsed_protocols, run_lengths)
    longest = {folder: max(lengths[folder] + attention_lengths[folder]) for folder in folders}
    rescaled_runs = _rescaled_runs(runs, longest, options)
    judge_run = None if options.judge is None else _load_judge(options.judge, runs, options)
    texts = TextCache(options, list(itertools.chain.from_iterable(lengths.values())))
    unfinished = UnfinishedLosses(out / "unfinished")
    batch_numbers = itertools.count()

    def should_stop() -> bool:
        # A batch has the same number in all processes, so all stop after the same batch.
        return stop.at(next(batch_numbers))

    def evaluation_of(run: Run, rescaling: Rescaling) -> RunEvaluation:
        text, sample = texts.of(run)
        return RunEvaluation(run, rescaling, options, text, sample, unfinished, should_stop)

    evaluations = {
        (folder, rescaling): evaluation_of(runs[folder], rescaling)
        for folder, rescaling in rescaled_runs
    }
    judge = None
    if judge_run is not None:
        # A judge is never rescaled.
        unscaled = evaluations.get((judge_run.workdir, UNSCALED))
        judge = unscaled or evaluation_of(judge_run, UNSCALED)
        _check_judge(judge, list(evaluations.values()))
    try:
        entries = [
            evaluate_run(evaluation, lengths[folder], attention_lengths[folder], judge)
            for (folder, _), evaluation in evaluations.items()
        ]
    except KeyboardInterrupt:
        processes.say(f"stopped: the same command continues from the losses in {unfinished.folder}")
        raise
    asked = dataclasses.asdict(options) | {"confidence": CONFIDENCE}
    results = {"version": VERSION} | provenance() | {"asked": asked, "runs": entries}
    if jax.process_index() == 0:
        from alibi_jax import report

        written = report.write(results, out)
        print(report.table(results), *(f"wrote {path}" for path in written), sep="\n", flush=True)
    unfinished.discard()
    return int(
        any("error" in part for entry in entries for part in (*entry["rows"], *entry["attention"]))
    )


class TextCache:
    """The text of each run and the sample of its targets.

    Runs with the same documents and the same tokenizer share one text and one sample.
    """

    def __init__(self, options: EvaluationOptions, lengths: list[int]):
        self._options, self._lengths = options, lengths
        self._cache: dict[tuple[str, str], tuple[EvaluationText, Sample]] = {}

    def of(self, run: Run) -> tuple[EvaluationText, Sample]:
        """The text of a run and the sample of its targets."""
        options, data = self._options, run.config.data
        # Imported here: TFDS takes a second, which --help and a wrong flag need not wait for.
        from alibi_jax.data.builders import open_documents

        documents = process_zero_first("documents", lambda: open_documents(data, options.split))
        key = (documents.fingerprint, run.tokenizer.fingerprint)
        remedy = "give all processes the same text"
        agree(lambda: {f"digest of the {options.split} text": digest(key[0])}, remedy)
        if key not in self._cache:
            text = process_zero_first(
                "text", lambda: read_text(data, options.split, run.tokenizer, options.documents)
            )
            agree(
                lambda: {
                    f"{options.split} tokens": f"{len(text.tokens)}, digest {text.digest[:16]}"
                },
                remedy,
            )
            sample = text.sample(self._lengths, options.targets, options.seed)
            self._cache[key] = text, sample
        return self._cache[key]


def _rescaled_runs(
    runs: dict[pathlib.Path, Run], longest: dict[pathlib.Path, int], options: EvaluationOptions
) -> list[tuple[pathlib.Path, Rescaling]]:
    """All pairs of a run and a rescaling that is defined for it, run by run.

    Raises ValueError where the run's longest input is invalid under the rescaling, where a
    rescaling is defined for no run, and where a run has no rescaling.
    """
    pairs = [
        (folder, rescaling)
        for folder, run in runs.items()
        for rescaling in options.parsed_rescalings
        if rescaling.applies_to(run.config)
    ]
    for folder, rescaling in pairs:
        rescaling.at(runs[folder].config, longest[folder])
    for rescaling in options.parsed_rescalings:
        if not any(rescaling.applies_to(run.config) for run in runs.values()):
            positions = ", ".join(sorted({run.config.model.position for run in runs.values()}))
            raise ValueError(
                f"--rescalings={options.rescalings}: {rescaling.name} is not for {positions}: "
                "leave it out"
            )
    for folder in runs.keys() - {folder for folder, _ in pairs}:
        raise ValueError(
            f"--rescalings={options.rescalings}: no rescaling of the list is defined for {folder}: "
            'leave the run out, or add the rescaling "none"'
        )
    return pairs


def _load(folder: pathlib.Path, options: EvaluationOptions) -> Run:
    return load_run(
        folder,
        options.step,
        options.parsed_mesh,
        data_path=options.data_path,
        data_dir=options.data_dir,
    )


def _load_judge(judge: str, runs: dict[pathlib.Path, Run], options: EvaluationOptions) -> Run:
    folder = local_path("--judge", judge)
    try:
        return runs.get(folder) or _load(folder, options)
    except ValueError as error:
        raise ValueError(f"--judge={judge}: {error}") from error


def _check_judge(judge: RunEvaluation, evaluations: list[RunEvaluation]) -> None:
    """Raises ValueError unless all runs have the same text and the same tokens as the judge."""
    for evaluation in evaluations:
        if evaluation.text is not judge.text:
            raise ValueError(
                f"--judge={judge.run.workdir} reads another text or other tokens than "
                f"{evaluation.run.workdir}: give a run with the same data and tokenizer"
            )
