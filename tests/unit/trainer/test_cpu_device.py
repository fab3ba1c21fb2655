"""The start of a rank on a CPU."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_rank_starts_without_the_tracker_that_megatrons_inference_imports():
    code = """
import sys
from r3train.trainer.megatron.cpu_device import prepare_device
prepare_device()
import r3train.launch.actor
print("wandb" in sys.modules)
import wandb
print(wandb.__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "wandb"], done
