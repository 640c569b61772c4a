import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax.config import Data
from alibi_jax.data import tokenizers
from alibi_jax.data.errors import DataError
from alibi_jax.data.tokenizers import BpeTokenizer, ByteTokenizer, from_dict, make_tokenizer

PROSE = "".join(
    f"Fellow citizens, in the year {year} the naïve café served {year % 97} soups.\r\n"
    for year in range(1790, 2020)
).encode()
VOCABULARY = 400


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer.train(iter([PROSE]), VOCABULARY)


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


def test_bpe_in_pieces_loses_nothing(bpe, monkeypatch):
    monkeypatch.setattr(tokenizers, "_PIECE", 100)
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


def test_dict_round_trip(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert type(again) is type(tokenizer)
        assert again.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(again.encode(PROSE), tokenizer.encode(PROSE))
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
