import jax
import pytest

from alibi_jax.config import ConfigError
from alibi_jax.profiling import Profiler
from alibi_jax.training import train

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def calls(monkeypatch):
    """What is asked of JAX's profiler."""
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: made.append(str(folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


@pytest.mark.parametrize(
    ("steps", "traced"), [("", []), ("1:1", [1]), ("3:5", [3, 4, 5]), ("10:10", [10])]
)
def test_steps_that_are_traced(tmp_path, calls, steps, traced):
    seen = []
    with Profiler(steps, tmp_path, 0, 10) as profiler:
        profiler.done(0)
        for step in range(1, 11):
            if len(calls) == 1:
                seen.append(step)
            if profiler.waits(step):
                profiler.done(step)
    assert seen == traced
    assert calls == ([str(tmp_path / "profile"), "stop"] if traced else [])


def test_a_run_that_stops_in_between_ends_its_trace(tmp_path, calls):
    with Profiler("1:5", tmp_path, 0, 10) as profiler:
        profiler.done(0)
    assert calls == [str(tmp_path / "profile"), "stop"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("10", "--profile=10: give FIRST:LAST, as 10:15"),
        ("10:x", "give FIRST:LAST"),
        ("5:3", "from step 3 to 10; give two of those, the first not after the last"),
        ("2:3", "from step 3 to 10"),
        ("9:11", "from step 3 to 10"),
    ],
)
def test_steps_that_a_run_has_not_are_refused(tmp_path, steps, message):
    with pytest.raises(ConfigError, match=message):
        Profiler(steps, tmp_path, 2, 10)


def test_a_run_is_traced(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="--profile=3:11: this run goes from step 1 to 10"):
        train(tiny_config(), tmp_path / "run", "3:11")
    assert not (tmp_path / "run").exists()
    assert train(tiny_config(), tmp_path / "run", "3:4") == 10
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
