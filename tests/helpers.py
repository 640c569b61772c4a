"""What several test files need."""

import math
import operator

import jax
import numpy as np


def mesh_of(data, fsdp, context, tensor):
    """A mesh of these sizes over the first devices that it takes."""
    from alibi_jax.config import Mesh
    from alibi_jax.distributed.sharding import make_mesh

    sizes = data, fsdp, context, tensor
    return make_mesh(Mesh(*sizes), devices=jax.devices()[: math.prod(sizes)])


def layers_of(params):
    """The parameters of each layer, out of their stacks."""
    stacks = params["layers"]["stacks"]
    depths = {place: len(jax.tree.leaves(stack)[0]) for place, stack in stacks.items()}
    return [
        jax.tree.map(operator.itemgetter(number // len(stacks)), stacks[number % len(stacks)])
        for number in range(sum(depths.values()))
    ]


def assert_same_arrays(one, other):
    """The same tree, and in it the same numbers bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other)):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path), strict=True)


def every_jaxpr(jaxpr):
    """A jaxpr and, recursively, those in the parameters of its equations."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                yield from every_jaxpr(getattr(parameter, "jaxpr", parameter))
