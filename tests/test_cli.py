"""train.py and eval.py as they are typed: real processes, their exit codes and what they say."""

import csv
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import QUICK_COMPILE

from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Checkpoint, Config
from alibi_jax.data.windows import evaluation_windows
from alibi_jax.model import initial_params
from alibi_jax.provenance import provenance

ROOT = Path(__file__).parents[1]
LENGTH = 32
CONFIG = """
from alibi_jax.config import Config

def get_config():
    config = Config()
    config.data.dataset = "text"
    config.data.path = {text!r}
    config.data.data_dir = {data!r}
    config.model.num_layers = 1
    config.model.width = 16
    config.model.num_heads = 2
    config.train.length = 32
    config.train.batch_size = 8
    config.train.steps = 4
    config.train.log_every = 1
    config.train.validation_every = 0
    config.optimizer.warmup_steps = 1
    return config
"""
# The environment in which programs are compiled as users' programs are.
FULL_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
PROGRESS = re.compile(r"^.+: (step|window|document|byte) [\d,]+( of [\d,]+)?(, loss .* tokens/s)?$")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a text of 30 kB and config.py, a tiny run on it."""
    folder = tmp_path_factory.mktemp("inputs")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} says that {i * i % 97} is next\n" for i in range(1000)))
    (folder / "config.py").write_text(CONFIG.format(text=str(text), data=str(folder / "data")))
    return folder


def start(script, *arguments, cwd, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        cwd=cwd,
        # The embedded corpus is never to be prepared in the home directory.
        env=kept | QUICK_COMPILE | {"TFDS_DATA_DIR": str(cwd / "tfds")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """(exit code, standard output, lines of standard error that tell no progress)."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    # A log has whole lines only: nothing returns to the start of one, or moves up.
    assert "\r" not in err
    assert "\x1b" not in err
    lines = [line.strip() for line in err.splitlines()]
    return process.returncode, out, [x for x in lines if x and not PROGRESS.search(x)]


def run(script, *arguments, cwd, **environment):
    return finish(start(script, *arguments, cwd=cwd, **environment))


def refuses(script, *arguments, cwd, says, **environment):
    """Runs a command that is to fail with one line, which holds all of `says`."""
    before = sorted(cwd.rglob("*"))
    code, out, lines = run(script, *arguments, cwd=cwd, **environment)
    assert code == 1, (out, lines)
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for part in says:
        assert part in lines[0]
    assert sorted(cwd.rglob("*")) == before


@pytest.fixture(scope="module")
def trained(inputs):
    """`trained("alibi")`: the workdir of a run of that position method."""
    made = {}

    def train(position):
        if position not in made:
            workdir = inputs / "runs" / position
            arguments = (
                f"--config={inputs / 'config.py'}",
                f"--config.model.position={position}",
            )
            arguments += (f"--workdir={workdir}",)
            code, out, lines = run("train.py", *arguments, cwd=inputs, **FULL_COMPILE)
            assert (code, lines) == (0, [])
            assert f"eval.py --workdir={workdir}" in out
            made[position] = workdir
        return made[position]

    return train


def results(folder):
    return json.loads((folder / "results.json").read_text())


