"""In a layer the host waits for the device once: how many rows each expert gets, and each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.engine.server import free_port
from r3train.families.tiny_options import TinyOptions
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.tiny import random_model, save

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
DISPATCHER, ROTARY, DELTA_NET = "token_dispatcher.py", "rope_utils.py", "common.py"


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def waits(request, tmp_path_factory) -> list[dict]:
    """Waits of each rank, with the experts of a layer spread over all."""
    directory = tmp_path_factory.mktemp("host_reads")
    return counted(
        directory, write_checkpoint(VARIANTS["moe4"], directory / "model"), request.param
    )


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def hybrids(request, tmp_path_factory) -> list[dict]:
    """Those with linear attention in three layers of four, with the rows of a sequence spread over all."""
    directory = tmp_path_factory.mktemp("host_reads_of_delta_nets")
    options = TinyOptions(family="qwen3_next", num_layers=4, head_dim=16)
    save(random_model(options), directory / "model", options)
    return counted(directory, directory / "model", request.param)


def counted(directory: Path, model: Path, ranks: int) -> list[dict]:
    stand_ins = str(Path(__file__).parent / "stand_ins")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--master-port",
            str(free_port("127.0.0.1")),
            "--nproc-per-node",
            str(ranks),
            "-m",
            "tests.rehearsal.host_reads",
            str(directory / "report"),
            str(model),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": stand_ins},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(file.read_text()) for file in directory.glob("report.*.json")]
    assert len(found) == ranks
    return found


def test_the_host_waits_once_a_layer_with_rotary_positions_fused_or_not(waits):
    for found in waits:
        layers = found["layers"]
        for kind in ("unfused", "fused"):
            for name, forwards in (("forward", 1), ("train", 2)):  # of a train pass: recomputation
                by_file = found[f"{kind} {name}"]
                assert by_file.pop(DISPATCHER) == forwards * layers
                assert ROTARY not in by_file
                # once per step, not once per layer; two are of each optimizer's first step
                assert sum(by_file.values()) <= (0 if name == "forward" else 2 * layers), by_file


def test_a_delta_net_waits_for_nothing_and_megatrons_own_is_seen_to(hybrids):
    for found in hybrids:
        layers = found["layers"]
        for name, forwards in (("unfused forward", 1), ("fused forward", 1), ("fused train", 2)):
            assert found[name].pop(DISPATCHER) == forwards * layers
            assert not found[name].keys() & {ROTARY, DELTA_NET, "gdn.py"}, found[name]
            assert sum(found[name].values()) <= (0 if forwards == 1 else 2 * layers), found[name]
        # each of three layers reads the lengths of queries and of keys twice
        assert found["megatron's delta net"] == {DISPATCHER: layers, DELTA_NET: 3 * 4}


def test_megatrons_own_rotation_is_seen_to_wait(waits):
    for found in waits:
        reads = 4 if len(waits) == 1 else 6  # two ranks have packs of one sequence
        assert found["megatron's rotation"][ROTARY] == found["layers"] * reads


def test_a_second_read_in_a_layer_is_seen(waits):
    for found in waits:
        layers = found["layers"]
        assert found["planted"] == {DISPATCHER: layers, "moe_layer.py": layers}
