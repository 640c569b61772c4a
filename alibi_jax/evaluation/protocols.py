"""Which windows are laid over a text, and so how much context each target has."""

import dataclasses
import math
from collections.abc import Sequence

from alibi_jax.data.windows import EvaluationWindows, evaluation_windows, fixed_context_windows
from alibi_jax.evaluation.eval_text import EvaluationText, Sample

NAMES = ("nonoverlapping", "sliding:STRIDE", "fixed")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How windows of a length are laid over a text.

    `nonoverlapping`: each window's targets have 1, 2, ..., L tokens of context; the paper's
    main tables. `sliding`: windows move by `stride`, and past a text's first only their last
    `stride` targets count, each with at least L - stride + 1 tokens of context; stride 1 is
    the paper's Appendix B. `fixed`: a sample of targets, the same at each length, each with
    exactly L tokens of context.
    """

    name: str
    stride: int | None = None

    def __str__(self) -> str:
        return self.name if self.stride is None else f"{self.name}:{self.stride}"

    def stride_at(self, length: int) -> int:
        """Targets that a window scores, outside a text's first."""
        return {"nonoverlapping": length, "fixed": 1}.get(self.name) or self.stride or length

    def windows(
        self, text: EvaluationText, length: int, sample: Sample, bos: int | None
    ) -> EvaluationWindows:
        """The windows; `sample` is of `fixed`. Raises ValueError where there are none."""
        if length > text.longest:
            raise ValueError(
                f"no text of the split has more than {text.longest} targets, fewer than one window"
            )
        if self.name == "fixed":
            if length > sample.longest:
                raise ValueError(
                    f"too few targets of the split stand in whole windows of {length} tokens after "
                    "a text's first, from which those of fixed context are drawn"
                )
            return fixed_context_windows(sample.targets, length, bos)
        return evaluation_windows(text.bounds, length, self.stride_at(length), bos)


def parse_protocols(text: str) -> tuple[Protocol, ...]:
    """From "nonoverlapping,sliding:64,fixed". Raises ValueError that names what is wrong."""
    protocols = []
    for part in text.split(","):
        name, _, stride = part.strip().partition(":")
        if name in ("nonoverlapping", "fixed") and not stride:
            protocols.append(Protocol(name))
        elif name == "sliding" and stride.isdecimal() and int(stride) > 0:
            protocols.append(Protocol(name, int(stride)))
        else:
            raise ValueError(
                f"--protocols={text}: {part!r} is not one; give any of {', '.join(NAMES)}, with "
                "commas between"
            )
    return tuple(dict.fromkeys(protocols))


def parse_lengths(text: str, train_length: int, flag: str = "lengths") -> list[int]:
    """From "512,1024", or multiples of the training length as "1x,2x,0.5x"."""
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


def check_strides(protocols: Sequence[Protocol], lengths: Sequence[int]) -> None:
    """Raises ValueError where a stride would jump over targets."""
    for protocol in protocols:
        for length in lengths:
            if protocol.stride is not None and protocol.stride > length:
                raise ValueError(
                    f"--protocols={protocol} with length {length}: a stride over the window's "
                    f"length would skip targets; give at most {min(lengths)}"
                )
