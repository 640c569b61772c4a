"""Evaluation protocols: how windows cover a text, and so how much context each target has.

`PROTOCOLS` has one record per protocol. A new protocol is one function that makes its windows and
one record in that table.
"""

import dataclasses
from collections.abc import Callable, Sequence

from alibi_jax.data.windows import EvaluationWindows, evaluation_windows, fixed_context_windows
from alibi_jax.evaluation.eval_text import EvaluationText, Sample


@dataclasses.dataclass(frozen=True)
class ProtocolSpec:
    """What defines a protocol.

    `make_windows(text, sample, length, stride, bos)` returns the windows of one length; `stride` is
    `Protocol.stride_at(length)`, and `bos` replaces the first input of each window unless it is
    None.
    """

    # As in `--protocols` and results.json.
    name: str
    # One line for the command line's help.
    description: str
    make_windows: Callable[[EvaluationText, Sample, int, int, int | None], EvaluationWindows]
    # Whether the user gives the stride, as in sliding:64.
    takes_stride: bool = False
    # Whether the targets are the sample; otherwise every target of the text is scored.
    scores_sample: bool = False

    @property
    def syntax(self) -> str:
        """How `--protocols` names the protocol."""
        return f"{self.name}:STRIDE" if self.takes_stride else self.name


def _windows_over_text(
    text: EvaluationText, sample: Sample, length: int, stride: int, bos: int | None
) -> EvaluationWindows:
    return evaluation_windows(text.bounds, length, stride, bos)


def _windows_of_sample(
    text: EvaluationText, sample: Sample, length: int, stride: int, bos: int | None
) -> EvaluationWindows:
    if length > sample.max_context:
        raise ValueError(
            f"too few targets to sample with {length} tokens of context: the sample is drawn from "
            f"the whole windows of {length} tokens after the first window of each text"
        )
    return fixed_context_windows(sample.targets, length, bos)


NONOVERLAPPING = ProtocolSpec(
    "nonoverlapping",
    "windows do not overlap; their targets have 1, 2, ..., L tokens of context",
    _windows_over_text,
)
SLIDING = ProtocolSpec(
    "sliding",
    "windows start every STRIDE tokens; after the first window of a text, a window scores only its "
    "last STRIDE targets, each with at least L - STRIDE + 1 tokens of context",
    _windows_over_text,
    takes_stride=True,
)
FIXED = ProtocolSpec(
    "fixed",
    "a sample of targets, the same at every length, each with exactly L tokens of context",
    _windows_of_sample,
    scores_sample=True,
)
PROTOCOLS = {spec.name: spec for spec in (NONOVERLAPPING, SLIDING, FIXED)}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol of `PROTOCOLS` by name, with its stride if it takes one.

    The paper's main tables (Press et al. 2021) use `nonoverlapping`; its appendix B uses `sliding`
    with stride 1.
    """

    name: str
    stride: int | None = None

    def __str__(self) -> str:
        return self.name if self.stride is None else f"{self.name}:{self.stride}"

    @property
    def spec(self) -> ProtocolSpec:
        """The entry of `PROTOCOLS`; KeyError for an unknown name."""
        return PROTOCOLS[self.name]

    def stride_at(self, length: int) -> int:
        """The number of targets that each window after the first window of a text scores."""
        if self.spec.scores_sample:
            return 1
        return length if self.stride is None else self.stride

    def windows(
        self, text: EvaluationText, length: int, sample: Sample, bos: int | None
    ) -> EvaluationWindows:
        """The windows of `length` tokens. Raises ValueError where the text has none."""
        if length > text.max_context:
            raise ValueError(
                f"the longest text of the split has {text.max_context} targets, fewer than one "
                f"window of {length} tokens"
            )
        return self.spec.make_windows(text, sample, length, self.stride_at(length), bos)


def parse_protocols(text: str) -> tuple[Protocol, ...]:
    """Parses "nonoverlapping,sliding:64,fixed". Raises ValueError, which names the wrong part."""
    protocols = []
    for part in text.split(","):
        name, _, stride = part.strip().partition(":")
        spec = PROTOCOLS.get(name)
        if spec is not None and not spec.takes_stride and not stride:
            protocols.append(Protocol(name))
        elif spec is not None and spec.takes_stride and _is_positive(stride):
            protocols.append(Protocol(name, int(stride)))
        else:
            syntaxes = ", ".join(spec.syntax for spec in PROTOCOLS.values())
            raise ValueError(
                f"--protocols={text}: {part!r} is not a protocol; give one or several of "
                f"{syntaxes}, separated by commas"
            )
    return tuple(dict.fromkeys(protocols))


def _is_positive(number: str) -> bool:
    return number.isdecimal() and int(number) > 0


def check_strides(protocols: Sequence[Protocol], lengths: Sequence[int]) -> None:
    """Raises ValueError where a stride is larger than a length, since it would skip targets."""
    for protocol in protocols:
        for length in lengths:
            if protocol.stride is not None and protocol.stride > length:
                raise ValueError(
                    f"--protocols={protocol} with length {length}: a stride larger than the window "
                    f"would skip targets; give at most {min(lengths)}"
                )
