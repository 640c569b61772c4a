"""What train.py and eval.py share: flags, joining other processes, errors in one line."""

import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from alibi_jax.config import Config, ConfigError, check_key, fields_of, local_path
from alibi_jax.config.paths import NO_ROOM
from alibi_jax.console import secure_streams
from alibi_jax.distributed import processes, sharding

_DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, for several processes that are started by hand."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes, with --coordinator."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Number of this process, from 0, with --coordinator."
)
_CACHE = flags.DEFINE_string(
    "compilation_cache", None, "Folder for compiled programs, which the next start then reads."
)
_JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Seconds within which all processes must start."
)
_CONFIG_KEY = re.compile(r"--?(?:no)?config\.([^=]*)")
_CONFIG_HELP = (
    "Configuration file: a Python file with get_config(). --config.SECTION.KEY=VALUE changes one "
    "of its values; alibi_jax/config/parts.py lists all keys."
)


def run(main: Callable[[], int]) -> NoReturn:
    """Parses the flags, runs `main` and exits with the code that it returns.

    An error prints one line on standard error and gives exit code 1. Ctrl-C gives 130, and so does
    SIGTERM where nothing has to be saved. `--help` lists the flags of this module along with those
    of the program.
    """
    secure_streams()
    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(lambda _: _guarded(main), flags_parser=_parse)
    raise AssertionError("app.run always exits")


def define_config(default: pathlib.Path) -> flags.FlagHolder[Config]:
    """Defines the flags --config=FILE and --config.a.b=VALUE.

    Keys and files are checked before the flag library sees them, since its own errors are
    tracebacks. Without --config the library reads `default` while it defines the flag.
    """
    secure_streams()
    try:
        # The library reads the files of --flagfile too, so their lines are checked as well.
        sys.argv[:] = flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False)
        for argument in sys.argv[1:]:
            if key := _CONFIG_KEY.match(argument):
                check_key(key[1])
        for index, prefix, name in list(_named_configs(sys.argv)):
            for argument in filter(_CONFIG_KEY.match, sys.argv[:index]):
                raise ConfigError(f"{argument} is before --config={name}: give --config=FILE first")
            # The library does not know that ~ is the home folder.
            sys.argv[index] = prefix + _read_config(name)
        holder = config_flags.DEFINE_config_file("config", str(default), _CONFIG_HELP)
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _fail(_value_remedy(str(error)))
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["config"])
    return holder


def start_devices(batch_size: int = 0, sizes: Sequence[int] = (-1,)) -> None:
    """Makes CPU cores devices of JAX, and joins the other processes of the run.

    Call it before any device is used. On a CPU, as many cores become devices as `batch_size` (0:
    any number) and a mesh of these `sizes` allow; `sharding.use_cpu_cores` says how many.
    """
    sharding.use_cpu_cores(batch_size, sizes, _NUM_PROCESSES.value or 1)
    processes.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _JOIN_TIMEOUT.value)


def _named_configs(argv: list[str]) -> Iterator[tuple[int, str, str]]:
    """For each --config, the index of the argument with the file's name, and its two parts.

    The parts are the text before the name and the name, which is empty if it is missing.
    """
    for index, argument in enumerate(argv):
        if argument.startswith(("--config=", "-config=")):
            prefix, equals, name = argument.partition("=")
            yield index, prefix + equals, name
        elif argument in ("--config", "-config"):
            yield index + 1, "", "".join(argv[index + 1 : index + 2])


def _read_config(name: str) -> str:
    """The name of a configuration file, with the home folder in place of `~`.

    Raises ConfigError that names the file unless its get_config() returns a Config.
    """
    # The text after a colon is an argument for get_config.
    given, *arguments = name.split(":", 1)
    path = local_path("--config", given)
    if not path.is_file():
        raise ConfigError(f"--config={name}: no such file; name a Python file with get_config()")
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        config = get_config(*arguments) if get_config is not None else None
    except Exception as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"--config={name}: {kind}{error}") from error
    if get_config is None:
        raise ConfigError(f"--config={name}: the file has no get_config(); see configs/tiny.py")
    if not isinstance(config, Config):
        raise ConfigError(
            f"--config={name}: get_config() returned {type(config).__name__}: return an "
            "alibi_jax.config.Config"
        )
    return ":".join([str(path), *arguments])


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        _fail(_value_remedy(str(error)))
    if len(rest) > 1:
        _fail(f"unexpected {rest[1]!r}: flags are --NAME=VALUE")
    return rest


def _value_remedy(message: str) -> str:
    """The type to give, if the value of a flag has a wrong one; else the library's message."""
    value = re.match(r"flag --([\w.]+)=(.*?): ", message, re.DOTALL)
    name, given = ("", "") if value is None else value.groups()
    if name.startswith("config."):
        _, part, key = name.split(".")
        wanted = fields_of(fields_of(Config)[part])[key]
        kind = getattr(wanted, "__name__", str(wanted))
        return f"{part}.{key}={given!r}: give a value of type {kind}"
    if name and (kind := flags.FLAGS[name].flag_type()) in ("int", "bool"):
        return f"--{name}={given}: give a value of type {kind}"
    return " ".join(message.removeprefix("ERROR:: ").split())


def _without_closed_loops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """`hook` for errors that nobody can catch, without those that follow from a failed save.

    When a save fails, Orbax closes its event loop. Each array that is still being written then has
    an error of its own, whose traceback would hide the line that names the failure.
    """

    def show(error: Any) -> None:
        if str(error.exc_value) != "Event loop is closed":
            hook(error)

    return show


def _guarded(main: Callable[[], int]) -> NoReturn:
    if not flags.FLAGS["verbosity"].present:
        # Orbax logs every file that it touches, and the traceback of each error that it also
        # raises; --verbosity=0 shows these lines.
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_handler().addFilter(
            lambda record: "orbax" not in pathlib.Path(record.pathname).parts
        )
        sys.unraisablehook = _without_closed_loops(sys.unraisablehook)
    try:
        if _CACHE.value is not None:
            _keep_programs(local_path("--compilation_cache", _CACHE.value))
        code = main()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if _DEBUG.value:
            traceback.print_exc()
        message = " ".join(str(error).split()) or "no message"
        known = isinstance(error, ValueError | OSError | FloatingPointError)
        if getattr(error, "errno", None) in NO_ROOM:
            message += ": make room there, and give the same command again"
        elif any("start new thread" in str(cause) for cause in _causes(error)):
            known = True
            message = (
                "the system lets this program start no other thread: raise its limit (ulimit -u, "
                "or the limit of the container), and give the same command again"
            )
        kind = "" if known else f"{type(error).__name__}: "
        hint = "" if known or _DEBUG.value else " (--debug shows where)"
        processes.exit_with_error(f"{kind}{message}{hint}", 1, maybe_peer_failure=not known)
    processes.announce_normal_exit()
    sys.exit(code)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _keep_programs(cache: pathlib.Path) -> None:
    """Keeps compiled programs in a folder. Raises ConfigError if it is a file."""
    if cache.exists() and not cache.is_dir():
        raise ConfigError(f"--compilation_cache={cache} is a file: give a folder, or a new name")
    jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _fail(message: str, code: int = 1) -> NoReturn:
    processes.exit_with_error(message, code)
