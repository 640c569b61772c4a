import json
from pathlib import Path

import numpy as np
import pytest
from helpers import flip
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Data
from alibi_jax.data import tokenizers
from alibi_jax.data.errors import DataError
from alibi_jax.data.tokenizers import BpeTokenizer, ByteTokenizer, from_dict, make_tokenizer
from alibi_jax.data.windows import evaluation_windows
from alibi_jax.data.word_tokenizer import WordTokenizer

PROSE = "".join(
    f"Fellow citizens, in the year {year} the naïve café served {year % 97} soups.\r\n"
    for year in range(1790, 2020)
).encode()
VOCABULARY = 400
# Text in the form of WikiText's files.
WORDS = " \n = Soup = \n \n the naïve café served the soup , the <unk> \n".encode()
LINES = st.lists(st.lists(st.text("aé語\u3000.<", min_size=1, max_size=3), max_size=4), max_size=6)


def written(lines):
    """Lines of words in the form of WikiText's files."""
    return "".join(f" {' '.join([*words, ''])}\n" for words in lines).encode()


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer.train(iter([PROSE]), VOCABULARY)


@pytest.fixture(scope="module")
def words():
    return WordTokenizer.train(iter([WORDS]))


def test_a_byte_is_a_token():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)
    ids = tokenizer.encode(b"ab\r\n\xff")
    np.testing.assert_array_equal(ids, [97, 98, 13, 10, 255])
    assert tokenizer.decode(ids) == b"ab\r\n\xff"
    assert tokenizer.token_bytes.tolist() == [0] + [1] * 255


def test_bytes_refuse_the_separator_in_text():
    with pytest.raises(DataError, match=r"data\.tokenizer='bytes'.*byte 2"):
        ByteTokenizer().encode(b"ab\0")


def test_bpe_has_the_vocabulary_that_was_asked_for(bpe):
    assert bpe.vocab_size == VOCABULARY
    assert bpe.separator == 0
    ids = bpe.encode(PROSE)
    assert ids.min() > 0
    assert ids.max() < VOCABULARY
    assert len(ids) < len(PROSE) / 2


def test_bpe_counts_bytes(bpe):
    assert bpe.token_bytes.shape == (VOCABULARY,)
    assert bpe.token_bytes[0] == 0
    assert bpe.token_bytes[1:].min() == 1
    assert bpe.token_bytes[bpe.encode(PROSE)].sum() == len(PROSE)


@settings(deadline=None)
@given(document=st.text())
def test_bpe_round_trip(bpe, document):
    data = document.encode("utf-8", "ignore")
    ids = bpe.encode(data)
    assert bpe.decode(ids) == data
    assert bpe.separator not in ids
    assert bpe.token_bytes[ids].sum() == len(data)


def test_bpe_keeps_every_character(bpe):
    characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)])).encode()
    assert bpe.decode(bpe.encode(characters)) == characters


