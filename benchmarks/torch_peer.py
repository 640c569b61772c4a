"""PyTorch's side of the benchmarks: a process that answers one line of JSON after another.

Started by `attention.py` and `train_step.py`, with the interpreter of an environment that has
torch. A line is `[function, arguments]`; the answer is `{"result": ...}` or `{"error": ...}`.
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

# What `seconds` and `growth` run, by name, and the bytes that each keeps between its calls.
_RUNS: dict[str, Callable[[], Any]] = {}
_KEPT: dict[str, int] = {}


def main() -> None:
    """Answers until standard input ends."""
    # Compilers print too: what they print goes to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    functions = {f.__name__: f for f in (attention, train_step, seconds, growth)}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"result": functions[name](**arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        print(json.dumps(reply), file=replies, flush=True)


def seconds(name: str) -> float:
    """Of a call of what was made under that name."""
    return _timing.timed(_RUNS[name])


def growth(name: str) -> float:
    """MiB that a call of what was made under that name needs at most, and what it keeps."""
    return _timing.growth(_RUNS[name]) + _KEPT[name] / 2**20


def attention(name: str, length: int, dtype: str, kind: str, slopes: list[float], size: int) -> Any:
    """Makes "mask", "flex" or "causal" attention ("forward" or "gradient"); some results."""
    kept = torch.empty(0)
    if name == "mask":
        kept = alibi_mask(tuple(slopes), length, getattr(torch, dtype))
        attend = functools.partial(F.scaled_dot_product_attention, attn_mask=kept)
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

    _RUNS[name] = forward if kind == "forward" else gradient
    _KEPT[name] = kept.nbytes
    results = [x.transpose(1, 2).float().numpy() for x in _RUNS[name]()]
    return _timing.sample(results).tolist()


@functools.lru_cache(maxsize=1)
def alibi_mask(slopes: tuple[float, ...], length: int, dtype: torch.dtype) -> Tensor:
    """`[1, N, T, T]`: the causal linear bias, -inf for the future; made head by head."""
    index = torch.arange(length)
    behind = (index - index[:, None]).float()
    behind.masked_fill_(behind > 0, -torch.inf)
    mask = torch.empty(1, len(slopes), length, length, dtype=dtype)
    for head, slope in enumerate(slopes):
        mask[0, head] = slope * behind
    return mask


def _flex(slopes: Tensor, length: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    causal = create_block_mask(
        lambda row, head, query, key: query >= key, None, None, length, length, device="cpu"
    )
    return functools.partial(torch.compile(flex_attention), score_mod=score, block_mask=causal)


class Transformer(nn.Module):
    """The model of `alibi_jax` with its default choices: ReLU, LayerNorm, tied embeddings.

    Parameters are float32 and those of `weights`; activations are `dtype`, as there.
    """

    def __init__(self, weights: dict[str, np.ndarray], mask: Tensor, dtype: torch.dtype):
        super().__init__()
        # Layers are stacked there; here each has a weight of its own.
        each = {}
        for name, x in weights.items():
            path = name.split(".")
            if path[0] == "layers":
                each |= {"/".join(["layers", str(n), *path[2:]]): y for n, y in enumerate(x)}
            else:
                each["/".join(path)] = x
        self.weights = nn.ParameterDict({name: torch.tensor(x) for name, x in each.items()})
        self.layers = 1 + max(int(name.split("/")[1]) for name in each if name[:6] == "layers")
        self.mask, self.dtype = mask, dtype

    def weight(self, *path: str) -> Tensor:
        """In the compute dtype."""
        return self.weights["/".join(path)].to(self.dtype)

    def norm(self, x: Tensor, *path: str) -> Tensor:
        """LayerNorm, statistics float32."""
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
                    "btd,dnh->bnth", normed, self.weight(*layer, "attention", which, "kernel")
                )
                for which in ("query", "key", "value")
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
    name: str, weights: str, tokens: list[list[int]], slopes: list[float], dtype: str, rate: float
) -> float:
    """Makes the step of a model, "eager" or "compiled", from a file of weights; its first loss."""
    kind = getattr(torch, dtype)
    inputs, targets = torch.tensor(tokens)[:, :-1], torch.tensor(tokens)[:, 1:]
    mask = alibi_mask(tuple(slopes), inputs.shape[1], kind)
    with np.load(weights) as arrays:
        model = Transformer(dict(arrays), mask, kind)
    matrices = [x for x in model.parameters() if x.ndim > 1]
    vectors = [x for x in model.parameters() if x.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(model, dynamic=False) if name == "compiled" else model

    def step() -> float:
        loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    _RUNS[name] = step
    return step()


if __name__ == "__main__":
    main()
