"""How the processes of a run learn that one of them has ended, and end too.

A process that waits in a collective for one that has died would wait on; JAX notices after 100
seconds, and ends it with a stack trace. Here the connections of the roll call tell at once.
"""

import os
import selectors
import signal
import sys
import threading
import time
from typing import NoReturn

from alibi_jax.distributed.rendezvous import Peers, read_line, write_line

# Seconds in which a process may still end by an error of its own, once another has by one.
_GRACE = 5.0


class Watchdog:
    """A process's connections to the others, and a thread that listens to them.

    Process 0 passes on what it hears, and ends last: JAX's coordinator is there, without which
    the others would be ended with a stack trace.
    """

    def __init__(self, process_id: int, num_processes: int, peers: Peers):
        self._process_id = process_id
        self._name = f"process {process_id} of {num_processes}"
        self._peers = peers
        # Who has ended for an error or has died, the first of them; until when to wait for that
        # to be this process's error too; and whether this process is ending already.
        self._culprit: int | None = None
        self._until = float("inf")
        self._ending = threading.Lock()
        self._told = False
        self._news = threading.Event()
        self._alone = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def leave(self) -> None:
        """Says that this process ends as it should."""
        self._say({"ends": self._process_id})

    def fail(self, message: str, code: int, *, through_others: bool) -> NoReturn:
        """Ends this process for an error.

        `through_others`: it may come of another's end, which is what is said then.
        """
        # From here on it ends, whatever is pressed.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if through_others and self._news.wait(2.0):
            message = self._because(self._culprit)
        if self._ending.acquire(blocking=False):
            print(f"error: {message}", file=sys.stderr, flush=True)
            self._say({"fails": self._process_id})
        if self._process_id == 0:
            self._alone.wait(2 * _GRACE)
        # At once: at a usual exit JAX waits for all others.
        os._exit(code)

    def _because(self, number: int | None) -> str:
        return (
            f"{self._name} stops, because process {number} has stopped, whose own output says why; "
            "the same command on all of them goes on from the last checkpoint"
        )

    def _say(self, message: dict[str, int]) -> None:
        for connection in self._peers.values():
            write_line(connection, message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, number)
            ended = set()
            while selector.get_map():
                wait = self._until - time.monotonic()
                for key, _ in selector.select(min(max(0.0, wait), 3600.0)):
                    message = read_line(self._peers[key.data], None)
                    if message is None:
                        # Left open here: to close it would be to have died.
                        selector.unregister(key.fileobj)
                        message = {"died": key.data}
                    ((how, number),) = message.items()
                    if how == "ends":
                        ended.add(number)
                    elif how == "fails" or number not in ended:
                        self._heard(how, number)
                if time.monotonic() >= self._until:
                    self._end_with_culprit()
        self._alone.set()
        if self._culprit is None:
            return
        if not self._told:
            time.sleep(max(0.0, min(_GRACE, self._until - time.monotonic())))
        self._end_with_culprit()
        if self._told:
            os._exit(1)

    def _heard(self, how: str, number: int) -> None:
        if self._culprit is None:
            self._culprit = number
            self._news.set()
            self._until = time.monotonic() + (0.0 if how == "died" else _GRACE)
            if self._process_id == 0:
                self._say({how: number})

    def _end_with_culprit(self) -> None:
        """Ends this process; process 0 only once nobody else is left, or that takes too long."""
        if self._ending.acquire(blocking=False):
            self._told = True
            print(f"error: {self._because(self._culprit)}", file=sys.stderr, flush=True)
            if self._process_id != 0:
                os._exit(1)
            self._until = time.monotonic() + 2 * _GRACE
        elif self._told:
            os._exit(1)
        else:
            # `fail` ends it.
            self._until = float("inf")
