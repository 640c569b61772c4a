"""What all fuzzers share: drawing inputs, counting what became of them, and what a refusal is."""

import collections
import contextlib
import resource
import signal

import jaxtyping
import pytest
from hypothesis import HealthCheck, given, settings

# An input is answered within seconds. An input that takes this long hangs.
_SECONDS = 60
# No input needs this much more memory than the inputs before it.
_MEMORY_KIB = 2**20


def inputs(few, many):
    """Runs a test with `few` inputs in the usual run, and with `many` behind `-m slow`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def fuzz(strategy, answer, count):
    """Calls `answer` with `count` inputs drawn from `strategy`, and prints the number of each word.

    `answer` returns one word for what became of an input, and raises an error for a fault. Up to
    200 inputs are the same at each run; more are drawn anew.
    """
    counts = collections.Counter()

    @settings(
        max_examples=count,
        derandomize=count <= 200,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value):
        with _limited():
            counts[answer(value)] += 1

    with pytest.MonkeyPatch.context() as patch:
        # The type checks of the tests would answer before the package does.
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        run()
    print(f"{sum(counts.values())} inputs:", dict(counts.most_common()))


@contextlib.contextmanager
def _limited():
    """Raises TimeoutError in a block that hangs, and AssertionError after one that takes memory."""

    def stop(*_):
        raise TimeoutError(f"no answer within {_SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _MEMORY_KIB


def one_line(error):
    """The message of an error, which is one line that is not too long to read."""
    message = str(error)
    assert message
    assert "\n" not in message
    assert len(message) < 1000, message
    return message
