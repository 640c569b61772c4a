"""The text of a plan and of a ranking of meshes."""

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
    """The text of a plan: memory of one device, FLOPs, communication, and estimated times."""
    model, train = config.model, config.train
    tokens = train.batch_size * train.length
    lines = [
        f"plan for {target.text}: {_mesh(program)}",
        f"  {model.num_layers} layers of width {model.width}, {model.position}, {model.dtype}, "
        f"remat {model.remat}; {program.num_params:,} parameters with a vocabulary of "
        f"{vocab_size:,}",
        f"  {tokens:,} tokens per step: {train.batch_size} windows of {train.length}"
        + (f", in {train.accumulation} micro-batches" if train.accumulation > 1 else ""),
        "",
        f"memory of one device (from the compiler, which took {program.compile_seconds:.0f} s)",
        _bytes("parameters, float32", program.parameter_bytes),
        _bytes(f"optimizer state, {config.optimizer.name}", program.optimizer_bytes),
    ]
    if program.refusal:
        lines += [
            _bytes("temporary arrays that the compiler asked for", program.temporary_bytes),
            f"  DOES NOT FIT: {program.refusal}",
        ]
        return "\n".join(lines)
    gradients = program.parameter_bytes
    rest = program.temporary_bytes - gradients - program.activation_bytes
    lines += [
        _bytes("temporary arrays in training", program.temporary_bytes),
        _bytes("  gradients, float32", gradients),
        _bytes("  activations for the backward pass, at most", program.activation_bytes),
        # For a small model XLA keeps fewer activations than `activation_bytes` counts, and keeps
        # some of them in on-chip memory, which is not listed here. Then there is no rest to show.
        *([_bytes("  the rest: gathered weights, logits, buffers", rest)] if rest > 0 else []),
        _bytes("temporary arrays in evaluation", program.evaluation_bytes),
        _bytes("peak", program.peak_bytes),
    ]
    if target.device is not None:
        share = program.peak_bytes / target.device.memory
        verdict = "fits" if share <= 1 else "DOES NOT FIT"
        lines.append(
            f"  {verdict}: {share:.0%} of the {target.device.memory / _GIB:.0f} GiB of a "
            f"{target.device.name}"
        )
    flops = step_flops(config, vocab_size)
    share = flops.products / (6 * program.num_params * tokens)
    lines += [
        "",
        "TFLOP of a step on all devices (counted from the configuration)",
        f"  matrix products {_format_tera(flops.products)} ({share:.0%} of 6 x parameters x "
        f"tokens), attention {_format_tera(flops.attention)}, recomputation "
        f"{_format_tera(flops.recomputed)}",
        "",
        "what each device sends in a step (read from the compiled program)",
    ]
    lines += [
        f"  {kind:<18} among {group:>4} devices: {times:>5} times, {num_bytes / 1e9:>8.3f} GB"
        for (kind, group), (times, num_bytes) in by_kind(list(program.exchanges)).items()
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
        "ESTIMATE of the time of a step, each part at its peak "
        f"({device.flops / 1e12:.0f} TFLOP/s in bfloat16, {device.bandwidth / 1e9:.0f} GB/s of "
        f"memory, {device.link / 1e9:.0f} GB/s along one axis of the network, one collective at a "
        "time)",
        f"  compute {estimate.compute * 1e3:,.1f} ms, memory {estimate.memory * 1e3:,.1f} ms, "
        f"network {estimate.network * 1e3:,.1f} ms",
    ]
    for name, seconds in (
        ("all three at the same time", estimate.overlapped),
        ("one after the other", estimate.sequential),
    ):
        lines.append(
            f"  {name}: {seconds * 1e3:,.1f} ms, MFU {model_flops / peak / seconds:.0%}, "
            f"{tokens / seconds * 86400 / 1e9:,.1f} billion tokens per day, "
            f"{config.train.steps * seconds / 86400:,.2f} days for {config.train.steps:,} steps"
        )
    lines.append(
        "  A real step takes longer than the first of these times, and possibly than the second."
    )
    return lines


def ranking(
    target: Target,
    compiled: list[tuple[Program, Roofline | None]],
    num_meshes: int,
) -> str:
    """A table of the `compiled` meshes out of `num_meshes`.

    The meshes that fit come before those that do not, and the fastest comes first.
    """
    assert target.device is not None
    memory = target.device.memory

    def sort_key(candidate: tuple[Program, Roofline | None]) -> tuple[bool, float]:
        program, estimate = candidate
        does_not_fit = program.peak_bytes > memory or estimate is None
        return does_not_fit, estimate.sequential if estimate else 0.0

    lines = [
        f"{len(compiled)} of {num_meshes} meshes for {target.text}, by the estimated time of a "
        "step (compute, memory and network one after the other, each at its peak)",
        f"  {'mesh':<44} {'GiB':>6} {'compute':>9} {'memory':>8} {'network':>8} {'step':>9}",
    ]
    for program, estimate in sorted(compiled, key=sort_key):
        mesh = _mesh(program)
        if estimate is None or program.peak_bytes > memory:
            lines.append(f"  {mesh:<44} {program.peak_bytes / _GIB:>6.2f} does not fit")
            continue
        parts = (estimate.compute, estimate.memory, estimate.network)
        lines.append(
            f"  {mesh:<44} {program.peak_bytes / _GIB:>6.2f} "
            + " ".join(f"{1e3 * part:>{width}.1f}" for part, width in zip(parts, (9, 8, 8)))
            + f" {1e3 * estimate.sequential:>6.1f} ms"
        )
    return "\n".join(lines)


def _mesh(program: Program) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(program.mesh).items())


def _format_tera(number: float) -> str:
    return f"{number / 1e12:,.0f}" if number >= 1e14 else f"{number / 1e12:.3g}"


def _bytes(name: str, number: int) -> str:
    unit, unit_bytes = ("GiB", _GIB) if number >= _GIB / 100 else ("MiB", _GIB / 1024)
    return f"  {name:<50} {number / unit_bytes:>9.3f} {unit}"
