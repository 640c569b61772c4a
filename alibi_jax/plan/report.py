"""A plan in words and numbers."""

import dataclasses

from alibi_jax.config import Config
from alibi_jax.flops import step_flops
from alibi_jax.plan.costs import Roofline
from alibi_jax.plan.hlo import by_kind
from alibi_jax.plan.program import Program
from alibi_jax.plan.targets import Target

_GIB = 2**30


def report(
    config: Config, vocab_size: int, target: Target, program: Program, estimate: Roofline | None
) -> str:
    """What one device holds, what a step computes and sends, and how long the run takes."""
    model, train = config.model, config.train
    tokens = train.batch_size * train.length
    lines = [
        f"plan for {target.text}: {_mesh(program)}",
        f"  {model.num_layers} layers of width {model.width}, {model.position}, {model.dtype}, "
        f"remat {model.remat}; {program.num_params:,} parameters with a vocabulary of "
        f"{vocab_size:,}",
        f"  {tokens:,} tokens a step: {train.batch_size} windows of {train.length}"
        + (f", in {train.accumulation} micro-batches" if train.accumulation > 1 else ""),
        "",
        f"memory of one device (compiled for it in {program.seconds:.0f} s)",
        _bytes("parameters, float32", program.parameters),
        _bytes(f"optimizer state, {config.optimizer.name}", program.optimizer),
    ]
    if program.refusal:
        lines += [
            _bytes("temporaries asked for", program.temporaries),
            f"  DOES NOT FIT: {program.refusal}",
        ]
        return "\n".join(lines)
    gradients = program.parameters
    rest = program.temporaries - gradients - program.activations
    lines += [
        _bytes("temporaries in training", program.temporaries),
        _bytes("  of them gradients (float32, as the parameters)", gradients),
        _bytes("  kept for the backward pass (before XLA saves any)", program.activations),
        # On a small model XLA keeps less than that, in memory nearer to the cores.
        *([_bytes("  the rest (gathered weights, logits, buffers)", rest)] if rest > 0 else []),
        _bytes("temporaries in evaluation", program.evaluation),
        _bytes("all together, at most", program.total),
    ]
    if target.device is not None:
        share = program.total / target.device.memory
        verdict = "fits" if share <= 1 else "DOES NOT FIT"
        lines.append(
            f"  {verdict}: {share:.0%} of the {target.device.memory / _GIB:.0f} GiB of a "
            f"{target.device.name}"
        )
    flops = step_flops(config, vocab_size)
    share = flops.products / (6 * program.num_params * tokens)
    lines += [
        "",
        "a step on all devices (counted from the configuration)",
        f"  products {_tera(flops.products)} TFLOP ({share:.0%} of 6 x parameters x tokens), "
        f"attention {_tera(flops.attention)}, computed again {_tera(flops.again)}",
        "",
        "what each device sends a step (read from the compiled program)",
    ]
    exchanged = by_kind(list(program.exchanges))
    lines += [
        f"  {kind:<18} among {group:>4}: {times:>5} times, {moved / 1e9:>8.3f} GB"
        for (kind, group), (times, moved) in exchanged.items()
    ] or ["  nothing"]
    if estimate is not None and target.device is not None:
        lines += ["", *_times(config, target, flops.model, estimate)]
    return "\n".join(lines)


def _times(config: Config, target: Target, model_flops: float, estimate: Roofline) -> list[str]:
    device = target.device
    assert device is not None
    peak = len(target.devices) * device.flops
    tokens = config.train.batch_size * config.train.length
    lines = [
        "ESTIMATE of a step, each part at its peak "
        f"({device.flops / 1e12:.0f} TFLOP/s of bfloat16, {device.bandwidth / 1e9:.0f} GB/s of "
        f"memory, {device.link / 1e9:.0f} GB/s along one axis of the network, one exchange at a "
        "time)",
        f"  products {estimate.compute * 1e3:,.1f} ms, memory {estimate.memory * 1e3:,.1f} ms, "
        f"network {estimate.network * 1e3:,.1f} ms",
    ]
    for name, seconds in (
        ("all at the same time", estimate.least),
        ("one after the other", estimate.most),
    ):
        lines.append(
            f"  {name}: {seconds * 1e3:,.1f} ms, MFU {model_flops / peak / seconds:.0%}, "
            f"{tokens / seconds * 86400 / 1e9:,.1f} billion tokens a day, "
            f"{config.train.steps * seconds / 86400:,.2f} days for {config.train.steps:,} steps"
        )
    lines.append("  What a step really takes lies beyond the first, and may lie beyond the second.")
    return lines


def ranking(
    target: Target,
    tried: list[tuple[Program, Roofline | None]],
    possible: int,
) -> str:
    """The meshes that were tried, those that fit first, the quickest first."""
    assert target.device is not None
    room = target.device.memory

    def order(one: tuple[Program, Roofline | None]) -> tuple[bool, float]:
        program, estimate = one
        return program.total > room or estimate is None, estimate.most if estimate else 0.0

    lines = [
        f"{len(tried)} of {possible} meshes for {target.text}, by estimated time a step "
        "(parts one after the other at their peaks)",
        f"  {'mesh':<44} {'GiB':>6} {'products':>9} {'memory':>8} {'network':>8} {'step':>9}",
    ]
    for program, estimate in sorted(tried, key=order):
        mesh = _mesh(program)
        if estimate is None or program.total > room:
            lines.append(f"  {mesh:<44} {program.total / _GIB:>6.2f} does not fit")
            continue
        each = (estimate.compute, estimate.memory, estimate.network)
        lines.append(
            f"  {mesh:<44} {program.total / _GIB:>6.2f} "
            + " ".join(f"{1e3 * x:>{n}.1f}" for x, n in zip(each, (9, 8, 8)))
            + f" {1e3 * estimate.most:>6.1f} ms"
        )
    return "\n".join(lines)


def _mesh(program: Program) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(program.mesh).items())


def _tera(number: float) -> str:
    return f"{number / 1e12:,.0f}" if number >= 1e14 else f"{number / 1e12:.3g}"


def _bytes(name: str, number: int) -> str:
    unit, size = ("GiB", _GIB) if number >= _GIB / 100 else ("MiB", _GIB / 1024)
    return f"  {name:<50} {number / size:>9.3f} {unit}"