# What is refused before anything of JAX or the data is touched; with configs/tiny.py.
@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.model.positon=rotary", ["model.positon", "did you mean 'position'?"]),
        ("--config.modle.position=rotary", ["modle", "did you mean 'model'?"]),
        ("--confg=x", ["'confg'", "config"]),
        ("--wrokdir=x", ["'wrokdir'", "workdir"]),
        ("--config.model=3", ["model is a whole section", "position, rescaling"]),
        ("--config.model.num_heads=x", ["model.num_heads='x'", "type int"]),
        ("--config.model.num_heads=2.5", ["model.num_heads='2.5'", "type int"]),
        ("--config.model.num_kv_heads=x", ["model.num_kv_heads='x'", "type int | None"]),
        ("--config.model.tied_embeddings=maybe", ["model.tied_embeddings='maybe'", "type bool"]),
        ("--config.optimizer.learning_rate=fast", ["optimizer.learning_rate='fast'", "float"]),
        ("--config.model.num_heads=7", ["model.num_heads=7", "model.width=128", "1, 2, 4"]),
        (
            "--config.train.accumulation=5",
            ["train.accumulation=5", "train.batch_size=32", "1, 2, 4, 8, 16, 32"],
        ),
        ("--config.model.position=alibbi", ["model.position='alibbi'", "'alibi'?"]),
        ("--config.train.length=0", ["train.length=0", "at least 1"]),
        ("--config.train.length=-1", ["train.length=-1", "at least 1"]),
        ("--config.model.dropout=nan", ["model.dropout=nan", "at least 0"]),
        ("--config=missing.py", ["--config=missing.py", "no such file"]),
        ("--config=", ["--config=", "no such file"]),
        ("--config=~nobody-here/c.py", ["--config=~nobody-here/c.py", "no such home folder"]),
        ("--noconfig.x", ["config.x", "no such key", "known: data"]),
        ("-noconfig.model.tied_embedings=1", ["model.tied_embedings", "'tied_embeddings'?"]),
        ("--noconfig.model.width", ["'noconfig.model.width'", "Did you mean: config.model.width"]),
        ("--flagfile=missing", ["error: Unable to open flagfile", "missing", "No such file"]),
        ("--join_timeout=soon", ["--join_timeout=soon", "type int"]),
        ("--debug=maybe", ["--debug=maybe", "type bool"]),
        ("--workdir=", ["--workdir=", "give a path"]),
        ("--plan=", ["--plan=", "v5e:16x16"]),
        ("leftover", ["'leftover'", "--NAME=VALUE"]),
        ("--compilation_cache=gs://x", ["--compilation_cache=gs://x", "mount the bucket"]),
        (f"--compilation_cache={__file__}", ["test_cli.py is a file: give a folder"]),
    ],
)
@pytest.mark.sample(12)
def test_train_refuses_what_is_typed_wrong(argument, says, tmp_path):
    refuses("train.py", "--workdir=run", argument, cwd=tmp_path, says=says)


@pytest.mark.parametrize("given", [["--config.model.positon=3"], ["--config.model.num_heads", "x"]])
def test_a_config_file_that_is_named_changes_nothing_of_that(given, inputs, tmp_path):
    name = given[0].partition("=")[0].removeprefix("--config.")
    config = f"--config={inputs / 'config.py'}"
    refuses("train.py", "--workdir=run", config, *given, cwd=tmp_path, says=[name])


