"""The recipes of docs/extending.md, followed word for word in a copy of the repository."""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/extending.md").read_text()
STEP = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<file>[^`]+)`, "
    r"(?:(?P<how>after|before|replace) `(?P<anchor>[^`]+)`(?: by)?|at the end)):\n\n"
    r"```python\n(?P<code>.*?)```$",
    re.MULTILINE | re.DOTALL,
)


def apply(step, root):
    """Makes one edit of the page; the line that it names must be there exactly once."""
    code = step["code"]
    if step["new"]:
        (root / step["new"]).write_text(code)
        return
    path = root / step["file"]
    text = path.read_text()
    if step["how"] is None:
        path.write_text(f"{text}\n\n{code}")
        return
    anchor = step["anchor"]
    if step["how"] == "replace":
        assert text.count(anchor) == 1, (step["file"], anchor)
        path.write_text(text.replace(anchor, code.strip()))
        return
    lines = text.splitlines(keepends=True)
    found = [number for number, line in enumerate(lines) if line.startswith(anchor)]
    assert len(found) == 1, (step["file"], anchor, found)
    at = found[0] + (step["how"] == "after")
    path.write_text("".join([*lines[:at], code, *lines[at:]]))


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the repository with every recipe followed."""
    root = tmp_path_factory.mktemp("extended")
    for name in ("alibi_jax", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "eval.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for step in STEP.finditer(PAGE):
        apply(step, root)
    run(root, "-m", "ruff", "check", "--quiet", "--fix", "alibi_jax")
    run(root, "-m", "ruff", "format", "--quiet", "alibi_jax")
    return root


def run(root, *command):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=root,
        env=environment | {"TFDS_DATA_DIR": str(root / "tfds")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(extended):
    flags = {
        "data.dataset": "pydoc",
        "model.position": "root,rotary",
        "model.activation": "reglu",
        "model.num_layers": 2,
        "model.width": 16,
        "model.num_heads": 2,
        "optimizer.name": "lion",
        "optimizer.learning_rate": 1e-3,
        "train.steps": 4,
        "train.length": 32,
        "train.batch_size": 8,
        "train.log_every": 1,
        "train.hidden_penalty": 0.5,
        "train.validation_every": 4,
        "train.validation_targets": 320,
    }
    run(extended, "train.py", *(f"--config.{key}={value}" for key, value in flags.items()))
    return extended / "runs/tiny"


def test_every_block_of_the_page_is_an_edit():
    assert len(re.findall(r"^```python$", PAGE, re.MULTILINE)) == len(list(STEP.finditer(PAGE)))


def test_the_table_counts_files_and_lines():
    """Lines that hold something, by recipe."""
    for title, row in (
        ("A position method", "a position method"),
        ("An activation", "an activation"),
        ("A rescaling", "a rescaling"),
        ("An optimizer", "an optimizer"),
        ("A dataset", "a dataset"),
        ("An evaluation protocol", "an evaluation protocol"),
        ("A loss term", "a loss term"),
        ("A figure", "a figure"),
    ):
        section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        steps = list(STEP.finditer(section))
        files = {step["new"] or step["file"] for step in steps}
        lines = sum(bool(line.strip()) for step in steps for line in step["code"].splitlines())
        cells = re.search(rf"^\| {row} \| (.*?) \| (\d+) \|$", PAGE, re.MULTILINE)
        assert str(len(files)) in cells[1], (title, len(files))
        assert int(cells[2]) == lines, (title, lines)


def test_the_recipes_keep_the_style(extended):
    run(extended, "-m", "ruff", "check", "alibi_jax")
    for step in STEP.finditer(PAGE):
        ast.parse((extended / (step["new"] or step["file"])).read_text())


def test_the_extended_package_trains(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


LOSS = """
import dataclasses
import jax, jax.numpy as jnp
from alibi_jax.config import Config, Model, Train
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.training.step import Trainer

def mean_loss(penalty):
    model = Model(num_layers=1, width=16, num_heads=2)
    train = Train(length=16, batch_size=4, hidden_penalty=penalty)
    trainer = Trainer(Config(model=model, train=train), 256, make_mesh())
    tokens = jnp.arange(64).reshape(4, 16)
    batch = {"inputs": tokens, "targets": tokens}
    total, count = trainer.loss(trainer.initial_state().params, batch, jax.random.key(0))
    return float(total / count)

