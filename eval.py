"""Evaluates checkpoints at many lengths: `python eval.py --workdir=runs/tiny`.

Writes results.json, results.csv and the extrapolation figure to <workdir>/eval, and prints the
table. --workdir again puts another run beside it. README.md has the rest.
"""

import pathlib

from absl import flags

from alibi_jax import command_line

_WORKDIR = flags.DEFINE_multi_string("workdir", None, "A run to evaluate; may be repeated.")
_LENGTHS = flags.DEFINE_string(
    "lengths", "1x,2x,4x,8x,16x,32x", "Tokens, or multiples of the training length."
)
_PROTOCOLS = flags.DEFINE_string(
    "protocols", "nonoverlapping", "Any of nonoverlapping and sliding:STRIDE."
)
_RESCALINGS = flags.DEFINE_string(
    "rescalings",
    "none",
    "Any of none, linear, ntk, yarn and dynamic_ntk, for rotary (linear for ALiBi too); the factor "
    "is the length over the training length, or F as in linear:F.",
)
_SPLIT = flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Of the corpus.")
_STEP = flags.DEFINE_integer("step", None, "The checkpoint; default: the latest.")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "Tokens a batch, at every length.")
_OUT = flags.DEFINE_string("out", None, "Where to write; default: eval/ in the first workdir.")


def main() -> int:
    """Flags in, one call out."""
    command_line.start_devices()
    from alibi_jax.report import evaluate

    return evaluate(
        [pathlib.Path(workdir) for workdir in _WORKDIR.value or []],
        lengths=_LENGTHS.value,
        protocols=_PROTOCOLS.value,
        rescalings=_RESCALINGS.value,
        split=_SPLIT.value,
        step=_STEP.value,
        batch_tokens=_BATCH_TOKENS.value,
        out=pathlib.Path(_OUT.value) if _OUT.value else None,
    )


if __name__ == "__main__":
    command_line.run(main)
