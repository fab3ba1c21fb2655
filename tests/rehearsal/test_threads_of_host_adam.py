"""An Adam on the host has a rank's share of the cores: torchrun would leave it one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.engine.server import free_port
from r3train.verify.model_zoo import VARIANTS, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ranks
@pytest.mark.parametrize("given, threads", [(None, 3), ("2", 1)], ids=["unset", "given"])
def test_ranks_with_their_adam_on_the_host_share_the_cores_unless_the_user_says_otherwise(
    given, threads, tmp_path
):
    """In the script every rank starts with one thread; with OMP_NUM_THREADS it stays as it is."""
    model = write_checkpoint(VARIANTS["moe4"], tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": given} if given else {}
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node"]
    launcher += ["2", "--master-port", str(free_port("127.0.0.1"))]
    launcher += ["-m", "tests.rehearsal.threads_of_host_adam", str(tmp_path / "report"), str(model)]
    done = subprocess.run(
        launcher, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(file.read_text()) for file in tmp_path.glob("report.*.json")]
    assert found == 2 * [{"device": 1, "host": threads}]


@pytest.mark.parametrize(
    "slurm, threads",
    [
        ({}, "1"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "unset"),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, "unset"),
    ],
    ids=["cores", "gpus", "gpus_by_name"],
)
def test_slurms_scripts_leave_the_threads_to_the_ranks_where_a_node_has_gpus(
    slurm, threads, tmp_path
):
    """torchrun tells a rank's own setting from the user's by the environment in which it was started."""
    script = 'source slurm/common.sh; echo "${OMP_NUM_THREADS-unset}"'
    for own, expected in ({}, threads), ({"OMP_NUM_THREADS": "5"}, "5"):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {"SLURM_JOB_ID": "1", "R3TRAIN_ROOT": str(ROOT), "RUN_DIR": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env=environment | slurm | own,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.split() == [expected], done
