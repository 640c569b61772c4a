"""What processes tell each other: real processes that join, compare facts and wait."""

import json
import socket

import numpy as np
import pytest
from helpers import free_port

from alibi_jax.distributed import agreement

# The last argument is what the process does, in Python.
CODE = """
import json, signal, sys, time
from alibi_jax.distributed import agreement, processes

port, number, count, action = sys.argv[1:]
number = int(number)
processes.join(f"localhost:{port}", int(count), number, 60)
try:
    exec(action)
except Exception as error:
    processes.exit_with_error(f"{type(error).__name__}: {error}", 1)
processes.announce_normal_exit()
"""


@pytest.fixture
def run(start_script):
    """A function that starts one process for each action."""

    def start(*actions):
        port = free_port()
        return [
            start_script(CODE, port, number, len(actions), action)
            for number, action in enumerate(actions)
        ]

    return start


def ends(processes):
    """(exit code, output, last line of standard error) of each process."""
    outputs = [process.communicate(timeout=120) for process in processes]
    return [
        (process.returncode, output, errors.rpartition("\n")[0].rpartition("\n")[2])
        for process, (output, errors) in zip(processes, outputs, strict=True)
    ]


def compare(*facts):
    return [
        f"agreement.agree(lambda: json.loads({json.dumps(json.dumps(values))}), 'do the same')\n"
        "print('agreed')"
        for values in facts
    ]


def test_processes_with_the_same_facts_go_on(run):
    facts = {"a": [1, None, "x"], "b": 0.1}
    assert ends(run(*compare(facts, facts, facts))) == [(0, "agreed\n", "")] * 3


def test_every_process_names_the_process_that_differs(run):
    processes = run(*compare({"seed": 0, "steps": 5}, {"seed": 0, "steps": 5}, {"seed": 1}))
    host = socket.gethostname()
    line = (
        f"error: LaunchError: process 2 ({host}) has seed=1, steps=None; process 0 ({host}) has "
        "seed=0, steps=5: do the same"
    )
    assert ends(processes) == [(1, "", line)] * 3


def test_a_single_process_agrees_with_itself():
    agreement.agree(lambda: pytest.fail("called"), "")
    assert agreement.process_zero_first("text", lambda: 5) == 5
    assert agreement.from_process_zero([1]) == [1]


def differences(*facts):
    return agreement._differences([(f"host-{n}", values) for n, values in enumerate(facts)], "end")


def test_differences_are_grouped_by_processes():
    assert differences({"a": 1}, {"a": 1}) == ""
    assert differences({"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 3, "b": 2}) == (
        "processes 1, 2 (host-1, host-2) have a=3; process 0 (host-0) has a=1: end"
    )
    assert differences({"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 1, "b": 4}) == (
        "process 1 (host-1) has a=3; process 2 (host-2) has b=4; process 0 (host-0) has a=1, b=2: "
        "end"
    )


def test_a_message_about_many_processes_and_facts_stays_short():
    first, second = ({str(n): n + k for n in range(100)} for k in (0, 1))
    message = differences(first, *[second] * 999)
    assert message == (
        "processes 1, 2, 3, 4 and 995 more (host-1, host-2, host-3, host-4) have 0=1, 1=2, 2=3, "
        "3=4 and 96 more; process 0 (host-0) has 0=0, 1=1, 2=2, 3=3 and 96 more: end"
    )
    each = differences(*({"a": f"{n} {'x' * 1000}"} for n in range(1000)))
    assert each.startswith("process 1 (host-1) has a='1 xxx")
    assert "process 4 (host-4)" in each
    assert "process 5" not in each
    assert " and 995 more; process 0 (host-0) has a='0 xxx" in each
    assert len(each) < 1000


def test_texts_and_arrays_have_digests():
    assert agreement.digest("abc") == "ba7816bf8f01cfea"
    assert agreement.digest(np.frombuffer(b"abc", np.uint8)) == "ba7816bf8f01cfea"


def test_an_error_in_process_0_is_raised_in_all(run):
    action = (
        "def prepare():\n    raise KeyError('no text')\n"
        "agreement.process_zero_first('text', prepare)"
    )
    failed, other = ends(run(action, "agreement.process_zero_first('text', time.time)"))
    assert failed == (1, "", "error: KeyError: 'no text'")
    assert other == (1, "", "error: ValueError: 'no text'")


def test_the_other_processes_find_what_process_0_has_prepared(run, tmp_path):
    action = (
        f"path = {str(tmp_path / 'text')!r}\n"
        "def prepare():\n"
        "    with open(path, 'a+') as file:\n"
        "        file.write(f'{number}')\n"
        "        file.seek(0)\n"
        "        return file.read()\n"
        "print(agreement.process_zero_first('text', prepare))\n"
        "print(agreement.process_zero_first('text', lambda: 'again'))\n"
        "print(agreement.from_process_zero({'n': number}))"
    )
    first, second = ends(run(action, action))
    assert first == (0, "0\nagain\n{'n': 0}\n", "")
    assert second == (0, "01\nagain\n{'n': 0}\n", "")


@pytest.mark.parametrize(
    ("waiting", "number"),
    [("agreement.process_zero_first('', print)", "SIGTERM"), (compare({})[0], "SIGINT")],
)
@pytest.mark.sample(1)
def test_a_signal_ends_a_process_that_waits_for_process_0(run, waiting, number):
    """Process 0 prepares for ever. Process 1 sends itself the signal while it waits."""
    signalled = (
        "import os, threading\n"
        f"threading.Timer(1, os.kill, [os.getpid(), signal.{number}]).start()\n"
        "try:\n"
        "    with processes.StopRequest():\n"
        f"        {waiting.splitlines()[0]}\n"
        "except KeyboardInterrupt:\n"
        "    processes.exit_with_error('interrupted', 130)"
    )
    first, second = ends(run("time.sleep(1000)", signalled))
    assert second == (130, "", "error: interrupted")
    assert first[0] == 1
    assert "process 0 of 2 stops, because process 1 has stopped" in first[2]