print(mean_loss(0.5) - mean_loss(0.0))
"""


@pytest.mark.slow
def test_the_new_loss_term_is_in_the_loss(extended):
    """After the last norm hidden states have a mean square of 1."""
    assert float(run(extended, "-c", LOSS)) == pytest.approx(0.5, abs=1e-3)


GATED = """
from alibi_jax.config import Config, Model
from alibi_jax.flops import step_flops

def flops(activation):
    return step_flops(Config(model=Model(activation=activation)), 256).model

print(flops("reglu") - flops("swiglu"), flops("reglu") > flops("relu"))
"""


def test_the_new_activation_is_gated_in_the_flops(extended):
    assert run(extended, "-c", GATED).split() == ["0.0", "True"]


DECODE = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from alibi_jax.evaluation import load_run

run = load_run(pathlib.Path(sys.argv[1]))
model = nnx.merge(run.graphdef, run.params)
tokens = jax.random.randint(jax.random.key(0), (2, 40), 1, 256)
whole = model.hidden_states(tokens)
cache, parts = model.init_cache(2, 40), []
for chunk in (tokens[:, :13], tokens[:, 13:14], tokens[:, 14:]):
    hidden, cache = model.hidden_states_with_cache(chunk, cache)
    parts.append(hidden)
print(float(jnp.abs(jnp.concatenate(parts, axis=1) - whole).max()))
"""


@pytest.mark.slow
def test_the_new_method_decodes_exactly(extended, trained):
    assert float(run(extended, "-c", DECODE, trained)) < 1e-5


def test_the_new_protocol_and_figure_are_in_the_report(extended, trained):
    flags = "--lengths=1x,2x", "--protocols=nonoverlapping,first", "--attention=", "--targets=64"
    out = run(extended, "eval.py", f"--workdir={trained}", *flags)
    assert re.search(
        r"^runs/tiny\s+root,rotary\s+32\s+first ", out.replace(f"{extended}/", ""), re.M
    )
    results = json.loads((trained / "eval/results.json").read_text())
    (entry,) = results["runs"]
    first = [row for row in entry["rows"] if row["protocol"] == "first"]
    # One text, the split: its first window alone.
    assert [row["targets"] for row in first] == [32, 64]
    assert all(math.isfinite(row["perplexity"]) for row in first)
    for name in ("extrapolation_first", "bits_per_byte"):
        assert (trained / "eval" / f"{name}.png").is_file()
        assert f'id="{name}' in (trained / "eval/report.html").read_text()


@pytest.mark.slow
def test_the_new_rescaling_changes_long_inputs_alone(extended, trained):
    out = extended / "rescaled"
    flags = "--lengths=1x,4x", "--protocols=nonoverlapping", "--attention=", "--targets=64"
    rescalings = f"--workdir={trained}", f"--out={out}", "--rescalings=none,sqrt,linear"
    run(extended, "eval.py", *rescalings, *flags)
    runs = json.loads((out / "results.json").read_text())["runs"]
    nll = {
        (entry["rescaling"], row["length"]): row["nll"] for entry in runs for row in entry["rows"]
    }
    assert nll["sqrt", 32] == nll["none", 32]
    assert len({nll[rescaling, 128] for rescaling in ("none", "sqrt", "linear")}) == 3


PLAN = """
from alibi_jax.config import Config, Model, Optimizer, Train
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.plan.costs import bytes_on_device, step_bytes
from alibi_jax.training.step import Trainer

def state(name):
    config = Config(
        model=Model(num_layers=1, width=16, num_heads=2),
        optimizer=Optimizer(name=name),
        train=Train(length=16, batch_size=4),
    )
    trainer = Trainer(config, 256, make_mesh())
    held = bytes_on_device(trainer.abstract_state.optimizer)
    return held, step_bytes(config, 256, 1000, held, make_mesh())

adamw, lion = state("adamw"), state("lion")
print(adamw[0] - lion[0], adamw[1] - lion[1])
"""


def test_a_plan_counts_the_new_optimizers_state(extended):
    """Lion has one moment and AdamW two: what a plan says of memory and traffic follows."""
    held, moved = map(float, run(extended, "-c", PLAN).split())
    assert held > 0
    assert moved == 2 * held
