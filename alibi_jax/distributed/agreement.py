"""What the processes of a run tell each other, so that all of them do the same.

Messages go through the key-value store of JAX's coordination service, which has no public
interface. A collective could time out, could not carry a message, and would itself hang if the
processes did not do the same.
"""

import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax._src import distributed

from alibi_jax.distributed.rendezvous import LaunchError

Result = TypeVar("Result")

# Longest pause in seconds between two looks for a message. The service itself could wait for the
# message, but no signal would interrupt that wait.
_LONGEST_PAUSE = 1.0
# A message names at most this many facts, processes, or groups of processes, and cuts off values.
_MOST_NAMED = 4
_LONGEST_VALUE = 80

# Counts the exchanges of this process. Every exchange has the same number in all processes, so
# its keys are unique.
_exchanges = itertools.count()


def num_processes() -> int:
    """The number of processes of the run; unlike `jax.process_count`, it starts no device."""
    return 1 if distributed.global_state.client is None else distributed.global_state.num_processes


def agree(facts: Callable[[], dict[str, Any]], remedy: str) -> None:
    """Raises LaunchError in every process unless `facts` gives the same in all of them.

    Facts are JSON values by name. The message names the processes and the facts that differ from
    process 0, and ends with `remedy`. All processes must call it. A single process does nothing,
    and does not call `facts`.
    """
    if num_processes() > 1:
        decide(facts(), lambda reports: _differences(reports, remedy))


def decide(value: Any, judge: Callable[[list[tuple[str, Any]]], str]) -> None:
    """Raises LaunchError in every process if process 0 finds a problem in the values of all.

    `judge` gets (host, value) of each process in order, and returns the problem, or "" if there is
    none. Values are JSON values. All processes must call it.
    """
    state, key = distributed.global_state, f"alibi_jax/{next(_exchanges)}"
    _send(f"{key}/{state.process_id}", [socket.gethostname(), value])
    if state.process_id == 0:
        numbers = range(state.num_processes)
        _send(f"{key}/problem", judge([_receive(f"{key}/{number}") for number in numbers]))
    problem = _receive(f"{key}/problem")
    if problem:
        raise LaunchError(problem)


def process_zero_first(name: str, prepare: Callable[[], Result]) -> Result:
    """Calls `prepare` in process 0, then in all other processes, and returns its result.

    On a shared disk, the other processes find the files that process 0 has prepared. An error in
    process 0 is raised in the other processes too, as a ValueError with the same message. `name`
    says what is prepared. All processes must call it.
    """
    if num_processes() == 1:
        return prepare()
    key = f"alibi_jax/{next(_exchanges)}/{name}"
    if distributed.global_state.process_id == 0:
        try:
            result = prepare()
        except Exception as error:
            _send(key, str(error) or type(error).__name__)
            raise
        _send(key, "")
        return result
    problem = _receive(key)
    if problem:
        raise ValueError(problem)
    return prepare()


def from_process_zero(value: Any) -> Any:
    """The JSON value that process 0 gives. All processes must call it."""
    if num_processes() == 1:
        return value
    key = f"alibi_jax/{next(_exchanges)}"
    if distributed.global_state.process_id == 0:
        _send(key, value)
    return _receive(key)


def digest(content: Any) -> str:
    """A short digest of text or of a contiguous array, as a fact to agree on."""
    data = content.encode() if isinstance(content, str) else content.data
    return hashlib.sha256(data).hexdigest()[:16]


def process_list(numbers: Sequence[int], hosts: Sequence[str]) -> str:
    """The name of each process with its host: "processes 1, 2 (host-b, host-c)"."""
    names = ", ".join(map(str, numbers[:_MOST_NAMED])) + _rest(numbers)
    kind = "process" if len(numbers) == 1 else "processes"
    return f"{kind} {names} ({', '.join(dict.fromkeys(hosts[n] for n in numbers[:_MOST_NAMED]))})"


def _send(key: str, value: Any) -> None:
    service: Any = distributed.global_state.client
    service.key_value_set(key, json.dumps(value))


def _receive(key: str) -> Any:
    """Waits for a message. The watchdog ends the wait if the sender has ended."""
    service: Any = distributed.global_state.client
    pause = 0.01
    while True:
        try:
            return json.loads(service.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _differences(reports: list[tuple[str, dict[str, Any]]], remedy: str) -> str:
    """One line that names the processes whose facts differ from process 0; "" if there is none."""
    hosts, facts = [host for host, _ in reports], [values for _, values in reports]
    expected = facts[0]
    groups: dict[str, tuple[list[int], list[str]]] = {}
    for number, values in enumerate(facts):
        names = [name for name in expected | values if values.get(name) != expected.get(name)]
        if names:
            key = json.dumps([[name, values.get(name)] for name in names])
            groups.setdefault(key, ([], names))[0].append(number)
    if not groups:
        return ""
    shown = list(groups.values())[:_MOST_NAMED]
    sentences = [
        f"{process_list(numbers, hosts)} {'has' if len(numbers) == 1 else 'have'} "
        f"{_named(names, facts[numbers[0]])}"
        for numbers, names in shown
    ]
    others = list(dict.fromkeys(name for _, names in shown for name in names))
    return (
        f"{'; '.join(sentences)}{_rest(list(groups))}; {process_list([0], hosts)} has "
        f"{_named(others, expected)}: {remedy}"
    )


def _named(names: Sequence[str], values: dict[str, Any]) -> str:
    pairs = []
    for name in names[:_MOST_NAMED]:
        value = repr(values.get(name))
        cut = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
        pairs.append(f"{name}={cut}")
    return ", ".join(pairs) + _rest(names)


def _rest(items: Sequence[Any]) -> str:
    return f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
