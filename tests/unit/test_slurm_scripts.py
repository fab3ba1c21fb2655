"""The batch scripts as text: what 16 nodes would run, without a Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train_single_node", "train_multi_node", "r3_regression")


def render(tmp_path: Path, script: str, *flags: str, nodes: int = 1, **environment: str):
    """The commands that a script would run, one list of words each."""
    fake = tmp_path / "bin"
    fake.mkdir(exist_ok=True)
    names = "\n".join(f"node{i:02d}" for i in range(1, nodes + 1))
    (fake / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' '{names}'\n")
    (fake / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", f"slurm/{script}.sbatch", *flags],
        cwd=ROOT,
        env={
            "PATH": f"{fake}:{os.environ['PATH']}",
            "RENDER": "1",
            "SLURM_JOB_ID": "4711",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": f"node[01-{nodes:02d}]",
            "RUN_DIR": "/shared/runs/a",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done, [shlex.split(line) for line in done.stdout.splitlines()]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_16_nodes_are_12_of_torchrun_and_4_of_servers(tmp_path):
    done, (servers, ranks) = render(
        tmp_path,
        "train_multi_node",
        "--use-rollout-routing-replay",
        nodes=16,
        TRAIN_NODES="12",
        NPROC_PER_NODE="8",
        SERVERS_PER_NODE="2",
        GPUS_PER_SERVER="4",
        CONFIG="configs/qwen3_30b_a3b.toml",
    )
    assert done.returncode == 0, done.stderr
    assert "--nodelist=node13,node14,node15,node16" in servers
    assert "--ntasks=8" in servers and "--gpus-per-task=4" in servers
    assert "--use-rollout-routing-replay" in servers  # servers must return routed experts
    train = ",".join(f"node{i:02d}" for i in range(1, 13))
    assert f"--nodelist={train}" in ranks and "--ntasks=12" in ranks
    assert after(ranks, "--nnodes") == "12" and after(ranks, "--nproc-per-node") == "8"
    assert after(ranks, "--rdzv-endpoint") == "node01:24711"
    assert after(ranks, "--rdzv-id") == "4711-0"
    assert after(ranks, "--rollout-external-engine-addrs") == "ADDRESSES"
    assert ranks[-1] == "--use-rollout-routing-replay"
    assert after(ranks, "--save") == "/shared/runs/a/checkpoints" and "--auto-resume" in ranks


def test_two_jobs_and_two_starts_share_no_port_name_or_directory(tmp_path):
    def of(**environment: str):
        return render(tmp_path, "train_multi_node", nodes=2, **environment)[1]

    first, other = of()[1], of(SLURM_JOB_ID="4712")[1]
    assert after(first, "--rdzv-endpoint") != after(other, "--rdzv-endpoint")
    again = of(SLURM_RESTART_COUNT="1")
    assert after(again[1], "--rdzv-id") == "4711-1"
    directories = [words[words.index("slurm/server.sh") + 1] for words in (of()[0], again[0])]
    assert directories[0] != directories[1]


@pytest.mark.parametrize("train_nodes, nodes", [("2", 2), ("0", 2)])
def test_a_split_without_trainers_or_servers_is_refused(tmp_path, train_nodes, nodes):
    done, _ = render(tmp_path, "train_multi_node", nodes=nodes, TRAIN_NODES=train_nodes)
    assert done.returncode == 2 and "at least one must train" in done.stderr


def test_the_regression_job_has_the_check_on_and_passes_further_flags(tmp_path):
    _, (ranks,) = render(tmp_path, "r3_regression", "--plant-bug", "layer_swap", NUM_ROLLOUT="2")
    assert {"--use-rollout-routing-replay", "--enable-r3-correctness-check"} <= set(ranks)
    assert after(ranks, "--num-rollout") == "2" and ranks[-2:] == ["--plant-bug", "layer_swap"]


def test_one_node_saves_resumes_and_logs_each_rank(tmp_path):
    _, (ranks,) = render(tmp_path, "train_single_node", NPROC_PER_NODE="4", SAVE_INTERVAL="5")
    assert after(ranks, "--nproc-per-node") == "4" and after(ranks, "--save-interval") == "5"
    assert after(ranks, "--log-dir") == "/shared/runs/a/logs/slurm-4711-start0/node-$SLURM_NODEID"
    assert after(ranks, "--signal-grace-s") == "100"


@pytest.mark.parametrize("script", [*SCRIPTS, "common", "ranks", "server", "local_cluster"])
def test_scripts_parse(script):
    (path,) = (ROOT / "slurm").glob(f"{script}.*")
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("script", ["train_single_node", "train_multi_node"])
def test_training_jobs_requeue_and_hear_of_their_end_early(script):
    text = (ROOT / "slurm" / f"{script}.sbatch").read_text()
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@120\n" in text


def test_the_flags_of_the_scripts_are_flags_of_the_trainer(tmp_path):
    from r3train.config import RunConfig
    from r3train.config.sources import places

    known = {flag for place in places(RunConfig).values() for flag in (place.flag,)}
    known |= {"--config", "--no-progress", "--no-plot"}
    for script in SCRIPTS:
        words = render(tmp_path, script, nodes=2)[1][-1]
        ours = words[words.index("train_async.py") :]
        assert {w for w in ours if w.startswith("--")} <= known
