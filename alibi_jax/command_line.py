"""What train.py and eval.py share: flags, several processes, errors in one line."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from absl import app, flags, logging

from alibi_jax import sharding
from alibi_jax.config import Config, ConfigError, check_key, fields_of

_DEBUG = flags.DEFINE_bool("debug", False, "Show a traceback with an error.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where several processes are launched by hand."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many, with --coordinator.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which one this is, with --coordinator.")

# Set where a launcher has started several processes that jax.distributed knows how to find.
_CLUSTER_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def run(main: Callable[[], int]) -> NoReturn:
    """Parses the flags and exits with what `main` returns; any error is one line, exit 1."""
    app.run(lambda _: _guarded(main), flags_parser=_parse)
    raise AssertionError("app.run returns by exiting")


def checked(config: Any) -> Config:
    """What `get_config()` returned, with its values checked."""
    # A file that could not be read comes as an object that raises its error when used.
    check = getattr(config, "check", None)
    if not isinstance(config, Config) or check is None:
        raise ConfigError(
            f"--config: get_config() returned a {type(config).__name__}: return an "
            "alibi_jax.config.Config"
        )
    check()
    return config


def start_devices(batch_size: int, multiple: int = 1) -> None:
    """Joins the other processes, and makes each CPU core a device; before any device is used.

    `batch_size` rows are to split evenly, over a mesh that is a `multiple` wide.
    """
    by_hand = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    if any(value is not None for value in by_hand) and None in by_hand:
        raise ConfigError("--coordinator, --num_processes and --process_id go together")
    processes = _NUM_PROCESSES.value or 1
    sharding.use_cpu_cores(batch_size // processes, -(-multiple // processes))
    if processes > 1:
        jax.distributed.initialize(*by_hand)
    elif _in_cluster():
        jax.distributed.initialize()


def say(text: str) -> None:
    """Prints, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def _in_cluster() -> bool:
    workers = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return len(workers) > 1 or any(int(os.environ.get(name, "1")) > 1 for name in _CLUSTER_SIZES)


def _parse(argv: list[str]) -> list[str]:
    try:
        for argument in argv[1:]:
            if argument.startswith(("--config.", "-config.")):
                check_key(argument.partition("config.")[2].partition("=")[0])
        rest = flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        _fail(_value_remedy(argv, str(error)))
    except flags.Error as error:
        _fail(str(error))
    except Exception as error:
        if "--debug" in argv:
            raise
        _fail(f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
    if len(rest) > 1:
        _fail(f"unexpected {rest[1]!r}: flags are --NAME=VALUE")
    return rest


def _value_remedy(argv: list[str], message: str) -> str:
    for argument in argv[1:]:
        key, _, value = argument.partition("config.")[2].partition("=")
        part, _, name = key.partition(".")
        if name and f"config.{key}={value}" in message:
            wanted = fields_of(fields_of(Config)[part])[name]
            return f"{key}={value!r}: give a value of type {getattr(wanted, '__name__', wanted)}"
    return message


def _guarded(main: Callable[[], int]) -> NoReturn:
    if not flags.FLAGS["verbosity"].present:
        # Orbax tells of every file it touches; --verbosity=0 shows that.
        logging.set_verbosity(logging.WARNING)
    try:
        code = main()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if _DEBUG.value:
            traceback.print_exc()
        message = " ".join(str(error).split()) or "no message"
        known = isinstance(error, ValueError | OSError | FloatingPointError)
        kind = "" if known else f"{type(error).__name__}: "
        hint = "" if known or _DEBUG.value else " (--debug shows where)"
        _fail(f"{kind}{message}{hint}")
    sys.exit(code)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
