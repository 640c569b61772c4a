"""Random texts and damaged files: each is refused with one line, or read exactly."""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
from fuzz import fuzz, inputs, one_line
from hypothesis import strategies as st

from alibi_jax.config import Data
from alibi_jax.data.errors import DataError
from alibi_jax.data.token_streams import document_starts, token_stream
from alibi_jax.data.tokenizers import BpeTokenizer, ByteTokenizer, from_dict, make_tokenizer
from alibi_jax.data.word_tokenizer import WordTokenizer

SPLITS = ("train", "validation", "test")
PIECES = [
    *(
        b"a",
        b"the ",
        b" <unk> ",
        b"\n",
        b" \n",
        b"\r\n",
        b"\r",
        b"\t",
        b"\x0b",
        b"\x0c",
        b" ",
        b"  ",
    ),
    *(b"\0", b"\x1c", b"\x1f", b"\x7f", b"\x80", b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80"),
    *(b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"),
    *(
        x.encode()
        for x in ("é", "語", "🙂", "\u0085", "\u00a0", "\u2028", "\u3000", "\ufeff", "e\u0301")
    ),
    "ein Wort\n".encode("utf-16"),
]
# Text that the word tokenizer takes, and text without any rule.
SPACED = st.lists(
    st.sampled_from([b" a", b" b", b" <unk>", " é".encode(), b" \n"]), max_size=40
).map(lambda words: b"".join(words) + b" \n")
ANY = st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join) | st.binary(max_size=60)
CLEAN = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80).map(
    str.encode
)
LONG = st.tuples(ANY | CLEAN, st.integers(1, 3000)).map(lambda x: x[0] * x[1])
TEXTS = ANY | CLEAN | SPACED | LONG


def words_of(text):
    """The words of a text by another way than the tokenizers': runs between ASCII whitespace."""
    return re.findall(rb"[^ \t\n\r\x0b\x0c]+", text)


def check_exact(tokenizer, documents):
    """Asserts that the tokens of documents are these documents, and are counted right."""
    again = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.fingerprint == tokenizer.fingerprint
    for document in documents:
        ids = tokenizer.encode(document)
        np.testing.assert_array_equal(again.encode(document), ids)
        assert tokenizer.decode(ids) == document
        assert int(tokenizer.token_bytes[ids].sum()) == len(document)
        assert int(tokenizer.words(ids).sum()) == len(words_of(document))
        assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def trained(kind, documents, vocab_size):
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return BpeTokenizer.train(iter(documents), vocab_size)
    return WordTokenizer.train(iter(documents))


@inputs(few=60, many=5_000)
def test_tokenizers_refuse_a_text_or_restore_it(count):
    def answer(drawn):
        kind, documents, unseen, vocab_size = drawn
        try:
            tokenizer = trained(kind, documents, vocab_size)
            check_exact(tokenizer, documents)
        except DataError as error:
            one_line(error)
            return f"{kind}: refused"
        try:
            check_exact(tokenizer, [unseen])
        except DataError as error:
            one_line(error)
            return f"{kind}: read, other text refused"
        return f"{kind}: read"

    kinds = st.sampled_from(["bytes", "bpe", "words"])
    documents = st.lists(TEXTS, min_size=1, max_size=3) | st.lists(SPACED, min_size=1, max_size=3)
    fuzz(st.tuples(kinds, documents, TEXTS, st.integers(257, 262)), answer, count)


NAMES = st.sampled_from(
    [
        *("a.txt", "b", "c.md", "é.txt", "語", "x y", ".hidden", "sub/a.txt", ".git/x"),
        *("a\nb", "'q'", "%s", "{x}", "[1]", "*", "wiki.train.tokens", "wiki.test.tokens"),
    ]
)
FILES = st.dictionaries(NAMES, TEXTS, max_size=4)


@st.composite
def folders(draw):
    """A dataset from files, its tokenizer, and the files: bytes by name."""
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["bytes", "bpe", "words"]))
        files = {
            f"wiki.{split}.tokens": draw(SPACED | TEXTS)
            for split in draw(st.sampled_from([SPLITS, ("train", "validation"), ("train", "test")]))
        }
        renamed = {name.replace("validation", "valid"): text for name, text in files.items()}
        return "wikitext", kind, renamed | draw(FILES)
    kind = draw(st.sampled_from(["bytes", "bpe"]))
    if draw(st.booleans()):
        return "text", kind, draw(FILES)
    if draw(st.booleans()):
        many = draw(st.lists(TEXTS, min_size=20, max_size=45))
        return "text", kind, {f"{number:03}": text for number, text in enumerate(many)}
    split_folders = draw(st.lists(st.sampled_from(SPLITS), unique=True))
    return (
        "text",
        kind,
        {f"{split}/{name}": text for split in split_folders for name, text in draw(FILES).items()},
    )


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            path.write_bytes(text)


def visible(files):
    """The files that are documents, in the order of their names."""
    return {
        name: text
        for name, text in sorted(files.items())
        if text and not any(part.startswith(".") for part in name.split("/"))
    }


def documents_of(tokens, starts, tokenizer):
    """The documents of a stream, each without its separator."""
    ends = [*starts[1:], len(tokens)]
    assert all(tokens[start] == tokenizer.separator for start in starts)
    return [tokenizer.decode(tokens[start + 1 : end]) for start, end in zip(starts, ends)]


def read(data):
    """The documents of each split, through the files of the tokens; and the tokenizer."""
    tokenizer = make_tokenizer(data)
    splits = {}
    for split in SPLITS:
        tokens = token_stream(data, split, tokenizer)
        starts = document_starts(data, split, tokenizer)
        splits[split] = documents_of(np.array(tokens), starts.tolist(), tokenizer)
    return splits, tokenizer


@inputs(few=4, many=400)
def test_folders_of_text_are_refused_or_read_exactly(count):
    def answer(drawn):
        dataset, kind, files = drawn
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "text").mkdir()
            write(folder / "text", files)
            data = Data(
                dataset=dataset,
                path=str(folder / "text"),
                data_dir=str(folder / "data"),
                tokenizer=kind,
                vocab_size=257,
            )
            try:
                splits, tokenizer = read(data)
            except DataError as error:
                message = one_line(error)
                return f"{dataset}: refused" if "data." in message else message
            again, _ = read(data)
            assert again == splits
        check_exact(tokenizer, [text for texts in splits.values() for text in texts])
        texts = visible(files)
        if dataset == "wikitext":
            parts = {s: [texts[f"wiki.{s.replace('validation', 'valid')}.tokens"]] for s in SPLITS}
            assert splits == parts
        elif any(name.startswith("train/") for name in files):
            assert splits == {
                split: [text for name, text in texts.items() if name.startswith(f"{split}/")]
                for split in SPLITS
            }
        elif len(texts) >= 20:
            numbered = list(enumerate(texts.values(), 1))
            assert splits["train"] == [text for n, text in numbered if n % 20 not in (10, 0)]
            assert splits["validation"] == [text for n, text in numbered if n % 20 == 10]
            assert splits["test"] == [text for n, text in numbered if n % 20 == 0]
        else:
            # Each document is cut in three parts, in order; a part may be empty.
            left = {split: list(parts) for split, parts in splits.items()}
            for text in texts.values():
                for split in SPLITS:
                    if left[split] and text.startswith(left[split][0]) and text:
                        text = text.removeprefix(left[split].pop(0))
                assert not text
            assert not any(left.values())
        return f"{dataset}: read"

    fuzz(folders(), answer, count)
