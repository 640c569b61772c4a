"""Strikes train.py and eval.py at random: kills, stops, full disks; then checks what is left.

    python tests/faults/strikes.py --strikes=200

A trial starts from a fresh folder, strikes a run one to three times, and then gives the same
command without a fault. That must end as a run that nothing has struck, bit for bit, and must leave
no other file. A trial that fails prints what differs and the flags that repeat it. The table at the
end counts the strikes by phase and kind.
"""

import argparse
import collections
import contextlib
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile

from cases import CASES, References, finish, start
from comparison import differences
from faults import FULL, KINDS, ON_DISKS, STOP, Disk, can_mount, strike
from programs import Programs

# Bytes and files that are enough for any case.
_ENOUGH = {"size": 2**28, "nr_inodes": 100_000}


class Striker:
    """The fork server and the cases without a fault; a context manager."""

    def __init__(self, folder, environment):
        self._folder = folder.resolve()
        self.programs = Programs(environment)
        self.references = References(self.programs, self._folder / "references")

    def __enter__(self):
        self.programs.__enter__()
        return self

    def __exit__(self, *error):
        self.programs.__exit__(*error)

    def trial(self, case, kinds, draw):
        """Strikes a case with faults of one or several kinds. Returns (strikes, problems)."""
        undisturbed = self.references.undisturbed(case)
        start_folder = self.references.start_folder(case.start, case.processes)
        folder, kind = self._folder / "struck", draw.choice(kinds)
        strikes, problems = [], []
        with contextlib.ExitStack() as stack:
            if kind in ON_DISKS:
                disk = stack.enter_context(Disk(folder))
            else:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.copytree(start_folder, folder, dirs_exist_ok=True)
            for _ in range(draw.randint(1, 3)):
                if kind in ON_DISKS:
                    disk.limit(**_room(kind, folder, undisturbed.folder, draw))
                struck, answers = strike(self.programs, case, folder, undisturbed, kind, draw)
                problems += answers
                if struck is None:
                    break
                strikes.append(struck)
                if kind not in ON_DISKS:
                    kind = draw.choice([kind for kind in kinds if kind not in ON_DISKS])
            if kind in ON_DISKS:
                disk.limit(**_ENOUGH)
            runs = start(self.programs, case, folder)
            problems += finish(self.programs, runs)
            if any(run.code != 0 for run in runs):
                problems += [f"again: exit code {run.code}: {run.err[-25:]}" for run in runs]
            else:
                every_step = self.references.every_step(case.processes)
                regular = all(struck.kind != STOP for struck in strikes)
                problems += differences(folder, undisturbed.folder, every_step, regular)
        return strikes, problems


def _room(kind, folder, undisturbed, draw):
    """Less room than a run needs: what the folder uses, and a part of what the run adds."""

    def use(root):
        paths = [root, *root.rglob("*")]
        blocks = sum(-(-path.stat().st_size // 4096) for path in paths if path.is_file())
        return blocks * 4096 if kind == FULL else len(paths)

    used = use(folder)
    # A resumed run may need less than it has used so far: it removes what the earlier run left.
    room = used + draw.randint(0, max(0, use(undisturbed) - used))
    return {"size": max(room, 4096)} if kind == FULL else {"nr_inodes": room + 2}


def table(counts):
    """The counts by case, phase and kind as a table in Markdown."""
    kinds = [kind for kind in KINDS + ON_DISKS if any(key[2] == kind for key in counts)]
    lines = ["| run | phase | " + " | ".join(kinds) + " |", "|---|---|" + "---:|" * len(kinds)]
    names = [*map(str, CASES)]
    rows = sorted({key[:2] for key in counts}, key=lambda row: (names.index(row[0]), row[1]))
    for row in rows:
        cells = [str(counts[(*row, kind)] or "") for kind in kinds]
        lines.append(f"| {row[0]} | {row[1]} | " + " | ".join(cells) + " |")
    totals = [str(sum(n for key, n in counts.items() if key[2] == kind)) for kind in kinds]
    return "\n".join([*lines, "| all | | " + " | ".join(totals) + " |"])


def main(arguments=None):
    """Strikes as the flags say. Returns the exit code: 1 where a trial has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strikes", type=int, default=200, help="number of strikes")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--trial", type=int, help="number of the one trial to repeat")
    parser.add_argument("--cases", default="", help="pattern of the names of cases")
    parser.add_argument("--kinds", default="", help="pattern of the kinds of faults")
    parser.add_argument("--folder", type=pathlib.Path, help="folder to keep; default: a new one")
    flags = parser.parse_args(arguments)
    counts, failed = collections.Counter(), 0
    with contextlib.ExitStack() as stack:
        folder = flags.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in ("references", "struck"):
            shutil.rmtree(folder / earlier, ignore_errors=True)
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        striker = stack.enter_context(Striker(folder, cache))
        cases = [case for case in CASES if re.search(flags.cases, str(case))]
        possible = KINDS + (ON_DISKS if can_mount(folder) else ())
        kinds = [kind for kind in possible if re.search(flags.kinds, kind)]
        first = flags.trial or 0
        for trial in [first] if flags.trial is not None else range(10**6):
            draw = random.Random(f"{flags.seed} {trial}")
            case = draw.choice(cases)
            strikes, problems = striker.trial(case, kinds, draw)
            counts.update((str(case), struck.phase, struck.kind) for struck in strikes)
            failed += bool(problems)
            print(f"trial {trial}: {case}: {'; '.join(map(str, strikes)) or 'not struck'}")
            for problem in problems:
                print(f"  FAILED (--seed={flags.seed} --trial={trial}): {problem}")
            print(end="", flush=True)
            if counts.total() >= flags.strikes:
                break
    print(table(counts))
    print(f"{counts.total()} strikes in {trial - first + 1} trials, of which {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    # So that a stop removes the folders and the file system in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
