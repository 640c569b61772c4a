"""Parses evaluation lengths: numbers of tokens, or multiples of the training length."""

import math


def parse_lengths(text: str, train_length: int, flag: str = "lengths") -> list[int]:
    """Parses "512,1024", or multiples of the training length as "1x,2x,0.5x".

    Raises ValueError, which names the flag and the wrong part.
    """
    lengths = []
    for part in text.split(","):
        part = part.strip()
        try:
            value = float(part[:-1]) * train_length if part.endswith("x") else int(part)
        except ValueError:
            value = 0
        if not 1 <= value < math.inf or value != int(value):
            raise ValueError(
                f"--{flag}={text}: {part!r} is not a length of at least 1 token; give numbers "
                f"as 512,1024 or multiples of the training length {train_length} as 1x,2x"
            )
        lengths.append(int(value))
    return list(dict.fromkeys(lengths))
