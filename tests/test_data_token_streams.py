import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers import file_size_limit, flip, left_by_a_kill

from alibi_jax.config import Data
from alibi_jax.data import token_streams
from alibi_jax.data.errors import DataError
from alibi_jax.data.prepared import prepared
from alibi_jax.data.token_streams import document_starts, token_stream
from alibi_jax.data.tokenizers import BpeTokenizer, ByteTokenizer
from alibi_jax.data.word_tokenizer import WordTokenizer

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path):
    for split, documents in {"train": ["one", "two é\r\n"], "validation": ["three"]}.items():
        (tmp_path / "text" / split).mkdir(parents=True)
        for number, document in enumerate(documents):
            (tmp_path / "text" / split / str(number)).write_bytes(document.encode())
    return Data(dataset="text", path=str(tmp_path / "text"), data_dir=str(tmp_path / "data"))


def kept(config):
    return [p for p in (Path(config.data_dir) / "alibi_jax").iterdir() if p.name[0] != "."]


def test_a_separator_before_each_document(config):
    tokens = token_stream(config, "train", ByteTokenizer())
    assert tokens.dtype == np.uint16
    assert bytes(tokens.tolist()) == "\0one\0two é\r\n".encode()
    assert bytes(token_stream(config, "validation", ByteTokenizer()).tolist()) == b"\0three"
    assert not tokens.flags.writeable


def test_tokenised_once(config, monkeypatch):
    first = token_stream(config, "train", ByteTokenizer())
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
    np.testing.assert_array_equal(token_stream(config, "train", ByteTokenizer()), first)
    document_starts(config, "train", ByteTokenizer())
    assert len(kept(config)) == 1


def test_documents_start_at_their_separators(config):
    starts = document_starts(config, "train", ByteTokenizer())
    assert starts.dtype == np.int64
    assert starts.tolist() == [0, 1 + len("one")]
    assert not starts.flags.writeable
    assert document_starts(config, "validation", ByteTokenizer()).tolist() == [0]


def test_documents_start_where_they_do_though_they_hold_the_separator(config):
    documents = [b" \n a b \n", b" \n", b" b \n \n"]
    for number, document in enumerate(documents):
        (Path(config.path) / "train" / str(number)).write_bytes(document)
    tokenizer = WordTokenizer.train(iter(documents))
    tokens = token_stream(config, "train", tokenizer)
    assert document_starts(config, "train", tokenizer).tolist() == [0, 5, 7]
    assert (tokens == tokenizer.separator).sum() == 3 + 5
    assert tokenizer.decode(tokens) == b"".join(b" \n" + document for document in documents)


def test_other_text_tokenizer_or_format_is_another_stream(config, monkeypatch):
    token_stream(config, "train", ByteTokenizer())
    bpe = BpeTokenizer.train(iter([b"one two"]), 258)
    tokens = token_stream(config, "train", bpe)
    assert np.flatnonzero(tokens == 0).tolist() == [0, 1 + len(bpe.encode(b"one"))]
    (Path(config.path) / "train" / "0").write_bytes(b"uno")
    assert token_stream(config, "train", ByteTokenizer())[1] == ord("u")
    monkeypatch.setattr(token_streams, "_FORMAT", token_streams._FORMAT + 1)
    token_stream(config, "train", ByteTokenizer())
    assert len(kept(config)) == 4


def test_a_large_vocabulary_takes_four_bytes(config, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 2**16 + 1)
    assert token_stream(config, "train", ByteTokenizer()).dtype == np.uint32
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 2**16)
    assert token_stream(config, "validation", ByteTokenizer()).dtype == np.uint16


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "tokens.bin", 6),
        lambda folder: (folder / "tokens.bin").unlink(),
        lambda folder: os.truncate(folder / "starts.bin", 8),
        lambda folder: (folder / "starts.bin").unlink(),
        lambda folder: (folder / "meta.json").write_text("{"),
        lambda folder: (folder / "meta.json").unlink(),
        lambda folder: (folder / "meta.json").write_text(json.dumps({"tokens": 1})),
        lambda folder: (folder / "tokens.bin").write_bytes(bytes(2 * 13)),
        lambda folder: flip(folder / "tokens.bin", 40),
        lambda folder: flip(folder / "starts.bin", 64),
    ],
)
def test_a_damaged_stream_is_made_again(config, damage, capsys):
    good = np.array(token_stream(config, "train", ByteTokenizer()))
    assert len(good) == 13
    (folder,) = kept(config)
    damage(folder)
    capsys.readouterr()
    np.testing.assert_array_equal(token_stream(config, "train", ByteTokenizer()), good)
    assert document_starts(config, "train", ByteTokenizer()).tolist() == [0, 4]
    assert list(folder.parent.iterdir()) == [folder]
    said = [line for line in capsys.readouterr().err.splitlines() if "tokenising" not in line]
    assert len(said) == 1
    assert said[0].startswith(f"{folder} is damaged and is made again: ")


