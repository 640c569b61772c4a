"""Plans for CPU devices; test_tpu_compile.py tests plans for TPUs."""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of

from alibi_jax.config import Config, ConfigError, Mesh, Model, Train
from alibi_jax.flops import step_flops
from alibi_jax.plan import plan
from alibi_jax.plan.costs import Roofline, bytes_on_device, roofline
from alibi_jax.plan.hlo import Collective, by_kind, collectives
from alibi_jax.plan.planner import _replace_values, memory_saving_changes
from alibi_jax.plan.program import Program, compile_step
from alibi_jax.plan.report import ranking, report
from alibi_jax.plan.search import candidate_meshes
from alibi_jax.plan.targets import DEVICES, Target
from alibi_jax.training.step import Trainer

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 256
LARGE = Model(num_layers=25, width=2048, num_heads=16, ff_width=8192)


def config_of(length=64, batch_size=8, accumulation=1, **model):
    values = {"num_layers": 6, "width": 64, "num_heads": 4} | model
    train = Train(length=length, batch_size=batch_size, accumulation=accumulation)
    return Config(model=Model(**values), train=train)


# FLOPs.


def matmul_flops(jaxpr):
    """FLOPs of all matrix products of a jaxpr; those in a loop count once per iteration."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            terms = math.prod(left[axis] for axis in contracted)
            total += 2 * terms * math.prod(equation.outvars[0].aval.shape)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                total += times * matmul_flops(getattr(parameter, "jaxpr", parameter))
    return total


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"remat": "full"},
        {"activation": "swiglu", "num_kv_heads": 2, "ff_width": 96},
        {"num_layers": 2},
    ],
    ids=str,
)
def test_flops_agree_with_the_traced_program(model):
    """Dense attention computes all pairs: twice the causal pairs, apart from the diagonal."""
    config = config_of(**model)
    trainer = Trainer(config, VOCAB, mesh_of(1, 1, 1, 1))
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)

    def loss(params, tokens):
        batch = {"inputs": tokens, "targets": tokens}
        return trainer.loss(params, batch, jax.random.key(0))[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(trainer.abstract_state.params, tokens)
    flops = step_flops(config, VOCAB)
    every_pair = flops.attention * 2 * 64 / 65
    recomputed = 0.0
    if config.model.remat == "full":
        # Two products are not recomputed: the logits, which are in one chunk here, and the last
        # product of each layer, whose result no gradient needs.
        forward = (flops.products / 3 + every_pair / 3) - 2.0 * 512 * 64 * VOCAB
        recomputed = forward - 6 * 2.0 * 512 * 64 * 256
    assert matmul_flops(jaxpr.jaxpr) == pytest.approx(
        flops.products + every_pair + recomputed, rel=0.01
    )


def test_flops_are_consistent():
    config = Config(model=LARGE, train=Train(length=1024, batch_size=512))
    flops, tokens = step_flops(config, 50_000), 512 * 1024
    # 6ND, with the embedding table counted once.
    num_params = 25 * (4 * 2048**2 + 2 * 2048 * 8192) + 50_000 * 2048
    assert flops.products == pytest.approx(6 * num_params * tokens, rel=1e-9)
    twice = _replace_values(config, {"model.num_layers": 50})
    logits = 6 * 50_000 * 2048 * tokens
    doubled = step_flops(twice, 50_000)
    assert doubled.products - logits == pytest.approx(2 * (flops.products - logits))
    assert doubled.attention == pytest.approx(2 * flops.attention)
    longer = step_flops(
        _replace_values(config, {"train.length": 2048, "train.batch_size": 256}), 50_000
    )
    assert longer.attention == pytest.approx(2 * flops.attention, rel=1e-3)
    assert longer.products == flops.products


def test_flops_of_an_adaptive_vocabulary_count_what_every_token_uses():
    """The first band with a class for each other band, and the projections in and out."""
    config, tokens = config_of(adaptive_cutoffs="100,180"), 8 * 64
    layers = step_flops(config_of(), VOCAB).products - 6 * tokens * 64 * VOCAB
    widths = 64 + 16 + 4
    expected = layers + 6 * tokens * 64 * (102 + widths + 16 + 4)
    assert step_flops(config, VOCAB).products == pytest.approx(expected)


# Collectives.


def compiled_text(function, in_spec, out_spec, shape=(8, 16)):
    mesh = mesh_of(2, 1, 1, 4)
    run = jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    placed = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, in_spec))
    return jax.jit(run).lower(placed).compile().as_text()


def looped(times, function):
    def run(x):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.sin(function(x)), x)

    return run


@pytest.mark.parametrize(
    ("function", "out_spec", "expected"),
    [
        # Each device has 8 rows of 4: 128 bytes.
        (lambda x: jax.lax.psum(x, "tensor"), jax.P(), ("all-reduce", 128, 4, 1)),
        (lambda x: jax.lax.psum(x, ("data", "tensor")), jax.P(), ("all-reduce", 128, 8, 1)),
        (looped(5, lambda x: jax.lax.psum(x, "tensor")), jax.P(), ("all-reduce", 128, 4, 5)),
        (
            looped(3, looped(5, lambda x: jax.lax.psum(x, "data"))),
            jax.P(),
            ("all-reduce", 128, 2, 15),
        ),
        (
            lambda x: jax.lax.all_gather(x, "tensor", axis=1, tiled=True),
            jax.P(),
            ("all-gather", 512, 4, 1),
        ),
        (
            # 32 rows of 4 go in.
            lambda x: jax.lax.psum_scatter(x, "tensor", scatter_dimension=0, tiled=True),
            jax.P("tensor"),
            ("reduce-scatter", 128, 4, 1),
        ),
        (
            # Only the branch for a true predicate counts.
            lambda x: jax.lax.cond(
                jax.lax.psum(x[0, 0], ("data", "tensor")) > 0.0,
                lambda x: jax.lax.ppermute(x, "tensor", [(0, 1)]),
                lambda x: jax.lax.all_gather(x, "tensor", axis=1, tiled=True)[:, :4],
                x,
            ),
            jax.P(None, "tensor"),
            ("collective-permute", 128, 2, 1),
        ),
        (
            looped(7, lambda x: jax.lax.ppermute(x, "tensor", [(0, 1), (1, 2)])),
            jax.P(None, "tensor"),
            ("collective-permute", 128, 2, 7),
        ),
    ],
)
def test_collectives_count_once_per_execution(function, out_spec, expected):
    text = compiled_text(function, jax.P(None, "tensor"), out_spec)
    # Without the all-reduce of the predicate, which has 4 bytes.
    found = [collective for collective in collectives(text) if collective.size > 4]
    assert found == [Collective(*expected)]


def test_collectives_with_the_same_channel_count_separately():
    """All collectives of jax.shard_map have the same channel."""

    def function(x):
        return jax.lax.psum(jnp.sin(jax.lax.psum(x, "tensor")), "tensor")

    ((times, bytes_sent),) = by_kind(
        collectives(compiled_text(function, jax.P(None, "tensor"), jax.P()))
    ).values()
    assert (times, bytes_sent) == (2, 2 * 2 * 128 * 3 / 4)


def test_bytes_that_a_ring_sends():
    assert Collective("all-gather", 1600, 16, 1).bytes_sent == 1500
    assert Collective("reduce-scatter", 1600, 16, 2).bytes_sent == 3000
    assert Collective("all-reduce", 1600, 16, 1).bytes_sent == 3000
    assert Collective("collective-permute", 1600, 2, 3).bytes_sent == 4800
    exchanges = [Collective("all-gather", 1600, 16, 2), Collective("all-gather", 800, 16, 1)]
    assert by_kind(exchanges) == {("all-gather", 16): (3, 3750.0)}


# A compiled step.


def test_each_device_holds_its_shard_of_the_state():
    config = config_of()
    replicated = compile_step(config, VOCAB, mesh_of(8, 1, 1, 1))
    sharded = compile_step(config, VOCAB, mesh_of(1, 8, 1, 1))
    params = Trainer(config, VOCAB, mesh_of(1, 1, 1, 1)).abstract_state.params
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    assert replicated.num_params == sharded.num_params == size
    assert replicated.parameter_bytes == 4 * size
    # AdamW's two moments and a count.
    assert replicated.optimizer_bytes == pytest.approx(2 * replicated.parameter_bytes, abs=64)
    # All but the vectors are sharded.
    assert sharded.parameter_bytes == pytest.approx(replicated.parameter_bytes / 8, rel=0.1)
    assert sharded.optimizer_bytes == pytest.approx(replicated.optimizer_bytes / 8, rel=0.1)
    kinds = {collective.kind for collective in sharded.exchanges}
    assert "all-gather" in kinds
    assert replicated.temporary_bytes > 0
    assert replicated.evaluation_bytes > 0
    assert replicated.activation_bytes == sharded.activation_bytes


@pytest.mark.slow
def test_activation_bytes_grow_with_rows_and_fall_with_devices():
    def activation_bytes(mesh=(1, 1, 1, 1), **changes):
        config = config_of(**changes)
        return compile_step(config, VOCAB, mesh_of(*mesh), evaluation=False).activation_bytes

    alone = activation_bytes()
    assert activation_bytes(batch_size=16) == pytest.approx(2 * alone, rel=0.05)
    assert activation_bytes(batch_size=16, accumulation=2) == pytest.approx(alone, rel=0.05)
    # Keys gathered from the other shard of the sequence are kept too.
    assert alone / 4 < activation_bytes(mesh=(2, 1, 2, 1)) < 1.1 * alone / 4
    # The float32 inputs of all layers.
    inputs = 6 * 8 * 64 * 64 * 4
    assert inputs < activation_bytes(remat="full") < 3 * inputs < alone


# Estimates, reports and searches.


def made_up(peak_gib=4.0, refusal="", **mesh):
    mesh = Mesh(**{"data": 4} | mesh)
    size = int(peak_gib * 2**30)
    return Program(mesh, size // 4, size // 2, 1000, 10, size // 4, refusal)


def target_of(count=4):
    return Target("v5e:2x2", jax.devices()[:count], DEVICES["v5e"])


def test_a_roofline_is_work_divided_by_peaks():
    device = dataclasses.replace(DEVICES["v5e"], flops=1e12, bandwidth=1e9, link=1e8)
    config = Config(model=LARGE, train=Train(length=1024, batch_size=8))
    flops = step_flops(config, 1000)
    exchanges = [Collective("all-gather", 1600, 16, 1), Collective("all-reduce", 1600, 16, 1)]
    times = roofline(flops, 5e9, exchanges, 4, device)
    assert times.compute == pytest.approx((flops.model + flops.recomputed) / 4e12)
    assert times.memory == 5.0
    assert times.network == pytest.approx(4500 / 1e8)
    parts = dataclasses.astuple(times)
    assert times.overlapped == max(parts)
    assert times.sequential == pytest.approx(sum(parts))


def test_a_report_marks_estimates_and_what_does_not_fit():
    config = config_of()
    text = report(config, VOCAB, target_of(), made_up(), Roofline(0.1, 0.2, 0.3))
    assert "fits: 25% of the 16 GiB of a TPU v5e" in text
    assert "ESTIMATE" in text
    assert "all three at the same time: 300.0 ms" in text
    assert "one after the other: 600.0 ms" in text
    too_large = report(config, VOCAB, target_of(), made_up(20.0), Roofline(0.1, 0.2, 0.3))
    assert "DOES NOT FIT: 125%" in too_large
    refused = report(config, VOCAB, target_of(), made_up(refusal="no room"), None)
    assert "DOES NOT FIT: no room" in refused
    assert "ESTIMATE" not in refused


def test_fitting_meshes_are_ranked_first_and_by_time():
    compiled = [
        (made_up(fsdp=1, data=4), Roofline(0.1, 0.1, 0.3)),
        (made_up(fsdp=2, data=2), Roofline(0.1, 0.1, 0.1)),
        (made_up(40.0, fsdp=4, data=1), Roofline(0.0, 0.0, 0.0)),
        (made_up(refusal="no room", tensor=4, data=1), None),
    ]
    lines = ranking(target_of(), compiled, 9).splitlines()
    assert lines[0].startswith("4 of 9 meshes")
    assert [line.strip()[:15] for line in lines[2:4]] == ["data 2 x fsdp 2", "data 4 x fsdp 1"]
    assert all(line.endswith("does not fit") for line in lines[4:])


def test_memory_saving_changes_begin_with_the_cheapest():
    config = config_of(batch_size=32, remat="projections")
    tried = [text for text, _ in memory_saving_changes(config, made_up(refusal="no room"))]
    remat, accumulation = "--config.model.remat=full", "--config.train.accumulation="
    assert tried[:4] == [remat, *(f"{remat} {accumulation}{n}" for n in (2, 4, 8))]
    assert tried[4] == f"--config.mesh.data=1 --config.mesh.fsdp=4 {remat}"
    for _, changed in memory_saving_changes(config, made_up(refusal="no room")):
        changed.check()
        assert changed.train.batch_size == 32


def test_candidate_meshes_divide_everything_and_the_most_promising_come_first():
    found = candidate_meshes(config_of(batch_size=8), target_of(8))
    assert found[0] in (
        Mesh(data=4, fsdp=2, context=1, tensor=1),
        Mesh(data=2, fsdp=4, context=1, tensor=1),
    )
    assert all(math.prod(dataclasses.astuple(mesh)) == 8 for mesh in found)
    # A sequence is sharded only where there are too few rows.
    assert all(mesh.context == 1 for mesh in found)
    few = candidate_meshes(config_of(batch_size=2), target_of(8))
    assert any(mesh.context > 1 for mesh in few)
    # Twelve rows are divisible by four devices and not by eight.
    twelve = candidate_meshes(config_of(batch_size=12), target_of(8))
    assert Mesh(data=2, fsdp=2, context=2, tensor=1) in twelve
    assert all(2 % (mesh.data * mesh.fsdp) == 0 for mesh in few)
    # Four heads are divisible by at most four devices.
    assert all(mesh.tensor <= 4 for mesh in found + few)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("v5e", "--plan=v5e: give a TPU and the shape of its slice"),
        ("v9:2x2", "known: v4, v5e, v5p, v6e"),
        ("cpu:0", "or cpu:8"),
        ("2*cpu:8", "or cpu:8"),
        # Characters that `str.isdigit` takes for digits, and `int` does not.
        ("cpu:²", "or cpu:8"),
        ("v5e:²x2", "2[*]v5e:16x16 for two slices"),
        ("²*v5e:2x2", "2[*]v5e:16x16 for two slices"),
        ("x*v5e:2x2", "2[*]v5e:16x16 for two slices"),
        ("0*v5e:2x2", "2[*]v5e:16x16 for two slices"),
        ("v5e:2x2,faster", "only ,search can follow"),
    ],
)
def test_invalid_requests_are_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        plan(Config(), target)


def test_bytes_on_a_device():
    mesh = mesh_of(2, 2, 1, 2)
    placed = jax.ShapeDtypeStruct(
        (8, 6), np.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp", "tensor"))
    )
    assert bytes_on_device({"x": placed}) == 8 * 6 * 4 // 4


def test_a_plan_on_the_command_line(tmp_path):
    """It trains nothing, reads no text and writes no file."""
    program = pathlib.Path(__file__).parent.parent / "train.py"
    flags = ["--plan=cpu:4", "--config.mesh.fsdp=2", "--config.model.num_layers=6"]
    done = subprocess.run(
        [sys.executable, str(program), *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "TFDS_DATA_DIR": str(tmp_path / "data")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan for cpu:4: data 2 x fsdp 2 x context 1 x tensor 1\n")
    assert "what each device sends in a step (read from the compiled program)" in done.stdout
    assert "all-gather         among    2" in done.stdout
    assert not list(tmp_path.iterdir())
