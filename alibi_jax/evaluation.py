"""Trained runs scored by protocol and length: the numbers of results.json."""

import dataclasses
import math
import pathlib
from typing import Any

import jax
import numpy as np

from alibi_jax import sharding
from alibi_jax.checkpoints import Checkpoints, Metadata
from alibi_jax.config import Config, from_dict
from alibi_jax.data import tokenizers
from alibi_jax.data.builders import open_documents
from alibi_jax.data.streams import document_starts, token_stream
from alibi_jax.model import abstract_model
from alibi_jax.rescaling import UNSCALED, Rescaling
from alibi_jax.scoring import Protocol, Scorer, Scores

# Nats whose perplexity a float64, and so the results' JSON, still holds.
_LARGEST_NLL = 700.0


def parse_protocols(text: str) -> list[Protocol]:
    """From "nonoverlapping,sliding:64". Raises ValueError that names what is wrong."""
    protocols = []
    for part in text.split(","):
        name, _, stride = part.strip().partition(":")
        if name == "nonoverlapping" and not stride:
            protocols.append(Protocol(name))
        elif name == "sliding" and stride.isdecimal() and int(stride) > 0:
            protocols.append(Protocol(name, int(stride)))
        else:
            raise ValueError(
                f"--protocols={text}: {part!r} is not one; give nonoverlapping or "
                "sliding:STRIDE, with commas between"
            )
    return protocols


def parse_lengths(text: str, train_length: int) -> list[int]:
    """From "512,1024", or multiples of the training length as "1x,2x,0.5x"."""
    lengths = []
    for part in text.split(","):
        part = part.strip()
        try:
            value = float(part[:-1]) * train_length if part.endswith("x") else int(part)
        except ValueError:
            value = 0
        if not 1 <= value < math.inf or value != int(value):
            raise ValueError(
                f"--lengths={text}: {part!r} is not a length of at least 1 token; give numbers "
                f"as 512,1024 or multiples of the training length {train_length} as 1x,2x"
            )
        lengths.append(int(value))
    return lengths


def check_strides(protocols: list[Protocol], lengths: list[int]) -> None:
    """Raises ValueError where a stride would jump over targets."""
    for protocol in protocols:
        for length in lengths:
            if protocol.stride is not None and protocol.stride > length:
                raise ValueError(
                    f"--protocols={protocol} with length {length}: a stride over the window's "
                    f"length would skip targets; give at most {min(lengths)}"
                )


def position_curve(scores: Scores) -> list[dict[str, Any]]:
    """Mean loss by context in bins 1, 2, 3-4, 5-8, ...: where in the window the loss falls."""
    curve, start = [], 0
    while start < len(scores.nll):
        stop = min(max(2 * start, start + 1), len(scores.nll))
        targets = int(scores.targets[start:stop].sum())
        if targets:
            curve.append(
                {
                    "context_from": start + 1,
                    "context_to": stop,
                    "nll": float(scores.nll[start:stop].sum() / targets),
                    "targets": targets,
                }
            )
        start = stop
    return curve


@dataclasses.dataclass
class Run:
    """A trained model ready to be scored."""

    workdir: pathlib.Path
    metadata: Metadata
    config: Config
    tokenizer: tokenizers.Tokenizer
    graphdef: Any
    params: Any
    mesh: jax.sharding.Mesh


def load_run(workdir: pathlib.Path, step: int | None = None) -> Run:
    """The parameters of a checkpoint (default: the latest) on all devices; nothing else of it.

    Raises:
        CheckpointError: where there is no such checkpoint, or it does not fit its configuration.
        ValueError: where the text is no longer the one that it was trained on.
    """
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.check_step(step)
        metadata = checkpoints.metadata(step)
        config = from_dict(metadata.config)
        tokenizer = tokenizers.from_dict(metadata.tokenizer)
        mesh = sharding.make_mesh()
        graphdef, abstract = abstract_model(config, metadata.vocab_size, mesh)
        params = checkpoints.restore(step, params=abstract)["params"]
    # A folder that has changed may have moved documents from one split to another.
    if open_documents(config.data, "train").fingerprint != metadata.text:
        raise ValueError(
            f"{workdir} was trained on another text than data.dataset="
            f"{config.data.dataset!r} now gives: restore that text"
        )
    return Run(workdir, metadata, config, tokenizer, graphdef, params, mesh)


