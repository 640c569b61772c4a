"""Runs train.py and eval.py many times: each run is a fork of this process, which has imported JAX.

Reads one JSON object a line from standard input, {"script", "arguments", "folder", "seconds"}, and
writes one for it, {"code", "out", "error"}; the code is null if the run did not end in time.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

# Imported before the forks, so that a run takes a tenth of a second. None of them uses a device.
import jax  # noqa: F401
from absl import app, flags  # noqa: F401
from ml_collections import config_flags  # noqa: F401

import alibi_jax.evaluation
import alibi_jax.plan
import alibi_jax.training.loop  # noqa: F401

ROOT = Path(__file__).parents[2]


def run(script, arguments, folder, seconds):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        child = os.fork()
        if not child:
            _become(script, arguments, folder, out.fileno(), error.fileno())
        code = _wait(child, seconds)
        texts = {}
        for name, file in {"out": out, "error": error}.items():
            file.seek(0)
            texts[name] = file.read().decode(errors="backslashreplace")
        return {"code": code, **texts}


def _become(script, arguments, folder, out, error):
    """Runs the script as Python does, and ends the process."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    sys.argv = [str(ROOT / script), *arguments]
    code = 0
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as request:
        code = request.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = 1 if isinstance(code, str) else code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _wait(child, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=replies, flush=True)
