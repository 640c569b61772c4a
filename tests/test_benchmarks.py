"""The benchmarks that compare with PyTorch, at a small size (`-m slow`)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def test_a_training_step_has_the_loss_of_pytorch():
    pytest.importorskip("torch")
    command = ["benchmarks/train_step.py", "--tokens=16", "--lengths=16", "--rounds=1"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # The exit code is 1 where the losses differ.
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 16 | 1 | torch |" in done.stdout.replace("** ", "")
