"""The commands that pages show, and the flags that programs have, read without running them."""

import ast
import dataclasses
import re

from helpers import REPOSITORY

# The texts of the pages whose commands users copy, by name.
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
        *sorted((REPOSITORY / "docs").glob("*.md")),
    ]
}
# A command ends where another one begins, where a comment begins, or at the end of its line.
_COMMAND = re.compile(r"\bpython ([\w./]+\.py)\b([^&|;\"#\n]*)")


def blocks(text):
    """The fenced blocks of shell commands of a page."""
    return re.findall(r"^```sh\n(.*?)\n^```$", text, re.MULTILINE | re.DOTALL)


def commands(text):
    """(program, its flags) of each `python PROGRAM ...` in the blocks and inline code of a page.

    Brackets around flags that may be left out are removed.
    """
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    sources = [re.sub(r"\\\n\s*", "", block) for block in blocks(text)]
    sources += [" ".join(code.split()) for code in inline]
    found = (match for source in sources for match in _COMMAND.finditer(source))
    return [(match[1], re.sub(r"[\[\]]", "", match[2]).split()) for match in found]


def usage(path):
    """(program, its flags) of each indented command in the docstring of a program."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return [
        command
        for line in re.findall(r"^    (python .*)$", text, re.MULTILINE)
        for command in commands(f"`{line}`")
    ]


def flags_of(program):
    """The names of the flags that a program defines, with argparse or absl.

    A program that calls `cli.define_config` has the flag `config`, and one that uses `cli` has the
    flags of that module.
    """
    source = (REPOSITORY / program).read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "define_config":
            names.add("config")
        elif re.match(r"DEFINE_|add_argument$", node.func.attr) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant):
                names.add(name.value.removeprefix("--"))
    if "cli.run(" in source:
        names |= flags_of("alibi_jax/cli.py")
    if program == "eval.py":
        from alibi_jax.evaluation import EvaluationOptions

        names |= {option.name for option in dataclasses.fields(EvaluationOptions)}
    return names


def assert_is_valid(program, flags):
    """Asserts that a program exists, and has the flags and the configuration's keys."""
    from alibi_jax.config import check_key

    assert (REPOSITORY / program).is_file(), program
    names = flags_of(program)
    for flag in flags:
        name = re.match(r"--([\w.]+)(=|$)", flag)
        assert name is not None, f"{program} takes no {flag}"
        if name[1].startswith("config.") and "config" in names:
            check_key(name[1].removeprefix("config."))
        else:
            assert name[1] in names, f"{program} has no --{name[1]}"
