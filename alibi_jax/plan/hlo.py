"""The collectives of a compiled program, read from the text of its HLO."""

import collections
import dataclasses
import functools
import math
import re

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective among `group` devices that runs `times` times in a step.

    `size` is the larger of its input and its output on one device, in bytes.
    """

    kind: str
    size: int
    group: int
    times: int

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in a step, with ring algorithms.

        An all-reduce goes round the ring twice: as a reduce-scatter and as an all-gather.
        """
        if self.kind == "collective-permute":
            return float(self.times * self.size)
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.size * (self.group - 1) / max(1, self.group)


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised program; those in a loop count once per iteration.

    A loop whose number of iterations is unknown counts once. Of a conditional, only the last branch
    counts. In `jax.lax.cond`, this is the branch for a true predicate.
    """
    computations = _computations(text)
    counts = _executions(computations)
    found = []
    for name, lines in computations.items():
        # XLA for TPUs splits an asynchronous collective over several computations, to overlap it
        # with other work. Only its start counts.
        if not counts[name] or name.startswith("async_collective_fusion"):
            continue
        for line in lines:
            match = re.search(rf"= (.*?) ({'|'.join(_KINDS)})(?:-start)?\(", line)
            group = _group_size(line)
            if match is None or group == 1:
                continue
            shape, kind = match.groups()
            size = _result_bytes(shape, match.group(0))
            if kind == "reduce-scatter":
                size *= group
            elif name.startswith("all-reduce-scatter"):
                # XLA for TPUs may write a reduce-scatter as an all-reduce whose result it slices.
                kind = "reduce-scatter"
            found.append(Collective(kind, size, group, counts[name]))
    return found


def by_kind(exchanges: list[Collective]) -> dict[tuple[str, int], tuple[int, float]]:
    """Sums over collectives of the same kind and group size, most bytes first.

    Maps (kind, group size) to (times in a step, bytes that each device sends in a step).
    """
    sums: dict[tuple[str, int], tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for collective in exchanges:
        key = collective.kind, collective.group
        times, num_bytes = sums[key]
        sums[key] = times + collective.times, num_bytes + collective.bytes_sent
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation by its name; the name of the entry computation is empty."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if start:
            lines = computations[start.group(2)] = []
            if start.group(1):
                computations = {"": lines} | computations
        else:
            lines.append(line)
    return computations


def _executions(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one execution of the entry computation."""
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            loop = re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if loop:
                condition, body = loop.groups()
                known = re.search(r"known_trip_count[^0-9]*(\d+)", line)
                times = (
                    int(known.group(1)) if known else _trip_count(computations.get(condition, []))
                )
                callers[body].append((name, times))
                continue
            if re.match(r"\s*(ROOT )?%?async-collective-done", line):
                continue
            branches = re.findall(r"branch_computations=\{([^}]*)\}", line)
            callees = re.findall(r"(?:calls|to_apply|true_computation)=%?([\w.\-]+)", line)
            callees += [names.split(",")[-1].strip(" %") for names in branches]
            for callee in callees:
                callers[callee].append((name, 1))

    @functools.cache
    def count(name: str) -> int:
        if name == "":
            return 1
        return sum(count(caller) * times for caller, times in callers[name])

    return {name: count(name) for name in computations}


def _trip_count(condition: list[str]) -> int:
    """The iterations of a loop that counts from 0 to a constant; 1 for any other loop."""
    comparisons = [line for line in condition if "compare(" in line and "direction=LT" in line]
    limits = [
        int(limit)
        for line in condition
        for limit in re.findall(r"s32\[\][^=]*constant\((\d+)\)", line)
    ]
    return limits[0] if len(comparisons) == 1 and len(limits) == 1 else 1


def _dims(dims: str) -> list[int]:
    return [int(dim) for dim in dims.split(",") if dim]


def _result_bytes(shape: str, instruction: str) -> int:
    """Bytes of an instruction's result.

    The result of an asynchronous start is a tuple of its operand and its output: the larger one
    counts.
    """
    sizes = [
        _BYTES.get(dtype, 4) * math.prod(_dims(dims))
        for dtype, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", shape)
    ]
    return max(sizes) if "-start(" in instruction else sum(sizes)


def _group_size(line: str) -> int:
    """The number of devices that take part in a collective."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*(?:\{([^}]*)\})", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota.group(1))
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if explicit:
        return len(explicit.group(1).split(","))
    return 2 if "source_target_pairs" in line else 1
