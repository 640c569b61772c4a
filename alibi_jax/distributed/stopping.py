"""A request to stop the run: SIGTERM or Ctrl-C."""

import contextlib
import itertools
import os
import select
import signal
import socket
import threading
import time
from typing import Any, NoReturn

import jax
from jax._src import distributed

from alibi_jax.distributed.agreement import num_processes
from alibi_jax.distributed.watchdog import exit_with_error

# Seconds within which a run must end after a request to stop: it finishes the step or the batch
# and saves. Clusters usually kill a job after 30 s to 5 min.
_GRACE = 300.0
# Seconds within which the program must end by itself where nothing has to be saved.
_INTERRUPT_GRACE = 5.0
# Seconds between two looks for a request of another process, and for its answer.
_PAUSE, _CHOOSING_PAUSE = 0.5, 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Numbers the requests of a program; the same in all processes.
_numbers = itertools.count()


class StopRequest:
    """Ends a run after SIGTERM or Ctrl-C; a context manager for the whole work of the run.

    Before the first call of `at` nothing has to be saved, so a signal raises KeyboardInterrupt.
    From then on, `at` says after which step to stop: all processes stop after the same step,
    whichever of them gets the signal. A second signal has its usual effect.

    No wait outlasts a request to stop. The process ends `grace` seconds after the signal, or a few
    seconds after it where nothing has to be saved, even if the main thread waits in a compilation,
    in a collective or for a file system. A thread sees to that, because the main thread handles a
    signal only when it is back in Python. In several processes this thread also agrees with the
    other processes on the last step. It asks for messages instead of waiting for them, so that it
    can end at any time.
    """

    def __init__(self, grace: float = _GRACE) -> None:
        self._grace = grace
        # Guards the three values after it. It is reentrant, because a signal may interrupt `at`.
        self._changed = threading.Condition(threading.RLock())
        # The last step that `at` was called for, -1 before the first call, and the step to stop at.
        self._reached = -1
        self._stop_at: int | None = None
        # Whether the processes are choosing the step to stop at; they do not begin another step.
        self._choosing = False
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._key = f"alibi_jax/stop/{next(_numbers)}"

    def __enter__(self) -> "StopRequest":
        # Python writes the number of each signal to one end at once, whatever the main thread does.
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup.fileno())
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()
        signal.set_wakeup_fd(self._previous_wakeup)
        # The thread reads the end of the file, and ends.
        self._wakeup.close()
        self._thread.join()
        self._signals.close()

    def at(self, step: int) -> bool:
        """Whether to stop after `step`. Processes must call it for the same steps, from 0 or 1."""
        with self._changed:
            self._changed.wait_for(lambda: not self._choosing)
            self._reached = step
            return self._stop_at is not None and step >= self._stop_at

    def _on_signal(self, number: int, frame: Any) -> None:
        self._restore_handlers()
        if self._reached < 0:
            raise KeyboardInterrupt
        if num_processes() == 1:
            self._stop_at = self._reached + 1

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers.clear()

    def _listen(self) -> None:
        """Receives signals, and the requests of other processes, until the context is left."""
        several = num_processes() > 1
        told, reason, code, deadline = False, "", 1, float("inf")
        while True:
            wait = deadline - time.monotonic()
            if wait <= 0:
                _end(reason, code)
            pause = _CHOOSING_PAUSE if self._choosing else _PAUSE if several else 3600.0
            if select.select([self._signals], [], [], min(wait, pause))[0]:
                received = self._signals.recv(1)
                if not received:
                    break
                if received[0] not in _SIGNALS:
                    # The program handles other signals too.
                    continue
                if self._reached < 0:
                    reason, code, grace = "interrupted", 130, _INTERRUPT_GRACE
                elif told:
                    reason, code, grace = "interrupted by a second signal", 130, _INTERRUPT_GRACE
                else:
                    name = signal.Signals(received[0]).name
                    reason = f"not finished {self._grace:.0f} s after {name}"
                    code, grace = 1, self._grace
                    self._send("requested")
                told, deadline = True, min(deadline, time.monotonic() + grace)
            if several:
                self._choose()
        if several and not self._choosing and self._stop_at is None:
            # Another process may be choosing, while this one has done all its steps.
            self._send("reached")

    def _choose(self) -> None:
        """Chooses the step to stop at, once a process has asked for it and all have reported.

        It is the step after the last one that any process has begun. A process that has reported
        begins no other step before the choice, so that no process is ahead of the choice.
        """
        if self._stop_at is not None:
            return
        if not self._choosing and self._sent("requested"):
            with self._changed:
                self._choosing = True
            self._send("reached")
        if self._choosing:
            reached = self._sent("reached")
            if len(reached) == num_processes():
                with self._changed:
                    self._stop_at = max(reached) + 1
                    self._choosing = False
                    self._changed.notify_all()

    def _send(self, event: str) -> None:
        """Tells the other processes of an event, with the last step of this process."""
        state: Any = distributed.global_state
        if state.client is not None:
            # The service fails if process 0 has ended. The watchdog then ends this process.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                state.client.key_value_set(
                    f"{self._key}/{event}/{state.process_id}", str(self._reached)
                )

    def _sent(self, event: str) -> list[int]:
        """The last step of each process that has sent the event."""
        service: Any = distributed.global_state.client
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            steps = service.key_value_dir_get(f"{self._key}/{event}/")
            return [int(step) for _, step in steps]
        return []


def _end(message: str, code: int) -> NoReturn:
    """Ends the process from a thread that is not the main thread."""
    try:
        exit_with_error(
            f"{message}; the same command continues from the last checkpoint or saved losses", code
        )
    finally:
        os._exit(code)
