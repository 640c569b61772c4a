import pytest

from alibi_jax.data.atomic import atomic_directory, discard


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
