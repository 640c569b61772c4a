"""The packages of alibi_jax stand in an order, and each imports only from those before it."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "alibi_jax"

# From the mathematics to the programs; CONTRIBUTING.md has the same order with its reasons.
ROOMS = (
    "position_arrays",
    "angles",
    "biases",
    "rotations",
    "embeddings",
    "attention",
    "progress",
    "console",
    "config",
    "distributed",
    "positions",
    "data",
    "model",
    "flops",
    "provenance",
    "checkpoints",
    "report",
    "evaluation",
    "training",
    "plan",
    "flax_attention",
    "generate",
    "cli",
)
# The rooms that other people's models import, and the packages that these rooms may import.
CORE = ("position_arrays", "angles", "biases", "rotations", "embeddings", "attention")
CORE_IMPORTS = {"alibi_jax", "jax", "numpy", "jaxtyping"} | sys.stdlib_module_names


@pytest.fixture(scope="module")
def draw_imports():
    spec = importlib.util.spec_from_file_location("draw_imports", ROOT / "docs/draw_imports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_room_has_a_place_in_the_order(draw_imports):
    assert sorted(draw_imports.imports(PACKAGE)) == sorted(ROOMS)


def test_no_room_imports_one_that_stands_after_it(draw_imports):
    upward = [
        f"{room} imports {other}"
        for room, others in draw_imports.imports(PACKAGE).items()
        for other in others
        if ROOMS.index(other) > ROOMS.index(room)
    ]
    assert not upward


def test_the_contributors_page_has_the_same_order():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("\n| room |")[2].partition("\n\n")[0]
    cells = " ".join(line.split("|")[1] for line in table.splitlines()[2:])
    named = cells.replace("`", "").replace(",", "").split()
    assert named == list(ROOMS)


def files_of(room):
    return sorted([*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")])


@pytest.mark.parametrize("room", CORE)
def test_the_core_imports_nothing_but_jax_numpy_and_jaxtyping(room):
    for path in files_of(room):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in CORE_IMPORTS, (path, name)


@pytest.mark.parametrize(
    "face",
    [path for path in sorted(PACKAGE.rglob("__init__.py")) if path.parent != PACKAGE],
    ids=lambda path: path.parent.relative_to(PACKAGE).as_posix(),
)
def test_a_face_has_names_and_no_logic(face):
    tree = ast.parse(face.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert names or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


def test_few_files_name_the_axes_of_the_mesh():
    """The configuration, the table of logical axes, and plans, which suggest other meshes."""
    files = set()
    for path in PACKAGE.rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A key such as "mesh.fsdp", but no sentence.
                names |= set() if " " in node.value else set(node.value.split("."))
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.keyword | ast.arg):
                names.add(node.arg)
        # "data", "context" and "tensor" are words for other things too.
        if "fsdp" in names:
            files.add(path.relative_to(PACKAGE).as_posix())
    plans = {"plan/planner.py", "plan/search.py"}
    assert files == {"config/parts.py", "distributed/sharding.py", *plans}


def test_the_list_and_the_picture(draw_imports, capsys, monkeypatch, tmp_path):
    out = tmp_path / "imports.png"
    monkeypatch.setattr(sys, "argv", ["draw_imports.py", f"--out={out}"])
    draw_imports.main()
    assert capsys.readouterr().out.startswith(f"{len(ROOMS)} rooms on ")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_circle_is_named(draw_imports):
    with pytest.raises(ValueError, match="circle: one, two"):
        draw_imports.floors({"one": {"two"}, "two": {"one"}, "three": set()})
