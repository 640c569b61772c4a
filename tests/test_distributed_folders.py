"""The lock of a folder, and the proof that all processes see the same folder."""

import errno
import fcntl
import json
import os
import re
import signal
import socket

import pytest
from helpers import file_size_limit, free_port

from alibi_jax.distributed import folders
from alibi_jax.distributed.folders import FolderError, check_shared, locked_folder

# A process that holds the lock, and a program that it has started, which outlives it.
HOLDS = """
import pathlib, subprocess, sys, time
from alibi_jax.distributed.folders import locked_folder

with locked_folder("workdir", pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_the_lock_is_there_while_it_is_held(tmp_path):
    with locked_folder("workdir", tmp_path):
        holder = json.loads((tmp_path / "lock").read_text())
        assert holder["host"] == socket.gethostname()
        assert holder["process"] == os.getpid()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", holder["since"])
        check_shared("workdir", tmp_path)
        assert os.listdir(tmp_path) == ["lock"]
    assert os.listdir(tmp_path) == []


def test_a_new_folder_is_removed_if_it_stays_empty(tmp_path):
    with locked_folder("workdir", tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / "lock").exists()
    assert not (tmp_path / "a" / "b").exists()
    with locked_folder("workdir", tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert os.listdir(tmp_path / "a" / "b") == ["file"]


def test_a_second_holder_is_refused_and_changes_nothing(tmp_path):
    with locked_folder("workdir", tmp_path):
        before = (tmp_path / "lock").read_bytes()
        since = json.loads(before)["since"]
        message = (
            f"--workdir={tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} "
            f"since {since}: wait until it ends, stop it, or give another --workdir"
        )
        for _ in range(2):
            with (
                pytest.raises(FolderError, match=f"^{re.escape(message)}$"),
                locked_folder("workdir", tmp_path),
            ):
                pass
        assert (tmp_path / "lock").read_bytes() == before
    with locked_folder("workdir", tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "null", "{}", '{"host": 1'])
def test_a_holder_that_has_not_yet_written_its_name_is_called_another_run(tmp_path, content):
    with (tmp_path / "lock").open("w") as file:
        file.write(content)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(FolderError, match=r"is in use by another run: wait until it ends"),
            locked_folder("out", tmp_path),
        ):
            pass


def test_a_lock_that_a_kill_left_does_not_block(start_script, tmp_path):
    process = start_script(HOLDS, tmp_path)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(FolderError, match=f"process {process.pid} on"):
            folders._acquire("workdir", tmp_path)
        process.kill()
        process.wait()
        assert json.loads((tmp_path / "lock").read_text())["process"] == process.pid
        with locked_folder("workdir", tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_of_many_processes_holds_the_lock_at_a_time(start_script, tmp_path):
    """The file is removed and made again while others open it."""
    (tmp_path / "count").write_text("0")
    code = """
import pathlib, sys
from alibi_jax.distributed.folders import FolderError, locked_folder

folder = pathlib.Path(sys.argv[1])
done = 0
while done < 100:
    try:
        with locked_folder("workdir", folder / "locked"):
            count = int((folder / "count").read_text())
            (folder / "count").write_text(str(count + 1))
            done += 1
    except FolderError:
        pass
"""
    several = [start_script(code, tmp_path) for _ in range(3)]
    for process in several:
        assert process.wait(120) == 0, process.stderr.read()
    assert (tmp_path / "count").read_text() == "300"


def test_a_folder_without_room_keeps_no_lock(tmp_path):
    (tmp_path / "run").mkdir()
    with (
        file_size_limit(8),
        pytest.raises(FolderError, match=r"run can't be written to \(File too large\): make room"),
        locked_folder("workdir", tmp_path / "run"),
    ):
        pass
    assert not list((tmp_path / "run").iterdir())
    with locked_folder("workdir", tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            FolderError, match=r"--out=.*file/eval can't be written to \(Not a directory"
        ),
        locked_folder("out", tmp_path / "file" / "eval"),
    ):
        pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, capfd, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)
    with locked_folder("workdir", tmp_path):
        pass
    assert capfd.readouterr().err == (
        f"warning: {tmp_path} is on a file system without locks (No locks available): make sure "
        "that no other run writes to this folder\n"
    )


SEVERAL = """
import pathlib, sys
from alibi_jax.distributed import processes
from alibi_jax.distributed.folders import check_shared, locked_folder

port, number, folder = sys.argv[1:]
processes.join(f"localhost:{port}", 2, int(number), 60)
try:
    with locked_folder("workdir", pathlib.Path(folder)):
        check_shared("workdir", pathlib.Path(folder))
except ValueError as error:
    processes.exit_with_error(str(error), 1)
processes.announce_normal_exit()
"""


@pytest.fixture
def share(start_script):
    """A function that gives each of two processes a folder: (exit code, last error line)."""

    def run(*names):
        port = free_port()
        processes = [start_script(SEVERAL, port, number, name) for number, name in enumerate(names)]
        errors = [process.communicate(timeout=120)[1] for process in processes]
        return [
            (process.returncode, [x for x in lines.splitlines() if x.startswith("error")])
            for process, lines in zip(processes, errors, strict=True)
        ]

    return run


def test_processes_that_see_one_folder_go_on(share, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".shared-0123").touch()
    assert share(tmp_path / "run", tmp_path / "link") == [(0, [])] * 2
    assert os.listdir(tmp_path / "run") == []


def test_processes_that_see_another_folder_are_named(share, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    host = socket.gethostname()
    line = (
        f"error: process 1 ({host}) does not see in --workdir={second} the file that process 0 "
        f"({host}) wrote in --workdir={first}: give all processes the same --workdir, on a disk "
        "that they share"
    )
    assert share(first, second) == [(1, [line])] * 2
    # Nothing is left.
    assert sorted(os.listdir(tmp_path)) == ["second"]
    assert os.listdir(second) == []


def test_all_processes_say_that_the_folder_is_in_use(share, tmp_path):
    with locked_folder("workdir", tmp_path):
        before = (tmp_path / "lock").read_bytes()
        ends = share(tmp_path, tmp_path)
        for code, (line,) in ends:
            assert code == 1
            assert line.startswith(
                f"error: --workdir={tmp_path} is in use by process {os.getpid()}"
            )
        assert (tmp_path / "lock").read_bytes() == before
