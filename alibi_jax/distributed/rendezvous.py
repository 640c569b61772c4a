"""Whether all processes of a run are there, before they join: who is missing is named.

JAX itself ends such a process with a stack trace that does not tell. Process 0 listens where JAX's
coordinator will, the others report to it, and all hear how it went. Their connections stay.
"""

import contextlib
import json
import socket
import time
from typing import Any

# Between two attempts to reach process 0, and between two lines about who is awaited, in seconds.
_RETRY = 0.2
_SAY_EVERY = 30.0
# A machine that has gone without a word is noticed after twenty seconds and three times ten.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

# The other end of a connection, by the number of its process: all of them have process 0, and
# process 0 has all of them.
Peers = dict[int, socket.socket]


class LaunchError(ValueError):
    """A run whose processes did not all come, or do not fit each other: names them."""


def rendezvous(address: str, num_processes: int, process_id: int, timeout: float) -> Peers:
    """The connections between process 0, which is at `address` (host:port), and all others.

    Returns once all have reported. Raises LaunchError, in each process, where after `timeout`
    seconds some have not, or two are the same, or they disagree about how many there are.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        outcome, peers = _call(int(port), num_processes, deadline, timeout)
    else:
        report = {"process": process_id, "of": num_processes}
        outcome, peers = _report(host.strip("[]"), int(port), report, deadline)
        if not outcome and not peers:
            outcome = (
                f"process {process_id} of {num_processes} found no process 0 at {address} within "
                f"{timeout:.0f} s: start it, with the same --coordinator, or check that the "
                "address can be reached from here"
            )
    if outcome:
        for connection in peers.values():
            connection.close()
        raise LaunchError(outcome)
    for connection in peers.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return peers


def _call(port: int, num_processes: int, deadline: float, timeout: float) -> tuple[str, Peers]:
    """(what is wrong, or nothing; who has reported), which all of those are told."""
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        outcome = (
            f"process 0 can't listen at port {port} ({error.strerror}): another run may be using "
            "it; give --coordinator another port"
        )
        return outcome, {}
    peers: Peers = {}
    outcome, said = "", time.monotonic()
    with server:
        while len(peers) < num_processes - 1 and not outcome:
            awaited = sorted(set(range(1, num_processes)) - peers.keys())
            now = time.monotonic()
            if now > deadline:
                outcome = (
                    f"{_named(awaited)} of {num_processes} did not start within {timeout:.0f} s: "
                    "start all of them, or see in their own output why they stopped"
                )
                break
            if now - said > _SAY_EVERY:
                print(f"waiting for {_named(awaited)} of {num_processes}", flush=True)
                said = now
            server.settimeout(max(0.01, min(deadline - now, _SAY_EVERY)))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            report = read_line(connection)
            if not (isinstance(report, dict) and report.keys() == {"process", "of"}):
                # Nobody of ours.
                connection.close()
                continue
            number, of = report["process"], report["of"]
            if of != num_processes:
                outcome = (
                    f"process {number} was started as one of {of}, process 0 as one of "
                    f"{num_processes}: give all the same --num_processes"
                )
            elif number in peers and _gone(peers[number]):
                # Started again, since it reported.
                peers.pop(number).close()
                peers[number] = connection
                continue
            elif number in peers or number == 0:
                outcome = f"process {number} was started twice: give each another --process_id"
            if outcome:
                write_line(connection, {"outcome": outcome})
                connection.close()
            else:
                peers[number] = connection
    for connection in peers.values():
        write_line(connection, {"outcome": outcome})
    return outcome, peers


def _report(host: str, port: int, report: dict[str, int], deadline: float) -> tuple[str, Peers]:
    """(what process 0 says is wrong, or nothing; the connection to it, where it was there)."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=5 * _RETRY)
            write_line(connection, report)
            # Process 0 answers when it has given up at the latest.
            answer = read_line(connection, deadline - time.monotonic() + 60.0)
            if answer is not None:
                return str(answer["outcome"]), {0: connection}
            connection.close()
        time.sleep(_RETRY)
    return "", {}


def read_line(connection: socket.socket, timeout: float | None = 10.0) -> Any:
    """One line of JSON; None where the connection has ended, or none came."""
    connection.settimeout(timeout)
    line = b""
    try:
        while not line.endswith(b"\n"):
            # One by one: what comes after the line is another's to read.
            byte = connection.recv(1)
            if not byte or len(line) > 4096:
                return None
            line += byte
        return json.loads(line)
    except (OSError, ValueError):
        return None


def write_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends it, unless the other end has gone."""
    with contextlib.suppress(OSError):
        connection.sendall((json.dumps(message) + "\n").encode())


def _gone(connection: socket.socket) -> bool:
    """Whether the other end has closed it; a process that waits says nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _named(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names}" if len(numbers) == 1 else f"processes {names}"
