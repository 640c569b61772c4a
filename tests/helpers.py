"""What several test files need."""

import math

import jax
import numpy as np
from jax.sharding import AxisType


def mesh_of(*sizes):
    """A mesh of these sizes over the first devices that it takes."""
    from alibi_jax.sharding import MESH_AXES

    return jax.make_mesh(
        sizes,
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes)],
    )


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
