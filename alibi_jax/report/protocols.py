"""What the report says about each evaluation protocol, known or unknown."""

import dataclasses
import re
from collections.abc import Iterable

from alibi_jax.report.formatting import Entry


@dataclasses.dataclass(frozen=True)
class ProtocolDescription:
    """The words of a report for one protocol.

    `figure` is the name of its figure's files, without suffix, and `title` ends the figure's
    title. `question` and `caption` stand below the figure on the page. If `has_stride`, the
    stride is part of the protocol's name, as in "sliding:64": each stride has a row of its own in
    tables and a line of its own in the figure. None means that the stride is part of the name in
    the rows where it differs from the length.
    """

    figure: str
    title: str
    question: str
    caption: str
    has_stride: bool | None


_DESCRIPTIONS = {
    "nonoverlapping": ProtocolDescription(
        figure="extrapolation",
        title="non-overlapping windows",
        question="Does the perplexity hold past the training length?",
        caption="Perplexity in non-overlapping windows by evaluation length. Lower is better. The "
        "dotted line is the training length. Longer windows also have fewer targets with little "
        "context, so a falling line alone does not show that longer context helps.",
        has_stride=False,
    ),
    "sliding": ProtocolDescription(
        figure="extrapolation_sliding",
        title="sliding windows",
        question="Does the perplexity hold when almost every target has long context?",
        caption="Perplexity in sliding windows by evaluation length. After the first window of a "
        "text, each window scores only its last S targets, where S is the stride.",
        has_stride=True,
    ),
    "fixed": ProtocolDescription(
        figure="extrapolation_fixed",
        title="the whole length as context",
        question="Does longer context alone help?",
        caption="Perplexity of the same sampled targets at each evaluation length, where each "
        "target has exactly that many tokens of context. If a line falls past the dotted line "
        "(the training length), the longer context lowers the loss.",
        has_stride=False,
    ),
}
# Figures of the protocols above, by file name without suffix.
KNOWN_FIGURES = tuple(description.figure for description in _DESCRIPTIONS.values())


def describe(protocol: str) -> ProtocolDescription:
    """The words for a protocol, by its name without a stride; generic ones if it is unknown."""
    if protocol in _DESCRIPTIONS:
        return _DESCRIPTIONS[protocol]
    return ProtocolDescription(
        # The name becomes part of file names and of ids on the page.
        figure="extrapolation_" + re.sub(r"[^\w-]+", "_", protocol),
        title=f"protocol {protocol}",
        question=f"Does the perplexity of the protocol {protocol} hold past the training length?",
        caption=f"Perplexity of the protocol {protocol} by evaluation length. Lower is better. The "
        "dotted line is the training length.",
        has_stride=None,
    )


def protocols_of(runs: Iterable[Entry]) -> list[str]:
    """The protocols of the runs' rows: known ones in their usual order, then the others."""
    found = dict.fromkeys(row["protocol"] for run in runs for row in run["rows"])
    known = [protocol for protocol in _DESCRIPTIONS if protocol in found]
    return known + [protocol for protocol in found if protocol not in _DESCRIPTIONS]


def stride_in_name(row: Entry) -> int | None:
    """The stride of a row if it is part of the protocol's name, otherwise None."""
    has_stride = describe(row["protocol"]).has_stride
    if has_stride is None:
        has_stride = row["stride"] != row["length"]
    return row["stride"] if has_stride else None


def protocol_name(row: Entry) -> str:
    """The protocol as the flag `--protocols` names it, with its stride if it has one."""
    stride = stride_in_name(row)
    return row["protocol"] if stride is None else f"{row['protocol']}:{stride}"