def test_every_named_config_file_is_checked(inputs, tmp_path):
    config = f"--config={inputs / 'config.py'}"
    refuses("train.py", config, "--config=gone.py", cwd=tmp_path, says=["--config=gone.py", "file"])
    says = ["--config.train.steps=3", "give --config=FILE first"]
    refuses("train.py", "--config.train.steps=3", config, cwd=tmp_path, says=says)
    (tmp_path / "flags").write_text("--config.modle.width=3\n")
    refuses("train.py", config, "--flagfile=flags", cwd=tmp_path, says=["modle", "'model'?"])


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_in_every_path(inputs, tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    home.mkdir()
    (home / "text.txt").write_text((inputs / "text.txt").read_text())
    (home / "c.py").write_text((inputs / "config.py").read_text())
    arguments = (
        "--config=~/c.py",
        "--workdir=~/run",
        "--config.data.path=~/text.txt",
        "--config.data.data_dir=~/data",
        "--compilation_cache=~/cache",
    )
    code, out, lines = run("train.py", *arguments, cwd=here, HOME=str(home))
    assert (code, lines) == (0, [])
    assert f"eval.py --workdir={home / 'run'}" in out
    arguments = (
        "--workdir=~/ru*",
        "--out=~/out",
        "--judge=~/run",
        "--data_path=~/text.txt",
        "--data_dir=~/data",
        "--lengths=1x,2x",
        "--attention=",
        "--targets=32",
        "--passage=8",
    )
    code, _, lines = run("eval.py", *arguments, cwd=here, HOME=str(home))
    assert (code, lines) == (0, [])
    made = {path.name for path in home.iterdir()}
    assert {"run", "data", "cache", "out"} <= made
    assert not list(here.iterdir())


@pytest.mark.slow
def test_work_is_not_lost_where_nothing_can_be_printed(inputs, tmp_path):
    train = f'exec "{sys.executable}" {ROOT / "train.py"} --config={inputs / "config.py"}'
    # Nobody reads standard output, and standard error is closed.
    command = f"{train} --workdir=run > >(exec >&-) 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
    command = f"{train} --config.model.widht=3 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_program_that_may_start_no_thread_says_so_and_ends(inputs, tmp_path):
    program = tmp_path / "program.py"
    # No machine has 64 TiB of addresses for the stack of a thread.
    program.write_text(
        "import runpy, sys, threading\n"
        "threading.stack_size(1 << 46)\n"
        f"sys.argv[0] = {str(ROOT / 'train.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    says = ["start no other thread", "ulimit -u", "give the same command again"]
    refuses(program, f"--config={inputs / 'config.py'}", "--workdir=run", cwd=tmp_path, says=says)


def test_errors_that_follow_from_a_failed_save_are_not_shown(tmp_path):
    """tensorstore raises them where nobody can catch them, as an object does that is deleted."""
    program = tmp_path / "program.py"
    program.write_text(
        "from alibi_jax import cli\n"
        "class Deleted:\n"
        "    def __init__(self, text):\n"
        "        self.text = text\n"
        "    def __del__(self):\n"
        "        raise RuntimeError(self.text)\n"
        "def main():\n"
        "    Deleted('Event loop is closed')\n"
        "    Deleted('something else')\n"
        "    return 0\n"
        "cli.run(main)\n"
    )
    code, _, lines = run(program, cwd=tmp_path)
    assert code == 0
    assert [line for line in lines if line.startswith("RuntimeError")] == [
        "RuntimeError: something else"
    ]


@pytest.mark.slow
def test_results_are_printed_in_ascii_where_nothing_else_can_be(trained, tmp_path):
    quick = "--lengths=1x,2x", "--protocols=nonoverlapping,fixed", "--targets=32", "--passage=8"
    arguments = (f"--workdir={trained('alibi')}", "--attention=", "--out=out", *quick)
    code, out, lines = run("eval.py", *arguments, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (code, lines) == (0, [])
    assert out.isascii()
    (only,) = results(tmp_path / "out")["runs"]
    (gain,) = (entry["gain"] for entry in only["decomposition"]["lengths"] if entry["length"] == 64)
    # A true minus sign is printed as a hyphen.
    assert f"[{gain['low']:.4f}, {gain['high']:.4f}]" in out
    assert min(gain["low"], gain["high"]) < 0
    assert "wrote out/report.html" in out


IMPORT = "from alibi_jax.config import Config, Model\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", ["no get_config()"]),
        ("def get_config():\n  return 3\n", ["returned int", "alibi_jax.config.Config"]),
        ("def get_config():\n  pass\n", ["returned NoneType", "alibi_jax.config.Config"]),
        ("def get_config():\n  return {'model': 1}\n", ["returned dict"]),
        ("def get_config():\n  raise RuntimeError('boom')\n", ["RuntimeError: boom"]),
        ("def get_config(:\n", ["SyntaxError", "line 1"]),
        ("import nonesuch\n", ["No module named 'nonesuch'"]),
        (
            IMPORT + "def get_config():\n  c = Config()\n  c.model.positon = 'alibi'\n  return c\n",
            ["model.positon", "did you mean 'position'?"],
        ),
        (
            IMPORT + "def get_config():\n  return Config(model=Model(positon='alibi'))\n",
            ["model.positon", "did you mean 'position'?"],
        ),
        (IMPORT + "def get_config():\n  return Config(modle=Model())\n", ["modle", "'model'?"]),
        (
            IMPORT + "def get_config():\n  return Config(model=Model(num_heads='8'))\n",
            ["model.num_heads='8'", "type int"],
        ),
    ],
)
@pytest.mark.sample(4)
def test_train_refuses_a_config_file_that_is_wrong(text, says, tmp_path):
    (tmp_path / "c.py").write_text(text)
    # An override as well: it is not to hide what is wrong with the file.
    arguments = ("--workdir=run", "--config=c.py", "--config.model.width=64")
    refuses("train.py", *arguments, cwd=tmp_path, says=["--config=c.py", *says])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts that cannot be trained on."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "empty").mkdir()
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 100)
    (folder / "short.txt").write_text("a short text\n" * 2)
    return folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", ["data.path", "no text", "give files"]),
        ("missing", ["data.path", "does not exist", "give a text file"]),
        ("binary.txt", ["data.path", "binary.txt", "not UTF-8", "iconv"]),
        ("short.txt", ["train.length=32", "33 tokens", "choose a shorter train.length"]),
    ],
)
@pytest.mark.sample(2)
def test_train_refuses_text_that_is_none(name, says, inputs, texts, tmp_path):
    path = texts / name
    says = [path.name if says[0] == "data.path" else "", *says]
    arguments = (
        "--workdir=run",
        f"--config={inputs / 'config.py'}",
        f"--config.data.path={path}",
    )
    refuses("train.py", *arguments, cwd=tmp_path, says=says)


