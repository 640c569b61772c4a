import jax
import pytest

from alibi_jax.config import ConfigError
from alibi_jax.training.loop import train
from alibi_jax.training.profiling import Profiler, parse_steps

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def calls(monkeypatch):
    """The calls to JAX's profiler."""
    recorded = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: recorded.append(str(folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: recorded.append("stop"))
    return recorded


@pytest.mark.parametrize(
    ("steps", "start", "traced"),
    [
        ("", 0, []),
        ("1:1", 0, [1]),
        ("3:5", 0, [3, 4, 5]),
        ("10:10", 0, [10]),
        # A resumed run traces only the steps that it still runs.
        ("3:5", 4, [5]),
        ("3:5", 5, []),
        ("3:5", 8, []),
        ("3:5", 2, [3, 4, 5]),
    ],
)
def test_the_given_steps_are_traced(tmp_path, calls, steps, start, traced):
    traced_steps = []
    with Profiler(parse_steps(steps), tmp_path, start, 10) as profiler:
        profiler.after_step(start)
        for step in range(start + 1, 11):
            if len(calls) == 1:
                traced_steps.append(step)
            if profiler.must_wait_for(step):
                profiler.after_step(step)
    assert traced_steps == traced
    assert calls == ([str(tmp_path / "profile"), "stop"] if traced else [])


def test_a_run_that_stops_early_ends_its_trace(tmp_path, calls):
    with Profiler((1, 5), tmp_path, 0, 10) as profiler:
        profiler.after_step(0)
    assert calls == [str(tmp_path / "profile"), "stop"]


@pytest.mark.parametrize("text", ["10", "10:x", "5:3", "0:3", ":", "1:2:3", "²:3", "-1:3"])
def test_invalid_steps_are_refused(text):
    with pytest.raises(ConfigError, match=f"--profile={text}: give the first and the last step"):
        parse_steps(text)


def test_steps_past_the_end_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--profile=9:11: the run ends at step 10"):
        Profiler((9, 11), tmp_path, 2, 10)


def test_a_run_is_traced(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match="--profile=3:11: the run ends at step 10"):
        train(tiny_config(), tmp_path / "run", "3:11")
    assert not (tmp_path / "run").exists()
    assert train(tiny_config(), tmp_path / "run", "3:4") == 10
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    # The flag is checked even where no step is left to run.
    with pytest.raises(ConfigError, match="--profile=banana"):
        train(tiny_config(), tmp_path / "run", "banana")
