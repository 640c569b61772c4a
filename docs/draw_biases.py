"""Draws docs/figures/biases.png: the effect of each position method on 64 queries and keys.

Run it in the root of the repository: python docs/draw_biases.py
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from alibi_jax.config import POSITIONS, Model
from alibi_jax.positions import PositionMethod, make_position_method

LENGTH, TRAIN_LENGTH, HEAD = 64, 64, 3
COLUMNS = 4


def heat_map(name: str, method: PositionMethod, config: Model) -> tuple[np.ndarray, str]:
    """The values of the method's panel, `[T, S]`, and a description of them."""
    positions = jnp.arange(LENGTH)
    bias = method.bias()
    if bias is not None:
        return np.asarray(bias(positions, positions)[HEAD]), "bias"
    text = jax.random.normal(jax.random.key(1), (1, LENGTH, config.width))
    gates = method.gates(text)
    if gates is not None:
        decay = np.cumsum(gates[0, :, HEAD], axis=0)
        return decay[:, None] - decay, "bias, of some text"
    positions = method.training_positions(positions, jax.random.key(0), 1)
    embedded = np.asarray(method.embed(jnp.zeros((1, LENGTH, config.width)), positions)[0])
    if embedded.any():
        training = ", in training" if name in ("shape", "randomized") else ""
        return embedded @ embedded.T, "product of embeddings" + training
    ones = jnp.ones((1, LENGTH, config.num_heads, config.head_size))
    query, key = method.rotate(ones, ones, positions, positions)
    scores = np.asarray(jnp.einsum("th,sh->ts", query[0, :, HEAD], key[0, :, HEAD]))
    return scores / query.shape[-1] ** 0.5, "score of ones with ones"


def main() -> None:
    """Draws one panel for each method, with its own colour scale; keys after a query are grey."""
    names = [name for name in POSITIONS if name != "none"]
    rows = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(3 * COLUMNS, 2.55 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS).ravel()
    for unused in panels[len(names) :]:
        unused.set_axis_off()
    future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    for panel, name in zip(panels, names):
        config = Model(position=name, width=256, num_heads=8, randomized_range=256)
        method = make_position_method(name, config, train_length=TRAIN_LENGTH, rngs=nnx.Rngs(4))
        values, description = heat_map(name, method, config)
        panel.set_facecolor("0.85")
        image = panel.imshow(np.ma.masked_array(values, future), cmap="viridis")
        colorbar = figure.colorbar(image, ax=panel, fraction=0.046, pad=0.03)
        colorbar.ax.tick_params(labelsize=7)
        panel.set_title(f"{name}\n{description}", fontsize=9)
        panel.set_xticks([0, LENGTH - 1])
        panel.set_yticks([0, LENGTH - 1])
        panel.tick_params(labelsize=7)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.savefig("docs/figures/biases.png", dpi=110)


if __name__ == "__main__":
    main()
