import json

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from alibi_jax.training.metrics import MetricsWriter


def write(workdir, resume_step, steps):
    with MetricsWriter(workdir, resume_step) as writer:
        for step in steps:
            writer.write(step, {"loss": 1 / step})


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def steps(workdir):
    return [line["step"] for line in lines(workdir)]


def events(workdir):
    """The events in TensorBoard's files, whose records are (size, checksum, event, checksum)."""
    for path in (workdir / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]


def test_each_step_has_a_line(tmp_path):
    write(tmp_path, 0, [1, 2, 3])
    assert lines(tmp_path) == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_a_line_is_on_disk_when_it_is_written(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": 0.5})
        assert lines(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_tensorboard_has_the_same_points(tmp_path):
    write(tmp_path, 0, [1, 2, 4])
    points = [(v.tag, e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert points == [("loss", 1, 1.0), ("loss", 2, 0.5), ("loss", 4, 0.25)]


def test_a_resumed_run_tells_tensorboard_its_first_step(tmp_path):
    write(tmp_path, 2, [3])
    starts = [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts == [3]


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(0, []), (2, [1, 2]), (4, [1, 2, 4]), (9, [1, 2, 4])]
)
def test_lines_past_the_resumed_step_are_dropped(tmp_path, resume_step, kept):
    write(tmp_path, 0, [1, 2, 4])
    write(tmp_path, resume_step, [10])
    assert steps(tmp_path) == [*kept, 10]


@pytest.mark.parametrize("cut_short", ["{", '{"step": 3, "lo', '{"step": 3, "loss": 0.33'])
def test_a_last_line_that_a_kill_cut_short_is_dropped(tmp_path, cut_short):
    write(tmp_path, 0, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut_short)
    write(tmp_path, 2, [3])
    assert steps(tmp_path) == [1, 2, 3]