@pytest.mark.parametrize(
    ("devices", "arguments", "says"),
    [
        (3, [], ["train.batch_size", "8", "3 devices", "choose a multiple of 3"]),
        (4, ["--config.mesh.data=3"], ["mesh.data=3", "4 devices", "multiply"]),
        (4, ["--config.mesh.fsdp=-1"], ["mesh.fsdp=-1", "only one"]),
        (4, ["--config.mesh.tensor=4"], ["model.num_heads=2", "4 devices", "multiple of 4"]),
    ],
)
@pytest.mark.sample(2)
def test_train_refuses_what_does_not_fit_the_devices(devices, arguments, says, inputs, tmp_path):
    config = ("--workdir=run", f"--config={inputs / 'config.py'}")
    environment = {"JAX_NUM_CPU_DEVICES": str(devices)}
    refuses("train.py", *config, *arguments, cwd=tmp_path, says=says, **environment)


def test_train_refuses_a_workdir_of_another_vocabulary(inputs, trained):
    workdir = trained("alibi")
    arguments = (
        f"--config={inputs / 'config.py'}",
        f"--workdir={workdir}",
        "--config.data.tokenizer=bpe",
        "--config.data.vocab_size=300",
    )
    # Before the new tokenizer is trained and its tokens are written.
    says = ["data.tokenizer='bpe'", "'bytes'", "another --workdir"]
    refuses("train.py", *arguments, cwd=inputs, says=says)


def test_train_resumes_and_a_debug_run_shows_a_traceback(inputs, trained):
    config = (f"--config={inputs / 'config.py'}", f"--workdir={trained('alibi')}")
    code, out, lines = run("train.py", *config, cwd=inputs)
    assert (code, lines) == (0, [])
    assert "step 4 of 4" in out
    code, _, lines = run("train.py", *config, "--debug", "--config.model.width=18", cwd=inputs)
    assert code == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: model.width=18")


def test_the_traceback_of_a_config_file(tmp_path):
    (tmp_path / "c.py").write_text("def get_config():\n  raise RuntimeError('boom')\n")
    code, _, lines = run("train.py", "--config=c.py", "--debug", cwd=tmp_path)
    assert code == 1
    assert any(line.startswith('File "c.py", line 2') for line in lines)
    assert lines[-1] == "error: --config=c.py: RuntimeError: boom"


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_help_names_the_flags(script, tmp_path):
    code, out, lines = run(script, "--help", cwd=tmp_path)
    # absl's own exit code for help.
    assert (code, lines) == (1, [])
    assert out.lstrip().startswith(("Trains", "Evaluates"))
    for flag in ("workdir", "[no]debug", "coordinator", "num_processes", "compilation_cache"):
        assert f"--{flag}:" in out
    assert ("--config:" in out) == (script == "train.py")


