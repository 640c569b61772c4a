"""Attention with a linear bias in NumPy and float64, with a bound on what float32 may change."""

from typing import NamedTuple

import numpy as np

LARGEST = 700.0


class Expected(NamedTuple):
    """The exact results, and for each the greatest error that rounding explains.

    `visible` is `[B, N, T, S]`. `share` `[B, N, T]` is how much of a row's weight the rounding of
    its scores may move; a row with 1 may have any mean of the values that it sees.
    """

    out: np.ndarray
    out_error: np.ndarray
    log_sum_exp: np.ndarray
    visible: np.ndarray
    share: np.ndarray
    weights: np.ndarray
    distance: np.ndarray


def visible_pairs(shape, *, causal, window, offset, segments, mask):
    """Which keys each query sees, `[B, N, T, S]`; the numbers are exact integers."""
    *_, length, key_length = shape
    relative = np.arange(key_length)[None] - (np.arange(length)[:, None] + int(offset))
    visible = np.ones(shape, bool)
    if causal:
        visible &= relative <= 0
    if window is not None:
        visible &= abs(relative) < window
    if segments is not None:
        queries, keys = segments
        visible &= ((queries[:, :, None] == keys[:, None]) & (queries != 0)[:, :, None])[:, None]
    return visible if mask is None else visible & mask


def expected(query, key, value, slopes, future_slopes, positions, visible, *, eps, score_error):
    """Attention of arrays that hold exactly what the function got.

    `positions` are those of queries and keys, `[B, T]` and `[B, S]`. `eps` is the rounding of the
    results' dtype, `score_error` an error of each score besides the rounding of float32.
    """
    query, key, value, slopes, future_slopes = (
        x.astype(np.float64) for x in (query, key, value, slopes, future_slopes)
    )
    groups = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, groups, axis=2) for x in (key, value))
    # What nobody sees may be anything: NaN must not reach the products.
    seen = visible.any(2).transpose(0, 2, 1)[..., None]
    key, value = np.where(seen, key, 0.0), np.where(seen, value, 0.0)
    query = np.where(visible.any(3).transpose(0, 2, 1)[..., None], query, 0.0)
    scale = max(query.shape[-1], 1) ** -0.5
    scores = np.einsum("btnh,bsnh->bnts", query, key) * scale
    sizes = np.einsum("btnh,bsnh->bnts", abs(query), abs(key)) * scale
    queries, keys = (x.astype(np.float64) for x in positions)
    relative = (keys[:, None, :] - queries[:, :, None])[:, None]
    slope = np.where(relative > 0, future_slopes[:, None, None], slopes[:, None, None])
    bias = -slope * abs(relative)
    rounding = (query.shape[-1] + 8) * 2.0**-24
    error = rounding * sizes + 2.0**-21 * (abs(bias) + abs(scores + bias)) + score_error
    scores = np.where(visible, scores + bias, -np.inf)
    row_max = scores.max(-1, keepdims=True, initial=-np.inf)
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)
    powers = np.exp(scores - row_max)
    total = powers.sum(-1, keepdims=True)
    weights = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
    with np.errstate(divide="ignore"):
        log_sum_exp = (row_max + np.log(total))[..., 0]
        log_weights = scores - row_max - np.where(total > 0, np.log(total), 0.0)
    # A weight p whose score is off by e becomes p·exp(e), before the division.
    moved = np.exp(np.minimum(log_weights + error, LARGEST)) - weights
    moved = np.where(visible, moved, 0.0).sum(-1)
    share = np.where(moved < 0.3, 2 * moved / (1 - np.minimum(moved, 0.3)), 1.0)
    largest = np.where(visible[..., None], abs(value.transpose(0, 2, 1, 3)[:, :, None]), 0.0)
    largest = largest.max(axis=(3, 4), initial=0.0)
    out_error = (2 * share + 4e-6 + 4 * eps) * largest + 1e-37
    return Expected(
        np.einsum("bnts,bsnv->btnv", weights, value),
        out_error.transpose(0, 2, 1)[..., None],
        log_sum_exp,
        visible,
        share,
        weights,
        abs(relative),
    )


def expected_gradients(query, key, value, cotangent, result):
    """The gradients in queries, keys, values and slopes; and of each the sum of absolute terms."""
    query, key, value, cotangent = (x.astype(np.float64) for x in (query, key, value, cotangent))
    groups = query.shape[2] // key.shape[2]
    seen = result.visible.any(2).transpose(0, 2, 1)[..., None]
    wide_key, wide_value = (np.where(seen, np.repeat(x, groups, 2), 0.0) for x in (key, value))
    query = np.where(result.visible.any(3).transpose(0, 2, 1)[..., None], query, 0.0)
    weights, scale = result.weights, query.shape[-1] ** -0.5

    def of(query, wide_key, wide_value, cotangent, combine):
        products = np.einsum("btnv,bsnv->bnts", cotangent, wide_value)
        inner = weights * combine(products, (weights * products).sum(-1, keepdims=True))
        of_key = np.einsum("bnts,btnh->bsnh", inner, query) * scale
        of_value = np.einsum("bnts,btnv->bsnv", weights, cotangent)
        return (
            np.einsum("bnts,bsnh->btnh", inner, wide_key) * scale,
            of_key.reshape(*key.shape[:3], groups, key.shape[3]).sum(3),
            of_value.reshape(*value.shape[:3], groups, value.shape[3]).sum(3),
            (inner * result.distance).sum((0, 2, 3)),
        )

    *exact, of_bias = of(query, wide_key, wide_value, cotangent, np.subtract)
    sizes = of(*map(abs, (query, wide_key, wide_value, cotangent)), np.add)
    # A linear bias is minus the slope times the distance.
    return [*exact, -of_bias], sizes
