from pathlib import Path, PurePosixPath

import pytest

from alibi_jax.data.errors import DataError
from alibi_jax.data.split_names import splits_by_name

TRAIN, VALIDATION, TEST = "train", "validation", "test"


def splits(*names):
    found = splits_by_name(Path("text"), map(PurePosixPath, names))
    return {split: [str(path) for path in paths] for split, paths in found.items()}


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("Train.TXT", "VALIDATION.txt", "Test.Txt"),
        ("train", "dev", "test"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("train.txt.raw", "valid.txt.raw", "test.txt.raw"),
        ("Stories2-large-train.txt", "Stories2-large-valid.txt", "Stories2-large-test.txt"),
        ("corpus_train_v1.txt", "corpus_val_v1.txt", "corpus_test_v1.txt"),
        ("train-00000-of-00010.txt", "validation-00000-of-00001.txt", "test-00000-of-00001.txt"),
        ("train1.txt", "dev1.txt", "test1.txt"),
        ("speech.train", "speech.dev", "speech.test"),
        ("training-monolingual.shuffled/1", "eval.txt", "heldout-monolingual.shuffled/1"),
        ("train/a/test.txt", "valid/train.txt", "test/x"),
        ("corpus/train.txt", "corpus/valid.txt", "corpus/test.txt"),
    ],
)
def test_names_of_corpora_give_the_splits(train, validation, test):
    found = splits(test, train, validation)
    assert found == {TRAIN: [train], VALIDATION: [validation], TEST: [test]}


def test_each_corpus_in_a_folder_of_its_own():
    names = [f"{corpus}/{name}.txt" for corpus in ("en", "de") for name in ("train", "test")]
    assert splits(*names) == {TRAIN: names[::2], TEST: names[1::2]}


def test_many_files_of_a_split_and_files_about_the_text():
    parts = [f"train-{number:05}.txt" for number in range(30)]
    found = splits("README.md", "LICENSE", *parts, "test.txt")
    assert found == {TRAIN: parts, TEST: ["test.txt"]}


@pytest.mark.parametrize(
    "names",
    [
        ["a.txt", "b.txt"],
        # Training text alone is cut, as a text of any other name is.
        ["train.txt"],
        ["train-0.txt", "train-1.txt"],
        ["train.txt", "more.txt"],
        # Longer words, and titles that have a word by chance.
        ["trainspotting.txt", "contest.txt", "validity.txt", "latest.txt", "devil.txt"],
        ["how-to-test.md", "a-day-on-the-train.md", "val-d-or.md"],
        ["train_test.txt", "a.txt"],
        # Names further down say nothing if not all have them.
        ["guide/a.md", "guide/test/b.md", "api/c.md"],
    ],
)
def test_names_of_other_files_give_no_splits(names):
    assert splits(*names) == {}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train.txt", "valid.txt", "more.txt"], r"'valid\.txt' is .* validation.*'more\.txt' has"),
        (["a.txt", "b.txt", "test.txt"], r"'test\.txt' is .* test split.*'a\.txt' has no split"),
        (["a.txt", "b.txt", "dev/c.txt"], r"'dev' is .* validation split.*'a\.txt' has no split"),
        (["valid.txt", "test.txt"], r"'test\.txt'.*there is no training split"),
        (["x.train.txt", "x.test.txt", "notes"], r"'x\.test\.txt' is .*'notes' has no split"),
    ],
)
def test_held_out_text_beside_text_without_a_split_is_refused(names, says):
    with pytest.raises(DataError, match=rf"^data\.path='text': {says}.*move or rename"):
        splits(*names)
