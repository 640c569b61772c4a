"""Every Python block that the documentation shows runs as it stands."""

import re
from pathlib import Path

import pytest

import alibi_jax
from alibi_jax.config import POSITIONS

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/attention.md", "docs/using-the-biases.md", "docs/positions.md")


def blocks(page):
    """The blocks of a page, with empty lines before them, so that errors name the page's line."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


@pytest.mark.parametrize(
    ("page", "source"),
    [
        pytest.param(page, source, id=f"{page}:{len(source) - len(source.lstrip()) + 1}")
        for page in PAGES
        for source in blocks(page)
    ],
)
def test_a_block_runs_as_it_stands(page, source):
    """The devices that a block asks for are those that the tests have."""
    exec(compile(source, ROOT / page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out(page):
    assert len(blocks(page)) == len(re.findall(r"```py|~~~|>>> ", (ROOT / page).read_text())) > 0


def test_the_page_names_every_bias_function():
    page = (ROOT / "docs/using-the-biases.md").read_text()
    table = page.partition("\n## The bias functions\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([a-z0-9]+_\w+|FireWeights|Decay|LinearBias|Bias)[`(]", table)) >= set(
        alibi_jax.biases.__all__
    )


def test_the_pages_name_every_position_method():
    readme = (ROOT / "README.md").read_text()
    row = re.search(r"^\| `--config\.model\.position` \| (.*);", readme, re.MULTILINE)[1]
    assert re.findall(r"`(\w+)`", row) == list(POSITIONS)
    table = (ROOT / "docs/positions.md").read_text().partition("\n| name |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(POSITIONS)


def test_every_code_in_the_name_of_a_test_is_explained():
    named = {
        code
        for path in (ROOT / "tests").glob("test_*.py")
        for code in re.findall(r"^def test_([a-i]\d+)_", path.read_text(), re.MULTILINE)
    }
    explained = re.findall(r"^\| ([a-i]\d+) \|", (ROOT / "tests/README.md").read_text(), re.M)
    assert set(explained) == named
    assert len(explained) == len(named)


def test_every_module_has_its_tests_under_its_name():
    """A test file names a module or package, or is in the list of the tests' page."""
    listed = (ROOT / "tests/README.md").read_text()
    package = ROOT / "alibi_jax"
    modules = {
        "_".join(path.relative_to(package).with_suffix("").parts).replace("___init__", "")
        for path in package.rglob("*.py")
    }
    for path in (ROOT / "tests").glob("test_*.py"):
        name = path.stem.removeprefix("test_")
        assert name in modules or f"`{path.name}`" in listed, path.name