@pytest.mark.slow
def test_a_smoke_run_needs_no_other_warm_up(inputs, tmp_path):
    arguments = (f"--config={inputs / 'config.py'}", "--config.optimizer.warmup_steps=50")
    code, out, lines = run("train.py", *arguments, "--config.train.steps=2", cwd=tmp_path)
    assert (code, lines) == (0, [])
    assert "optimizer.warmup_steps=50 is more than train.steps=2" in out


@pytest.mark.slow
def test_steps_are_traced_and_programs_kept(inputs, tmp_path):
    arguments = (
        f"--config={inputs / 'config.py'}",
        "--profile=2:3",
        "--compilation_cache=cache",
    )
    code, _, lines = run("train.py", *arguments, cwd=tmp_path)
    assert code == 0, lines
    assert list((tmp_path / "runs" / "config" / "profile").rglob("*.xplane.pb"))
    assert any("train_step" in path.name for path in (tmp_path / "cache").iterdir())
    refuses("train.py", "--plan=cpu:1", "--profile=2:3", cwd=tmp_path, says=["a plan runs no step"])


def test_metrics_have_a_line_a_logged_step(trained):
    lines = (trained("alibi") / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    assert [value["step"] for value in values] == [1, 2, 3, 4]
    assert all({"loss", "tokens_per_second"} <= value.keys() for value in values)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], ["--workdir", "train.py"]),
        (["--workdir=missing"], ["missing", "no checkpoints", "train.py --workdir=missing"]),
        (["--workdir=empty"], ["empty", "no checkpoints", "train.py"]),
        (["--workdir=begun"], ["begun", "no complete checkpoint", "train first"]),
        (["--workdir=x", "leftover"], ["'leftover'"]),
        (["--workdir=x", "--split=dev"], ["--split=dev", "validation"]),
        (["--workdir=x", "--coordinator=localhost:1"], ["--coordinator", "--num_processes"]),
    ],
)
@pytest.mark.sample(2)
def test_eval_refuses_without_a_run(arguments, says, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    refuses("eval.py", *arguments, cwd=tmp_path, says=says)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--lengths=junk", ["--lengths=junk", "1x,2x"]),
        ("--step=7", ["--step=7", "[4]"]),
        ("--judge=missing", ["--judge=missing", "no checkpoints"]),
    ],
)
def test_eval_refuses_what_cannot_be_meant(argument, says, trained, tmp_path):
    workdir = trained("alibi")
    refuses("eval.py", f"--workdir={workdir}", argument, "--out=out", cwd=tmp_path, says=says)


@pytest.mark.slow
def test_eval_refuses_parameters_that_do_not_fit_their_metadata(tmp_path):
    config = Config()
    config.model.width, config.model.num_heads, config.model.num_layers = 16, 2, 1
    params = initial_params(config, 256, jax.random.key(0))
    config.model.width = 32
    metadata = Metadata(4, dataclasses.asdict(config), "text", {"kind": "bytes"}, 256, provenance())
    with Checkpoints(tmp_path / "run", Checkpoint()) as checkpoints:
        checkpoints.save(params, {"count": params["norm"]["bias"]}, metadata)
    says = ["params: layers.stacks.0", "(1, 16, 2, 8)", "(1, 32, 2, 16)", "another workdir"]
    refuses("eval.py", "--workdir=run", cwd=tmp_path, says=says)


