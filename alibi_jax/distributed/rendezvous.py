"""The rendezvous of the processes of a run, before they join JAX: missing processes are named.

Without it JAX ends a process whose peers are missing, with a stack trace that does not name them.
Process 0 listens at the address where JAX's coordinator will listen later, the other processes
report to it, and process 0 tells all of them the result. The connections stay open for the
watchdog.
"""

import contextlib
import json
import socket
import time
from typing import Any

# Seconds between two attempts to reach process 0, and between two lines about missing processes.
_RETRY = 0.2
_ANNOUNCE_EVERY = 30.0
# TCP detects a machine that vanished without closing its connections: after 20 s without traffic
# it sends up to three probes, 10 s apart.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

# Open sockets by the process number of the other end. Process 0 is connected to all other
# processes, and each of them only to process 0.
Connections = dict[int, socket.socket]


class LaunchError(ValueError):
    """Some processes of a run did not start, or were started with contradictory arguments."""


def rendezvous(address: str, num_processes: int, process_id: int, timeout: float) -> Connections:
    """Connects process 0, which listens at `address` (host:port), with all other processes.

    Returns once all processes have reported. Raises LaunchError in every process if some have not
    reported after `timeout` seconds, if two processes have the same number, or if they were started
    with different numbers of processes.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if process_id == 0:
        problem, connections = _gather_reports(int(port), num_processes, deadline, timeout)
    else:
        report = {"process": process_id, "num_processes": num_processes}
        problem, connections = _send_report(host.strip("[]"), int(port), report, deadline)
        if not problem and not connections:
            problem = (
                f"process {process_id} of {num_processes} found no process 0 at {address} within "
                f"{timeout:.0f} s: start process 0 with the same --coordinator, or check that the "
                "address can be reached from here"
            )
    if problem:
        for connection in connections.values():
            connection.close()
        raise LaunchError(problem)
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return connections


def _gather_reports(
    port: int, num_processes: int, deadline: float, timeout: float
) -> tuple[str, Connections]:
    """Process 0: waits for the reports of all other processes and tells them the result.

    Returns (problem, connections to the processes that reported). `problem` is "" if there is none.
    """
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        problem = (
            f"process 0 can't listen at port {port} ({error.strerror}): another run may be using "
            "it; give --coordinator another port"
        )
        return problem, {}
    connections: Connections = {}
    problem, last_announced = "", time.monotonic()
    with server:
        while len(connections) < num_processes - 1 and not problem:
            missing = sorted(set(range(1, num_processes)) - connections.keys())
            now = time.monotonic()
            if now > deadline:
                problem = (
                    f"{_process_list(missing)} of {num_processes} did not start within "
                    f"{timeout:.0f} s: start all of them, or see in their own output why they "
                    "stopped"
                )
                break
            if now - last_announced > _ANNOUNCE_EVERY:
                print(f"waiting for {_process_list(missing)} of {num_processes}", flush=True)
                last_announced = now
            server.settimeout(max(0.01, min(deadline - now, _ANNOUNCE_EVERY)))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            report = read_line(connection)
            if not (isinstance(report, dict) and report.keys() == {"process", "num_processes"}):
                # The client is not a process of this run.
                connection.close()
                continue
            number, reported_count = report["process"], report["num_processes"]
            if reported_count != num_processes:
                problem = (
                    f"process {number} was started as one of {reported_count}, process 0 as one of "
                    f"{num_processes}: give the same --num_processes to all"
                )
            elif number in connections and _is_closed(connections[number]):
                # The process ended after its report and was started again.
                connections.pop(number).close()
                connections[number] = connection
                continue
            elif number in connections or number == 0:
                problem = (
                    f"process {number} was started twice: give each process its own --process_id"
                )
            if problem:
                write_line(connection, {"problem": problem})
                connection.close()
            else:
                connections[number] = connection
    for connection in connections.values():
        write_line(connection, {"problem": problem})
    return problem, connections


def _send_report(
    host: str, port: int, report: dict[str, int], deadline: float
) -> tuple[str, Connections]:
    """Other processes: reports to process 0 and waits for its answer.

    Returns (problem according to process 0 or "", connection to process 0). The connection is
    missing if process 0 was not reached.
    """
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=5 * _RETRY)
            write_line(connection, report)
            # Process 0 answers at its own deadline at the latest.
            answer = read_line(connection, deadline - time.monotonic() + 60.0)
            if answer is not None:
                return str(answer["problem"]), {0: connection}
            connection.close()
        time.sleep(_RETRY)
    return "", {}


def read_line(connection: socket.socket, timeout: float | None = 10.0) -> Any:
    """Reads one line of JSON. Returns None if the connection is closed, or after `timeout` s."""
    connection.settimeout(timeout)
    line = b""
    try:
        while not line.endswith(b"\n"):
            # Byte by byte, so that the bytes of the next line stay in the socket.
            byte = connection.recv(1)
            if not byte or len(line) > 4096:
                return None
            line += byte
        return json.loads(line)
    except (OSError, ValueError):
        return None


def write_line(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends `message` as one line of JSON. Does nothing if the connection is closed."""
    with contextlib.suppress(OSError):
        connection.sendall((json.dumps(message) + "\n").encode())


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection; a waiting process sends nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _process_list(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names}" if len(numbers) == 1 else f"processes {names}"
