"""Detects that another process of the run has ended, and ends this process too.

Without the watchdog, a process that waits in a collective for a dead process waits for 100 seconds,
until JAX ends it with a stack trace. The watchdog notices at once, through the connections that the
rendezvous has left open.
"""

import os
import selectors
import signal
import sys
import threading
import time
from typing import NoReturn

from alibi_jax.distributed.rendezvous import Connections, read_line, write_line

# Seconds that a process may take to end by its own error after another process has failed.
_GRACE = 5.0


class Watchdog:
    """The connections of a process to the others, and a thread that listens to them.

    Process 0 forwards the first failure that it hears of, because the other processes are connected
    only to process 0. Process 0 ends last, because it runs JAX's coordinator: without the
    coordinator JAX would end the other processes with a stack trace.
    """

    def __init__(self, process_id: int, num_processes: int, connections: Connections):
        self._process_id = process_id
        self._name = f"process {process_id} of {num_processes}"
        self._connections = connections
        # The first process that failed or died, and the time until which this process may still
        # end by an error of its own. After its report of that failure, process 0 uses the deadline
        # as the time until which it waits for the others.
        self._failed_process: int | None = None
        self._deadline = float("inf")
        # Held by the thread that ends this process.
        self._exiting = threading.Lock()
        # Whether this process ends because of `_failed_process`.
        self._reported_peer_failure = False
        self._peer_has_failed = threading.Event()
        self._all_disconnected = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def announce_normal_exit(self) -> None:
        """Tells the other processes that this process is about to exit without an error."""
        self._send_to_all({"finished": self._process_id})

    def exit_with_error(self, message: str, code: int, *, maybe_peer_failure: bool) -> NoReturn:
        """Prints `message`, tells the other processes, and exits with `code`.

        With `maybe_peer_failure`, the error may be only the consequence of another process's
        exit. If another process has failed, the message then names it instead.
        """
        # Ctrl-C must not interrupt the exit. Only the main thread may say so, and only the main
        # thread is interrupted.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if maybe_peer_failure and self._peer_has_failed.wait(2.0):
            message = self._peer_failure_message()
        if self._exiting.acquire(blocking=False):
            _print_error(message)
            self._send_to_all({"failed": self._process_id})
        if self._process_id == 0:
            self._all_disconnected.wait(2 * _GRACE)
        # sys.exit is not used: with it JAX would wait for all other processes.
        os._exit(code)

    def _peer_failure_message(self) -> str:
        return (
            f"{self._name} stops, because process {self._failed_process} has stopped (see the "
            "output of that process); the same command on all processes resumes from the last "
            "checkpoint"
        )

    def _send_to_all(self, message: dict[str, int]) -> None:
        for connection in self._connections.values():
            write_line(connection, message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, number)
            finished = set()
            while selector.get_map():
                wait = self._deadline - time.monotonic()
                for key, _ in selector.select(min(max(0.0, wait), 3600.0)):
                    message = read_line(self._connections[key.data], None)
                    if message is None:
                        # The socket stays open, because closing it would tell the other end that
                        # this process has died.
                        selector.unregister(key.fileobj)
                        message = {"died": key.data}
                    ((event, number),) = message.items()
                    if event == "finished":
                        finished.add(number)
                    elif event == "failed" or number not in finished:
                        self._on_failure(event, number)
                if time.monotonic() >= self._deadline:
                    self._exit_after_peer_failure()
        self._all_disconnected.set()
        if self._failed_process is None:
            return
        if not self._reported_peer_failure:
            time.sleep(max(0.0, min(_GRACE, self._deadline - time.monotonic())))
        self._exit_after_peer_failure()
        if self._reported_peer_failure:
            os._exit(1)

    def _on_failure(self, event: str, number: int) -> None:
        if self._failed_process is None:
            self._failed_process = number
            self._peer_has_failed.set()
            self._deadline = time.monotonic() + (0.0 if event == "died" else _GRACE)
            if self._process_id == 0:
                self._send_to_all({event: number})

    def _exit_after_peer_failure(self) -> None:
        """Ends this process. Process 0 first waits for the others, up to a deadline."""
        if self._exiting.acquire(blocking=False):
            self._reported_peer_failure = True
            _print_error(self._peer_failure_message())
            if self._process_id != 0:
                os._exit(1)
            self._deadline = time.monotonic() + 2 * _GRACE
        elif self._reported_peer_failure:
            os._exit(1)
        else:
            # `exit_with_error` ends this process.
            self._deadline = float("inf")


def _print_error(message: str) -> None:
    # One write: with two, as `print` makes them, a line of another thread may come in between.
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


# The watchdog of this process, once it has joined other processes.
_watchdogs: list[Watchdog] = []


def watch(process_id: int, num_processes: int, connections: Connections) -> None:
    """Starts the watchdog of this process."""
    _watchdogs.append(Watchdog(process_id, num_processes, connections))


def announce_normal_exit() -> None:
    """Tells the other processes that this process is about to exit without an error."""
    if _watchdogs:
        _watchdogs[0].announce_normal_exit()


def exit_with_error(message: str, code: int, *, maybe_peer_failure: bool = False) -> NoReturn:
    """Prints `message`, exits with `code`, and makes the other processes exit soon after.

    With `maybe_peer_failure`, the error may be only the consequence of another process's exit.
    If another process has exited, the message then says so instead.
    """
    if _watchdogs:
        _watchdogs[0].exit_with_error(message, code, maybe_peer_failure=maybe_peer_failure)
    sys.stdout.flush()
    _print_error(message)
    # sys.exit is not used: it would wait for the threads of libraries, and after an error some of
    # them wait for each other.
    os._exit(code)
