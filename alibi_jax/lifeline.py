"""How the processes of a run learn that one of them has ended, and end too.

A process that waits in a collective for one that has died would wait on; JAX notices after 100
seconds, and ends it with a stack trace. Here the connections of the roll call tell at once.
"""

import os
import selectors
import sys
import threading
from typing import NoReturn

from alibi_jax.roll_call import Peers, read_line, write_line

# Seconds in which a process may still end by an error of its own, once another has by one.
_GRACE = 5.0


class Lifeline:
    """A process's connections to the others, and a thread that listens to them.

    Process 0 passes on what it hears, and ends last: JAX's coordinator is there, without which
    the others would be ended with a stack trace.
    """

    def __init__(self, process_id: int, num_processes: int, peers: Peers):
        self._process_id = process_id
        self._name = f"process {process_id} of {num_processes}"
        self._peers = peers
        self._ending = threading.Lock()
        self._alone = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def leave(self) -> None:
        """Says that this process ends as it should."""
        self._say({"ends": self._process_id})

    def fail(self, message: str, code: int) -> NoReturn:
        """Ends this process for an error of its own, unless it comes of another's end."""
        # Of a death something may be heard through JAX before it is heard here.
        self._alone.wait(1.0)
        self._end(f"error: {message}", {"fails": self._process_id}, code)

    def _end(self, line: str, told: dict[str, int], code: int = 1) -> NoReturn:
        # Whoever comes first, of the listener and what it listens for.
        self._ending.acquire()
        print(line, file=sys.stderr, flush=True)
        self._say(told)
        if self._process_id == 0:
            self._alone.wait(2 * _GRACE)
        # At once: at a usual exit JAX waits for all others.
        os._exit(code)

    def _end_with(self, number: int) -> NoReturn:
        line = (
            f"error: {self._name} stops, because process {number} has stopped, whose own output "
            "says why; the same command on all of them goes on from the last checkpoint"
        )
        self._end(line, {"died": number})

    def _say(self, message: dict[str, int]) -> None:
        for connection in self._peers.values():
            write_line(connection, message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, number)
            failed = set()
            while selector.get_map():
                for key, _ in selector.select():
                    message = read_line(self._peers[key.data], None)
                    ((how, number),) = (message or {"died": key.data}).items()
                    if number == key.data and how != "fails":
                        # Left open: to close it would be to have died.
                        selector.unregister(key.fileobj)
                    if how != "ends" and number not in failed:
                        failed.add(number)
                        self._heard(how, number)
        self._alone.set()

    def _heard(self, how: str, number: int) -> None:
        # This thread goes on listening, until nobody is left.
        wait = 0.0 if how == "died" else _GRACE
        timer = threading.Timer(wait, self._end_with, [number])
        timer.daemon = True
        timer.start()
