import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import file_size_limit

from alibi_jax.data.atomic import atomic_directory, atomic_file, discard, remove_abandoned

REPOSITORY = Path(__file__).parents[1]


def test_appears_only_when_whole(tmp_path):
    final = tmp_path / "deep" / "final"
    with atomic_directory(final) as staging:
        (staging / "file").write_text("ours")
        assert not final.exists()
        assert staging.parent == final.parent
    assert (final / "file").read_text() == "ours"
    assert list(final.parent.iterdir()) == [final]


def test_error_leaves_nothing(tmp_path):
    def fail():
        with atomic_directory(tmp_path / "final") as staging:
            (staging / "file").write_text("ours")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not list(tmp_path.iterdir())


def test_the_first_to_finish_stays(tmp_path):
    final = tmp_path / "final"
    with atomic_directory(final) as slow:
        (slow / "file").write_text("slow")
        with atomic_directory(final) as quick:
            (quick / "file").write_text("quick")
    assert (final / "file").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [final]


def test_a_final_that_cannot_be_made_is_an_error(tmp_path):
    final = tmp_path / "final"
    with pytest.raises(OSError, match="final"), atomic_directory(final):
        final.write_text("a file")


def test_discard_removes_a_folder_with_its_content(tmp_path):
    (tmp_path / "old" / "inner").mkdir(parents=True)
    discard(tmp_path / "old")
    assert not list(tmp_path.iterdir())


def test_readable_by_others(tmp_path):
    with atomic_directory(tmp_path / "final"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "final").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    final = tmp_path / "deep" / "plot.png"
    for content in ("first", "second"):
        with atomic_file(final) as staging:
            staging.write_text(content)
            assert staging.suffix == ".png"
            assert not final.exists() or final.read_text() == "first"
        assert final.read_text() == content
        assert list(final.parent.iterdir()) == [final]


def test_an_error_keeps_the_earlier_file(tmp_path):
    (tmp_path / "final").write_text("earlier")

    def fail():
        with atomic_file(tmp_path / "final") as staging:
            staging.write_text("new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (tmp_path / "final").read_text() == "earlier"
    assert len(list(tmp_path.iterdir())) == 1


def write_directory(final):
    with atomic_directory(final) as staging:
        (staging / "inner").mkdir()
        for path in ("one", "inner/two"):
            (staging / path).write_text(path)


def write_file(final):
    with atomic_file(final) as staging:
        staging.write_text("text")


@pytest.mark.parametrize(
    ("write", "names"),
    [(write_directory, ["one", "two", "inner", "staging"]), (write_file, ["staging"])],
)
def test_all_is_on_the_disk_before_the_rename_and_the_rename_too(
    write, names, tmp_path, monkeypatch
):
    final, synced, fsync = tmp_path / "final", [], os.fsync

    def spy(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        name = re.sub(r"\.final\..*", "staging", path.name)
        synced.append((name, final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write(final)
    assert sorted(synced[:-1]) == sorted((name, False) for name in names)
    # A directory is synced after what it holds.
    assert synced[-2] == ("staging", False)
    assert synced[-1] == (tmp_path.name, True)


@pytest.mark.parametrize("atomic", [atomic_directory, atomic_file])
def test_a_full_disk_is_named_in_one_line_and_leaves_nothing(atomic, tmp_path):
    final = tmp_path / "final"

    def fill():
        with atomic(final) as staging, file_size_limit(1000):
            (staging / "file" if staging.is_dir() else staging).write_bytes(bytes(2000))

    said = f"{final}: File too large while it was written: make room there, and give the same"
    with pytest.raises(OSError, match=re.escape(said)):
        fill()
    assert not list(tmp_path.iterdir())


PROGRAM = """
import pathlib, sys
from alibi_jax.data import atomic

with getattr(atomic, sys.argv[1])(pathlib.Path(sys.argv[2])) as staging:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("atomic", ["atomic_directory", "atomic_file"])
def test_only_what_no_process_is_writing_is_abandoned(atomic, tmp_path):
    hidden_by_others = tmp_path / ".final.txt"
    hidden_by_others.touch()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, atomic, str(tmp_path / "final.txt")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        writer.stdout.readline()
        (staging,) = set(tmp_path.iterdir()) - {hidden_by_others}
        remove_abandoned(tmp_path)
        assert staging.exists()
        writer.send_signal(signal.SIGKILL)
    assert staging.exists()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [hidden_by_others]


def test_the_files_of_users_and_of_other_machines_stay(tmp_path):
    for name in (".notes.2024-12", ".thesis.2023-10", ".a.unfinished-other-host-12-0a1b2c3d"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / f".b.unfinished-{socket.gethostname()}-12-0a1b2c3d" / "inner").mkdir(parents=True)
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    remove_abandoned(tmp_path / "missing")
