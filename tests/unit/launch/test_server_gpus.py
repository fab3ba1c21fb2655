"""GPUs that servers take next to ranks and next to one another; no server is started, no GPU needed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

import train_async
from r3train.engine.server import SGLangServer
from r3train.commands import serve
from r3train.launch.gpus import server_size
from tests.unit.local_servers import servers_of_rank_0


@pytest.fixture
def node(monkeypatch):
    """``node(gpus, ranks)`` is a node with so many GPUs visible and so many ranks of torchrun."""
    monkeypatch.setattr(SGLangServer, "start", lambda self: self)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def of(gpus: int, ranks: int | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return of


@pytest.fixture
def started(tmp_path):
    """``started(servers, mode, **sglang)``: the servers that rank 0 would start, as their flags."""

    def start(servers: int = 1, mode: str = "distributed", **sglang) -> list[dict]:
        made = servers_of_rank_0(tmp_path, servers, mode, **sglang)
        return [server.server_args for server in made]

    return start


def bases(servers: list[dict]) -> list[object]:
    return [args.get("base_gpu_id") for args in servers]


def test_servers_of_rank_0_take_the_gpus_behind_the_ranks(node, started):
    node(gpus=8, ranks=4)
    assert bases(started(1, tp_size=4)) == [4]
    assert bases(started(4)) == [4, 5, 6, 7]
    assert bases(started(2, tp_size=2)) == [4, 6]
    assert bases(started(2, base_gpu_id=5)) == [5, 6]


@pytest.mark.parametrize("spelling", ["tp_size", "tp", "tensor_parallel_size"])
def test_every_spelling_of_the_size_counts(node, started, spelling):
    node(gpus=8, ranks=2)
    assert bases(started(2, **{spelling: 3})) == [2, 5]


def test_all_sizes_that_take_gpus_count_and_those_inside_tensor_parallelism_do_not(node, started):
    node(gpus=9, ranks=1)
    assert bases(started(2, tp_size=2, pp_size=2)) == [1, 5]
    assert bases(started(2, tp_size=2, dp_size=2)) == [1, 5]
    assert bases(started(2, tp_size=4, attn_dp_size=2)) == [1, 5]
    assert bases(started(2, tp_size=4, dp_size=2, enable_dp_attention=True)) == [1, 5]
    # every second GPU, as given: ranks on 0, servers on 1 3 and 5 7
    assert bases(started(2, tp_size=2, gpu_id_step=2)) == [1, 5]


@pytest.mark.parametrize(
    "gpus, ranks, flags, said",
    [
        (8, 8, {}, "server 0 of this node takes GPU 8, .*8 GPUs are visible"),
        (8, 4, {"tp_size": 8}, "server 0 of this node takes GPUs 4 to 11"),
        (8, 4, {"tp_size": 4, "servers": 2}, "server 1 of this node takes GPUs 8 to 11"),
        (
            8,
            4,
            {"base_gpu_id": 0, "tp_size": 4},
            "GPUs 0 to 3, .*ranks of this node take GPUs 0 to 3",
        ),
        (8, 4, {"base_gpu_id": 3}, "takes GPU 3, .*--nproc-per-node"),
        (8, 4, {"tp": 2, "tp_size": 2}, "tp_size is given twice: tp, tp_size"),
        (8, 4, {"tp_size": "all"}, "tp_size: expected a number above 0, got 'all'"),
    ],
)
def test_a_server_without_gpus_of_its_own_is_refused_before_one_starts(
    node, started, gpus, ranks, flags, said
):
    node(gpus, ranks)
    with pytest.raises(ValueError, match=said):
        started(**flags)


def test_sharing_a_gpu_with_a_rank_is_asked_for_and_not_over_nccl(node, started):
    node(gpus=1, ranks=1)
    assert bases(started(mode="disk", base_gpu_id=0)) == [0]
    assert bases(started(mode="disk", base_gpu="0")) == [0]  # as SGLang's parser takes it
    with pytest.raises(ValueError, match="--update-weight-transfer-mode disk"):
        started(base_gpu_id=0)
    with pytest.raises(ValueError, match="1 GPU is visible.* --sglang-base-gpu-id names it"):
        started(mode="disk")


def test_colocated_servers_take_the_gpus_of_the_ranks_and_can_release_them(node, started):
    node(gpus=8, ranks=8)
    servers = started(2, tp_size=4, colocate=True)
    assert bases(servers) == [0, 4]
    assert all(args["enable_memory_saver"] for args in servers)
    with pytest.raises(ValueError, match="server 2 of this node takes GPUs 8 to 11"):
        started(3, tp_size=4, colocate=True)


def test_the_training_command_refuses_before_the_ranks_join(node, recipe, monkeypatch):
    def joins(*_):
        raise AssertionError("went on")

    monkeypatch.setattr("r3train.launch.start.rank.run", joins)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    node(gpus=8, ranks=8)
    refused = CliRunner().invoke(train_async.main, recipe)
    assert refused.exit_code == 2 and "server 0 of this node takes GPU 8" in refused.output
    for elsewhere in (["--rollout-external-engine-addrs", "127.0.0.1:30000"], ["--dry-run"]):
        asked = CliRunner().invoke(train_async.main, [*recipe, *elsewhere])
        assert "server 0 of this node" not in asked.output


def test_without_gpus_and_without_ranks_nothing_is_moved(node, started):
    node(gpus=0, ranks=8)
    assert bases(started(2, tp_size=1)) == [None, None]
    node(gpus=2)
    assert bases(started(2, device="cpu")) == [None, None]


def test_a_rank_that_torchrun_did_not_start_is_a_rank_too(node, started, monkeypatch):
    node(gpus=2)  # no LOCAL_WORLD_SIZE
    assert bases(started(1)) == [1]
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ValueError, match="GPU 2, .*the ranks take GPUs 0 to 1"):
        started(1)


# ---- r3train serve --------------------------------------------------------------------------


@pytest.fixture
def recipe(tiny) -> list[str]:
    flags = ["--config", "configs/tiny_cpu.toml", "--hf-checkpoint", str(tiny / "model")]
    return [*flags, "--prompt-data", str(tiny / "prompts.jsonl")]


@pytest.fixture
def served(monkeypatch, recipe):
    """``served(*flags)``: the flags of the server that ``r3train serve`` would run, or its refusal."""
    made: list[SGLangServer] = []
    monkeypatch.setattr(serve, "serve_here", lambda server, *_: made.append(server))

    def run(*flags: str) -> dict | str:
        made.clear()
        done = CliRunner().invoke(serve.serve, [*flags, *recipe])
        assert done.exit_code == (0 if made else 2), done.output
        return made[0].server_args if made else " ".join(done.output.replace("│", " ").split())

    return run


def test_servers_of_one_node_take_disjoint_gpus_whether_or_not_slurm_hides_the_others(node, served):
    node(gpus=8)
    found = [served("--num-gpus", "4", "--local-index", i) for i in ("0", "1")]
    assert [(args["base_gpu_id"], args["tp_size"]) for args in found] == [(0, 4), (4, 4)]
    found = [served("--local-index", i, "--sglang-tp", "2") for i in ("0", "3")]
    assert bases(found) == [0, 6]
    node(gpus=4)  # of this task alone: the other four are hidden
    assert "server 1 of this node takes GPUs 4 to 7" in served(
        "--num-gpus", "4", "--local-index", "1"
    )


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--local-index", "1"], "nothing says how many GPUs a server takes: --num-gpus"),
        (
            ["--num-gpus", "4", "--sglang-tp-size", "2"],
            "tp_size 2 takes 2 GPUs, --num-gpus gives 4",
        ),
        (["--num-gpus", "9"], "takes GPUs 0 to 8"),
        (["--num-gpus", "0"], "--num-gpus"),
    ],
)
def test_a_server_that_does_not_fit_its_gpus_is_refused(node, served, flags, said):
    node(gpus=8)
    assert said in served(*flags)


def test_gpus_asked_for_where_none_is_are_refused_and_servers_without_them_need_none(node, served):
    node(gpus=0)
    assert "no GPU is visible" in served("--num-gpus", "4")
    assert "base_gpu_id" not in served("--local-index", "1")


def test_a_server_over_several_nodes_counts_the_gpus_of_one(node, served):
    node(gpus=8)
    meeting = ["--sglang-dist-init-addr", "host1:29600"]
    second = ["--sglang-nnodes", "2", "--num-gpus", "8", "--sglang-node-rank", "1"]
    for size in ([], ["--sglang-tp-size", "16"]):
        args = served(*second, *meeting, *size)
        assert (args["base_gpu_id"], args["tp_size"]) == (0, 16)
    assert "takes 8 GPUs, --num-gpus gives 4" in served(
        *second[:2], "--num-gpus", "4", *second[4:], *meeting, "--sglang-tp-size", "16"
    )
    assert "nnodes 2 needs --sglang-node-rank, 0 to 1, and the same" in served(*second)
    assert "node_rank 2 is none of nnodes 2" in served(*second[:-1], "2", *meeting)


def test_of_a_server_over_several_nodes_the_first_alone_has_an_address(
    node, recipe, monkeypatch, tmp_path
):
    node(gpus=8)
    files = []
    monkeypatch.setattr(serve, "serve_here", lambda _, file, grace_s: files.append(file))
    flags = ["--sglang-nnodes", "2", "--num-gpus", "8", "--sglang-dist-init-addr", "host1:29600"]
    for rank in ("0", "1"):
        given = [*flags, "--sglang-node-rank", rank, "--address-file", str(tmp_path / "addr")]
        done = CliRunner().invoke(serve.serve, [*given, *recipe])
        assert done.exit_code == 0, done.output
    assert files == [tmp_path / "addr", None]


def test_rank_0_starts_no_server_over_several_nodes(node, started):
    node(gpus=8, ranks=4)
    with pytest.raises(ValueError, match="nnodes: rank 0 starts servers on its own node only"):
        started(1, tp_size=8, nnodes=2)


def test_a_dry_run_starts_nothing_and_may_plan_for_gpus_that_are_elsewhere(
    node, recipe, monkeypatch
):
    node(gpus=0)
    monkeypatch.setattr(serve, "serve_here", lambda *_: pytest.fail("it was started"))
    flags = ["--num-gpus", "4", "--local-index", "1", "--dry-run", *recipe]
    done = CliRunner().invoke(serve.serve, flags)
    assert done.exit_code == 0, done.output
    assert "[replay]" in done.output
    assert "--tp-size 4" in done.output and "--base-gpu-id 4" in done.output
    assert "--device cpu" not in done.output
    done = CliRunner().invoke(serve.serve, ["--num-gpus", "4", "--sglang-tp-size", "2", *flags[4:]])
    assert done.exit_code == 2 and "--num-gpus gives 4" in done.output


def test_the_size_of_a_server_counts_the_gpus_of_all_its_nodes():
    assert server_size({"tp_size": 16, "nnodes": 2}) == 16
    assert server_size({"tp_size": 2, "gpu_id_step": 2}) == 2
    assert server_size({"device": "cpu"}) is None
