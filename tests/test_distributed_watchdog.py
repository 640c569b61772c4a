"""Real processes that only wait for each other: their exit codes and messages."""

import socket
import subprocess
import sys

import pytest

# The third argument is what the process does.
CODE = """
import atexit, os, sys, time
from alibi_jax.distributed.watchdog import Watchdog
from alibi_jax.distributed.rendezvous import rendezvous

port, number, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
watchdog = Watchdog(number, 3, rendezvous(f"localhost:{port}", 3, number, 30))
if action == "finish":
    watchdog.announce_normal_exit()
    # At exit JAX waits for all other processes, as the sleep does here.
    atexit.register(time.sleep, 30 if len(sys.argv) > 4 else 1)
elif action == "die":
    os._exit(9)
elif action == "fail":
    watchdog.exit_with_error("no such key", 1, maybe_peer_failure=False)
elif action == "fail through a peer":
    time.sleep(0.5)
    watchdog.exit_with_error("connection closed", 1, maybe_peer_failure=True)
elif action == "fail late":
    time.sleep(1)
    watchdog.exit_with_error("no room", 1, maybe_peer_failure=False)
else:
    time.sleep(60)
"""
PEER_FAILURE = (
    "stops, because process 1 has stopped (see the output of that process); the same command on all"
)


def run(*actions, extra_arguments=()):
    """(exit code, standard error) of processes 0, 1 and 2, which do `actions`."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, port, str(number), action, *extra_arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, action in enumerate(actions)
    ]
    return [(process.wait(60), process.stderr.read()) for process in running]


def test_all_processes_finish_normally():
    assert run("finish", "finish", "finish") == [(0, "")] * 3


@pytest.mark.parametrize("action", ["die", "fail late"])
def test_a_failed_process_ends_the_others_which_name_it(action):
    exits = run("wait", action, "wait")
    assert exits[1] == ((9, "") if action == "die" else (1, "error: no room\n"))
    for number in (0, 2):
        code, errors = exits[number]
        assert code == 1
        assert errors.startswith(f"error: process {number} of 3 {PEER_FAILURE}")
        assert errors.count("\n") == 1


def test_an_error_caused_by_a_peer_names_the_peer():
    exits = run("fail through a peer", "die", "fail through a peer")
    for number, (code, errors) in enumerate(exits):
        assert code == (9 if number == 1 else 1)
        assert errors.startswith(f"error: process {number} of 3 {PEER_FAILURE}") or number == 1


def test_each_process_prints_an_error_that_all_have():
    assert run("fail", "fail", "fail") == [(1, "error: no such key\n")] * 3


def test_finished_processes_do_not_wait_for_one_that_failed():
    exits = run("finish", "fail late", "finish", extra_arguments=("long",))
    assert [code for code, _ in exits] == [1, 1, 1]
    assert PEER_FAILURE in exits[0][1]
