"""Evaluates checkpoints at many lengths: `python eval.py --workdir=runs/tiny`.

Writes report.html, results.json, results.csv and the figures to <workdir>/eval, and prints the
table and what it says. --workdir again, or a pattern as 'runs/*', puts runs side by side. Stopped
at any moment, the same command goes on where it was. README.md has the rest.
"""

import dataclasses

from absl import flags

from alibi_jax import cli
from alibi_jax.config import parse_mesh

_WORKDIR = flags.DEFINE_multi_string(
    "workdir", None, "A run to evaluate, or a pattern of them; may be repeated."
)
_LENGTHS = flags.DEFINE_string(
    "lengths", "1x,2x,4x,8x,16x,32x", "Tokens, or multiples of the training length."
)
_PROTOCOLS = flags.DEFINE_string(
    "protocols",
    "nonoverlapping,fixed",
    "Any of nonoverlapping, sliding:STRIDE and fixed: each target with exactly so much context.",
)
_RESCALINGS = flags.DEFINE_string(
    "rescalings",
    "none",
    "Any of none, linear, ntk, yarn and dynamic_ntk, for rotary (linear for ALiBi too); the factor "
    "is the length over the training length, or F as in linear:F.",
)
_ATTENTION = flags.DEFINE_string(
    "attention",
    None,
    "Lengths at which attention is looked at: its resolution, how far it is; default: those of "
    "--lengths up to 2x.",
)
_JUDGE = flags.DEFINE_string(
    "judge", None, "The run that says which targets LongPPL counts; default: each run for itself."
)
_SPLIT = flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Of the corpus.")
_DOCUMENTS = flags.DEFINE_bool(
    "documents", False, "Windows stay within a document; else documents follow one another."
)
_BOS = flags.DEFINE_bool("bos", False, "Each window begins with the token put before documents.")
_TARGETS = flags.DEFINE_integer("targets", 512, "Targets that fixed context samples.")
_PASSAGE = flags.DEFINE_integer("passage", 200, "Targets in the passage that the report shows.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the sample, and of the bootstrap.")
_STEP = flags.DEFINE_integer("step", None, "The checkpoint; default: the latest.")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "Tokens a batch, at every length.")
_MESH = flags.DEFINE_string(
    "mesh", "", "Devices along each axis, as fsdp=4,context=2; default: each takes whole windows."
)
_OUT = flags.DEFINE_string("out", None, "Where to write; default: eval/ in the first workdir.")


def main() -> int:
    """Flags in, one call out."""
    sizes = dataclasses.astuple(parse_mesh(_MESH.value))
    cli.start_devices(sizes=sizes)
    from alibi_jax.evaluation import evaluate

    return evaluate(
        [str(cli.folder("workdir", name)) for name in _WORKDIR.value or []],
        lengths=_LENGTHS.value,
        protocols=_PROTOCOLS.value,
        rescalings=_RESCALINGS.value,
        attention=_ATTENTION.value,
        judge=_JUDGE.value,
        split=_SPLIT.value,
        documents=_DOCUMENTS.value,
        bos=_BOS.value,
        targets=_TARGETS.value,
        passage=_PASSAGE.value,
        seed=_SEED.value,
        step=_STEP.value,
        batch_tokens=_BATCH_TOKENS.value,
        mesh=_MESH.value,
        out=cli.folder("out", _OUT.value) if _OUT.value else None,
    )


if __name__ == "__main__":
    cli.run(main)
