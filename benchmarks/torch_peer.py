"""PyTorch's part of the benchmarks: a process that answers requests, each one line of JSON.

`attention.py` and `train_step.py` start it with the interpreter of an environment that has torch. A
request is `[function, arguments]`; the answer is `{"result": ...}` or `{"error": ...}`.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import _timing
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The calls that `seconds` and `peak_memory` measure, by name, and the bytes that each call keeps
# from one call to the next.
_RUNS: dict[str, Callable[[], Any]] = {}
_KEPT_BYTES: dict[str, int] = {}


def main() -> None:
    """Answers requests until standard input ends."""
    # Output of compilers goes to standard error, so that it does not mix with the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    functions = {f.__name__: f for f in (attention, train_step, seconds, peak_memory)}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"result": functions[name](**arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps(reply), file=replies, flush=True)


def seconds(name: str) -> float:
    """The seconds of a call that was prepared under this name."""
    return _timing.seconds_per_call(_RUNS[name])


def peak_memory(name: str) -> float:
    """The MiB that a call that was prepared under this name needs, and those that it keeps."""
    return _timing.peak_memory(_RUNS[name]) + _KEPT_BYTES[name] / 2**20


def attention(
    name: str, length: int, dtype: str, pass_name: str, slopes: list[float], size: int
) -> Any:
    """Prepares "mask", "flex" or "causal" attention, and returns a sample of its results.

    `pass_name` is "forward" or "gradient".
    """
    kept_mask = torch.empty(0)
    if name == "mask":
        kept_mask = alibi_mask(tuple(slopes), length, getattr(torch, dtype))
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=kept_mask)
    elif name == "flex":
        attend = _flex(torch.tensor(slopes), length)
    else:
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    arrays = torch.from_numpy(_timing.normal_arrays(4, length, len(slopes), size))
    *inputs, cotangent = arrays.to(getattr(torch, dtype)).transpose(2, 3).contiguous()

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(*inputs),)

    def gradient() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(attend(*leaves), leaves, cotangent)

    _RUNS[name] = forward if pass_name == "forward" else gradient
    _KEPT_BYTES[name] = kept_mask.nbytes
    results = [x.transpose(1, 2).float().numpy() for x in _RUNS[name]()]
    return _timing.sample(results).tolist()


@functools.lru_cache(maxsize=1)
def alibi_mask(slopes: tuple[float, ...], length: int, dtype: torch.dtype) -> Tensor:
    """The causal linear bias, `[1, N, T, T]`, with -inf for the future; made head by head."""
    index = torch.arange(length)
    relative = (index - index[:, None]).float()
    relative.masked_fill_(relative > 0, -torch.inf)
    mask = torch.empty(1, len(slopes), length, length, dtype=dtype)
    for head, slope in enumerate(slopes):
        mask[0, head] = slope * relative
    return mask


def _flex(slopes: Tensor, length: int) -> Callable[..., Tensor]:
    """Compiled flex attention that computes the linear bias itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    causal = create_block_mask(
        lambda row, head, query, key: query >= key, None, None, length, length, device="cpu"
    )
    return functools.partial(torch.compile(flex_attention), score_mod=score, block_mask=causal)


class Transformer(nn.Module):
    """The model of `alibi_jax` with its default choices: ReLU, LayerNorm, tied embeddings.

    Parameters are float32 and have the values in `weights`. Activations have the dtype `dtype`, as
    in `alibi_jax`.
    """

    def __init__(self, weights: dict[str, np.ndarray], mask: Tensor, dtype: torch.dtype):
        super().__init__()
        # `alibi_jax` stacks the weights of its layers; here each layer has its own.
        weights_by_name = {}
        for name, x in weights.items():
            path = name.split(".")
            if path[0] == "layers":
                # The path begins with "layers.stacks.0": all layers are in the one stack.
                weights_by_name |= {
                    "/".join(["layers", str(n), *path[3:]]): y for n, y in enumerate(x)
                }
            else:
                weights_by_name["/".join(path)] = x
        self.weights = nn.ParameterDict(
            {name: torch.tensor(x) for name, x in weights_by_name.items()}
        )
        self.layers = 1 + max(
            int(name.split("/")[1]) for name in weights_by_name if name[:6] == "layers"
        )
        self.mask, self.dtype = mask, dtype

    def weight(self, *path: str) -> Tensor:
        """A weight in the compute dtype."""
        return self.weights["/".join(path)].to(self.dtype)

    def norm(self, x: Tensor, *path: str) -> Tensor:
        """LayerNorm, with statistics in float32."""
        scale, bias = (self.weight(*path, name) for name in ("scale", "bias"))
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps=1e-6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean negative log-likelihood, float32."""
        table = self.weights["vocabulary/embedding"]
        x = (table[tokens] * table.shape[1] ** 0.5).to(self.dtype)
        for number in range(self.layers):
            layer = ("layers", str(number))
            normed = self.norm(x, *layer, "attention_norm")
            query, key, value = (
                torch.einsum(
                    "btd,dnh->bnth", normed, self.weight(*layer, "attention", part, "kernel")
                )
                for part in ("query", "key", "value")
            )
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
            x = x + torch.einsum(
                "bnth,nhd->btd", out, self.weight(*layer, "attention", "out", "kernel")
            )
            hidden = self.norm(x, *layer, "ff_norm") @ self.weight(*layer, "ff", "up", "kernel")
            x = x + torch.relu(hidden) @ self.weight(*layer, "ff", "down", "kernel")
        logits = self.norm(x, "norm") @ self.weight("vocabulary", "embedding").T
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train_step(
    name: str,
    weights: str,
    tokens: list[list[int]],
    slopes: list[float],
    dtype: str,
    learning_rate: float,
) -> float:
    """Prepares the training step of a model, and returns its first loss.

    `name` is "eager" or "compiled". `weights` is the path of a file of weights.
    """
    compute_dtype = getattr(torch, dtype)
    inputs, targets = torch.tensor(tokens)[:, :-1], torch.tensor(tokens)[:, 1:]
    mask = alibi_mask(tuple(slopes), inputs.shape[1], compute_dtype)
    with np.load(weights) as arrays:
        model = Transformer(dict(arrays), mask, compute_dtype)
    matrices = [x for x in model.parameters() if x.ndim > 1]
    vectors = [x for x in model.parameters() if x.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    compute_loss = torch.compile(model, dynamic=False) if name == "compiled" else model

    def step() -> float:
        loss = compute_loss(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    _RUNS[name] = step
    return step()


if __name__ == "__main__":
    main()
