"""Random command lines of train.py and eval.py: each is answered with one line, or taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import fuzz, inputs
from hypothesis import strategies as st

from alibi_jax.config import POSITIONS, Config, flatten
from alibi_jax.evaluation.options import EvaluationOptions

SERVER = Path(__file__).parent / "command_line_server.py"
KEYS = [f"config.{key}" for key in flatten(Config())]
SHARED = ["debug", "coordinator", "num_processes", "process_id", "compilation_cache"]
ABSL = [
    *("verbosity", "v", "stderrthreshold", "logger_levels", "logtostderr", "alsologtostderr"),
    *("showprefixforinfo", "log_dir", "flagfile", "undefok", "help", "helpshort", "helpfull"),
    *("helpxml", "?", "only_check_args", "version"),
]
# The flags that ask for more than one line.
MORE_LINES = ("debug", "verbosity", "-v", "stderrthreshold", "logger_levels", "logto")
FLAGS = {
    "train.py": ["config", "plan", "profile", "step", "workdir", *SHARED],
    "eval.py": ["workdir", "out", *EvaluationOptions.__dataclass_fields__, *SHARED],
}
# Values that a flag may take, and values that are nearly so.
MEANT = {
    "coordinator": ["localhost:", ":0", "localhost:²", "localhost:99999", "[::1]", "localhost:-1"],
    "plan": ["cpu:0", "cpu:²", "v5e:²x2", "v5e:0x0", "v5e", "²*v5e:2x2", "cpu:2,searhc"],
    "profile": ["10:15", "15:10", ":", "1:", ":1", "0:1", "²:³", "-1:2", "1:2:3"],
    "lengths": ["1x,2x", "512,", "0x", "-1x", "1.5x", "x1", "²x", "1x,1x", "٣"],
    "attention": ["", "1x", "64", "64,x", "²"],
    "protocols": ["sliding:64", "sliding:0", "sliding:²", "sliding", "fixed,fixed", "fixed:2"],
    "rescalings": ["linear:2", "linear:0", "linear:nan", "linear:inf", "ntk:²", "yarn:1e39"],
    "mesh": ["fsdp=2", "fsdp=0", "fsdp=", "data=-1,fsdp=-1", "fsdp=²", "tensor=٣", "fsdp=99999999"],
    "config": ["file", ".", "", "missing.py", "file:x", "/dev/null"],
    "workdir": [".", "file", "gs://x", "runs/*", "[", "~"],
    "out": ["file", "gs://x", "file/x", "/proc/x"],
}
# No value lets a run begin: each plan is for no device, and each coordinator is at no address.
VALUES = st.sampled_from(
    [
        *(
            "",
            " ",
            "0",
            "1",
            "-1",
            "2",
            "007",
            "1e3",
            "1.5",
            "nan",
            "inf",
            "-inf",
            "1e39",
            "²",
            "٣",
        ),
        *(
            "2147483648",
            "9223372036854775808",
            str(10**40),
            "1_000",
            "0x10",
            "None",
            "none",
            "null",
        ),
        *(
            "true",
            "False",
            "yes",
            "ja",
            "é",
            "語",
            "🙂",
            "\udcff",
            "\u2028",
            "a\nb",
            "\t",
            "'",
            '"',
        ),
        *(
            "text",
            "words",
            "bfloat16",
            "x" * 300,
            "..",
            "/",
            "*",
            "a=b",
            "--config",
            "=",
            ",",
            ",,",
        ),
        *("validation", *POSITIONS, *(value for values in MEANT.values() for value in values)),
    ]
) | st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=6)
FORMS = st.sampled_from(["--{}={}"] * 6 + ["-{}={}", "--{} {}", "--no{}", "--{}", "---{}={}"])


@st.composite
def arguments_of(draw, script):
    """One flag in one of the forms in which flags are typed, right or wrong."""
    if draw(st.integers(0, 30)) == 0:
        address = draw(st.sampled_from(MEANT["coordinator"]))
        number = draw(st.sampled_from([-1, 0, 1, 2]))
        return [f"--coordinator={address}", "--num_processes=2", f"--process_id={number}"]
    names = st.sampled_from(FLAGS[script]) | st.sampled_from([*FLAGS[script], *ABSL])
    name = draw(names | st.sampled_from(KEYS) if script == "train.py" else names)
    meant = name in MEANT and draw(st.integers(0, 3)) > 0
    value = draw(st.sampled_from(MEANT[name]) if meant else VALUES)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(name)))
        name = draw(st.sampled_from([name[:at] + name[at + 1 :], f"{name[:at]}é{name[at:]}"]))
    flag, *separate = draw(FORMS).split(" ")
    return [flag.format(name, value), *([value] if separate else [])]


@st.composite
def command_lines(draw):
    """A script and its arguments, in any order and number."""
    script = draw(st.sampled_from(list(FLAGS)))
    given = draw(st.lists(arguments_of(script), max_size=2))
    if draw(st.integers(0, 9)) == 0:
        given.append([draw(VALUES)])
    return script, [
        argument for arguments in draw(st.permutations(given)) for argument in arguments
    ]


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """`call(script, arguments)` gives (code, out, lines of standard error)."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "file").write_text("a file, not a folder\n")
    with subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def ask(script, arguments):
            request = {
                "script": script,
                "arguments": arguments,
                "folder": str(folder),
                "seconds": 60,
            }
            print(json.dumps(request), file=server.stdin, flush=True)
            reply = json.loads(server.stdout.readline())
            assert [path.name for path in folder.rglob("*")] == ["file"]
            return reply["code"], reply["out"], reply["error"].split("\n")[:-1]

        yield ask
        server.stdin.close()


@inputs(few=30, many=5_000)
def test_command_lines_are_answered_in_one_line(count, call):
    def answer(command):
        script, arguments = command
        # A line without a fault ends at the workdir, which is a file. The flag before it is for a
        # flag without a value, which takes the next argument.
        given = [*arguments, "--nodebug", "--workdir=file", "--join_timeout=1"]
        code, out, lines = call(script, given)
        shown = f"{script} {given}: exit code {code}\n{out}\n" + "\n".join(lines)
        assert code in (0, 1), shown
        if any(argument.lstrip("-").startswith(("help", "?")) for argument in arguments) and out:
            assert not lines, shown
            return f"{script}: help"
        if code == 0:
            assert any("only_check" in argument for argument in arguments), shown
            return f"{script}: checked only"
        # Log lines and tracebacks may come before, but only where they were asked for.
        if not any(asked in argument for asked in MORE_LINES for argument in arguments):
            assert len(lines) == 1, shown
        assert lines[-1].startswith("error: "), shown
        assert "--debug shows" not in lines[-1], shown
        if "--workdir=file is a file" in lines[-1] or "file: no checkpoints" in lines[-1]:
            return f"{script}: taken"
        names = [name.removeprefix("config.") for name in (*FLAGS[script], *ABSL, *KEYS)]
        names += ["flag", "key", "level", "section", "unexpected", "process"]
        assert any(name in lines[-1] for name in names if len(name) > 1), shown
        return f"{script}: refused"

    fuzz(command_lines(), answer, count)
