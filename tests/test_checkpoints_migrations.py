"""Checkpoints of earlier versions. tests/data has one of format 2 with three layers."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers import layers_of, mesh_of

from alibi_jax.checkpoints import Checkpoints
from alibi_jax.checkpoints.migrations import FORMAT, dotted_name, format_2_tree, from_format_2
from alibi_jax.config import from_dict
from alibi_jax.evaluation import load_run
from alibi_jax.training.loop import train
from alibi_jax.training.step import Trainer

pytestmark = pytest.mark.usefixtures("quick_compile")

WRITTEN = pathlib.Path(__file__).parent / "data" / "format_2"


def config_of(data_dir):
    with Checkpoints(WRITTEN) as checkpoints:
        metadata = checkpoints.metadata(5)
    assert metadata.format == 2 < FORMAT
    config = from_dict(metadata.config)
    config.data.data_dir = str(data_dir)
    return config


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sizes", [(-1, 1, 1, 1), (1, 2, 2, 2)])
@pytest.mark.sample(1)
def test_a_run_of_format_2_goes_on_as_it_did(sizes, data_dir, tmp_path):
    config = config_of(data_dir)
    mesh = config.mesh
    mesh.data, mesh.fsdp, mesh.context, mesh.tensor = sizes
    workdir = shutil.copytree(WRITTEN, tmp_path / "run")
    assert train(config, workdir) == 10
    # The lines up to step 10 that the earlier version wrote, from its own checkpoint of step 5.
    for line, before in zip(lines(workdir), lines(WRITTEN), strict=True):
        for name in ("step", "loss", "learning_rate", "grad_norm"):
            assert line[name] == pytest.approx(before[name], rel=1e-5), name
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.metadata(10).format == FORMAT


def test_parameters_of_format_2_are_read_alone(data_dir, tmp_path):
    workdir = shutil.copytree(WRITTEN, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "5" / "optimizer")
    # The configuration names the default folder; in the tests the text is in another one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(data_dir))
        run = load_run(workdir)
    assert run.config.model.remat == "full"
    # The record of the process that trained it stays the same: results name the run by it.
    stored = json.loads((WRITTEN / "checkpoints" / "5" / "_CHECKPOINT_METADATA").read_text())
    assert run.metadata.provenance == stored["custom_metadata"]["provenance"]
    layers = layers_of(jax.device_get(run.params))
    assert ["position" in layer["attention"] for layer in layers] == [False, True, False]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(layers))


def test_every_array_is_converted_to_format_2_and_back(tiny_config):
    config = tiny_config(
        {"model.position": "alibi,kerple_log", "model.num_layers": 5, "model.width": 128}
        | {"model.tied_embeddings": False, "optimizer.name": "adafactor"}
    )
    rng = np.random.default_rng(0)
    wanted = Trainer(config, 130, mesh_of(1, 2, 1, 2)).abstract_state

    def drawn(leaf):
        values = np.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    params = jax.tree.map(drawn, wanted.params)
    # Adafactor gives some parameters placeholder moments, which belong to no single layer.
    optimizer = jax.tree.map(drawn, wanted.optimizer)
    for now, abstract in ((params, wanted.params), (optimizer, wanted.optimizer)):
        then = as_in_format_2(now)
        shapes = {dotted_name(path): x.shape for path, x in jax.tree.leaves_with_path(then)}
        before = format_2_tree(abstract, shapes, 5)
        assert jax.tree.map(lambda x: x.shape, before) == jax.tree.map(lambda x: x.shape, then)
        placed = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), then, before)
        after = from_format_2(placed, abstract)
        jax.tree.map(np.testing.assert_array_equal, after, with_rows_of_zeros(now))
        assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(
            lambda x: x.sharding, abstract
        )


def is_params(node):
    return isinstance(node, dict) and "vocabulary" in node


def as_in_format_2(tree):
    """The layout of format 2: parameters per layer, and tables of 130 rows beside them."""

    def before(node):
        if not is_params(node):
            return node
        rest = {name: x for name, x in node.items() if name not in ("layers", "vocabulary")}
        tables = jax.tree.map(lambda x: x[:130] if len(x) == 256 else x, node["vocabulary"])
        stacks = node["layers"]["stacks"]
        layers = {
            number: jax.tree.map(
                lambda x, n=number // 2: x if x.shape == (1,) else x[n], stacks[number % 2]
            )
            for number in range(5)
        }
        return rest | tables | {"layers": layers}

    return jax.tree.map(before, tree, is_leaf=is_params)


def with_rows_of_zeros(tree):
    def padded(node):
        if not is_params(node):
            return node
        zeroed = jax.tree.map(
            lambda x: x.at[130:].set(0) if len(x) == 256 else x, node["vocabulary"]
        )
        return node | {"vocabulary": zeroed}

    return jax.tree.map(padded, tree, is_leaf=is_params)