def test_g4_alibi_evaluates_past_its_training_length(inputs, trained):
    workdir = trained("alibi")
    quick = "--targets=32", "--passage=8"
    code, out, lines = run(
        "eval.py",
        f"--workdir={workdir}",
        "--lengths=1x,8x,0.5x",
        *quick,
        cwd=inputs,
        **FULL_COMPILE,
    )
    assert (code, lines) == (0, [])
    (only,) = results(workdir / "eval")["runs"]
    assert only["train_length"] == LENGTH
    assert [(row["protocol"], row["length"]) for row in only["rows"]] == [
        (protocol, length) for protocol in ("nonoverlapping", "fixed") for length in (32, 256, 16)
    ]
    assert all(row["perplexity"] > 1 for row in only["rows"])
    for row in only["rows"]:
        assert f"{row['perplexity']:.3f}" in out


@pytest.mark.slow
def test_g4_learned_says_why_it_has_no_number_past_its_table(inputs, trained, tmp_path):
    alibi, learned = trained("alibi"), trained("learned")
    code, out, lines = run(
        "eval.py",
        f"--workdir={alibi}",
        f"--workdir={learned}",
        "--lengths=1x,4x",
        "--protocols=nonoverlapping,sliding:16",
        "--out=out",
        cwd=tmp_path,
    )
    assert (code, lines) == (1, [])
    by_position = {r["position"]: r["rows"] for r in results(tmp_path / "out")["runs"]}
    assert list(by_position) == ["alibi", "learned"]
    for rows in by_position.values():
        assert [row["length"] for row in rows] == [32, 128, 32, 128]
    for row in by_position["alibi"]:
        assert "error" not in row
    for row in by_position["learned"]:
        if row["length"] == LENGTH:
            assert "error" not in row
        else:
            assert "nll" not in row
            assert re.search(rf"\b{LENGTH}\b.*\b{row['length']}\b", row["error"])
            assert row["error"] in out
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["quantity"] == "nll"]
    assert len(found) == 8 - 2
    assert not (learned / "eval").exists()


def test_f10_two_processes_evaluate_as_one(inputs, trained, tmp_path):
    """Two processes with two devices each; the number of windows is no multiple of four."""
    arguments = (
        f"--workdir={trained('alibi')}",
        "--lengths=1x,5x",
        "--protocols=nonoverlapping,sliding:24,fixed",
        "--targets=30",
        "--passage=8",
        "--batch_tokens=256",
    )
    code, _, lines = run("eval.py", *arguments, "--out=one", cwd=tmp_path)
    assert (code, lines) == (0, [])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        start(
            "eval.py",
            *arguments,
            f"--out=two_{number}",
            f"--coordinator=localhost:{port}",
            "--num_processes=2",
            f"--process_id={number}",
            cwd=tmp_path,
            JAX_NUM_CPU_DEVICES="2",
        )
        for number in range(2)
    ]
    try:
        done = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _, _ in done] == [0, 0], done
    # Process 0 alone speaks and writes.
    assert "perplexity" in done[0][1]
    assert "perplexity" not in done[1][1]
    assert not (tmp_path / "two_1").exists()
    one, two = results(tmp_path / "one"), results(tmp_path / "two_0")
    assert two["processes"] == 2
    assert two["devices"].startswith("4 x")
    (one,), (two,) = one["runs"], two["runs"]
    for a, b in zip(one["rows"], two["rows"], strict=True):
        if a["protocol"] != "fixed":
            bounds = np.array([0, a["targets"] + 1])
            assert len(evaluation_windows(bounds, a["length"], a["stride"])) % 4
        assert a["targets"] == b["targets"]
        assert b["nll"] == pytest.approx(a["nll"], rel=1e-6)
        assert b["bits_per_byte"] == pytest.approx(a["bits_per_byte"], rel=1e-6)
    for a, b in zip(one["decomposition"]["lengths"], two["decomposition"]["lengths"], strict=True):
        for name in ("curse", "early_tokens", "context"):
            assert b[name] == pytest.approx(a[name], abs=2e-6)
    for a, b in zip(one["attention"], two["attention"], strict=True):
        assert b["resolution"] == pytest.approx(a["resolution"], rel=1e-4)
