"""The batch scripts as text: what 16 nodes would run, without a Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from r3train.config import RunConfig
from r3train.engine.key import engine_api_key
from r3train.engine.server import PORTS
from r3train.launch.gpus import server_size
from tests.published import RECIPES

ROOT = Path(__file__).resolve().parents[3]
EPHEMERAL = 32768  # Linux gives ports from here on to outgoing connections, unless told otherwise
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
            "BIN": str(fake),  # without r3train, which would look at the topology for a second
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done, [shlex.split(line) for line in done.stdout.splitlines()]


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def documented(text: str, script: str) -> tuple[dict[str, str], list[str]]:
    """(environment, words) of the one sbatch command of a page or a script's head, for a script."""
    (line,) = [
        found
        for found in re.sub(r"\\\n#?\s*", "", text).splitlines()
        if "sbatch " in found and f"{script}.sbatch" in found and "--gpus-per-node" in found
    ]
    words = shlex.split(line.lstrip("# "))
    at = words.index("sbatch")
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


def render_documented(tmp_path: Path, text: str, script: str, **given: str):
    """Render the job that Slurm would make of a documented command: settings, nodes, GPUs."""
    environment, words = documented(text, script)
    at = words.index(f"slurm/{script}.sbatch")
    asked = dict(word.lstrip("-").split("=", 1) for word in words[:at])
    gpus = asked.pop("gpus-per-node")
    environment |= {"SLURM_GPUS_PER_NODE": gpus, "SLURM_GPUS_ON_NODE": gpus} | given
    nodes = int(asked.pop("nodes", "1"))
    assert not asked
    return render(tmp_path, script, *words[at + 1 :], nodes=nodes, **environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_container_holds_every_step_and_sees_its_directories(script, tmp_path):
    image = "/shared/r3train.sqsh"
    given = {"CONTAINER": image, "CONTAINER_MOUNTS": "/models,/data"}
    done, steps = render(tmp_path, script, nodes=2, **given)
    assert done.returncode == 0 and steps, done.stderr
    names = (str(ROOT), "/shared/runs/a", "/models", "/data")
    mounts = ",".join(f"{name}:{name}" for name in names)
    for words in steps:
        before = words[: words.index("bash")]
        assert f"--container-image={image}" in before
        assert f"--container-mounts={mounts}" in before
        assert f"--container-workdir={ROOT}" in before
    _, steps = render(tmp_path, script, nodes=2, **given | {"CONTAINER": "/shared/r3train.sif"})
    for words in steps:
        called = words[words.index("apptainer") : words.index("bash")]
        assert called[:3] == ["apptainer", "exec", "--nv"]
        assert after(called, "--bind") == mounts and called[-1] == "/shared/r3train.sif"
    _, steps = render(tmp_path, script, nodes=2)
    assert not any("container" in word or "apptainer" in word for words in steps for word in words)
    _, steps = render(tmp_path, script, nodes=2, CONTAINER=image, RUN_DIR="runs/a")
    run_dir = ROOT / "runs/a"
    assert all(f"--container-mounts={ROOT}:{ROOT},{run_dir}:{run_dir}" in step for step in steps)
    refused, _ = render(tmp_path, script, nodes=2, CONTAINER_MOUNTS="/models")
    assert refused.returncode == 2 and "without effect without CONTAINER" in refused.stderr


def test_a_laptop_renders_what_slurm_would_run():
    """Without any variable or program of Slurm's; the nodes and GPUs are those that the caller names."""
    asked = {
        "train_single_node": ({}, [("--nodes=1", "--ntasks=1")]),
        "r3_regression": ({}, [("--nodes=1", "--ntasks=1")]),
        "train_multi_node": (
            {"SLURM_JOB_NUM_NODES": "16", "SLURM_GPUS_ON_NODE": "8", "TRAIN_NODES": "14"},
            [("--nodelist=node15,node16",), ("--ntasks=14", "node01:10001")],
        ),
    }
    assert set(asked) == set(SCRIPTS)
    for script, (given, expected) in asked.items():
        done = subprocess.run(
            ["bash", f"slurm/{script}.sbatch"],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "RENDER": "1", **given},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        steps = [shlex.split(line) for line in done.stdout.splitlines()]
        assert len(steps) == len(expected)
        assert all(set(words) <= set(step) for words, step in zip(expected, steps)), done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_that_is_not_there_is_refused_before_a_job_waits_for_its_nodes(script, tmp_path):
    refused, _ = render(tmp_path, script, nodes=2, CONFIG="no_such_recipe")
    assert refused.returncode == 2 and "CONFIG is no_such_recipe" in refused.stderr
    done, steps = render(tmp_path, script, nodes=2, CONFIG="qwen3_30b_a3b")
    assert done.returncode == 0 and steps, done.stderr


def test_the_container_of_a_second_regression_sees_its_run_its_logs_and_its_summary(tmp_path):
    given = {"CONTAINER": "/a.sqsh", "SLURM_RESTART_COUNT": "1", "SUMMARY": "/reports/r3.md"}
    _, (step,) = render(tmp_path, "r3_regression", **given)
    names = (str(ROOT), "/shared/runs/a-start1", "/shared/runs/a", "/reports")
    assert "--container-mounts=" + ",".join(f"{name}:{name}" for name in names) in step
    assert after(step, "--run-dir") == "/shared/runs/a-start1"
    assert after(step, "--log-dir").startswith("/shared/runs/a/logs/")


@pytest.mark.parametrize(
    "place", ["docs/guide/several_machines.md", "slurm/train_multi_node.sbatch"]
)
def test_16_nodes_are_12_of_torchrun_and_4_of_servers(tmp_path, place):
    text = (ROOT / place).read_text()
    done, (servers, ranks) = render_documented(tmp_path, text, "train_multi_node")
    assert done.returncode == 0, done.stderr
    assert "--nodelist=node13,node14,node15,node16" in servers
    # two of four GPUs on each node of eight
    assert "--ntasks=8" in servers and "--ntasks-per-node=2" in servers
    assert after(servers, "--num-gpus") == "4"
    assert after(servers, "--config") == "configs/qwen3_30b_a3b.toml"
    assert "--use-rollout-routing-replay" in servers  # servers must return routed experts
    train = ",".join(f"node{i:02d}" for i in range(1, 13))
    assert f"--nodelist={train}" in ranks and "--ntasks=12" in ranks
    assert after(ranks, "--nnodes") == "12" and after(ranks, "--nproc-per-node") == "8"
    assert after(ranks, "--rdzv-endpoint") == "node01:14711"
    assert after(ranks, "--rdzv-id") == "4711-0"
    assert after(ranks, "--rollout-external-engine-addrs") == "ADDRESSES"
    assert ranks[-2:] == ["--use-rollout-routing-replay", "--enable-r3-correctness-check"]
    assert "--auto-resume" in ranks and "--save" not in ranks


def test_a_server_is_told_its_number_on_its_node(tmp_path):
    """``slurm/server.sh``: the servers of a node take GPUs by it."""
    program = tmp_path / "r3train"
    program.write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "R3TRAIN_ROOT": str(ROOT), "BIN": str(tmp_path)}
    environment |= {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "node15"}
    command = ["bash", "slurm/server.sh", "/there", "--num-gpus", "4"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    words = said.split()
    assert words[0] == "serve" and after(words, "--local-index") == "1"
    assert after(words, "--index") == "5" and after(words, "--num-gpus") == "4"
    assert after(words, "--host") == "node15" and after(words, "--address-file") == "/there/5.addr"


def test_servers_over_two_nodes_each_meet_at_their_first_node(tmp_path):
    """Each task runs ``slurm/server.sh``: its server's number, its place in it, one address a server."""
    given = {"NODES_PER_SERVER": "2", "GPUS_PER_SERVER": "8", "TRAIN_NODES": "2"}
    done, (servers, _) = render(tmp_path, "train_multi_node", nodes=6, **given)
    assert done.returncode == 0, done.stderr
    assert "--ntasks=4" in servers and "--ntasks-per-node=1" in servers
    program = tmp_path / "r3train"
    program.write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "R3TRAIN_ROOT": str(ROOT), "BIN": str(tmp_path)}
    found = []
    for task in range(4):
        environment |= {"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"node{task + 3:02d}"}
        said = subprocess.run(
            servers[servers.index("env") :],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        words = said.stdout.split()
        assert after(words, "--num-gpus") == "8" and after(words, "--sglang-nnodes") == "2"
        assert after(words, "--address-file").endswith(f"/{task // 2}.addr")
        flags = ("--index", "--sglang-node-rank", "--sglang-dist-init-addr")
        found.append([after(words, flag) for flag in flags])
    first, second = "node03:14711", "node05:14711"
    assert found == [["0", "0", first], ["0", "1", first], ["1", "0", second], ["1", "1", second]]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"NODES_PER_SERVER": "2", "GPUS_PER_SERVER": "8"}, "1 nodes serve: they do not divide by"),
        ({"NODES_PER_SERVER": "2"}, "GPUS_PER_SERVER must say how many GPUs it takes of each node"),
        (
            {"NODES_PER_SERVER": "2", "SERVERS_PER_NODE": "2", "GPUS_PER_SERVER": "4"},
            "a server over 2 nodes has them to itself",
        ),
        ({"SERVERS_PER_NODE": "2"}, "SERVERS_PER_NODE is 2 on nodes of 8 GPUs: GPUS_PER_SERVER"),
        (
            {"SERVERS_PER_NODE": "2", "GPUS_PER_SERVER": "8"},
            "SERVERS_PER_NODE 2 x GPUS_PER_SERVER 8 = 16",
        ),
        ({"GPUS_PER_SERVER": "16"}, "1 x GPUS_PER_SERVER 16 = 16 GPUs, and a node has 8"),
        ({"GPUS_PER_SERVER": "four"}, "GPUS_PER_SERVER is four"),
        ({"SERVERS_PER_NODE": "0"}, "SERVERS_PER_NODE is 0"),
    ],
)
@pytest.mark.parametrize(
    "gpus",
    [{"SLURM_GPUS_ON_NODE": "8"}, {"SLURM_GPUS_PER_NODE": "h100:8"}],
    ids=["count", "typed"],
)
def test_servers_that_would_share_or_miss_gpus_are_refused(tmp_path, given, gpus, said):
    done, words = render(tmp_path, "train_multi_node", nodes=2, **given, **gpus)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not words


