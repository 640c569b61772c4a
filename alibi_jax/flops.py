"""The floating-point operations of a training step, and the peak rates of devices.

The operations are counted from the configuration, because the compiler's own count includes the
body of a loop only once.
"""

from typing import NamedTuple

from alibi_jax.config import ACTIVATIONS, REMATS, Config, Model
from alibi_jax.model.adaptive_softmax import make_bands

# Peak bfloat16 FLOP/s, by the beginning of JAX's name for the device; the first match counts.
# Sources: the Cloud TPU documentation; NVIDIA's data sheets, without sparsity.
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
    """The floating-point operations of a training step on all devices together.

    `products` counts the matrix products with parameters, `attention` counts attention, and
    `recomputed` counts the operations that the backward pass repeats from the forward pass.
    """

    products: float
    attention: float
    recomputed: float

    @property
    def model(self) -> float:
        """The operations without recomputation: the numerator of MFU."""
        return self.products + self.attention


def step_flops(config: Config, vocab_size: int) -> Flops:
    """The multiplications and additions of a training step: two per term of a matrix product.

    The backward pass has twice the operations of the forward pass. Causal attention computes half
    of all pairs. The count omits the position methods. It also omits the logits within the rarer
    bands of an adaptive softmax, because the number of targets in these bands depends on the text.
    """
    model, train = config.model, config.train
    tokens = train.batch_size * train.length
    width, ff = model.width, model.ff_width or 4 * model.width
    kv_heads = model.num_kv_heads or model.num_heads
    gated = ACTIVATIONS[model.activation].gated
    projected_heads = 2 * model.num_heads + 2 * kv_heads
    layer = 2.0 * width * (projected_heads * model.head_size + (3 if gated else 2) * ff)
    pairs = (train.length + 1) / 2
    attention = 2.0 * 2.0 * model.num_heads * model.head_size * pairs * model.num_layers
    layers, logits = layer * model.num_layers, 2.0 * width * vocabulary_rows(model, vocab_size)
    remat = REMATS[model.remat]
    recomputed = layers * remat.recomputes_projections + attention * remat.recomputes_attention
    # Logits in several chunks are always recomputed. Logits that fit in a single chunk are not
    # recomputed; they are counted all the same, because they are few.
    products = layers + logits + _band_projections(model, vocab_size)
    return Flops(3 * tokens * products, 3 * tokens * attention, tokens * (recomputed + logits))


def vocabulary_rows(model: Model, vocab_size: int) -> int:
    """The number of logits per token: of the vocabulary, or of an adaptive softmax's first band."""
    if not model.cutoffs:
        return vocab_size
    return make_bands(model, vocab_size)[0].size + len(model.cutoffs)


def _band_projections(model: Model, vocab_size: int) -> float:
    """Operations per token of an adaptive vocabulary's projections.

    Every band has a projection at the input. Every band except the first also has a projection at
    the output.
    """
    if not model.cutoffs:
        return 0.0
    widths = [band.width for band in make_bands(model, vocab_size)]
    return 2.0 * model.width * (sum(widths) + sum(widths[1:]))


def peak_flops(device_kind: str) -> float | None:
    """The peak bfloat16 FLOP/s that the device's maker states; None for an unknown device."""
    if "MIG" in device_kind:
        # The device is a part of a GPU (Multi-Instance GPU), with a part of its rate.
        return None
    return next((peak for kind, peak in PEAKS.items() if device_kind.startswith(kind)), None)
