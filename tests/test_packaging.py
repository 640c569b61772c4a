"""What is installed with the package, what it imports, and what a type checker sees of it."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import alibi_jax
from alibi_jax.attention import api

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(lines):
    """{package: requirement} of requirement lines."""
    found = {}
    for line in lines:
        line = line.partition("#")[0].strip()
        if line:
            found[re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")] = line
    return found


def test_requirements_are_the_core_and_what_training_needs():
    core = requirements(PROJECT["dependencies"])
    train = requirements(PROJECT["optional-dependencies"]["train"])
    assert requirements((ROOT / "requirements.txt").read_text().splitlines()) == core | train


def test_the_citation_and_the_changelog_name_this_version():
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    changelog = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert citation.strip('"') == changelog == alibi_jax.__version__


def test_every_requirement_has_its_reason():
    page = (ROOT / "docs/dependencies.md").read_text().lower().replace("_", "-")
    for package in requirements((ROOT / "requirements.txt").read_text().splitlines()):
        assert f"| {package} |" in page, package


@pytest.mark.parametrize("extra", ["test", "bench", "peers", "tpu", "cuda13"])
def test_what_runs_programs_brings_what_they_need(extra):
    assert "alibi-jax[train]" in PROJECT["optional-dependencies"][extra]


CORE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ImportError(f"{{name}} is not among what the core needs")

sys.meta_path.insert(0, Refused())
import jax, numpy as np
import alibi_jax, alibi_jax.biases, alibi_jax.rotations, alibi_jax.embeddings
from alibi_jax.attention import alibi_attention, attention
from alibi_jax.attention import context_parallel, rolling_cache, statistics
q = jax.random.normal(jax.random.key(0), (1, 600, 8, 16))
assert np.isfinite(alibi_attention(q, q, q, alibi_jax.alibi_slopes(8))).all()
assert alibi_jax.alibi_bias(8, 4).shape == (8, 4, 4)
print(alibi_jax.__version__)
"""


def test_the_core_imports_jax_numpy_and_jaxtyping_only():
    core = requirements(PROJECT["dependencies"])
    others = requirements(PROJECT["optional-dependencies"]["train"]).keys() - core.keys()
    modules = {name.replace("-", "_") for name in others} | {"absl", "orbax", "pytest", "beartype"}
    code = CORE.format(refused=sorted(modules))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{alibi_jax.__version__}\n"), done.stderr


def test_flax_attention_is_on_the_face_and_imported_when_asked_for():
    code = (
        "import sys, alibi_jax; assert 'flax' not in sys.modules\n"
        "from alibi_jax import alibi_attention_fn; assert 'flax' in sys.modules\n"
        "print(alibi_attention_fn.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "alibi_jax.flax_attention\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'alibi_bais'"):
        alibi_jax.alibi_bais  # noqa: B018


def test_without_flax_the_error_names_the_remedy():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "from alibi_jax import *\n"
        "from alibi_jax import alibi_attention_fn"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.endswith("for Flax's attention modules: pip install flax\n")


def test_a_type_checker_knows_every_option_of_attention():
    options = dict(inspect.signature(api.attention).parameters)
    named = {name for name, option in options.items() if option.kind is option.KEYWORD_ONLY}
    assert named == api._Options.__annotations__.keys() | {"return_residual"}


def test_a_type_checker_sees_the_types(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(
        "from alibi_jax import alibi_bias, alibi_slopes\n"
        "from alibi_jax.attention import alibi_attention\n"
        "reveal_type(alibi_bias(8, 16))\n"
        "reveal_type(alibi_attention)\n"
        "alibi_slopes('eight')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--config-file=", str(user)],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert 'Revealed type is "jax' in done.stdout, done.stdout + done.stderr
    assert "implementation: str | None" in done.stdout.replace("Union[str, None]", "str | None")
    assert 'has incompatible type "str"; expected "int' in done.stdout
