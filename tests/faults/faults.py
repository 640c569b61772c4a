"""The kinds of faults: how each strikes a run, and what a run that it has struck may answer."""

import collections
import contextlib
import dataclasses
import pathlib
import re
import shutil
import signal
import subprocess

from cases import finish, start

BEFORE, AFTER, ANY_TIME = "kill before a file operation", "kill soon after one", "kill at any time"
TORN, STOP = "kill in a write", "SIGTERM"
TOO_LARGE, FULL, NO_FILES = "file too large", "disk full", "no new files"
# The kinds that need a file system of their own.
ON_DISKS = (FULL, NO_FILES)
KINDS = (BEFORE, AFTER, ANY_TIME, TORN, STOP, TOO_LARGE)

_KILLED = (-signal.SIGKILL, -signal.SIGALRM, -signal.SIGXFSZ)
# The greatest number of seconds between an operation and the kill soon after it.
_SOON = 0.05
# The phase of a run at an event, and the phase after the event, by the first pattern that fits.
_PHASES = (
    (r"data/text_files", "preparing the text", "preparing the text"),
    (r"data/alibi_jax/\.?bpe-", "learning the tokenizer", "learning the tokenizer"),
    (r"data/", "tokenising", "tokenising"),
    (r"rename run/checkpoints/\S+ run/checkpoints/\d+$", "saving", "training"),
    (r"run/checkpoints/\d+\.\S*tmp", "saving", "saving"),
    (r"rmdir run/checkpoints/\d+$", "removing a checkpoint", "training"),
    (r"run/checkpoints/", "removing a checkpoint", "removing a checkpoint"),
    (r"run/(metrics|tensorboard)", "opening the metrics", "compiling and training"),
    (r"run/eval/unfinished", "saving losses", "scoring"),
    (r"run/eval$|run/eval/\.writable", "starting", "scoring"),
    (r"run/eval/", "writing the results", "writing the results"),
    (r"", "starting", "starting"),
)


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault that has struck a run."""

    kind: str
    phase: str
    # What repeats it.
    details: str

    def __str__(self):
        return f"{self.kind} while {self.phase} ({self.details})"


@dataclasses.dataclass
class _Plan:
    """What will strike which process, and when."""

    victim: int
    # Whether all processes are killed at once, as when a job is cancelled.
    all_at_once: bool
    # Further fields of each process's job.
    jobs: list[dict]
    # Seconds until a signal is sent; None: the job's fields have the fault.
    wait: float | None = None
    # The event at which the fault strikes.
    event: int | None = None

    def __str__(self):
        wait = {} if self.wait is None else {"seconds": round(self.wait, 2)}
        return f"process {self.victim}, {self.jobs[self.victim] | wait}"


def _plan(case, undisturbed, kind, draw):
    victim, all_at_once = draw.randrange(case.processes), draw.random() < 0.3
    plan = _Plan(victim, all_at_once, [{} for _ in range(case.processes)])
    events = undisturbed.runs[victim].events
    if kind in (TORN, TOO_LARGE):
        size = _size(undisturbed.folder, draw)
        # A disk is too small for all processes.
        for job in plan.jobs if kind == TOO_LARGE else plan.jobs[victim : victim + 1]:
            job |= {"file_size": size, "file_size_kills": kind == TORN}
    elif events and (kind in (BEFORE, AFTER) or (kind == STOP and draw.random() < 0.5)):
        plan.event = _event(events, draw)
        watch = {"event": plan.event}
        if kind == AFTER:
            watch["delay"] = round(draw.uniform(0.0005, _SOON), 4)
        if kind == STOP:
            watch["number"] = int(signal.SIGTERM)
        plan.jobs[victim]["watch"] = watch
    elif kind not in ON_DISKS:
        plan.wait = draw.uniform(0, undisturbed.seconds)
    return plan


def strike(programs, case, folder, undisturbed, kind, draw):
    """Starts a case in `folder` and strikes it once. Returns (strike, problems).

    The strike is None if the run had ended before. `undisturbed` is the case without a fault, and
    `draw` a random.Random. The problems are what a run must not answer.
    """
    plan = _plan(case, undisturbed, kind, draw)
    runs = start(programs, case, folder, plan.jobs)
    victim, problems, sent = runs[plan.victim], [], False
    if plan.wait is not None and not programs.wait([victim], plan.wait):
        victim.send(signal.SIGTERM if kind == STOP else signal.SIGKILL)
        sent = True
    if plan.all_at_once and kind in (BEFORE, AFTER, ANY_TIME, TORN):
        problems += finish(programs, [victim])
        for run in runs:
            run.send(signal.SIGKILL)
    problems += finish(programs, runs)
    if problems:
        return None, problems
    problems += [problem for run in runs for problem in _answer(run, kind)]
    if kind == STOP:
        struck = sent or (plan.event is not None and len(victim.events) >= plan.event)
    elif kind in (TOO_LARGE, *ON_DISKS):
        struck = any(run.code != 0 for run in runs)
        problems += _answers_to_no_room(runs)
    else:
        struck = victim.code in _KILLED
    if not struck:
        return None, problems
    last = (victim.events or [""])[-1]
    at, after = _phases(last)
    phase = at if kind == BEFORE or (kind == STOP and not sent) else after
    return Strike(kind, phase, f"{plan}, last event {last!r}"), problems


def _phases(event):
    """The phase of a run at an event, and the phase after it."""
    return next(names for pattern, *names in _PHASES if re.search(pattern, event))


def _event(events, draw):
    """The number of an event. Each phase is as likely, however many events it has."""
    numbers = collections.defaultdict(list)
    for number, event in enumerate(events, start=1):
        numbers[_phases(event)[0]].append(number)
    return draw.choice(draw.choice(list(numbers.values())))


def _size(folder, draw):
    """A limit that some file of the folder exceeds: all but its last byte, or fewer bytes."""
    sizes = {path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    # Where no file can have four bytes, Python finds no folder for temporary files.
    size = draw.choice(sorted(size for size in sizes if size >= 16))
    return draw.choice((size // 4, size // 2, size - 1))


def _answer(run, kind):
    """What is wrong with the end of a run that a fault has struck, or that missed a struck one."""
    stopped = (130, -signal.SIGTERM) if kind == STOP else ()
    if run.code in (0, *_KILLED, *stopped):
        return []
    # Another thread may write its progress behind the line.
    wrong = run.code != 1 or not any(line.startswith("error: ") for line in run.err[-2:])
    if wrong or any("Traceback" in line for line in run.err):
        return [f"exit code {run.code}: {' | '.join(run.err[-25:])}"]
    return []


def _answers_to_no_room(runs):
    """A problem unless a process that fails says where there is no room, or none fails."""
    failed = [run for run in runs if run.code != 0]
    if not failed or any("make room" in line for run in failed for line in run.err[-2:]):
        return []
    return [f"no word of room: {run.err[-1:]}" for run in failed]


class Disk:
    """A file system in memory under `folder`, whose room can be changed; a context manager."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "faults", self.folder)
        return self

    def __exit__(self, *_):
        _run("umount", self.folder)
        self.folder.rmdir()

    def limit(self, **limits):
        """Sets `size` in bytes or `nr_inodes`, the number of files and folders."""
        options = ",".join(f"{name}={value}" for name, value in limits.items())
        _run("mount", "-o", f"remount,{options}", self.folder)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)


def can_mount(folder):
    """Whether this process may mount a file system, as the superuser may."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), Disk(folder / "probe"):
        return True
    shutil.rmtree(folder / "probe", ignore_errors=True)
    return False
