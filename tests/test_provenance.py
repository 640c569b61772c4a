import importlib.util
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

import alibi_jax
from alibi_jax.provenance import provenance

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "alibi_jax"
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def test_provenance_names_command_versions_and_devices(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/eval.py", "--workdir=runs/tiny"])
    record = provenance()
    assert record["command"] == "eval.py --workdir=runs/tiny"
    assert record["python"] == platform.python_version()
    assert record["versions"]["alibi-jax"] == alibi_jax.__version__
    assert record["versions"]["jax"] == jax.__version__
    assert record["devices"] == "8 x cpu"
    assert record["processes"] == 1
    assert json.loads(json.dumps(record)) == record


@pytest.fixture
def git(tmp_path):
    """`git("commit", ...)` in the folder `tmp_path`, which is a repository."""

    def run(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(
            ["git", *identity, "-c", "commit.gpgsign=false", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    run("init")
    return run


def copy_package(folder):
    shutil.copytree(PACKAGE, folder / "alibi_jax", ignore=shutil.ignore_patterns("__pycache__"))


def commit_of(folder):
    """The commit recorded by a new process that imports the package from a folder."""
    code = "from alibi_jax.provenance import provenance; print(provenance()['commit'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        # The current directory of the process must not matter.
        cwd=folder.anchor,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit_by(folder):
    """The commit recorded by the module in a folder, which is loaded into this process."""
    spec = importlib.util.spec_from_file_location("loaded", folder / "alibi_jax" / "provenance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.provenance()["commit"]


@needs_git
def test_the_commit_is_the_packages_own_and_marked_where_files_differ(tmp_path, git):
    copy_package(tmp_path)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert re.fullmatch("[0-9a-f]{40}", head)
    assert commit_of(tmp_path) == commit_by(tmp_path) == head
    # Git would note the new time of the file, under a lock that a kill would leave behind.
    os.utime(tmp_path / "file", (0, 0))
    index = (tmp_path / ".git" / "index").read_bytes()
    assert commit_by(tmp_path) == head
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == commit_by(tmp_path) == f"{head}-dirty"


def own_project(folder, name="alibi-jax"):
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')


@needs_git
@pytest.mark.parametrize("ignored", [True, False])
def test_a_repository_that_the_package_is_installed_in_is_not_its_own(ignored, tmp_path, git):
    site_packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    copy_package(site_packages)
    # The name alone is not enough: a fork of this repository has the same one.
    own_project(tmp_path)
    (tmp_path / ".gitignore").write_text(".venv/\n" if ignored else "")
    git("add", ".")
    git("commit", "-m", "x")
    tracked = git("ls-files", ".venv")
    assert not tracked if ignored else "alibi_jax/provenance.py" in tracked
    assert commit_of(site_packages) == "None"
    assert commit_by(site_packages) is None


@needs_git
@pytest.mark.parametrize(
    ("spoil", "differs"),
    [
        (lambda root: None, False),
        (lambda root: own_project(root, "another"), True),
        (lambda root: (root / "pyproject.toml").write_text("[tool]\n"), True),
        (lambda root: (root / "pyproject.toml").write_text("[project"), True),
        (lambda root: (root / "pyproject.toml").unlink(), True),
        (lambda root: (root / ".gitignore").write_text("alibi_jax/\n"), True),
    ],
)
def test_a_copy_in_another_project_has_no_commit(spoil, differs, tmp_path, git):
    copy_package(tmp_path)
    own_project(tmp_path)
    spoil(tmp_path)
    git("add", ".")
    git("commit", "--allow-empty", "-m", "x")
    assert (commit_by(tmp_path) is None) == differs


@needs_git
def test_a_repository_without_a_commit_gives_none(tmp_path, git):
    copy_package(tmp_path)
    own_project(tmp_path)
    git("add", ".")
    assert commit_by(tmp_path) is None


@needs_git
def test_a_linked_worktree_and_a_symbolic_link_are_checkouts_too(tmp_path, git):
    copy_package(tmp_path)
    own_project(tmp_path)
    git("add", ".")
    git("commit", "-m", "x")
    git("worktree", "add", "tree")
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    assert commit_by(tmp_path / "tree") == commit_by(tmp_path / "link") == git("rev-parse", "HEAD")


def test_outside_a_checkout_there_is_none(tmp_path):
    copy_package(tmp_path)
    assert commit_of(tmp_path) == "None"


def test_without_git_there_is_none(tmp_path, monkeypatch):
    own_project(tmp_path)
    copy_package(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_by(tmp_path) is None