@pytest.mark.parametrize("name", ["tokens.bin", "starts.bin", "meta.json"])
def test_no_flipped_bit_goes_unnoticed(config, name):
    token_stream(config, "train", ByteTokenizer())
    (folder,) = kept(config)
    read = "starts" if name == "starts.bin" else "tokens"
    good = np.array(token_streams._mapped(folder, read))
    for bit in range(8 * (folder / name).stat().st_size):
        flip(folder / name, bit)
        with pytest.raises((ValueError, KeyError)):
            token_streams._mapped(folder, read)
        flip(folder / name, bit)
    np.testing.assert_array_equal(token_streams._mapped(folder, read), good)


def test_a_disk_that_damages_every_stream_is_named(config, monkeypatch):
    write = token_streams._write

    def write_damaged(folder, *arguments):
        meta = write(folder, *arguments)
        flip(folder / "tokens.bin", 3)
        return meta

    monkeypatch.setattr(token_streams, "_write", write_damaged)
    with pytest.raises(
        DataError, match=r"3 times and was damaged each time: give a data\.data_dir"
    ):
        token_stream(config, "train", ByteTokenizer())


def test_a_stream_of_an_earlier_version_is_read_as_it_is(config, monkeypatch):
    good = np.array(token_stream(config, "train", ByteTokenizer()))
    (folder,) = kept(config)
    meta = json.loads((folder / "meta.json").read_text())
    later = {"tokens_crc32", "starts_crc32", "digest"}
    assert later <= meta.keys()
    earlier = {key: value for key, value in meta.items() if key not in later}
    (folder / "meta.json").write_text(json.dumps(earlier, indent=1))
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
    np.testing.assert_array_equal(token_stream(config, "train", ByteTokenizer()), good)
    assert document_starts(config, "train", ByteTokenizer()).tolist() == [0, 4]


def test_a_full_disk_is_named_and_the_same_call_goes_on(config):
    Path(config.path, "train", "2").write_text("a longer document " * 10_000)
    token_stream(config, "validation", ByteTokenizer())
    with (
        file_size_limit(200_000),
        pytest.raises(OSError, match=r"/alibi_jax/\w{24}: File too large .*make room there"),
    ):
        token_stream(config, "train", ByteTokenizer())
    assert len(kept(config)) == 1
    assert len(token_stream(config, "train", ByteTokenizer())) == 13 + 1 + 180_000


def test_litter_of_killed_programs_goes_at_the_next_start(config):
    token_stream(config, "train", ByteTokenizer())
    (folder,) = kept(config)
    litter = left_by_a_kill(folder)
    litter.mkdir()
    token_stream(config, "train", ByteTokenizer())
    assert list(folder.parent.iterdir()) == [folder]


class Blank(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield "a", {"text": ""}


def test_a_stream_without_text_is_refused(tmp_path):
    Blank(data_dir=str(tmp_path)).download_and_prepare(file_format="array_record")
    config = Data(dataset="blank", data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.train_split.*'blank'.*no text"):
        token_stream(config, "train", ByteTokenizer())
    assert not kept(config)


PROGRAM = """
import hashlib, os, pathlib, sys, time
from alibi_jax.config import Data
from alibi_jax.data.token_streams import token_stream
from alibi_jax.data.tokenizers import ByteTokenizer

folder, wait_in_text = pathlib.Path(sys.argv[1]), len(sys.argv) > 2


class Slow(ByteTokenizer):
    encoded = 0

    def encode(self, document):
        Slow.encoded += 1
        if wait_in_text and Slow.encoded == 5:
            (folder / "middle").touch()
            time.sleep(60)
        return super().encode(document)


(folder / f"ready-{os.getpid()}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
tokens = token_stream(Data(data_dir=str(folder / "data")), "validation", Slow())
print(hashlib.sha256(tokens.tobytes()).hexdigest())
"""


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def good_stream(tmp_path):
    config = Data(data_dir=str(tmp_path / "data"))
    tokens = token_stream(config, "validation", ByteTokenizer())
    assert len(tokens) == 504_682 + 12
    assert len(kept(config)) == 1
    return hashlib.sha256(tokens.tobytes()).hexdigest()


def test_two_processes_at_once_make_one_good_stream(tmp_path):
    processes = [start(tmp_path), start(tmp_path)]
    wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    (tmp_path / "go").touch()
    digests = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert digests == {good_stream(tmp_path)}
    assert not [p for p in (tmp_path / "data").rglob("*") if p.name.startswith(".")]


def test_a_killed_process_leaves_nothing_that_is_taken_for_good(tmp_path):
    (tmp_path / "go").touch()
    with start(tmp_path, "wait in the middle") as process:
        wait_for((tmp_path / "middle").exists)
        process.send_signal(signal.SIGKILL)
    assert not kept(Data(data_dir=str(tmp_path / "data")))
    good_stream(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "full"), MemoryError(), ImportError("x")])
def test_a_passing_error_throws_no_prepared_folder_away(tmp_path, error):
    def load(folder):
        raise error

    def make(folder):
        (folder / "file").write_text("content")

    with pytest.raises(type(error)):
        prepared(tmp_path / "folder", load, make)
    assert (tmp_path / "folder" / "file").read_text() == "content"
