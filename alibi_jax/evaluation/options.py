"""The options of an evaluation: every option of eval.py, its default and its meaning."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from alibi_jax.config import Mesh, parse_mesh
from alibi_jax.evaluation.lengths import parse_lengths
from alibi_jax.evaluation.protocols import PROTOCOLS, Protocol, parse_protocols
from alibi_jax.evaluation.rescaling import NAMES, Rescaling, methods_with, parse_rescalings

# By default attention is measured at lengths up to this multiple of the training length.
_MAX_ATTENTION_MULTIPLE = 2
_PROTOCOLS_HELP = "; ".join(f"{p.syntax} ({p.description})" for p in PROTOCOLS.values())
_RESCALINGS_HELP = ", ".join(
    name if name == "none" else f"{name} (for {', '.join(methods_with(name))})" for name in NAMES
)


def _option(
    default: Any,
    meaning: str,
    *,
    minimum: int | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A field of `EvaluationOptions`; eval.py reads `meaning` and `choices` for its flags."""
    metadata = {"meaning": meaning, "minimum": minimum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """What is measured, at which lengths and on which text; the same for every run.

    The fields have the names and the order of the keys of "asked" in results.json.
    """

    lengths: str = _option(
        "1x,2x,4x,8x,16x,32x",
        "Evaluation lengths, separated by commas: numbers of tokens (such as 512) or multiples of "
        "the training length (such as 4x).",
    )
    protocols: str = _option(
        "nonoverlapping,fixed",
        f"Evaluation protocols for windows of L tokens, separated by commas: {_PROTOCOLS_HELP}.",
    )
    rescalings: str = _option(
        "none",
        f"Rescalings of positions, separated by commas: {_RESCALINGS_HELP}. The factor is the "
        "evaluation length divided by the training length, or F if given as linear:F.",
    )
    attention: str | None = _option(
        None,
        "Lengths at which the entropy, the distance and the resolution of attention are measured, "
        "in the form of --lengths; default: the lengths of --lengths up to "
        f"{_MAX_ATTENTION_MULTIPLE}x; with an empty value attention is not measured.",
    )
    judge: str | None = _option(
        None,
        "Workdir of the run that decides which targets LongPPL counts; default: each run decides "
        "for itself.",
    )
    split: str = _option(
        "validation",
        "Split of the corpus to evaluate on.",
        choices=("train", "validation", "test"),
    )
    step: int | None = _option(
        None, "Step of the checkpoint to evaluate; default: the latest checkpoint."
    )
    documents: bool = _option(
        False, "Keep each window inside one document; by default windows run across documents."
    )
    bos: bool = _option(
        False,
        "Replace the first input of each window by the separator token, which precedes each "
        "document.",
    )
    targets: int = _option(512, "Number of sampled targets of the protocol `fixed`.", minimum=1)
    passage: int = _option(
        200, "Number of consecutive targets in the passage that the report shows.", minimum=0
    )
    seed: int = _option(0, "Seed of the target sample and of the bootstrap.", minimum=0)
    batch_tokens: int = _option(8192, "Number of tokens per batch, at every length.", minimum=1)
    mesh: str = _option(
        "",
        "Number of devices along each mesh axis, such as fsdp=4,context=2; by default each device "
        "scores whole windows.",
    )
    data_path: str | None = _option(
        None,
        "Where the training text is now, in place of the data.path of the runs; not needed where "
        "the text is prepared.",
    )
    data_dir: str | None = _option(
        None,
        "Folder of prepared datasets and token streams, in place of the data.data_dir of the runs.",
    )

    def check(self) -> None:
        """Raises ValueError for the first invalid value, and names its flag.

        Lengths are checked later: a multiple depends on the training length of a run.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum, choices = field.metadata["minimum"], field.metadata["choices"]
            if minimum is not None and value < minimum:
                raise ValueError(f"--{field.name}={value} must be at least {minimum}")
            if choices is not None and value not in choices:
                raise ValueError(f"--{field.name}={value} must be one of {', '.join(choices)}")
        parse_protocols(self.protocols)
        parse_rescalings(self.rescalings)
        parse_mesh(self.mesh)

    @property
    def parsed_protocols(self) -> tuple[Protocol, ...]:
        """The protocols in order, without repetitions."""
        return parse_protocols(self.protocols)

    @property
    def parsed_rescalings(self) -> list[Rescaling]:
        """The rescalings in order, without repetitions."""
        return parse_rescalings(self.rescalings)

    @property
    def parsed_mesh(self) -> Mesh:
        """The number of devices along each mesh axis."""
        return parse_mesh(self.mesh)

    def evaluation_lengths(self, train_length: int) -> list[int]:
        """The lengths of `--lengths` in tokens, for a run of this training length."""
        return parse_lengths(self.lengths, train_length)

    def attention_lengths(self, train_length: int) -> list[int]:
        """The lengths at which attention is measured, for a run of this training length."""
        if self.attention is None:
            longest = _MAX_ATTENTION_MULTIPLE * train_length
            return [n for n in self.evaluation_lengths(train_length) if n <= longest]
        return parse_lengths(self.attention, train_length, "attention") if self.attention else []
