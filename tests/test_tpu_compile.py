"""Compilation for TPUs without a TPU: libtpu compiles on any machine with Linux.

Each compilation runs in a process of its own, because libtpu reads the environment when it is
loaded, and writes a lock.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

HEADS, BLOCK = 8, 512
CHIPS = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
CODE = f"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from alibi_jax.attention.reach import KeyBlocks
from alibi_jax.attention.tpu.attention import pallas_tpu

def compiled(chip, length, gradient, dtype, size, segments):
    device = topologies.get_topology_desc(chip, platform="tpu").devices[0]
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(
        shape, dtype, sharding=SingleDeviceSharding(device)
    )
    x = struct((1, length, {HEADS}, size), dtype)
    ranges = struct((1, {HEADS}, -(-length // {BLOCK})), jnp.int32)
    ids = struct((1, length), jnp.int32) if segments else None

    def attend(query, key, value, slopes, blocks, ids):
        return pallas_tpu(
            query, key, value, slopes, blocks, causal=True, offset=0, window=None,
            query_segment_ids=ids, key_segment_ids=ids, block_size={BLOCK},
        )

    def loss(*inputs):
        return (attend(*inputs).astype(jnp.float32) ** 2).sum()

    function = jax.grad(loss, (0, 1, 2, 3)) if gradient else attend
    inputs = x, x, x, struct(({HEADS},), jnp.float32), KeyBlocks(ranges, ranges), ids
    return jax.jit(function).lower(*inputs).compile()

for case in json.loads(sys.argv[1]):
    print(compiled(*case).memory_analysis().temp_size_in_bytes)
"""


STEP = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from alibi_jax.config import Config, Mesh, Model, Train
from alibi_jax.distributed.sharding import make_mesh
from alibi_jax.training.step import Trainer

devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
mesh = make_mesh(Mesh(data=2, tensor=2), devices=devices)
model = Model(position=sys.argv[1], num_layers=1, width=256, num_heads=4, dtype="bfloat16")
trainer = Trainer(Config(model=model, train=Train(length=1024, batch_size=4)), 256, mesh)
tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32, sharding=trainer.batch_sharding)
with jax.set_mesh(mesh):
    lowered = trainer.train_step.lower(
        trainer.abstract_state, {"inputs": tokens, "targets": tokens}, np.int32(0)
    )
text = lowered.compile().as_text()
print([name for name in ("forward", "backward") if f"alibi_{name}_kernel" in text])
"""


SLICES = """
from jax.experimental import topologies
from alibi_jax.config import Mesh
from alibi_jax.distributed.sharding import make_mesh

devices = topologies.get_topology_desc("v5e:4x4", platform="tpu", num_slices=2).devices
mesh = make_mesh(Mesh(data=4, fsdp=2, context=2, tensor=2), devices=devices)
assert len(set(mesh.devices.flat)) == 32
slices = [{device.slice_index for device in row.flat} for row in mesh.devices]
print(dict(mesh.shape), slices)
try:
    make_mesh(Mesh(data=1, fsdp=-1), devices=devices)
except ValueError as error:
    print(error)
"""


PLAN = """
import pathlib, re, sys
from alibi_jax.config import Config, Mesh, Model, Train
from alibi_jax import plan as plans
from alibi_jax.plan import program

# No size of the model is 384, so that 384 in a shape is a sequence length.
model = Model(num_layers=6, width=512, num_heads=8, dtype="bfloat16", remat="full")
config = Config(model=model, train=Train(length=384, batch_size=64))
texts = []
read = program.collectives
program.collectives = lambda text: texts.append(text) or read(text)
config.mesh.data, config.mesh.fsdp = 2, 2
assert plans.plan(config, "v5e:2x2") == 0
(text,) = texts
shapes = {tuple(x.split(",")) for x in re.findall(r"[a-z]+[0-9]+\\[([0-9,]+)\\]", text)}
print("SQUARES", [shape for shape in shapes if shape.count("384") > 1])
"""
ADAPTIVE = """
from alibi_jax import plan as plans
from alibi_jax.config import Config, Data, Model, Train

