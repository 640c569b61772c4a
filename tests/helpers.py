"""Helpers of several test files."""

import contextlib
import math
import operator
import pathlib
import resource
import socket
import time

import jax
import numpy as np

REPOSITORY = pathlib.Path(__file__).parent.parent
# Variables of the environment with which XLA compiles in half the time.
QUICK_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def mesh_of(data, fsdp, context, tensor):
    """A mesh of these sizes over the first devices."""
    from alibi_jax.config import Mesh
    from alibi_jax.distributed.sharding import make_mesh

    sizes = data, fsdp, context, tensor
    return make_mesh(Mesh(*sizes), devices=jax.devices()[: math.prod(sizes)])


def layers_of(params):
    """The parameters of each layer, sliced out of their stacks."""
    stacks = params["layers"]["stacks"]
    depths = {index: len(jax.tree.leaves(stack)[0]) for index, stack in stacks.items()}
    return [
        jax.tree.map(operator.itemgetter(number // len(stacks)), stacks[number % len(stacks)])
        for number in range(sum(depths.values()))
    ]


def assert_same_arrays(left, right):
    """Asserts that two trees have the same structure and the same arrays, bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right)):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path), strict=True)


def every_jaxpr(jaxpr):
    """A jaxpr and, recursively, the jaxprs in the parameters of its equations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                yield from every_jaxpr(getattr(parameter, "jaxpr", parameter))


def flip(path, bit):
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@contextlib.contextmanager
def file_size_limit(size):
    """A limit of the system for the size of files, past which a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def free_port():
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def train_flags(config, workdir):
    from alibi_jax.config import flatten

    values = flatten(config).items()
    return [f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in values if v is not None)]


def finish(process, code=0):
    """Waits for a process, checks its exit code, and returns its (output, errors)."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors[-3000:]
    return output, errors


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.001)


def left_by_a_kill(path):
    """The name of what a killed program of this machine leaves while it writes `path`."""
    writer = f"{socket.gethostname()}-4194304-0a1b2c3d"
    return path.with_name(f".{path.name}.unfinished-{writer}{path.suffix}")
