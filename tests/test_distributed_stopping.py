"""Requests to stop, in real processes: signals while a process computes, waits or hangs."""

import signal

import pytest
from helpers import free_port

# A process that hangs outside Python, where no handler of a signal runs. The first argument is
# whether a step has begun, the second the grace in seconds.
HANGS = """
import ctypes, sys, threading
from alibi_jax.distributed.processes import StopRequest

c = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
with StopRequest(float(sys.argv[2])) as stop:
    if sys.argv[1] == "step":
        assert not stop.at(1)
    c.pthread_mutex_lock(mutex)
    threading.Timer(0.5, print, ["hangs"], {"flush": True}).start()
    c.pthread_mutex_lock(mutex)
"""
CONTINUES = "the same command continues from the last checkpoint or saved losses"


def exits(processes):
    """(exit code, standard error) of each process."""
    return [(process.wait(120), process.stderr.read()) for process in processes]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_hangs_after_a_step(start_script, number):
    process = start_script(HANGS, "step", 1)
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(number)
    assert exits([process]) == [(1, f"error: not finished 1 s after {number.name}; {CONTINUES}\n")]


@pytest.mark.parametrize(
    ("begun", "numbers", "reason"),
    [
        ("no step", [signal.SIGINT], "interrupted"),
        ("no step", [signal.SIGTERM], "interrupted"),
        # Two signals of different kinds, because equal ones may count as one.
        ("step", [signal.SIGTERM, signal.SIGINT], "interrupted by a second signal"),
    ],
)
@pytest.mark.sample(1)
def test_a_process_that_hangs_ends_soon_if_it_saves_nothing_or_is_told_twice(
    start_script, begun, numbers, reason
):
    process = start_script(HANGS, begun, 10_000)
    assert process.stdout.readline() == "hangs\n"
    for number in numbers:
        process.send_signal(number)
    assert exits([process]) == [(130, f"error: {reason}; {CONTINUES}\n")]


def test_a_signal_before_the_first_step_interrupts(start_script):
    process = start_script("""
import signal, time
from alibi_jax.distributed.processes import StopRequest

try:
    with StopRequest():
        print("waits", flush=True)
        time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
""")
    assert process.stdout.readline() == "waits\n"
    process.terminate()
    assert process.stdout.readline() == "interrupted\n"
    assert exits([process]) == [(0, "")]


# Processes that work in step. A process begins a step before the others have finished theirs, as
# with JAX's asynchronous dispatch. In each round one process gets the signal, perhaps after its
# last step.
ROUNDS = """
import os, random, signal, sys, threading, time
from jax._src import distributed
from alibi_jax.distributed import processes

port, number, count = map(int, sys.argv[1:])
processes.join(f"localhost:{port}", count, number, 60)
barrier = distributed.global_state.client.wait_at_barrier
for round in range(10):
    rng = random.Random(round)
    target, delay, last = rng.randrange(count), rng.uniform(0, 0.4), rng.choice([20, 100_000])
    barrier(f"{round}", 60_000)
    with processes.StopRequest() as stop:
        timer = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGTERM])
        for step in range(1, last + 1):
            time.sleep(random.uniform(0, 0.01))
            stopping = stop.at(step)
            if step == 1 and number == target:
                timer.start()
            if step > 1:
                barrier(f"{round} {step - 1}", 60_000)
            if stopping:
                break
        if number == target:
            timer.join()
    barrier(f"{round} {step}", 60_000)
    print(round, step, flush=True)
processes.announce_normal_exit()
"""


def test_all_processes_stop_after_the_same_step(start_script):
    count, port = 3, free_port()
    several = [start_script(ROUNDS, port, number, count) for number in range(count)]
    outputs = [process.communicate(timeout=300) for process in several]
    assert [process.returncode for process in several] == [0] * count, outputs
    first = outputs[0][0]
    assert [int(line.split()[0]) for line in first.splitlines()] == [*range(10)]
    assert [output for output, _ in outputs] == [first] * count


# Process 1 hangs in its first step, and process 0 waits for it.
ONE_HANGS = """
import sys, time
from jax._src import distributed
from alibi_jax.distributed import processes

processes.join(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]), 60)
with processes.StopRequest(2.0) as stop:
    stop.at(1)
    print("waits", flush=True)
    if sys.argv[2] == "1":
        time.sleep(1000)
    distributed.global_state.client.wait_at_barrier("step", 1_000_000)
"""


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.sample(1)
def test_a_run_that_hangs_ends_whichever_process_gets_the_signal(start_script, target):
    port = free_port()
    several = [start_script(ONE_HANGS, port, number) for number in range(2)]
    for process in several:
        assert process.stdout.readline() == "waits\n"
    several[target].terminate()
    ends = exits(several)
    assert ends[target] == (1, f"error: not finished 2 s after SIGTERM; {CONTINUES}\n")
    code, errors = ends[1 - target]
    assert code == 1
    assert f"error: process {1 - target} of 2 stops, because process {target} has stopped" in errors