model = Model(
    num_layers=1, width=256, num_heads=4, dtype="bfloat16", final_norm=False, use_bias=True,
    adaptive_cutoffs="1000,4000", adaptive_dropout=0.2,
)
data = Data(dataset="wikitext", path="wikitext", tokenizer="words", vocab_size=20_000)
config = Config(data=data, model=model, train=Train(length=512, batch_size=8))
config.mesh.fsdp, config.mesh.tensor = 2, 2
assert plans.plan(config, "v4:2x2x1") == 0
"""
TOO_LARGE = """
from alibi_jax import plan as plans
from alibi_jax.config import Config, Model, Train

model = Model(num_layers=6, width=1024, num_heads=8, dtype="bfloat16", remat="full")
config = Config(model=model, train=Train(length=1024, batch_size=2048))
print("CODE", plans.plan(config, "v5e:2x2"))
"""


def printed(code, *arguments):
    """The output of a process of its own that runs `code`."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        # There is no TPU host to query, and other processes may use libtpu at the same time.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def temporaries(cases):
    """Bytes of temporary arrays on the chip, per case."""
    return [int(line) for line in printed(CODE, json.dumps(cases)).split()]


def check(cases):
    """Checks that all compile, with temporary arrays of at most 2560 bytes per query and head.

    A row of a gradient takes 512 bytes: 128 lanes of float32. The gradients of keys and values
    exist twice while a span of queries is added. The other temporaries are the gradient of the
    queries, and the inputs transposed to heads first.
    """
    for (_, length, *_), used in zip(cases, temporaries(cases), strict=True):
        assert used <= 2560 * length * HEADS


def test_b11_gradients_take_memory_linear_in_the_length():
    """At 8192 the scores of one head would take 256 MiB; the bound is 160 MiB for all eight."""
    check(
        [
            ("v5e:2x2", 8192, True, "bfloat16", 64, False),
            ("v6e:2x2", 8192, True, "float32", 64, True),
        ]
    )


def test_a_plan_for_an_absent_pod():
    text = printed(PLAN)
    assert "plan for v5e:2x2: data 2 x fsdp 2 x context 1 x tensor 1" in text
    assert "reduce-scatter     among    2" in text
    assert "fits: " in text
    assert "ESTIMATE" in text
    # Each of the six layers in the loop gathers its weights twice: rematerialisation repeats it.
    assert int(text.split("all-gather         among    2 devices:")[1].split()[0]) >= 12
    assert text.endswith("SQUARES []")


def test_an_adaptive_model_planned_for_a_v4():
    """The two cores of a v4 chip are one device, as at run time."""
    text = printed(ADAPTIVE)
    assert "plan for v4:2x2x1: data 1 x fsdp 2 x context 1 x tensor 2" in text
    assert "% of the 32 GiB of a TPU v4" in text


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_one_that_does():
    text = printed(TOO_LARGE)
    refused, _, remedied = text.partition("it fits with --config.train.accumulation=")
    assert "DOES NOT FIT: RESOURCE_EXHAUSTED" in refused
    assert "exceeds available HBM (15.75G)" in refused
    assert "  fits: " in remedied
    assert remedied.endswith("CODE 1")


def test_slices_are_replicas():
    """Only the sum of gradients crosses the slow network between slices."""
    mesh, refused = printed(SLICES).splitlines()
    sizes = {"data": 4, "fsdp": 2, "context": 2, "tensor": 2}
    assert mesh == f"{sizes} {[{0}, {0}, {1}, {1}]}"
    assert "mesh.data=1 is not divisible by the 2 slices" in refused


def test_a_sharded_training_step_uses_the_kernels():
    """Rows are sharded over two chips, heads over two; slopes are concrete without a chip."""
    assert printed(STEP, "alibi") == "['forward', 'backward']"


@pytest.mark.slow
def test_a_training_step_with_learned_slopes():
    assert printed(STEP, "alibi_learned") == "['forward', 'backward']"


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 8192, 32768])
@pytest.mark.parametrize("chip", CHIPS)
def test_b11_every_chip_and_length(chip, length):
    check([(chip, length, gradient, "bfloat16", 64, False) for gradient in (False, True)])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_wide_heads_in_float32_with_segments(chip):
    check([(chip, 8192, True, "float32", 128, segments) for segments in (False, True)])


@pytest.mark.slow
def test_very_long_rows():
    check([("v4:2x2x1", 131072, True, "bfloat16", 128, True)])
