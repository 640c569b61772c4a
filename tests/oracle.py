"""A second implementation of the whole model, in NumPy and float64, written from the papers.

It computes one sequence, one head, one query and one key at a time. The model has pre-norm
LayerNorm, ReLU and tied embeddings. Parameters have the same names and shapes as in the model.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from helpers import layers_of


class Pair(NamedTuple):
    """A query and a key of one head, with their positions i and j."""

    query: np.ndarray
    key: np.ndarray
    i: int
    j: int
    head: int
    config: object
    train_length: int
    weights: dict
    # The layer's normalised inputs at the tokens after the key, up to and including the query.
    between: np.ndarray

    @property
    def product(self):
        return self.query @ self.key / math.sqrt(len(self.query))

    @property
    def distance(self):
        return abs(self.i - self.j)


def logits(params, config, tokens, positions, visible, *, train_length, vocab_size):
    """The logits `[T, V]` of one sequence; `visible[i, j]` says whether query i sees key j."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    names, shared = config.positions, params.get("positions", {})
    table = params["vocabulary"]["embedding"]
    x = table[tokens] * math.sqrt(config.width)
    if names[0] in EMBEDDINGS:
        embed, weights = EMBEDDINGS[names[0]], shared.get(names[0])
        x = x + np.array([embed(position, config.width, weights) for position in positions])
    for number, layer in enumerate(layers_of(params)):
        name = names[number % len(names)]
        weights = layer["attention"].get("position") or shared.get(name)
        normed = norm(x, layer["attention_norm"])
        x = x + attention(
            normed, layer["attention"], name, weights, config, positions, visible, train_length
        )
        hidden = np.maximum(norm(x, layer["ff_norm"]) @ layer["ff"]["up"]["kernel"], 0)
        x = x + hidden @ layer["ff"]["down"]["kernel"]
    # Rows of the table past the vocabulary are padding.
    return norm(x, params["norm"]) @ table[:vocab_size].T


def norm(x, weights):
    """Ba et al. 2016, equation 4."""
    deviations = x - x.mean(axis=-1, keepdims=True)
    variance = (deviations**2).mean(axis=-1, keepdims=True)
    return deviations / np.sqrt(variance + 1e-6) * weights["scale"] + weights["bias"]


def attention(x, layer, name, weights, config, positions, visible, train_length):
    """Vaswani et al. 2017, section 3.2; groups of heads share a key head (Ainslie et al. 2023)."""
    out = np.zeros_like(x)
    for head in range(config.num_heads):
        key_head = head * (config.num_kv_heads or config.num_heads) // config.num_heads
        queries = x @ layer["query"]["kernel"][:, head]
        keys = x @ layer["key"]["kernel"][:, key_head]
        values = x @ layer["value"]["kernel"][:, key_head]
        for i in range(len(x)):
            seen_keys = [j for j in range(len(x)) if visible[i, j]]
            if not seen_keys:
                continue
            pairs = [
                Pair(
                    queries[i],
                    keys[j],
                    int(positions[i]),
                    int(positions[j]),
                    head,
                    config,
                    train_length,
                    weights,
                    x[j + 1 : i + 1],
                )
                for j in seen_keys
            ]
            scores = scores_of(name, pairs)
            powers = np.exp(scores - scores.max())
            out[i] += powers / powers.sum() @ values[seen_keys] @ layer["out"]["kernel"][head]
    return out


def scores_of(name, pairs):
    """The scores of one query, before the softmax."""
    return np.array([SCORES.get(name, lambda pair: pair.product)(pair) for pair in pairs])


