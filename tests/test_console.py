"""Standard streams of a real process: closed, broken, full, or without the characters needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a program prints, and what its file and a library's message hold afterwards.
PROGRAM = """
import contextlib, os, sys
# Not from the package, whose import takes longer than the rest.
from console import secure_streams

secure_streams()
secure_streams()
print("\\u22120.25 \\u2014 caf\\xe9 \\udcff", flush=True)
print("\\u2212error", file=sys.stderr)
for _ in range(3):
    print("line" * 30_000)
with open(sys.argv[1], "wb", 0) as file:
    with contextlib.suppress(OSError):
        os.write(2, b"a library's message\\n")
    file.write(b"content" if file.fileno() > 2 else b"")
sys.exit(3)
"""


def run(tmp_path, redirection, **environment):
    """(exit code, standard output, standard error) of PROGRAM under a shell's redirection."""
    command = f'"{sys.executable}" -c "$0" file {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "alibi_jax"), "PYTHONUTF8": "1"} | environment,
        capture_output=True,
    )
    # No message of a library is in a file of the program's.
    assert (tmp_path / "file").read_bytes() == b"content"
    return done.returncode, done.stdout, done.stderr


def test_everything_is_printed_where_it_can_be(tmp_path):
    code, out, err = run(tmp_path, "")
    assert code == 3
    assert out.decode() == "\u22120.25 \u2014 café \\udcff\n" + ("line" * 30_000 + "\n") * 3
    assert err.decode() == "\u2212error\na library's message\n"


def test_characters_that_the_encoding_lacks_are_printed_in_ascii(tmp_path):
    code, out, err = run(tmp_path, "", PYTHONIOENCODING="ascii")
    assert code == 3
    assert out.splitlines()[0] == rb"-0.25 - caf\xe9 \udcff"
    assert err.splitlines()[0] == b"-error"


@pytest.mark.parametrize(
    ("redirection", "out", "err"),
    [
        (">&-", 0, 2),
        ("2>&-", 4, 0),
        ("<&- >&- 2>&-", 0, 0),
        (">/dev/full", 0, 2),
        ("2>/dev/full", 4, 0),
        # A pipe whose reader has gone; the exit code is the program's.
        ("> >(exec >&-)", 0, 2),
        ("2> >(exec 2>&-)", 4, 0),
    ],
)
def test_a_stream_that_takes_nothing_stops_nothing(redirection, out, err, tmp_path):
    code, printed, errors = run(tmp_path, redirection)
    assert code == 3
    assert len(printed.splitlines()) == out
    assert len(errors.splitlines()) == err
