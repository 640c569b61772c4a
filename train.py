"""Trains a model: `python train.py --config=configs/tiny.py --workdir=runs/tiny`.

The same command again resumes the run. Any value of the configuration can be given, as in
`--config.model.position=rotary`. README.md explains more.
"""

import dataclasses
import pathlib

from absl import flags
from ml_collections import config_flags

from alibi_jax import cli
from alibi_jax.config import ConfigError, local_path
from alibi_jax.distributed import processes

_CONFIG = cli.define_config(pathlib.Path(__file__).parent / "configs" / "tiny.py")
_PLAN = flags.DEFINE_string(
    "plan",
    None,
    "Compile the run for the named devices (v5e:16x16, cpu:8, ...), which need not be attached, "
    "print its memory and time, and train nothing; v5e:16x16,search compares several meshes.",
)
_PROFILE = flags.DEFINE_string(
    "profile", "", "First and last step to trace into <workdir>/profile: 10:15."
)
_STEP = flags.DEFINE_integer(
    "step",
    None,
    "Go back to the checkpoint of this step and remove the later ones; default: the latest. Leave "
    "it out to resume the run afterwards, or the run goes back again.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run; default: runs/ and the name of the config file."
)


def main() -> int:
    """Trains or plans the run that the flags describe."""
    config = _CONFIG.value
    config.check()
    if _PLAN.value is not None and _PROFILE.value:
        raise ConfigError(f"--profile={_PROFILE.value} with --plan: a plan runs no step to trace")
    if _PLAN.value is not None and _STEP.value is not None:
        raise ConfigError(f"--step={_STEP.value} with --plan: a plan reads no checkpoint")
    if _PLAN.value is not None:
        from alibi_jax.plan import plan

        return plan(config, _PLAN.value)
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    given = _WORKDIR.value
    workdir = local_path("--workdir", f"runs/{name}" if given is None else given)
    cli.start_devices(
        config.train.batch_size // config.train.accumulation,
        tuple(dataclasses.asdict(config.mesh).values()),
    )
    from alibi_jax.training.loop import train

    step = train(config, workdir, _PROFILE.value, _STEP.value)
    processes.say(
        f"{workdir}: step {step} of {config.train.steps}"
        + (f"; next: python eval.py --workdir={workdir}" if step >= config.train.steps else "")
    )
    return 0


if __name__ == "__main__":
    cli.run(main)
