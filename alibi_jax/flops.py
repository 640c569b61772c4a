"""What a training step computes, and what devices can compute.

Counted from the configuration and not read from the compiler, which counts the body of a loop once.
"""

from typing import NamedTuple

from alibi_jax.config import ACTIVATIONS, REMATS, Config, Model
from alibi_jax.model.adaptive_softmax import make_bands

# By how JAX calls the device, the first that it begins with: Cloud TPU documentation; NVIDIA's data
# sheets, without sparsity.
PEAKS = {
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


class Flops(NamedTuple):
    """Of a training step on all devices together: what it takes, and what is computed again."""

    products: float
    attention: float
    again: float

    @property
    def model(self) -> float:
        """What the model takes, however it is computed: the numerator of MFU."""
        return self.products + self.attention


def step_flops(config: Config, vocab_size: int) -> Flops:
    """Multiplications and additions of a training step, two for each product's term.

    The backward pass takes twice the forward pass. Attention is causal: half of all pairs. What a
    position method adds is left out, and so are an adaptive softmax's rarer bands, whose share of
    targets only the text has.
    """
    model, train = config.model, config.train
    tokens = train.batch_size * train.length
    width, ff = model.width, model.ff_width or 4 * model.width
    kv_heads = model.num_kv_heads or model.num_heads
    gated = ACTIVATIONS[model.activation].gated
    heads = 2 * model.num_heads + 2 * kv_heads
    layer = 2.0 * width * (heads * model.head_size + (3 if gated else 2) * ff)
    pairs = (train.length + 1) / 2
    attention = 2.0 * 2.0 * model.num_heads * model.head_size * pairs * model.num_layers
    layers, logits = layer * model.num_layers, 2.0 * width * vocabulary_rows(model, vocab_size)
    remat = REMATS[model.remat]
    again = layers * remat.recomputes_projections + attention * remat.recomputes_attention
    # Chunks of logits are always computed again; of what is in one chunk that is little.
    products = layers + logits + _projections(model, vocab_size)
    return Flops(3 * tokens * products, 3 * tokens * attention, tokens * (again + logits))


def vocabulary_rows(model: Model, vocab_size: int) -> int:
    """Logits of each position: of all tokens, or of an adaptive softmax's first band."""
    if not model.cutoffs:
        return vocab_size
    return make_bands(model, vocab_size)[0].size + len(model.cutoffs)


def _projections(model: Model, vocab_size: int) -> float:
    """Of an adaptive vocabulary, in and, but for the first band, out."""
    if not model.cutoffs:
        return 0.0
    widths = [band.width for band in make_bands(model, vocab_size)]
    return 2.0 * model.width * (sum(widths) + sum(widths[1:]))


def peak_flops(device_kind: str) -> float | None:
    """Of bfloat16 products a second, as the device's maker says; None where it isn't known."""
    if "MIG" in device_kind:
        # A part of a device.
        return None
    return next((peak for kind, peak in PEAKS.items() if device_kind.startswith(kind)), None)
