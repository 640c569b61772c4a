"""Random damage to prepared data: it is refused with one line, or made again."""

import random
import re

import pytest
from fuzz import fuzz, inputs, one_line
from hypothesis import strategies as st
from test_fuzz_texts import SPLITS, read, write

from alibi_jax.config import Data


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """`prepared(kind)`: a folder with a text and its data, the files by name, the documents."""
    made = {}

    def prepare(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            lines = [f" line {n} of é text \n".encode() for n in range(60)]
            for split in SPLITS:
                write(folder / "text", {f"{split}/{n}": b"".join(lines[n:]) for n in range(2)})
            splits, _ = read(config(folder, kind))
            files = {
                path.relative_to(folder): path.read_bytes()
                for path in sorted((folder / "data").rglob("*"))
                if path.is_file()
            }
            made[kind] = folder, files, splits
        return made[kind]

    return prepare


def config(folder, kind):
    return Data(
        dataset="text",
        path=str(folder / "text"),
        data_dir=str(folder / "data"),
        tokenizer=kind,
        vocab_size=270,
    )


def damaged(content, seed):
    """Bytes with one damage: cut, emptied, a bit flipped, zeros, a part reversed, lengthened."""
    draw = random.Random(seed)
    at = draw.randrange(max(1, len(content)))
    match draw.randrange(8):
        case 0:
            return b""
        case 1:
            return content[:at]
        case 2:
            changed = bytearray(content or b"\0")
            changed[at] ^= 1 << draw.randrange(8)
            return bytes(changed)
        case 3:
            return bytes(len(content))
        case 4:
            return content[:at] + content[at : at + 40][::-1] + content[at + 40 :]
        case 5:
            return content + content[:at]
        case 6:
            return (
                content[:at]
                + draw.choice([b"\xff", b"\n", b"}", b"null", b'"', b"-1", b"[]"])
                + content[at + 1 :]
            )
    return draw.choice([b"{}", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"{", b"NaN"])


@inputs(few=6, many=1_000)
def test_damaged_data_is_refused_or_made_again(count, prepared):
    def answer(drawn):
        kind, number, seed = drawn
        folder, files, splits = prepared(kind)
        name = sorted(files)[number % len(files)]
        content = damaged(files[name], seed)
        shown = re.sub(r"[0-9a-f]{24,}", "#", str(name.relative_to("data")))
        try:
            (folder / name).write_bytes(content)
            again, _ = read(config(folder, kind))
        except ValueError as error:
            one_line(error)
            return f"{shown}: refused"
        finally:
            for path in (folder / "data").rglob("*"):
                if path.is_file() and path.relative_to(folder) not in files:
                    path.unlink()
            write(folder, {str(path): text for path, text in files.items()})
        assert again == splits, shown
        return f"{shown}: read"

    kinds = st.sampled_from(["bytes", "bpe", "words"])
    fuzz(st.tuples(kinds, st.integers(0, 999), st.integers(0, 2**32)), answer, count)
