import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.checkpoints import Checkpoints, Metadata, check_path
from alibi_jax.config import Checkpoint, ConfigError
from alibi_jax.training.loop import train

METADATA = Metadata(10, {"model": {}}, "text", {}, 256, {})


def saved_and_read(workdir):
    """Whether a checkpoint in this folder has its parameters when it is read."""
    params = {"a": jax.device_put(np.arange(100, dtype=np.float32), jax.devices()[0])}
    with Checkpoints(workdir, Checkpoint()) as checkpoints:
        checkpoints.save(params, {"m": params["a"]}, METADATA)
    abstract = jax.ShapeDtypeStruct((100,), jnp.float32, sharding=params["a"].sharding)
    with Checkpoints(workdir) as checkpoints:
        read = checkpoints.restore(10, params={"a": abstract})["params"]["a"]
    return bool((read == params["a"]).all())


@pytest.mark.parametrize(
    "name",
    ["lr=1e-3", "a]b", "a b", "a%20b#c", "{a},$b!~", "ü\n'\"", "x.orbax-checkpoint-tmp", "a:b"],
)
def test_other_names_hold_a_checkpoint(tmp_path, name):
    assert saved_and_read(tmp_path / name)


@pytest.mark.parametrize("name", ["lr=[1e-3]", "a[b", "a*", "run?", "a\\b", "gs:"])
@pytest.mark.parametrize("above", [False, True])
def test_a_name_that_loses_checkpoints_is_refused_before_any_work(
    tiny_config, tmp_path, name, above
):
    workdir = tmp_path / name / "run" if above else tmp_path / name
    with pytest.raises(ConfigError, match=r"^--workdir=.*give a folder without it"):
        train(tiny_config(), workdir)
    with pytest.raises(ConfigError, match="can't be saved"):
        Checkpoints(workdir, Checkpoint())
    assert not any(tmp_path.iterdir())


def test_the_folders_above_a_relative_name_count(tmp_path, monkeypatch):
    (tmp_path / "[1]").mkdir()
    monkeypatch.chdir(tmp_path / "[1]")
    with pytest.raises(ConfigError, match="--workdir=run: "):
        check_path(pathlib.Path("run"), saving=True)


def test_a_run_may_be_read_from_a_folder_with_brackets(tmp_path):
    assert saved_and_read(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "[run]")
    with Checkpoints(tmp_path / "[run]") as checkpoints:
        assert checkpoints.metadata(10).text == "text"
        abstract = jax.ShapeDtypeStruct(
            (100,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
        read = checkpoints.restore(10, params={"a": abstract})["params"]["a"]
    np.testing.assert_array_equal(read, np.arange(100))


def test_a_backslash_is_refused_for_reading_too(tmp_path):
    (tmp_path / "a\\b" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="can't be read"):
        Checkpoints(tmp_path / "a\\b")