def test_servers_without_gpus_need_no_number_of_them(tmp_path):
    done, (servers, _) = render(tmp_path, "train_multi_node", nodes=2, SERVERS_PER_NODE="2")
    assert done.returncode == 0 and "--num-gpus" not in servers
    done, (servers, _) = render(tmp_path, "train_multi_node", nodes=2, SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0, "one server a node may take its size from the recipe"


def test_one_node_of_8_gpus_is_4_of_ranks_and_4_of_the_server_behind_them(tmp_path):
    text = (ROOT / "slurm/train_single_node.sbatch").read_text()
    done, (ranks,) = render_documented(tmp_path, text, "train_single_node")
    assert done.returncode == 0, done.stderr
    assert after(ranks, "--nproc-per-node") == "4"  # GPUs 0 to 3, and the launcher goes on at 4
    assert after(ranks, "--sglang-tp-size") == "4"


def test_a_node_has_a_rank_for_each_gpu_that_no_server_beside_them_takes(tmp_path):
    for script, given, ranks in (
        ("train_single_node", {"SLURM_GPUS_ON_NODE": "8"}, "8"),
        ("train_single_node", {"SLURM_GPUS_ON_NODE": "8", "GPUS_PER_SERVER": "2"}, "6"),
        ("train_single_node", {}, "2"),
        ("train_multi_node", {"SLURM_GPUS_PER_NODE": "h100:8", "GPUS_PER_SERVER": "4"}, "8"),
    ):
        done, steps = render(tmp_path, script, nodes=2, **given)
        assert done.returncode == 0, done.stderr
        assert after(steps[-1], "--nproc-per-node") == ranks
    done, steps = render(tmp_path, "train_single_node", SLURM_GPUS_ON_NODE="8", GPUS_PER_SERVER="8")
    assert done.returncode == 2 and not steps and "NPROC_PER_NODE is 0" in done.stderr


HERE = {"BIN": str(Path(sys.executable).parent)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.file)
def test_the_sbatch_line_of_a_recipe_gives_it_the_ranks_and_servers_of_its_head(recipe, tmp_path):
    head, config = recipe.path.read_text().split("[model]")[0], RunConfig.from_toml(recipe.path)
    elsewhere = config.rollout.rollout_external_engine_addrs
    script = "train_multi_node" if elsewhere else "train_single_node"
    done, steps = render_documented(tmp_path, head, script, **HERE)
    assert done.returncode == 0, done.stderr
    assert len(steps) == 1 + bool(elsewhere)
    assert {after(words, "--config") for words in steps} == {recipe.file}
    nodes = int(after(steps[-1], "--nnodes")) if elsewhere else 1
    assert nodes * int(after(steps[-1], "--nproc-per-node")) == recipe.num_gpus
    size = server_size(config.rollout.sglang)
    if elsewhere and size is not None:
        assert after(steps[0], "--num-gpus") == str(size)
        (tasks,) = (word for word in steps[0] if word.startswith("--ntasks="))
        assert tasks == f"--ntasks={len(elsewhere)}"


@pytest.mark.parametrize(
    "script, given, said",
    [
        ("train_single_node", {"NPROC_PER_NODE": "3"}, "world size 3 is not a multiple of"),
        ("r3_regression", {"NPROC_PER_NODE": "3"}, "1 x 3 ranks: world size 3"),
        ("train_multi_node", {"NPROC_PER_NODE": "5"}, "1 x 5 ranks: world size 5"),
        (
            "train_single_node",
            {"CONFIG": "qwen3_30b_a3b_one_node", "SLURM_GPUS_ON_NODE": "8"},
            "server 0 of this node takes GPUs 8 to 11",
        ),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_a_job_has_started_anything(
    script, given, said, tmp_path
):
    for how in ({}, {"RENDER": "", "RUN_DIR": str(tmp_path / "run")}):
        done, words = render(tmp_path, script, nodes=2, **HERE, **given, **how)
        assert done.returncode == 2 and not words and said in done.stderr, done.stderr
    for flags in (["--no-such-flag"], ["--custom-rm-path", "no_such_module:reward"]):
        done, words = render(tmp_path, script, *flags, nodes=2, **HERE)
        assert done.returncode == 2 and flags[-1] in done.stderr and not words
    done, words = render(tmp_path, script, nodes=2, **HERE)
    assert done.returncode == 0 and words, done.stderr


PAGES = (
    "Makefile",
    "README.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
)


@pytest.mark.parametrize("page", PAGES)
def test_ranks_of_one_node_meet_where_torchrun_unpickles_nothing(page):
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for command in re.findall(r"^(?!#).*torchrun .*train_async\.py", text, re.M):
        assert "--master-port" in command or "--nnodes" in command, command


@pytest.mark.parametrize("script", ["train_single_node", "r3_regression"])
def test_the_jobs_of_one_node_meet_at_loopback_and_a_port_of_their_own(tmp_path, script):
    ports = set()
    for job in ("4711", "4712"):
        _, (ranks,) = render(tmp_path, script, SLURM_JOB_ID=job)
        assert after(ranks, "--master-addr") == "127.0.0.1"
        assert not {"--standalone", "--rdzv-backend"} & set(ranks)
        ports.add(after(ranks, "--master-port"))
    assert len(ports) == 2


@pytest.mark.parametrize("script", ["train_single_node", "r3_regression"])
def test_ranks_and_server_that_do_not_fit_a_node_are_refused(tmp_path, script):
    eight = {"SLURM_GPUS_ON_NODE": "8", "GPUS_PER_SERVER": "4"}
    done, words = render(tmp_path, script, NPROC_PER_NODE="8", **eight)
    assert done.returncode == 2 and not words
    assert "8 ranks and a server of 4 GPUs take 12, and a node has 8" in done.stderr
    done, (ranks,) = render(tmp_path, script, NPROC_PER_NODE="4", **eight)
    assert done.returncode == 0 and after(ranks, "--sglang-tp-size") == "4"
    done, words = render(tmp_path, script, NPROC_PER_NODE="gpu", **eight)
    assert done.returncode == 2 and "NPROC_PER_NODE is gpu" in done.stderr and not words
    done, (ranks,) = render(tmp_path, script, NPROC_PER_NODE="gpu")
    assert done.returncode == 0 and "--sglang-tp-size" not in ranks


def test_a_summary_that_cannot_be_written_is_said_before_anything_runs(tmp_path):
    summary = tmp_path / "no such directory" / "r3.md"
    done, words = render(tmp_path, "r3_regression", RENDER="", **regression(tmp_path, 0, summary))
    assert done.returncode == 2 and str(summary) in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("verdict", [0, 1, 2, 3])
def test_the_regression_jobs_exit_code_is_that_of_check_evidence(tmp_path, verdict):
    summary = tmp_path / "r3.md"
    settings = regression(tmp_path, verdict, summary)
    done, _ = render(tmp_path, "r3_regression", RENDER="", **settings)
    assert done.returncode == verdict, done.stderr
    assert (tmp_path / "ran").exists() and not summary.exists(), "left by the look beforehand"


def test_the_second_start_of_a_regression_job_has_a_directory_for_its_summary(tmp_path):
    settings = regression(tmp_path, 0, "", start=1)
    done, _ = render(tmp_path, "r3_regression", RENDER="", **settings)
    assert done.returncode == 0 and (tmp_path / "ran").exists(), done.stderr
    assert f"summary: {tmp_path}/run-start1/r3_summary.md" in done.stdout


def regression(
    tmp_path: Path, verdict: int, summary: Path | str, *, start: int = 0
) -> dict[str, str]:
    """Settings of a regression job that runs here, with programs in the place of srun and r3train."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    log = tmp_path / f"run/logs/slurm-4711-start{start}/node-a.log"
    programs = {"srun": f"touch '{tmp_path}/ran' '{log}'", "r3train": f"exit {verdict}"}
    for name, does in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    places = {"RUN_DIR": f"{tmp_path}/run", "BIN": f"{tmp_path}/bin", "SUMMARY": str(summary)}
    return places | {"SLURM_RESTART_COUNT": str(start)}


def test_two_jobs_and_two_starts_share_no_port_name_or_directory(tmp_path):
    def of(**environment: str):
        return render(tmp_path, "train_multi_node", nodes=2, **environment)[1]

    first, other = of()[1], of(SLURM_JOB_ID="4712")[1]
    assert after(first, "--rdzv-endpoint") != after(other, "--rdzv-endpoint")
    again = of(SLURM_RESTART_COUNT="1")
    assert after(again[1], "--rdzv-id") == "4711-1"
    directories = [words[words.index("slurm/server.sh") + 1] for words in (of()[0], again[0])]
    assert directories[0] != directories[1]


@pytest.mark.parametrize("job_id", ["1", "9999", "10000", "4711", "67108863"])
def test_the_rendezvous_port_is_no_servers_and_no_outgoing_connections(tmp_path, job_id):
    (_, ranks) = render(tmp_path, "train_multi_node", nodes=2, SLURM_JOB_ID=job_id)[1]
    port = int(after(ranks, "--rdzv-endpoint").rpartition(":")[2])
    assert 1024 < port < min(PORTS.start, EPHEMERAL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_has_its_nodes_whole_and_its_tasks_all_cores(tmp_path, script):
    text = (ROOT / "slurm" / f"{script}.sbatch").read_text()
    assert "#SBATCH --exclusive\n" in text and "#SBATCH --mem=0\n" in text
    for words in render(tmp_path, script, nodes=2)[1]:
        assert words[0] == "srun" and "--cpu-bind=none" in words


def test_every_job_makes_a_key_that_its_commands_do_not_show(tmp_path):
    shown = f"source {ROOT}/slurm/common.sh; cd /; env"
    keys = set()
    for _ in range(2):
        environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "1", "RENDER": "1"}
        environment["R3TRAIN_ROOT"] = str(ROOT)
        done = subprocess.run(
            ["bash", "-c", shown], env=environment, capture_output=True, text=True
        )
        lines = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        keys.add(engine_api_key(lines))  # one that servers and trainer take
    assert len(keys) == 2 and None not in keys
    given = "a-key-of-the-one-who-submits"
    done, _ = render(tmp_path, "train_multi_node", nodes=2, R3TRAIN_ENGINE_API_KEY=given)
    assert done.returncode == 0 and given not in done.stdout + done.stderr


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
    assert after(ranks, "--save") == "/shared/runs/a/checkpoints"


def test_checkpoints_are_where_the_recipe_has_them(tmp_path):
    of_recipe = {"CONFIG": "olmoe_1b_7b_one_node", "NPROC_PER_NODE": "4"}
    for interval in ("", "5"):
        _, (ranks,) = render(tmp_path, "train_single_node", SAVE_INTERVAL=interval, **of_recipe)
        assert "--auto-resume" in ranks and "--save" not in ranks
        assert ("--save-interval" in ranks) == bool(interval)


WORKER = """
import os, signal, sys, time
from pathlib import Path
from r3train.loop.stop import StopSignal

mine = Path(sys.argv[1]) / os.environ["RANK"]
stop = StopSignal(60)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "nothing is there to be saved yet"
with stop:
    mine.with_suffix(".ready").touch()
    while stop.received is None:
        time.sleep(0.05)
    time.sleep(2)
    mine.with_suffix(".saved").write_text(stop.received)
"""


@pytest.mark.slow
def test_ranks_save_and_end_with_0_when_slurm_sends_term_to_every_process_of_the_step(tmp_path):
    worker, said = tmp_path / "worker.py", tmp_path / "said"
    worker.write_text(WORKER)
    command = ["bash", "slurm/ranks.sh", "--standalone", "--nproc-per-node", "2", worker, tmp_path]
    environment = {**os.environ, "R3TRAIN_ROOT": str(ROOT), "BIN": str(Path(sys.executable).parent)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with said.open("w") as out:
        step = psutil.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    tree = [step]
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert step.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        tree += step.children(recursive=True)
        for process in tree:
            process.terminate()
        assert step.wait(60) == 0, said.read_text()
    finally:
        for process in [*tree, *(step.children(recursive=True) if step.is_running() else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert [path.read_text() for path in sorted(tmp_path.glob("*.saved"))] == ["SIGTERM"] * 2


@pytest.mark.parametrize("script", [*SCRIPTS, "common", "ranks", "server", "local_cluster"])
def test_scripts_parse(script):
    (path,) = (ROOT / "slurm").glob(f"{script}.*")
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("script", ["train_single_node", "train_multi_node"])
def test_training_jobs_requeue_and_hear_of_their_end_early(script):
    text = (ROOT / "slurm" / f"{script}.sbatch").read_text()
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=B:USR1@120\n" in text


def test_the_flags_of_the_scripts_are_flags_of_the_trainer(tmp_path):
    from r3train.config.sources import places

    known = {flag for place in places(RunConfig).values() for flag in (place.flag,)}
    known |= {"--config", "--no-progress", "--no-plot"}
    for script in SCRIPTS:
        words = render(tmp_path, script, nodes=2)[1][-1]
        ours = words[words.index("train_async.py") :]
        assert {w for w in ours if w.startswith("--")} <= known
