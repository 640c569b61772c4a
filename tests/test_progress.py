import io
import re
import subprocess
import sys

import pytest

from alibi_jax import progress as progresses
from alibi_jax.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_one_whole_line_for_each_note(monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with Progress(1200, "training", unit="step", initial=2) as progress:
        for step in range(3, 1006):
            progress.update()
            if step in (4, 1005):
                progress.note(f"loss {step}.5")
    assert log.getvalue() == (
        "training: step 4 of 1,200, loss 4.5\ntraining: step 1,005 of 1,200, loss 1005.5\n"
    )


def test_a_log_gets_a_line_now_and_then_without_notes(monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(progresses.time, "monotonic", lambda: next(clock))
    with Progress(None, "tokenising", unit="byte") as progress:
        for _ in range(5):
            progress.update(10)
    lines = log.getvalue().splitlines()
    assert lines == ["tokenising: byte 20", "tokenising: byte 40", "tokenising: byte 50"]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(3, "training", unit="step") as progress:
        progress.update(3)
        progress.note("loss 1.5")
    assert "\r" in sys.stderr.getvalue()
    assert re.search(r"training: 100%.* 3/3 .*loss 1\.5", sys.stderr.getvalue())


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_only_one_process_shows_progress(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    with Progress(3, "training", unit="step", shown=False) as progress:
        progress.update(3)
        progress.note("loss 1.5")
    assert sys.stderr.getvalue() == ""


def test_a_closed_standard_error_is_no_reason_to_stop():
    code = (
        "from alibi_jax.progress import Progress\n"
        "with Progress(3, 'training', unit='step') as progress:\n"
        "    progress.update()\n    progress.note('loss')\nprint('done')"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -c "$1" 2>&-', "sh", code],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n"
