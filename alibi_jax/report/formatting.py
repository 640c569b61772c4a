"""Numbers, intervals and lists of words as every part of a report writes them."""

import math
from collections.abc import Sequence
from typing import Any

# A part of results.json: a run, a row, an interval, ...
Entry = dict[str, Any]


def format_nats(value: float | None) -> str:
    """Four decimals, a true minus sign, no negative zero; a dash for a missing number."""
    if value is None:
        return "—"
    return f"{value:z.4f}".replace("-", "−")


def has_interval(estimate: Entry) -> bool:
    """Whether both ends of the interval were measured."""
    return estimate["low"] is not None and estimate["high"] is not None


def format_interval(estimate: Entry) -> str:
    """The interval in brackets with a space before it; empty if there is no interval."""
    if not has_interval(estimate):
        return ""
    return f" [{format_nats(estimate['low'])}, {format_nats(estimate['high'])}]"


def format_perplexity(value: float | None) -> str:
    """Four significant digits, or all digits before the point: 4.532, 19.73, 48,210; or a dash."""
    if value is None:
        return "—"
    decimals = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def format_percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"


def format_confidence(confidence: float) -> str:
    """The confidence of the intervals, with as many digits as it needs: 95 %, 97.5 %."""
    return f"{100 * confidence:g} %"


def keep_percent_together(text: str) -> str:
    """The text with a no-break space between each number and its percent sign."""
    return text.replace(" %", "\u00a0%")


def count_noun(number: int, noun: str) -> str:
    """`1 document`, `12 documents`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def join_with_and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))
