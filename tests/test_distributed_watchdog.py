"""Real processes that only wait for each other: how each ends, and what it says."""

import socket
import subprocess
import sys

import pytest

CODE = """
import atexit, os, sys, time
from alibi_jax.distributed.watchdog import Watchdog
from alibi_jax.distributed.rendezvous import rendezvous

port, number, does = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
line = Watchdog(number, 3, rendezvous(f"localhost:{port}", 3, number, 30))
if does == "ends":
    line.leave()
    # As JAX does at exit, which waits for all others.
    atexit.register(time.sleep, 30 if len(sys.argv) > 4 else 1)
elif does == "dies":
    os._exit(9)
elif does == "refuses":
    line.fail("no such key", 1, through_others=False)
elif does == "breaks":
    time.sleep(0.5)
    line.fail("connection closed", 1, through_others=True)
elif does == "late":
    time.sleep(1)
    line.fail("no room", 1, through_others=False)
else:
    time.sleep(60)
"""
OTHER = "stops, because process 1 has stopped, whose own output says why; the same command on all"


def run(*does, stays=()):
    """(exit code, errors) of processes 0, 1 and 2."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, port, str(number), what, *stays],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, what in enumerate(does)
    ]
    return [(process.wait(60), process.stderr.read()) for process in running]


def test_all_end_as_they_should():
    assert run("ends", "ends", "ends") == [(0, "")] * 3


@pytest.mark.parametrize("does", ["dies", "late"])
def test_the_others_end_with_one_and_name_it(does):
    ends = run("waits", does, "waits")
    assert ends[1] == ((9, "") if does == "dies" else (1, "error: no room\n"))
    for number in (0, 2):
        code, errors = ends[number]
        assert code == 1
        assert errors.startswith(f"error: process {number} of 3 {OTHER}")
        assert errors.count("\n") == 1


def test_an_error_that_comes_of_anothers_end_names_it():
    for number, (code, errors) in enumerate(run("breaks", "dies", "breaks")):
        assert code == (9 if number == 1 else 1)
        assert errors.startswith(f"error: process {number} of 3 {OTHER}") or number == 1


def test_what_all_refuse_each_says_for_itself():
    assert run("refuses", "refuses", "refuses") == [(1, "error: no such key\n")] * 3


def test_who_has_ended_already_does_not_wait_for_one_that_failed():
    ends = run("ends", "late", "ends", stays=("long",))
    assert [code for code, _ in ends] == [1, 1, 1]
    assert OTHER in ends[0][1]
