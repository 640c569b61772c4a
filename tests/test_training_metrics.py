import errno
import json
import math
import resource

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from alibi_jax.training.metrics import MetricsWriter

# Lines of JSON that a metrics file cannot have.
NO_NUMBERS = [
    b'{"step": 2, "loss": 1e999}',
    b'{"step": 2, "skipped_steps": null}',
    b'{"step": true}',
    b"[" * 100_000,
]


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null(tmp_path, value):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": value, "grad_norm": 2.0})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "loss": null, "grad_norm": 2.0}\n'
    points = [(v.tag, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert points == [("grad_norm", 2.0)]


@pytest.mark.parametrize(
    "bad",
    [b"", b"\xff", b'{"step": 2, "lo', b"[2]", b"2", b'{"loss": 1.0}', b"\0" * 90, *NO_NUMBERS],
)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_damaged_line_is_named_and_left_out(tmp_path, bad, before):
    write(tmp_path, 0, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in [*good[:before], bad, *good[before:]]))
    with MetricsWriter(tmp_path, 3, 3) as writer:
        (note,) = writer.notes
    assert note.startswith(f"{path}, line {before + 1} is damaged and left out: {bad[:40]!r}")
    assert path.read_bytes().splitlines() == good


def test_lost_lines_are_said(tmp_path):
    write(tmp_path, 0, [2, 4, 6])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    with MetricsWriter(tmp_path, 7, 6) as writer:
        assert writer.notes == [
            f"{path} ends at step 4, and the run resumes after step 7: the metrics of the steps up "
            "to 6 are lost"
        ]
    path.unlink()
    with MetricsWriter(tmp_path, 7, 6) as writer:
        assert "ends at step 0" in writer.notes[0]


def test_an_undamaged_file_has_no_note(tmp_path):
    write(tmp_path, 0, [2, 4, 6])
    for resume_step, last_logged in [(7, 6), (6, 6), (5, 4), (0, 0)]:
        with MetricsWriter(tmp_path, resume_step, last_logged) as writer:
            assert writer.notes == []


def test_nan_of_an_earlier_version_becomes_null(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "validation_loss": NaN}\n')
    write(tmp_path, 1, [])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "validation_loss": null}\n'


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    written = []

    def write_until_full(writer):
        for step in range(1, 100):
            written.append(step)
            writer.write(step, {"loss": 1 / step})

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, 0) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError, match=r"metrics\.jsonl|tensorboard") as caught:
                write_until_full(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    # With room again, the run goes on from the last whole line.
    write(tmp_path, written[-2], [written[-1]])
    assert steps(tmp_path) == written
