"""A process that has imported the programs once, and forks for each run of train.py or eval.py.

A run then starts in milliseconds instead of seconds, so that hundreds of kills take minutes. The
server uses no device of JAX and has one thread, so that it can fork safely. A fork is a process
like any other: it reads its own arguments and ends as Python ends.

The server reads one `Job` a line as JSON and answers {"started": pid}. When a run has ended, it
writes {"ended": pid, "code": exit code}; the code is -9 for SIGKILL.
"""

import dataclasses
import faulthandler
import json
import logging
import os
import resource
import runpy
import signal
import sys

# The modules that the programs import, the late ones too.
PRELOADED = (
    "alibi_jax.cli",
    "alibi_jax.evaluation",
    "alibi_jax.report",
    "alibi_jax.training.loop",
    "grain",
    "matplotlib.pyplot",
    "tokenizers",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a program."""

    # The path of the program and its arguments.
    argv: list[str]
    # The folder in which it runs.
    folder: str
    # Pipes with the suffixes .out, .err and .events take its output, its errors and its events.
    pipes: str
    # The arguments of `file_events.watch`.
    watch: dict[str, float]
    # The largest size of a file in bytes, -1: any, and whether a larger one kills the process.
    file_size: int = -1
    file_size_kills: bool = False


def serve() -> Job:
    """Forks for each job. Returns the job in the fork; exits at the end of the input."""
    signal.signal(signal.SIGCHLD, _report_ended)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        # So that the start is reported before the end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid != 0:
            _write({"started": pid})
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if pid == 0:
            return job
    sys.exit()


def keep_all_programs() -> None:
    """Makes every process write to the folder of compiled programs; with JAX only process 0 does.

    The other processes of a run would compile for half a minute each time.
    """
    from jax._src import compiler, distributed

    write = compiler._cache_write

    def write_as_process_0(*arguments):
        state = distributed.global_state
        number, state.process_id = state.process_id, 0
        write(*arguments)
        state.process_id = number

    compiler._cache_write = write_as_process_0


def become(job: Job) -> None:
    """Gives this process the streams, the folder, the arguments and the limits of a job."""
    for stream, name in ((0, os.devnull), (1, f"{job.pipes}.out"), (2, f"{job.pipes}.err")):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, stream)
        os.close(file)
    # SIGABRT, which is sent to a run that hangs, prints where each thread is.
    faulthandler.enable()
    os.chdir(job.folder)
    sys.argv = job.argv
    if job.file_size >= 0:
        if job.file_size_kills:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_size, job.file_size))
    file_events.watch(job.folder, f"{job.pipes}.events", **job.watch)


def _report_ended(*_):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _write({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _write(message):
    # No buffer: a signal could interrupt a write to it.
    os.write(1, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    import file_events

    for module in PRELOADED:
        __import__(module)
    # A log during an import adds a handler, which a program that starts alone does not have.
    logging.root.handlers.clear()
    keep_all_programs()
    become(serve())
    runpy.run_path(sys.argv[0], run_name="__main__")
