"""Counts what a process does to the files of a folder, and ends the process at one event.

Python announces each operation on files just before it happens (`sys.addaudithook`), in every
thread. So a kill can be placed between any two operations, and can be repeated.
"""

import os
import signal
import sys

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# The events of Python that change files: the number of their paths.
_PATHS = {
    "open": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.link": 2,
    "os.symlink": 2,
}


def watch(folder, pipe, event=None, delay=0.0, number=signal.SIGKILL):
    """Writes one line to `pipe` for each event in `folder`: "os.rename from to".

    At event `event` (from 1) the process gets the signal `number` before the event happens; with a
    `delay` the process is killed that number of seconds later, wherever it then is.
    """
    lines = os.open(pipe, os.O_WRONLY)
    folder = os.path.realpath(folder)
    count = 0

    def hook(name, arguments):
        nonlocal count
        if name not in _PATHS:
            return
        if name == "open" and not (arguments[2] or 0) & _WRITING:
            return
        paths = [
            _absolute(path, arguments[-1] if name != "open" else -1)
            for path in arguments[: _PATHS[name]]
        ]
        inside = [os.path.relpath(path, folder) for path in paths if path.startswith(folder + "/")]
        if not inside:
            return
        count += 1
        os.write(lines, (" ".join((name, *inside)) + "\n").encode())
        if count == event:
            if delay:
                # The usual effect of SIGALRM: the process ends at once, whatever it does.
                signal.setitimer(signal.ITIMER_REAL, delay)
            else:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def _absolute(path, folder):
    """The path as a string. `folder` is the descriptor of the folder that it is in, or -1."""
    if isinstance(path, int):
        return ""
    path = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    return os.path.abspath(path)
