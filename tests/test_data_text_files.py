import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.data import text_files
from alibi_jax.data.errors import DataError


@settings(deadline=None)
@given(
    whole=st.text(st.sampled_from("aé語🙂"), min_size=1, max_size=80)
    | st.text(st.sampled_from("a語\r\n"), min_size=1, max_size=200)
)
def test_a_cut_loses_nothing_and_splits_no_character(whole):
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(whole.encode())
        pieces = {}
        for split, documents in text_files.split_documents(Path(file.name)).items():
            try:
                ((_, pieces[split]),) = documents
            except DataError:
                assert len(whole.encode()) < 80
                pieces[split] = b""
    assert b"".join(pieces[split] for split in text_files.SPLITS) == whole.encode()
    for piece in pieces.values():
        piece.decode()
    if pieces["validation"] and pieces["test"]:
        assert len(whole.encode()) * 0.8 - 4 <= len(pieces["train"]) <= len(whole.encode()) * 0.9


def test_fingerprint_is_of_names_and_bytes(tmp_path):
    seen = set()
    for i, files in enumerate(
        [{"a": b"1", "b": b"2"}, {"a": b"12"}, {"a": b"1", "c": b"2"}, {"a": b"2", "b": b"1"}]
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        seen.add(text_files.fingerprint(folder))
    assert len(seen) == 4
