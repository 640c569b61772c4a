import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from alibi_jax.provenance import provenance

PACKAGE = Path(__file__).parents[1] / "alibi_jax"


def test_it_says_what_ran_and_on_what(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/eval.py", "--workdir=runs/tiny"])
    record = provenance()
    assert record["command"] == "eval.py --workdir=runs/tiny"
    assert record["python"] == platform.python_version()
    assert record["versions"]["jax"] == jax.__version__
    assert record["devices"] == "8 x cpu"
    assert record["processes"] == 1
    assert json.loads(json.dumps(record)) == record


def commit_of(folder):
    """What the package says of its commit when it is imported from a folder."""
    shutil.copytree(PACKAGE, folder / "alibi_jax", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from alibi_jax.provenance import provenance; print(provenance()['commit'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        # Wherever the command is given.
        cwd=folder.anchor,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_the_packages_own_and_marked_where_files_differ(tmp_path):
    def git(*arguments):
        name = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", *name, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "x", "--no-gpg-sign")
    head = git("rev-parse", "HEAD")
    assert re.fullmatch("[0-9a-f]{40}", head)
    assert commit_of(tmp_path) == head
    (tmp_path / "file").write_text("2")
    shutil.rmtree(tmp_path / "alibi_jax")
    assert commit_of(tmp_path) == f"{head}-dirty"


def test_outside_a_checkout_there_is_none(tmp_path):
    assert commit_of(tmp_path) == "None"
