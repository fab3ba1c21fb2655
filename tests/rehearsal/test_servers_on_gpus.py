"""SGLang's own decisions for every recipe's servers on three cards, and which backends of experts record routes.

A subprocess per card (``gpu_servers``) believes in it; no kernel runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.launch.job.finding import OK
from r3train.doctor.kernels import CARDS as CARD_NAMES, check_tuned_experts, server_experts
from r3train.families.published import PUBLISHED
from r3train.launch.estimate.memory_use import server_fraction
from r3train.engine.refusals import UNRECORDED_BACKENDS
from tests.published import MOE_RECIPES

ROOT = Path(__file__).resolve().parents[2]
CARDS = {"H100": 81559, "H200": 143771, "B200": 183359}  # MiB, as nvidia-smi says
MIB = 1 << 20
pytestmark = pytest.mark.ranks  # two processes, and no gloo
each_card = pytest.mark.parametrize("card", CARDS)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """The findings of each card's process."""
    directory = tmp_path_factory.mktemp("cards")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("NVIDIA_TF32_OVERRIDE", None)
    running = {}
    for card in CARDS:
        words = [str(directory / f"{card}.json"), card, str(directory / card)]
        command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.gpu_servers", *words]
        with open(directory / f"{card}.log", "w") as log:
            running[card] = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )
    try:
        for card, process in running.items():
            assert process.wait() == 0, (directory / f"{card}.log").read_text()[-4000:]
    finally:
        for process in running.values():
            process.kill()
    return {card: json.loads((directory / f"{card}.json").read_text()) for card in CARDS}


@each_card
def test_the_backends_that_record_no_routes_are_those_that_are_refused(card, reports):
    """A backend that a newer SGLang adds, or changes, is asked too."""
    records = reports[card]["records"]
    assert {name for name, recorded in records.items() if not recorded} == UNRECORDED_BACKENDS
    assert records["triton"] and records["auto"] and records["deep_gemm"] and len(records) > 20


@each_card
def test_every_recipes_servers_record_their_routes(card, reports):
    report = reports[card]
    assert report["servers"].keys() == {recipe.file for recipe in MOE_RECIPES}
    for name, server in report["servers"].items():
        assert server["enable_return_routed_experts"], name
        assert report["records"][server["moe_runner_backend"]], name
        # what it is asked for: no later decision has changed it
        assert server["moe_runner_backend"] == "triton" and server["dtype"] == "bfloat16", name


@pytest.mark.parametrize(
    "card, recipe, backend",
    [
        *(("H100", f"gpt_oss_20b{of}", "triton_kernel") for of in ("", "_one_node", "_colocated")),
        ("B200", "gpt_oss_20b", "triton_kernel"),
        ("B200", "qwen3_30b_a3b", "flashinfer_trtllm"),
        ("B200", "moonlight_16b_a3b", "flashinfer_trtllm"),
        ("B200", "deepseek_v3", "flashinfer_trtllm"),
        ("B200", "glm_4_5_air", "flashinfer_trtllm"),
        ("H100", "qwen3_30b_a3b", "auto"),
    ],
)
def test_sglangs_own_choice_is_why_a_backend_is_named(card, recipe, backend, reports):
    assert reports[card]["alone"][recipe] == backend


@each_card
def test_every_recipes_servers_overlap_scheduling_and_computing(card, reports):
    for name, server in reports[card]["servers"].items():
        assert not server["disable_overlap_schedule"], name


@each_card
def test_shared_experts_may_be_fused_so_their_column_is_dropped_from_the_rows(card, reports):
    """tests/rehearsal/test_captured_rows.py has those rows; a CPU server fuses none."""
    for name, server in reports[card]["servers"].items():
        assert server["disable_shared_experts_fusion"] == name.startswith("glm_4_7_flash"), name


@each_card
def test_the_doctor_looks_for_the_file_of_tuned_experts_that_sglang_looks_for(card, reports):
    """A model's own class says what is fused, SGLang's own search what is found."""
    for recipe in MOE_RECIPES:
        server, config = reports[card]["servers"][recipe.file], RunConfig.from_toml(recipe.path)
        if not config.rollout.rollout_external_engine_addrs or "tp_size" in config.rollout.sglang:
            hf = read_hf_facts(PUBLISHED / recipe.model)
            assert list(server_experts(config, hf)) == server["experts"], recipe.file
            found = check_tuned_experts(config, hf, CARD_NAMES[card], {})
            assert [each.level == OK for each in found] == [server["is_tuned"]], recipe.file


@each_card
def test_the_page_says_which_recipes_servers_find_tuned_experts(card, reports):
    page = (ROOT / "docs/run/gpus.md").read_text()
    rows = page.partition("\n## Tuned MoE kernels\n")[2].partition("\n## ")[0]
    for recipe in MOE_RECIPES:
        server = reports[card]["servers"][recipe.file]
        experts, columns = server["experts"]
        (row,) = re.findall(rf"^\|.*\b{recipe.file}\b.*$", rows, re.M)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:3] == [str(server["tp_size"]), f"{experts}, {columns}"], (cells, server)
        found = cells[3 + list(CARDS).index(card)]
        assert (found == "yes") == server["is_tuned"], (card, row)


@each_card
def test_no_recipes_router_is_multiplied_in_tf32(card, reports):
    """SGLang turns it on for two families and gives the flag no say; the environment has the last word."""
    servers = reports[card]["servers"]
    asked = {name for name, server in servers.items() if server["enable_tf32_matmul"]}
    assert asked == {"glm_4_5_air", "minimax_m2"}
    assert {server["NVIDIA_TF32_OVERRIDE"] for server in servers.values()} == {"0"}


@each_card
def test_the_estimate_gives_a_server_about_the_memory_that_sglang_takes(card, reports):
    for recipe in MOE_RECIPES:
        found = reports[card]["servers"][recipe.file]["mem_fraction_static"]
        config = RunConfig.from_toml(recipe.path)
        paper = server_fraction(config, CARDS[card] * MIB)
        assert paper == pytest.approx(found, abs=0.03), recipe.file
        given = config.rollout.sglang.get("mem_fraction_static")
        assert given is None or paper == found == given, recipe.file


@each_card
def test_decoding_runs_in_whole_graphs_and_a_servers_gpus_are_the_recipes(card, reports):
    for recipe in MOE_RECIPES:
        server = reports[card]["servers"][recipe.file]
        assert server["cuda_graphs"]["decode"]["backend"] == "full", recipe.file
        assert server["cuda_graphs"]["decode"]["max_bs"] >= 256, recipe.file
        given = RunConfig.from_toml(recipe.path).rollout.sglang.get("tp_size")
        assert given is None or server["tp_size"] == given, recipe.file
