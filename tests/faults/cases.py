"""The runs that faults strike: train.py and eval.py on a small text, in one process and in two."""

import dataclasses
import functools
import random
import shutil
import signal
import socket
import time

STEPS, EVERY, KEEP = 8, 2, 2
# Each path is relative, so that all runs have the same configuration.
CONFIG = {
    "data.dataset": "text",
    "data.path": "text",
    "data.data_dir": "data",
    "data.tokenizer": "bpe",
    "data.vocab_size": 270,
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    # The steps draw random numbers.
    "model.dropout": 0.1,
    "optimizer.warmup_steps": 2,
    "train.steps": STEPS,
    "train.length": 16,
    "train.batch_size": 4,
    "train.accumulation": 2,
    "train.log_every": 1,
    "train.validation_every": 4,
    "train.validation_targets": 64,
    "checkpoint.every": EVERY,
    "checkpoint.keep": KEEP,
}
_TRAIN = ("--workdir=run", *(f"--config.{key}={value}" for key, value in CONFIG.items()))
# Many small batches, and few programs to compile.
_EVALUATE = ("--workdir=run", "--lengths=1x,2x", "--targets=20", "--passage=8")
_EVALUATE += ("--batch_tokens=64", "--attention=")
# Seconds in which the processes of a run must find each other, and in which each run must end.
_JOIN_TIMEOUT, TIMEOUT = 20, 180


@dataclasses.dataclass(frozen=True)
class Case:
    """A command, the folder that it starts from, and its number of processes."""

    name: str
    program: str
    arguments: tuple[str, ...]
    # "text": the text alone; "killed": a run that a kill ended; "trained": a run that has ended.
    start: str
    processes: int = 1

    def __str__(self):
        return f"{self.name}, {self.processes} process{'es' if self.processes > 1 else ''}"


_TRAINING = Case("training", "train.py", _TRAIN, "text")
_SINGLE = (
    _TRAINING,
    Case("resuming", "train.py", _TRAIN, "killed"),
    Case("going back", "train.py", (*_TRAIN, f"--step={STEPS - EVERY}"), "trained"),
    Case("evaluation", "eval.py", _EVALUATE, "trained"),
)
CASES = _SINGLE + tuple(dataclasses.replace(case, processes=2) for case in _SINGLE)


def start(programs, case, folder, jobs=({}, {})):
    """Starts the processes of a case; `jobs` has further fields of each process's job."""
    several = ()
    if case.processes > 1:
        with socket.create_server(("localhost", 0)) as free:
            coordinator = f"localhost:{free.getsockname()[1]}"
        several = (f"--coordinator={coordinator}", f"--num_processes={case.processes}")
        several += (f"--join_timeout={_JOIN_TIMEOUT}",)
    return [
        programs.start(
            case.program,
            [*case.arguments, *several, *([f"--process_id={number}"] if several else [])],
            folder,
            **jobs[number],
        )
        for number in range(case.processes)
    ]


def finish(programs, runs):
    """Waits for runs to end. Returns where their threads are if they do not, and ends them."""
    programs.wait(runs, TIMEOUT)
    hung = [run for run in runs if run.code is None]
    for run in hung:
        run.send(signal.SIGABRT)
    programs.wait(hung, TIMEOUT)
    return [f"hangs: {' | '.join(run.err[-60:])}" for run in hung]


def write_text(folder):
    """Writes six small documents of 300 different words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(300)]
    (folder / "text").mkdir(parents=True)
    for number in range(6):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=400)))


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A case without a fault: its folder, its runs and its seconds."""

    folder: object
    runs: list
    seconds: float


class References:
    """The cases without a fault, each made once when it is needed."""

    def __init__(self, programs, folder):
        self._programs, self._folder = programs, folder
        write_text(folder / "text")
        # A kept checkpoint of any step is compared with the one of these runs.
        self.undisturbed = functools.cache(self._undisturbed)
        self.start_folder = functools.cache(self._start_folder)

    def every_step(self, processes):
        """The folder of a training that kept the checkpoint of every step."""
        arguments = (*_TRAIN, "--config.checkpoint.every=1", f"--config.checkpoint.keep={STEPS}")
        case = Case("every step", "train.py", arguments, "text", processes)
        return self.undisturbed(case).folder

    def _undisturbed(self, case):
        folder = self._folder / str(case)
        shutil.copytree(self.start_folder(case.start, case.processes), folder)
        began = time.monotonic()
        runs = start(self._programs, case, folder)
        problems = finish(self._programs, runs)
        problems += [" ".join(run.err) for run in runs if run.code != 0]
        if problems:
            raise RuntimeError(f"{case} fails without a fault: {problems}")
        return Undisturbed(folder, runs, time.monotonic() - began)

    def _start_folder(self, name, processes):
        if name == "text":
            return self._folder / "text"
        training = dataclasses.replace(_TRAINING, processes=processes)
        if name == "trained":
            return self.undisturbed(training).folder
        # Killed in the middle of its third save.
        events = self.undisturbed(training).runs[0].events
        event = [n for n, line in enumerate(events, 1) if f"checkpoints/{3 * EVERY}." in line][12]
        folder = self._folder / f"{name} {processes}"
        shutil.copytree(self._folder / "text", folder)
        runs = start(self._programs, training, folder, ({"watch": {"event": event}}, {}))
        finish(self._programs, runs)
        if runs[0].code != -signal.SIGKILL:
            raise RuntimeError(f"no kill at event {event}: {runs[0].err}")
        return folder
