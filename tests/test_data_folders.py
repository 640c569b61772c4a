import os

import pytest

from alibi_jax.data.errors import DataError
from alibi_jax.data.folders import files_under


def make(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def found(root):
    return [str(path.relative_to(root)) for path in files_under(root)]


def test_links_to_files_and_folders_are_followed(tmp_path):
    make(tmp_path, "text/a.txt", "elsewhere/b.txt", "elsewhere/deep/c.txt", "d.txt")
    root = tmp_path / "text"
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "relative.txt").symlink_to("../d.txt")
    names = files_under(root)
    assert {str(path.relative_to(root)): path.read_text() for path in names} == {
        "a.txt": "text/a.txt",
        "folder/b.txt": "elsewhere/b.txt",
        "folder/deep/c.txt": "elsewhere/deep/c.txt",
        "relative.txt": "d.txt",
    }
    assert all(os.path.realpath(path) == real for path, real in names.items())


def test_loops_end_and_a_files_own_name_comes_first(tmp_path):
    make(tmp_path, "z/file", "z/other")
    (tmp_path / "a").symlink_to("z")
    (tmp_path / "z" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to("z/file")
    names = files_under(tmp_path)
    assert {*found(tmp_path)[:2]} == {"z/file", "z/other"}
    assert {*names.values()} == {str(tmp_path / "z" / "file"), str(tmp_path / "z" / "other")}
    assert {"a/file", "b", "z/up/z/file"} <= {*found(tmp_path)}


def test_hidden_names_are_left_out_even_as_links(tmp_path):
    make(tmp_path, "a", ".git/config", "b/.hidden")
    (tmp_path / ".link").symlink_to("nowhere")
    assert found(tmp_path) == ["a"]


@pytest.mark.parametrize("target", ["nowhere", "broken.txt"])
def test_a_link_to_nothing_is_named(target, tmp_path):
    make(tmp_path, "a")
    (tmp_path / "broken.txt").symlink_to(target)
    with pytest.raises(DataError, match=rf"broken\.txt' is a link to '{target}'.*remove the link"):
        files_under(tmp_path)