def test_separators_decode_to_nothing(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = np.concatenate([[0], tokenizer.encode(b"ab"), [0]]).astype(np.int32)
        assert tokenizer.decode(ids) == b"ab"


def test_bpe_in_chunks_loses_nothing(bpe, monkeypatch):
    monkeypatch.setattr(tokenizers, "_CHUNK_BYTES", 100)
    no_line_ends = "語é🙂".encode() * 100
    for document in (PROSE, no_line_ends, PROSE[:100], b""):
        assert bpe.decode(bpe.encode(document)) == document


def test_bpe_refuses_what_is_not_utf8(bpe):
    with pytest.raises(DataError, match="not UTF-8 at byte 2"):
        bpe.encode(b"ab\xff")


def test_bpe_training_is_deterministic(bpe):
    again = BpeTokenizer.train(iter([PROSE]), VOCABULARY)
    assert again.fingerprint == bpe.fingerprint
    other = BpeTokenizer.train(iter([PROSE]), VOCABULARY - 1)
    assert other.fingerprint != bpe.fingerprint


def test_too_little_text_for_the_vocabulary():
    with pytest.raises(DataError, match=r"data\.vocab_size=5000: .* gives (2\d\d) tokens"):
        BpeTokenizer.train(iter([b"hello hello hello"]), 5000)


def test_dict_round_trip(bpe, words):
    for tokenizer in (bpe, ByteTokenizer(), words):
        again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(again.encode(WORDS), tokenizer.encode(WORDS))
    assert bpe.fingerprint != ByteTokenizer().fingerprint


def test_bpe_is_trained_once_for_a_training_split(tmp_path, monkeypatch):
    for split in ("train", "validation"):
        (tmp_path / "text" / split).mkdir(parents=True)
        (tmp_path / "text" / split / "a").write_bytes(PROSE)
    config = Data(
        dataset="text",
        path=str(tmp_path / "text"),
        data_dir=str(tmp_path / "data"),
        tokenizer="bpe",
        vocab_size=300,
    )
    first = make_tokenizer(config)
    with monkeypatch.context() as patch:
        patch.setattr(BpeTokenizer, "train", lambda *_: pytest.fail("trained again"))
        assert make_tokenizer(config).fingerprint == first.fingerprint
        # Only the training split matters.
        (tmp_path / "text" / "validation" / "a").write_bytes(b"other")
    config.vocab_size = 301
    assert make_tokenizer(config).vocab_size == 301
    (tmp_path / "text" / "train" / "a").write_bytes(PROSE[:5000])
    assert make_tokenizer(config).fingerprint != first.fingerprint


def test_make_bytes():
    assert isinstance(make_tokenizer(Data()), ByteTokenizer)


def test_the_vocabulary_of_words_falls_in_frequency(words):
    assert words.byte_strings == [
        b" " + word.encode()
        for word in ["\n", "the", "=", ",", "<unk>", "Soup", "café", "naïve", "served", "soup"]
    ]
    assert (words.vocab_size, words.separator) == (10, 0)
    two = WordTokenizer.train(iter([b" b b a \n", b" a c \n \n b \n"]))
    assert two.byte_strings == [b" \n", b" b", b" a", b" c"]
    assert WordTokenizer.train(iter([b" a a \n"])).separator == 1


def test_each_word_and_each_line_end_is_a_token(words):
    ids = words.encode(WORDS)
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 2, 5, 2, 0, 0, 1, 7, 6, 8, 1, 9, 3, 1, 4, 0]
    assert words.decode(ids) == WORDS
    assert words.encode(b"").tolist() == []
    assert words.encode(b" \n").tolist() == [words.separator]
    # The text "<eos>" is a word like any other.
    assert len(WordTokenizer.train(iter([b" <eos> \n"])).byte_strings) == 2


def test_targets_of_words_are_counted_as_published_numbers_are():
    """One target per word and per line: the stream begins with the separator, a line end.

    That is 217,646 for the validation split of WikiText-2 and WikiText-103.
    """
    lines = ["", " = Title = ", "", *(f" line {i % 7} of words " for i in range(300)), ""]
    document = "".join(f"{line or ' '}\n" for line in lines).encode()
    tokenizer = WordTokenizer.train(iter([document]))
    stream = np.concatenate([[tokenizer.separator], tokenizer.encode(document)])
    assert len(stream) - 1 == len(document.split()) + document.count(b"\n") == 1507
    windows = evaluation_windows(np.array([0, len(stream)]), 512, 512)
    assert len(windows) == 3
    assert windows.batch(stream, np.array([2]))["scored"].sum() == 1507 - 2 * 512


@settings(deadline=None)
@given(lines=LINES)
def test_words_round_trip(lines):
    document = written(lines)
    tokenizer = WordTokenizer.train(iter([document]))
    ids = tokenizer.encode(document)
    assert len(ids) == sum(len(words) + 1 for words in lines)
    assert tokenizer.decode(ids) == document
    assert tokenizer.token_bytes[ids].sum() == len(document)
    counts = np.bincount(ids, minlength=tokenizer.vocab_size)
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (b" the\tsoup \n", 2),
        (b" the  soup \n", 2),
        (b"the soup \n", 2),
        (b" the soup\n", 2),
        (b" the soup", 2),
        (b" the soup ", 2),
        (b" the soup \r\n", 2),
        (b" \n\n", 3),
        (b"  \n", 2),
    ],
)
def test_text_that_words_would_not_give_back_is_refused(words, line, at):
    for read in (words.encode, lambda text: WordTokenizer.train(iter([text]))):
        with pytest.raises(DataError, match=rf"'words': line {at} .*one space.*'bpe'") as caught:
            read(b" the soup \n" + line)
        assert "\n" not in str(caught.value)


def test_a_word_that_the_training_split_lacks_is_refused(words):
    with pytest.raises(DataError, match=r"'words': 'stew' in line 2 .*<unk>.*training split"):
        words.encode(b" the soup \n the stew \n")
    with pytest.raises(DataError, match="not UTF-8 at byte 1"):
        WordTokenizer.train(iter([b" \xff \n"]))