def evaluate_run(
    run: Run,
    lengths: list[int],
    protocols: list[Protocol],
    split: str,
    batch_tokens: int,
    rescaling: Rescaling = UNSCALED,
) -> dict[str, Any]:
    """A run's entry of results.json: a row for each protocol and length.

    A length that the model or the split cannot serve gives a row that says why, under "error".
    """
    config = run.config
    tokens = token_stream(config.data, split, run.tokenizer)
    # Separators before documents are no text, also where the same token ends lines. The first
    # one is no target.
    separators = len(document_starts(config.data, split, run.tokenizer)) - 1
    separator_bytes = separators * int(run.tokenizer.token_bytes[run.tokenizer.separator])
    # The parameters are the run's; what a rescaling changes is in the graph, one for each length.
    scorers = {
        length: Scorer(
            abstract_model(rescaling.at(config, length), run.metadata.vocab_size, run.mesh)[0],
            run.mesh,
            batch_tokens,
        )
        for length in lengths
    }
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    for protocol in protocols:
        for length in lengths:
            row: dict[str, Any] = {
                "protocol": protocol.name,
                "length": length,
                "stride": protocol.stride or length,
                "rescaling_factor": rescaling.factor_at(config, length),
            }
            rows.append(row)
            try:
                scores = _score(run, scorers[length], tokens, protocol, length)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                row["error"] = str(error).strip().splitlines()[0]
                continue
            scores.num_bytes -= separator_bytes
            row |= {
                "nll": scores.mean_nll,
                "perplexity": math.exp(scores.mean_nll),
                "bits_per_byte": scores.bits_per_byte,
                "targets": int(scores.targets.sum()),
                "min_context": protocol.windows(len(tokens), length).min_context,
                "seconds": scores.seconds,
                "compile_seconds": scores.compile_seconds,
            }
            if protocol.name == "nonoverlapping":
                curves[str(length)] = position_curve(scores)
    return {
        "workdir": str(run.workdir),
        "position": config.model.position,
        "rescaling": str(rescaling),
        "train_length": config.train.length,
        "step": run.metadata.step,
        "split": split,
        "config": run.metadata.config,
        "trained_by": run.metadata.provenance,
        "rows": rows,
        "position_nll": curves,
        "early_token": early_token(rows),
    }


def _score(run: Run, scorer: Scorer, tokens: np.ndarray, protocol: Protocol, length: int) -> Scores:
    if length > len(tokens) - 1:
        raise ValueError(f"the split has {len(tokens) - 1} targets, fewer than one window")
    scores = scorer(
        run.params,
        tokens,
        protocol.windows(len(tokens), length),
        run.tokenizer.token_bytes,
        f"{run.workdir.name} {protocol} at {length}",
    )
    if not scores.mean_nll < _LARGEST_NLL:
        raise ValueError(f"the mean loss is {scores.mean_nll} nats: the model's numbers ran away")
    return scores


def early_token(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What short contexts at the start of each window cost, in nats, by length.

    The loss in non-overlapping windows less that in sliding ones of the smallest stride
    measured (Press et al. 2021, Appendix B: the early token curse); empty without both.
    """
    cost: dict[str, Any] = {}
    scored = [row for row in rows if "nll" in row]
    for row in scored:
        sliding = [
            other
            for other in scored
            if other["protocol"] == "sliding" and other["length"] == row["length"]
        ]
        if row["protocol"] == "nonoverlapping" and sliding:
            finest = min(sliding, key=lambda other: other["stride"])
            cost[str(row["length"])] = {
                "nats": row["nll"] - finest["nll"],
                "stride": finest["stride"],
            }
    return cost
