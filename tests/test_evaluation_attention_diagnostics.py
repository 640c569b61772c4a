import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of

from alibi_jax.attention.statistics import attention_resolution
from alibi_jax.config import Config
from alibi_jax.evaluation.attention_diagnostics import attention_report
from alibi_jax.model import abstract_model, initial_params

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB, LAYERS, HEADS, LENGTH = 12, 2, 4, 8


@functools.cache
def config_of(position="alibi"):
    config = Config()
    config.model.position = position
    config.model.num_layers, config.model.width, config.model.num_heads = LAYERS, 16, HEADS
    config.model.num_kv_heads = 2
    config.train.length = 16
    return config


@functools.cache
def fresh_params(position="alibi"):
    return jax.device_get(initial_params(config_of(position), VOCAB, jax.random.key(0)))


def stream(num_tokens):
    return np.random.default_rng(0).integers(0, VOCAB, num_tokens).astype(np.uint16)


def report(
    tokens, num_windows, *, position="alibi", length=LENGTH, params=None, sizes=(1, 1, 1, 1)
):
    mesh = mesh_of(*sizes)
    graphdef, abstract = abstract_model(config_of(position), VOCAB, mesh)
    params = fresh_params(position) if params is None else params
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract)
    return attention_report(graphdef, mesh, placed, tokens, length, num_windows)


def expected(tokens, starts, position="alibi"):
    """The report over windows with these starts, computed one window at a time."""
    graphdef, _ = abstract_model(config_of(position), VOCAB, mesh_of(1, 1, 1, 1))
    params = jax.tree.map(jnp.asarray, fresh_params(position))
    measure = jax.jit(nnx.merge(graphdef, params).attention_statistics)
    of_windows = [measure(jnp.asarray(tokens[None, s : s + LENGTH], jnp.int32)) for s in starts]
    entropy, distance, scores = (
        np.mean(np.array(x), axis=0, dtype=np.float64) for x in zip(*of_windows)
    )
    resolution = attention_resolution(scores)[:, 0]
    return {
        "length": LENGTH,
        "windows": len(starts),
        "resolution": resolution.mean(),
        "layers": [
            {
                "layer": layer,
                "resolution": resolution[layer].mean(),
                "heads": [
                    {
                        "resolution": resolution[layer, head],
                        "distance": distance[layer, 0, head],
                        "entropy": entropy[layer, 0, head],
                    }
                    for head in range(HEADS)
                ],
            }
            for layer in range(LAYERS)
        ],
    }


def assert_same(one, other, tolerance=1e-6):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other)):
        assert x == pytest.approx(y, rel=tolerance, abs=tolerance), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("num_tokens", "num_windows", "starts"),
    [
        (100, 4, [0, 31, 62, 92]),
        (100, 1, [92]),
        # At most as many windows as fit without overlap.
        (25, 4, [0, 9, 17]),
        (16, 4, [0, 8]),
        (15, 4, [7]),
        (8, 4, [0]),
    ],
)
@pytest.mark.sample(2)
def test_windows_are_spaced_evenly_and_the_last_ends_with_the_stream(
    num_tokens, num_windows, starts
):
    tokens = stream(num_tokens)
    assert_same(report(tokens, num_windows), expected(tokens, starts))


@pytest.mark.parametrize("position", ["learned", "rotary", "fox"])
def test_any_method_is_reported(position):
    tokens = stream(30)
    assert_same(report(tokens, 2, position=position), expected(tokens, [0, 22], position))


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 2)])
def test_devices_change_nothing(sizes):
    """Five windows: the last batch has padding."""
    tokens = stream(61)
    assert_same(report(tokens, 5, sizes=sizes), report(tokens, 5))


def test_resolution_comes_from_the_mean_scores():
    tokens = stream(100)
    each = [report(tokens[s : s + LENGTH], 1)["resolution"] for s in (0, 92)]
    both = report(tokens, 2)["resolution"]
    assert abs(both - np.mean(each)) > 1e-4


def test_a_changed_head_changes_its_numbers_alone():
    tokens, params = stream(30), jax.tree.map(np.copy, fresh_params())
    before = report(tokens, 2)
    params["layers"]["stacks"][0]["attention"]["query"]["kernel"][LAYERS - 1, :, 1] *= 3
    after = report(tokens, 2, params=params)
    for layer in range(LAYERS):
        for head in range(HEADS):
            one, other = (x["layers"][layer]["heads"][head] for x in (before, after))
            for name in one:
                changed = abs(one[name] - other[name]) > 1e-4
                assert changed == (layer == LAYERS - 1 and head == 1), (layer, head, name)


def test_the_report_is_json():
    measured = report(stream(30), 2)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert list(measured) == ["length", "windows", "resolution", "layers"]
    assert list(measured["layers"][0]) == ["layer", "resolution", "heads"]
    assert list(measured["layers"][0]["heads"][0]) == ["resolution", "distance", "entropy"]


def test_a_stream_on_disk_is_read(tmp_path):
    np.save(tmp_path / "tokens.npy", stream(50))
    assert report(np.load(tmp_path / "tokens.npy", mmap_mode="r"), 3) == report(stream(50), 3)


def test_a_report_compiles_once(compiled):
    report(stream(50), 5)
    assert compiled.count("statistics") == 1


def test_invalid_windows_lengths_and_outputs_are_refused():
    with pytest.raises(ValueError, match=r"7 tokens, fewer than one window of length=8"):
        report(stream(7), 2)
    with pytest.raises(ValueError, match=r"num_windows=0 must be at least 1"):
        report(stream(30), 0)
    with pytest.raises(ValueError, match=r"learned positions end at 16"):
        report(stream(30), 1, position="learned", length=17)
    params = fresh_params()
    params["vocabulary"] = jax.tree.map(lambda x: x * np.nan, params["vocabulary"])
    with pytest.raises(ValueError, match=r"length=8 is not finite"):
        report(stream(30), 2, params=params)
