"""What a compiled program sends between devices, read from its text."""

import collections
import dataclasses
import functools
import math
import re

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange: `size` bytes in the larger of what goes in and comes out of a device.

    Among `group` devices, `times` a step.
    """

    kind: str
    size: int
    group: int
    times: int

    @property
    def moved(self) -> float:
        """Bytes that each device sends a step, by rings: an all-reduce goes round twice."""
        if self.kind == "collective-permute":
            return float(self.times * self.size)
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.size * (self.group - 1) / max(1, self.group)


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised program, those in loops as often as the loops run.

    A loop whose condition has no number counts once; of a choice the last branch counts, which is
    that of `jax.lax.cond` whose condition holds.
    """
    computations = _computations(text)
    counts = _executions(computations)
    found = []
    for name, lines in computations.items():
        # XLA for TPUs cuts an exchange up, to compute beside it: what it begins with counts.
        if not counts[name] or name.startswith("async_collective_fusion"):
            continue
        for line in lines:
            one = re.search(rf"= (.*?) ({'|'.join(_KINDS)})(?:-start)?\(", line)
            group = _group(line)
            if one is None or group == 1:
                continue
            shape, kind = one.groups()
            size = _size(shape, one.group(0))
            if kind == "reduce-scatter":
                size *= group
            elif name.startswith("all-reduce-scatter"):
                # As XLA for TPUs may write it: an all-reduce of which a part is kept.
                kind = "reduce-scatter"
            found.append(Collective(kind, size, group, counts[name]))
    return found


def by_kind(every: list[Collective]) -> dict[tuple[str, int], tuple[int, float]]:
    """(times a step, bytes that each device sends) of each kind and number of devices."""
    sums: dict[tuple[str, int], tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for one in every:
        times, moved = sums[one.kind, one.group]
        sums[one.kind, one.group] = times + one.times, moved + one.moved
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def _computations(text: str) -> dict[str, list[str]]:
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
    """How often each computation runs; the entry, whose name is empty, once."""
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            loop = re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if loop:
                condition, body = loop.groups()
                known = re.search(r"known_trip_count[^0-9]*(\d+)", line)
                times = int(known.group(1)) if known else _trips(computations.get(condition, []))
                callers[body].append((name, times))
                continue
            if re.match(r"\s*(ROOT )?%?async-collective-done", line):
                continue
            listed = re.findall(r"branch_computations=\{([^}]*)\}", line)
            called = re.findall(r"(?:calls|to_apply|true_computation)=%?([\w.\-]+)", line)
            called += [each.split(",")[-1].strip(" %") for each in listed]
            for callee in called:
                callers[callee].append((name, 1))

    @functools.cache
    def count(name: str) -> int:
        if name == "":
            return 1
        return sum(count(caller) * times for caller, times in callers[name])

    return {name: count(name) for name in computations}


def _trips(condition: list[str]) -> int:
    """Of a loop that counts from 0 and ends at a number."""
    compared = [line for line in condition if "compare(" in line and "direction=LT" in line]
    numbers = [
        int(n) for line in condition for n in re.findall(r"s32\[\][^=]*constant\((\d+)\)", line)
    ]
    return numbers[0] if len(compared) == 1 and len(numbers) == 1 else 1


def _dims(dims: str) -> list[int]:
    return [int(dim) for dim in dims.split(",") if dim]


def _size(shape: str, instruction: str) -> int:
    """Bytes of a result; of a start the last of what it holds, of any other all together."""
    each = [
        _BYTES.get(kind, 4) * math.prod(_dims(dims))
        for kind, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", shape)
    ]
    return max(each) if "-start(" in instruction else sum(each)


def _group(line: str) -> int:
    """Devices that take part in one exchange."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*(?:\{([^}]*)\})", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh.group(2)))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    if iota:
        return int(iota.group(1))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    return 2 if "source_target_pairs" in line else 1