def sinusoid(position, width, weights=None):
    """Vaswani et al. 2017, section 3.5: sines and cosines, interleaved."""
    angles = [position / 10000 ** (2 * k / width) for k in range(width // 2)]
    return np.array([wave(angle) for angle in angles for wave in (math.sin, math.cos)])


def learned(position, width, weights):
    return weights["table"][position]


def alibi(pair):
    """Press et al. 2021, section 3; a factor divides the slopes (Al-Khateeb et al. 2023)."""
    slope = 2 ** (-8 * (pair.head + 1) / pair.config.num_heads)
    return pair.product - slope / linear_factor(pair) * pair.distance


def alibi_learned(pair):
    slope = math.exp(pair.weights["log_slopes"][pair.head])
    return pair.product - slope / linear_factor(pair) * pair.distance


def linear_factor(pair):
    return pair.config.rescaling_factor if pair.config.rescaling == "linear" else 1


def t5(pair):
    """Raffel et al. 2020, section 2.1, 32 buckets to distance 128, as in T5's code."""
    bucket = pair.distance
    if bucket >= 16:
        bucket = min(16 + int(math.log(bucket / 16) / math.log(128 / 16) * 16), 31)
    return pair.product + pair.weights["table"][bucket, pair.head]


def kerple_log(pair):
    """Chi et al. 2022 (KERPLE), section 4."""
    scale, rate = (math.exp(pair.weights[name][pair.head]) for name in ("log_scale", "log_rate"))
    return pair.product - scale * math.log(1 + rate * pair.distance)


def kerple_power(pair):
    """Chi et al. 2022 (KERPLE), section 4."""
    scale = math.exp(pair.weights["log_scale"][pair.head])
    exponent = 2 / (1 + math.exp(-pair.weights["exponent_logits"][pair.head]))
    return pair.product - scale * pair.distance**exponent


def sandwich(pair):
    """Chi et al. 2023 (Sandwich): sinusoids with 128 features, divided by the ratio h·8/N."""
    inner = sinusoid(pair.i, 128) @ sinusoid(pair.j, 128) - 64
    return pair.product + inner / ((pair.head + 1) * 8 / pair.config.num_heads)


def fire(pair):
    """Li et al. 2023 (FIRE), section 3; absolute values and 1e-6 as in the authors' code."""
    weights = pair.weights
    rate, threshold = abs(weights["rate"]), math.exp(weights["log_threshold"])
    normalizer = math.log(rate * max(threshold, pair.i) + 1) + 1e-6
    normalized_distance = math.log(rate * pair.distance + 1) / normalizer
    hidden = np.maximum(normalized_distance * weights["hidden_kernel"] + weights["hidden_bias"], 0)
    bias = hidden @ weights["out_kernel"][:, pair.head] + weights["out_bias"][pair.head]
    return pair.product + bias


def fox(pair):
    """Lin et al. 2025 (Forgetting Transformer), section 3."""
    kernel, bias = pair.weights["kernel"][:, pair.head], pair.weights["gate_bias"][pair.head]
    return pair.product + sum(
        math.log(1 / (1 + math.exp(-(x @ kernel + bias)))) for x in pair.between
    )


def rotated_product(pair, frequencies, decay=1.0):
    """Su et al. 2021, equation 16: features k and k + H/2 form a complex number, which rotates."""

    def rotated(x, position):
        half = len(x) // 2
        return (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies)

    product = rotated(pair.query, pair.i) * np.conj(rotated(pair.key, pair.j))
    return (decay * product).real.sum() / math.sqrt(len(pair.query))


def frequencies_of(pair, base=10000.0):
    size = len(pair.query)
    return base ** (-2 * np.arange(size // 2) / size)


def rotary(pair):
    """Rescaled: Chen et al. 2023, section 3.2; Peng et al. 2023 (YaRN), sections 3.1, 3.2, 3.4."""
    size, factor = len(pair.query), pair.config.rescaling_factor
    frequencies = frequencies_of(pair)
    match pair.config.rescaling:
        case "linear":
            return rotated_product(pair, frequencies / factor)
        case "ntk":
            return rotated_product(
                pair, frequencies_of(pair, 10000 * factor ** (size / (size - 2)))
            )
        case "yarn":
            turns = pair.train_length / (2 * math.pi / frequencies)
            ramp = np.clip((turns - 1) / (32 - 1), 0, 1)
            rescaled = (1 - ramp) * frequencies / factor + ramp * frequencies
            return (0.1 * math.log(factor) + 1) ** 2 * rotated_product(pair, rescaled)
    return rotated_product(pair, frequencies)


def rotary_truncated(pair):
    """Barbero et al. 2024, section 6: the slowest pairs are not rotated."""
    frequencies = frequencies_of(pair)
    frequencies[int(pair.config.rotary_fraction * len(frequencies)) :] = 0
    return rotated_product(pair, frequencies)


def xpos(pair):
    """Sun et al. 2022, section 3.2; 512 divides the exponent, as in the authors' code."""
    fractions = np.arange(len(pair.query) // 2) / (len(pair.query) // 2)
    decay = ((fractions + 0.4) / 1.4) ** ((pair.i - pair.j) / 512)
    return rotated_product(pair, frequencies_of(pair), decay)


def transformer_xl(pair):
    """Dai et al. 2019, section 3.3: terms a to d; sines first, then cosines."""
    content, position = (pair.weights[f"{of}_bias"][pair.head] for of in ("content", "position"))
    kernel = pair.weights["kernel"][:, pair.head]
    width = len(kernel)
    angles = (pair.i - pair.j) / 10000 ** (2 * np.arange(width // 2) / width)
    relative = np.concatenate([np.sin(angles), np.cos(angles)]) @ kernel
    score = (pair.query + content) @ pair.key + (pair.query + position) @ relative
    return score / math.sqrt(len(pair.query))


EMBEDDINGS = {
    "sinusoidal": sinusoid,
    "shape": sinusoid,
    "randomized": sinusoid,
    "learned": learned,
}
SCORES = {
    score.__name__: score
    for score in (
        alibi,
        alibi_learned,
        t5,
        kerple_log,
        kerple_power,
        sandwich,
        fire,
        fox,
        rotary,
        rotary_truncated,
        xpos,
        transformer_xl,
    )
}
