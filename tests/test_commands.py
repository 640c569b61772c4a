"""The commands that pages show: all name what exists, and those for one machine run as they stand.

test_benchmarks.py runs the benchmarks, test_distributed_processes.py the two terminals of
docs/pods.md, and `.ci/run` the README's test command.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from commands import PAGES, assert_is_valid, blocks, commands
from helpers import QUICK_COMPILE, REPOSITORY, free_port

# A block with one of these words is run by another test, or needs a cluster or a cloud account.
NOT_RUN_HERE = ("pytest", "--workdir=runs/two", "gcloud", "xpk", "srun")
# Functions of the shell that make each program of a block small, and install nothing.
SMALLER = """
set -eu
python3() { :; }
pip() { :; }
python() {
  local smaller=()
  case "$*" in
    *--plan=*) smaller=(--config.model.num_layers=1) ;;
    train.py*)
      smaller=(
        --config.model.num_layers=1 --config.model.width=16 --config.model.num_heads=2
        --config.model.ff_width=32 --config.train.length=64 --config.train.batch_size=8
        --config.train.accumulation=1 --config.train.steps=2 --config.train.validation_every=0
        --config.optimizer.warmup_steps=1
      )
      [[ "$*" != *configs/paper* ]] || smaller+=(--config.model.adaptive_cutoffs=20,60)
      [[ "$*" = *data.path* ]] ||
        smaller+=(--config.data.dataset=text --config.data.path=path/to/texts)
      ;;
    eval.py*) smaller=(--targets=16 --passage=8 --attention=) ;;
  esac
  "$PYTHON" "$@" "${smaller[@]}"
}
"""
# Without this a block ends before the programs that it has started in the background.
WAIT = '\nfor job in $(jobs -p); do wait "$job"; done\n'


def is_run_here(block):
    return "python " in block and not any(word in block for word in NOT_RUN_HERE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder like a copy of the repository, with texts where the README's commands have them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "eval.py", "configs"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "docs" / "figures").mkdir(parents=True)
    for path in (REPOSITORY / "docs").glob("*.py"):
        (folder / "docs" / path.name).symlink_to(path)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    # Bytes for windows of 4,096 in the validation split, which is a twentieth of a text.
    line = " It costs {} to send {} letters . \n"
    texts, wikitext = folder / "path" / "to" / "texts", folder / "path" / "to" / "wikitext-103"
    texts.mkdir(parents=True)
    (texts / "text.txt").write_text("".join(line.format(i % 97, i) for i in range(6000)))
    words = " = Costs = \n" + "".join(line.format(i, i) for i in range(97))
    wikitext.mkdir()
    for split in ("train", "valid", "test"):
        (wikitext / f"wiki.{split}.tokens").write_text(words)
    return folder


@pytest.fixture(scope="module")
def run_block(checkout):
    """A function that runs a block of commands in the folder, and returns what it prints."""

    def run(block):
        script = SMALLER + block.replace("localhost:9876", f"localhost:{free_port()}") + WAIT
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=checkout,
            env=os.environ
            | {"PYTHON": sys.executable, "TFDS_DATA_DIR": str(checkout / "data")}
            | QUICK_COMPILE,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def readme(run_block):
    """What each block of the README printed, in their order, without the plan."""
    return {
        block: run_block(block)
        for block in blocks(PAGES["README.md"])
        if is_run_here(block) and "--plan=" not in block
    }


def plans():
    """The blocks of the pages that make a plan."""
    return [
        pytest.param(block, id=f"{page}, {re.search('--plan=([^ ]*)', block)[1]}")
        for page, text in PAGES.items()
        for block in blocks(text)
        if "--plan=" in block
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_command_names_a_program_and_flags_that_exist(page):
    for program, flags in commands(PAGES[page]):
        assert_is_valid(program, flags)


@pytest.mark.parametrize("page", PAGES)
def test_a_command_names_tests_and_extras_that_exist(page):
    text = PAGES[page]
    for path in re.findall(r"pytest [^`\n]*?\b(tests/[\w./]+)", text):
        assert (REPOSITORY / path).exists(), path
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"pip install [^`\n]*?\.\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_commands_are_found_on_the_pages():
    """So that the tests above cannot pass because they find no command."""
    found = {page: commands(text) for page, text in PAGES.items()}
    assert ("eval.py", ["--workdir=runs/tiny"]) in found["README.md"]
    # A command in a text that goes on in the next line, and one with a line that continues it.
    assert ("eval.py", ["--workdir=runs/NAME", "--lengths=1x,8x"]) in found["docs/positions.md"]
    assert ("train.py", "--config.mesh.fsdp=64") in [
        (program, flags[-1]) for program, flags in found["docs/pods.md"] if flags
    ]


@pytest.mark.slow
def test_the_figure_of_position_methods_is_drawn(run_block, checkout):
    run_block("python docs/draw_biases.py")
    assert (checkout / "docs/figures/biases.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_their_order(readme, checkout):
    runs = {path.parent.parent.name for path in checkout.glob("runs/*/checkpoints/2")}
    methods = {"alibi", "rotary", "sinusoidal", "t5", "none"}
    assert runs == {"tiny", "mine", "wikitext103"} | methods
    printed = "".join(readme.values())
    # One line for each run, and for the second process none: two commands resume a run.
    assert printed.count("step 2 of 2") >= len(runs)
    (only,) = json.loads((checkout / "runs/tiny/eval/results.json").read_text())["runs"]
    assert {(row["protocol"], row["length"]) for row in only["rows"]} == {
        (protocol, length)
        for protocol in ("nonoverlapping", "sliding")
        for length in (64, 128, 512, 4096)
    }
    compared = json.loads((checkout / "runs/comparison/results.json").read_text())["runs"]
    assert {run["position"] for run in compared} == methods


@pytest.mark.slow
def test_the_commands_of_the_page_of_evaluation_run(readme, run_block, checkout):
    shutil.rmtree(checkout / "runs" / "comparison")
    (block,) = blocks(PAGES["docs/evaluation.md"])
    run_block(block)
    compared = json.loads((checkout / "runs/comparison/results.json").read_text())["runs"]
    assert [run["position"] for run in compared] == ["alibi", "rotary"]


@pytest.mark.slow
def test_the_commands_of_the_page_of_position_methods_run(run_block, checkout):
    for program, flags in commands(PAGES["docs/positions.md"]):
        if program in ("train.py", "eval.py"):
            command = " ".join(["python", program, *flags])
            run_block(command.replace("NAME", "fox"))
    (only,) = json.loads((checkout / "runs/fox/eval/results.json").read_text())["runs"]
    assert {row["length"] for row in only["rows"]} == {64, 512}


@pytest.mark.slow
@pytest.mark.parametrize("block", plans())
def test_the_plans_of_the_pages_fit(block, run_block):
    """With one layer. The exit code is 0 only if the run fits."""
    pytest.importorskip("libtpu")
    target = re.search("--plan=([^ ]*)", block)[1]
    printed = run_block(block)
    assert printed.startswith(f"plan for {target}: ")
    assert "ESTIMATE of the time of a step" in printed


def test_no_block_of_commands_is_left_out():
    """The tests above run all blocks of two pages, and the plans of every page."""
    for page, text in PAGES.items():
        if page not in ("README.md", "docs/evaluation.md"):
            for block in filter(is_run_here, blocks(text)):
                assert "--plan=" in block, f"{page} has a block that no test runs: {block}"
