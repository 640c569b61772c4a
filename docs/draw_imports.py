"""Lists and draws which packages of `alibi_jax` import which others.

`python docs/draw_imports.py` prints the list; `--out=imports.png` draws it as well. `--package`
names the folder of another copy of the package, such as an earlier commit's.
"""

import argparse
import ast
import pathlib

_PACKAGE = pathlib.Path(__file__).parent.parent / "alibi_jax"


def imports(package: pathlib.Path) -> dict[str, set[str]]:
    """{room: the other rooms that it imports}; a room is a module or package right in `package`."""
    paths = [path for path in package.iterdir() if path.suffix == ".py" or path.is_dir()]
    rooms = {path.stem for path in paths if path.stem not in ("__init__", "__pycache__")}
    found: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room in rooms:
            found[room] |= imported_rooms(path, package.name) & rooms - {room}
    return found


def imported_rooms(path: pathlib.Path, package: str) -> set[str]:
    """The rooms of `package` that a file imports, at its top or inside a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            rooms.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            rooms |= {name[1] for name in names if name[0] == package and len(name) > 1}
    return rooms


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
    """The rooms by floor: each imports only from floors below. Raises ValueError for a circle."""
    left, found = dict(graph), []
    while left:
        floor = [room for room in left if not graph[room] & left.keys()]
        if not floor:
            raise ValueError(f"these rooms import each other in a circle: {', '.join(left)}")
        found.append(floor)
        for room in floor:
            del left[room]
    return found


def draw(graph: dict[str, set[str]], out: str) -> None:
    """Draws the rooms on their floors, and an arrow from each room to those it imports."""
    from matplotlib.figure import Figure

    levels = floors(graph)
    centres = {
        room: ((column + 1) / (len(floor) + 1), level)
        for level, floor in enumerate(levels)
        for column, room in enumerate(floor)
    }
    figure = Figure(figsize=(11, 1 + 1.1 * len(levels)), layout="constrained")
    axes = figure.add_subplot()
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    for number, (room, others) in enumerate(graph.items()):
        for other in others:
            axes.annotate(
                "",
                centres[other],
                centres[room],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": colours[number % len(colours)],
                    "alpha": 0.6,
                    "shrinkA": 12,
                    "shrinkB": 12,
                    "connectionstyle": "arc3,rad=0.08",
                },
            )
    for room, (x, y) in centres.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.4"}
        axes.text(x, y, room, ha="center", va="center", fontsize=10, bbox=box)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, len(levels) - 0.5)
    axes.set_axis_off()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Prints the list, and draws it where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=pathlib.Path, default=_PACKAGE, help="its folder")
    parser.add_argument("--out", help="file for the picture, such as imports.png")
    arguments = parser.parse_args()
    graph = imports(arguments.package)
    levels = floors(graph)
    count = sum(map(len, graph.values()))
    print(f"{len(graph)} rooms on {len(levels)} floors, {count} imports, no circle")
    for level, floor in reversed(list(enumerate(levels))):
        for room in floor:
            print(f"{level}  {room:<22} {', '.join(sorted(graph[room])) or '-'}")
    if arguments.out:
        draw(graph, arguments.out)


if __name__ == "__main__":
    main()