def test_words_are_learned_once_for_a_training_split(tmp_path, monkeypatch):
    for split, name in (("train", "train"), ("valid", "validation")):
        (tmp_path / f"wiki.{split}.tokens").write_bytes(WORDS + f" {name} \n".encode())
    config = Data(
        dataset="wikitext",
        path=str(tmp_path),
        data_dir=str(tmp_path / "data"),
        tokenizer="words",
        vocab_size=300,
    )
    first = make_tokenizer(config)
    assert b" train" in first.byte_strings
    assert b" validation" not in first.byte_strings
    config.vocab_size = 301
    monkeypatch.setattr(WordTokenizer, "train", lambda *_: pytest.fail("learned again"))
    assert make_tokenizer(config).fingerprint == first.fingerprint


@pytest.fixture
def stored(tmp_path):
    """A configuration of words, and the file of its tokenizer."""
    for split in ("train", "validation"):
        (tmp_path / "text" / split).mkdir(parents=True)
        (tmp_path / "text" / split / "a").write_bytes(WORDS)
    config = Data("text", str(tmp_path / "text"), str(tmp_path / "data"), tokenizer="words")
    make_tokenizer(config)
    (path,) = Path(config.data_dir).glob("alibi_jax/words-*/tokenizer.json")
    return config, path


def test_a_damaged_tokenizer_is_learned_again(stored, capsys):
    config, path = stored
    good = path.read_bytes()
    flip(path, 8 * good.index(b"caf"))
    assert json.loads(path.read_text())
    assert b" caf\xc3\xa9" in make_tokenizer(config).byte_strings
    assert path.read_bytes() == good
    said = capsys.readouterr().err
    assert f"{path.parent} is damaged and is made again: its values differ from those" in said


def test_a_flipped_bit_is_noticed_or_changes_nothing(stored):
    _, path = stored
    good, unnoticed = tokenizers._stored_tokenizer(path.parent).fingerprint, 0
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        try:
            read = tokenizers._stored_tokenizer(path.parent)
        except (ValueError, TypeError, KeyError):
            pass
        else:
            assert read.fingerprint == good
            unnoticed += 1
        flip(path, bit)
    # The letters of the hexadecimal digits in \u00e9 and \u00ef may be capitals.
    assert unnoticed == 3


def test_a_tokenizer_of_an_earlier_version_is_read_as_it_is(stored, monkeypatch):
    config, path = stored
    first = make_tokenizer(config)
    values = json.loads(path.read_text())
    del values["digest"]
    path.write_text(json.dumps(values))
    monkeypatch.setattr(WordTokenizer, "train", lambda *_: pytest.fail("learned again"))
    assert make_tokenizer(config).fingerprint == first.fingerprint


def streamed(tokenizer, documents):
    parts = [np.array([tokenizer.separator, *tokenizer.encode(doc)]) for doc in documents]
    return np.concatenate(parts).astype(np.uint16)


def test_words_begin_in_the_tokens_that_hold_their_first_byte():
    counts = ByteTokenizer().words(streamed(ByteTokenizer(), [b"ab c\n", b"d", b"e\xc2\xa0f"]))
    assert counts.dtype == np.int32
    #                         \0 a b   c \n \0 d \0 e      f
    assert counts.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert ByteTokenizer().words(np.array([], np.uint16)).shape == (0,)
    assert ByteTokenizer().words(np.frombuffer(b"ab", np.uint8)).tolist() == [1, 0]


def test_several_words_may_begin_in_one_token(monkeypatch):
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(tokenizer, "byte_strings", [b"", b"a b", b" c\td ", b"e", b"  "])
    counts = tokenizer.words(np.array([0, 1, 3, 2, 3, 4, 1, 1, 0, 3]))
    assert counts.tolist() == [0, 2, 0, 2, 1, 0, 2, 1, 0, 1]


@settings(deadline=None)
@given(documents=st.lists(st.text(st.sampled_from("ab é\u3000\r\n\t\v\f\x1c")), min_size=1))
def test_the_words_of_a_stream_are_those_of_its_documents(bpe, documents):
    raw = [document.encode() for document in documents]
    for tokenizer in (bpe, ByteTokenizer()):
        total = tokenizer.words(streamed(tokenizer, raw)).sum()
        assert total == sum(len(document.split()) for document in raw)


@settings(deadline=None)
@given(documents=st.lists(LINES, min_size=1, max_size=4))
def test_each_word_token_is_a_word(documents):
    raw = [written(lines) for lines in documents]
    tokenizer = WordTokenizer.train(iter(raw))
    tokens = streamed(tokenizer, raw)
    np.testing.assert_array_equal(tokenizer.words(tokens), tokens != tokenizer.separator)
    assert tokenizer.words(tokens).sum() == sum(len(document.split()) for document in raw)
