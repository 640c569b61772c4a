"""Runs of train.py and eval.py through the fork server, with faults that strike them."""

import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
import time

import fork_server

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
_STREAMS = ("out", "err", "events")


class Run:
    """A run of a program: what it has written so far, and its exit code once it has ended."""

    def __init__(self, pid):
        self.pid = pid
        self.code = None
        self._bytes = {name: bytearray() for name in _STREAMS}

    def __getattr__(self, name):
        """`out`, `err` and `events` as lists of lines."""
        if name not in _STREAMS:
            raise AttributeError(name)
        return self._bytes[name].decode(errors="replace").splitlines()

    def send(self, number):
        """Sends a signal, unless the run has ended."""
        if self.code is None:
            os.kill(self.pid, number)


class Programs:
    """Starts programs through a fork server; a context manager."""

    def __init__(self, environment):
        """`environment` has variables for all runs, such as the folder of compiled programs."""
        self._environment = environment
        self._runs = {}
        self._count = 0

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._server = subprocess.Popen(
            [sys.executable, fork_server.__file__],
            # One thread, so that a fork is safe; one device a process.
            env=os.environ
            | {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
            | {"PYTHONPATH": str(REPOSITORY)}
            | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._messages = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server.stdout, selectors.EVENT_READ, (None, None))
        return self

    def __exit__(self, *_):
        for run in self._runs.values():
            run.send(signal.SIGKILL)
        self._server.stdin.close()
        self._server.wait()
        self._selector.close()
        self._folder.cleanup()

    def start(self, program, arguments, folder, **job):
        """Starts a program in `folder`; `job` has further fields of `fork_server.Job`."""
        self._count += 1
        pipes = f"{self._folder.name}/{self._count}"
        ends = {}
        for name in _STREAMS:
            os.mkfifo(f"{pipes}.{name}")
            ends[name] = os.open(f"{pipes}.{name}", os.O_RDONLY | os.O_NONBLOCK)
        argv = [str(REPOSITORY / program), *arguments]
        fields = fork_server.Job(argv, str(folder), pipes, **{"watch": {}} | job)
        self._started = None
        self._server.stdin.write((json.dumps(dataclasses.asdict(fields)) + "\n").encode())
        while self._started is None:
            self._listen(None)
        run = self._runs[self._started] = Run(self._started)
        for name, end in ends.items():
            self._selector.register(end, selectors.EVENT_READ, (run, name))
        return run

    def wait(self, runs, seconds):
        """Waits at most `seconds` until all `runs` have ended. Returns whether they have."""
        deadline = time.monotonic() + seconds
        while any(run.code is None for run in runs):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._listen(left)
        return True

    def _listen(self, seconds):
        for key, _ in self._selector.select(seconds):
            if key.fileobj not in self._selector.get_map():
                # A message before this event has closed the pipe.
                continue
            run, name = key.data
            if run is not None:
                self._read(key.fileobj, run, name)
                continue
            part = os.read(self._server.stdout.fileno(), 65536)
            if not part:
                raise RuntimeError("the fork server has ended")
            self._messages += part
            *lines, rest = self._messages.split(b"\n")
            self._messages = rest
            for line in lines:
                self._handle(json.loads(line))

    def _handle(self, message):
        if "started" in message:
            self._started = message["started"]
            return
        run = self._runs.pop(message["ended"])
        run.code = message["code"]
        for key in list(self._selector.get_map().values()):
            if key.data[0] is run:
                self._read(key.fileobj, *key.data)
                if key.fileobj in self._selector.get_map():
                    self._selector.unregister(key.fileobj)
                    os.close(key.fileobj)

    def _read(self, end, run, name):
        """Takes what a pipe holds."""
        while True:
            try:
                part = os.read(end, 65536)
            except BlockingIOError:
                return
            if not part:
                self._selector.unregister(end)
                os.close(end)
                return
            run._bytes[name] += part
