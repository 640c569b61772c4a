"""Standard output and error of a program that must not stop because a line can't be printed."""

import codecs
import io
import os
import select
import sys
from typing import Any

# The ASCII forms of the characters in tables of results, for terminals without the originals.
_ASCII = {"\u2212": "-", "\u2014": "-", "\u00a0": " "}
_ERRORS = "alibi_jax.console"


def secure_streams() -> None:
    """Makes standard output and error accept every text, even where nobody can read it.

    A character that the encoding lacks is printed in ASCII: a minus sign as a hyphen, and most
    others as an escape such as `\\xe9`. Text for a closed pipe or a full disk is dropped. A stream
    that was closed before the program started becomes the null device. Streams that are not the
    interpreter's own, as in a notebook, stay as they are.
    """
    codecs.register_error(_ERRORS, _in_ascii)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # Without this, the next file that is opened would get the number of the closed stream,
            # and libraries would print their messages into that file.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        elif stream is not getattr(sys, f"__{name}__"):
            continue
        if name != "stdin":
            encoding = "utf-8" if stream is None else stream.encoding
            lasting: Any = _Lasting(descriptor, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(lasting, encoding, _ERRORS, line_buffering=True))


class _Lasting(io.FileIO):
    """An open file, unbuffered, that drops what it cannot write."""

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.fileno(), rest) :]
            except BlockingIOError:
                select.select([], [self], [])
            except OSError:
                break
        return len(data)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """The text for what cannot be encoded, and where to go on; an error handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or ascii(c)[1:-1] for c in missing), error.end
