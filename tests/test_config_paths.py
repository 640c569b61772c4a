import os
from pathlib import Path

import pytest

from alibi_jax.config import ConfigError, local_path


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert local_path("--workdir", "~/runs") == Path("/home/someone/runs")
    assert local_path("--workdir", "~") == Path("/home/someone")
    assert local_path("--workdir", "runs/~") == Path("runs/~")
    assert local_path("--workdir", "./~") == Path("~")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "--out= is empty.*give a path"),
        ("gs://bucket/x", "--out=gs://bucket/x is an address.*mount the bucket"),
        ("~nobody-here/x", "--out=~nobody-here/x.*no such home folder.*without ~"),
        (os.fsdecode(b"a\xff"), r"--out=a\udcff is '.*/a\\udcff', whose name is not UTF-8: rename"),
    ],
)
def test_what_can_be_no_path_is_refused(value, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        local_path("--out", value)


def test_without_a_home_folder_a_path_without_tilde_is_needed(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(ConfigError, match=r"^data\.data_dir=~/x: .*set HOME, or give a path"):
        local_path("data.data_dir", "~/x")
    assert local_path("data.data_dir", "x") == Path("x")


def test_a_relative_path_in_a_folder_that_is_not_utf_8_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"^--workdir=run is '.*/\\udcff/run', whose name"):
        local_path("--workdir", "run")
