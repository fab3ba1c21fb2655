"""Every recipe's ranks are built at the model's real size: names, places, shapes, and how much they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.families import tensor_names
from r3train.families.published import PUBLISHED
from r3train.launch.estimate import memory_use
from r3train.launch.estimate.memory_use import Model, StageRanks, stages
from tests.published import RECIPES, Recipe, write_config

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1900)]


def rehearsed(directory: Path, *words: str) -> dict[str, list[dict]]:
    """Facts of the named ranks, by word."""
    report = directory / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.real_size", str(report)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def facts_of(recipe: Recipe, directory: Path) -> HfModelFacts:
    write_config(directory / recipe.file, recipe.model)
    return read_hf_facts(directory / recipe.file)


def check_rank(rank: dict, recipe: Recipe, hf: HfModelFacts) -> None:
    """A rank that loads: the tensors of its live experts and of its layers, each once, all of them fitting."""
    assert rank["misfits"] == [], (recipe.file, rank["rank"])
    names = rank["names"]
    assert len(set(names)) == len(names) and set(names) <= tensor_names(hf)
    per_rank = (
        hf.num_experts // RunConfig.from_toml(recipe.path).parallel.expert_model_parallel_size
    )
    own = range(rank["ep_rank"] * per_rank, (rank["ep_rank"] + 1) * per_rank)
    loaded = {int(name.split(".experts.")[1].split(".")[0]) for name in names if _of_one(name)}
    reads = rank["reads_experts"] and any(map(_of_one, tensor_names(hf)))
    assert loaded == (set(own) if reads else set())


def _of_one(name: str) -> bool:
    """True for a tensor of one expert; gpt-oss has those of all experts in one."""
    return ".experts." in name and name.split(".experts.")[1].split(".")[0].isdigit()


# ranks of stages next to the first, which has dense layers
STAGES = {
    "glm_4_5_air": (16, 48),
    "mixtral_8x7b": (8,),
    "minimax_m2": (16, 80),
    "deepseek_v3": (32, 224),
    "kimi_k2": (32, 224),
}
OTHER = "gpt_oss_20b?intermediate_size=2816"  # its checkpoint has 2880


def ranks_of(recipe: Recipe) -> str:
    """The word for ``rehearsed``: the first rank of a recipe, and of the stages that hold something else."""
    return f"{recipe.file}:{','.join(map(str, (0, *STAGES.get(recipe.file, ()))))}"


@pytest.fixture(scope="module")
def first_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    """Ranks of every recipe, its first before all, and of one whose experts have another width than the checkpoint's."""
    directory = tmp_path_factory.mktemp("first_ranks")
    return rehearsed(directory, *map(ranks_of, RECIPES), OTHER)


def test_the_first_rank_of_every_recipe_holds_its_part_of_the_model(first_ranks, tmp_path):
    for recipe in RECIPES:
        hf = facts_of(recipe, tmp_path)
        for rank in first_ranks[ranks_of(recipe)]:
            check_rank(rank, recipe, hf)


def model_of(recipe: Recipe) -> Model:
    return Model(read_hf_facts(PUBLISHED / recipe.model))


def estimated(rank: dict, recipe: Recipe) -> StageRanks:
    """The estimate of the stage that a rank is in."""
    found = stages(RunConfig.from_toml(recipe.path), model_of(recipe), recipe.num_gpus)
    assert rank["rank"] in found[rank["stage"]].ranks
    return found[rank["stage"]]


def held_wrong(ranks: dict[str, list[dict]]) -> list[tuple[str, int]]:
    """Ranks that hold, here or on the host, more than a tenth more or less than is estimated."""
    found = []
    for recipe in RECIPES:
        for rank in ranks[ranks_of(recipe)]:
            held = estimated(rank, recipe).held
            here = rank["weights"] + rank["gradients"] + rank["optimizer"]
            pair = held.rank, held.offloaded
            if pair != pytest.approx((here, rank["offloaded"]), rel=0.1):
                found.append((recipe.file, rank["rank"]))
    return found


def test_the_estimate_is_what_the_ranks_of_each_stage_hold(first_ranks):
    """Weights, gradients and optimizer, here and on the host, as Megatron's own buffers and shards hold them."""
    assert not held_wrong(first_ranks)


def test_a_step_of_the_optimizer_makes_less_in_passing_than_a_microbatch(first_ranks):
    for recipe in RECIPES:
        for rank in first_ranks[ranks_of(recipe)]:
            paper = estimated(rank, recipe)
            assert rank["step"] < paper.total - paper.held.rank, (recipe.file, rank["step"])


@pytest.mark.parametrize("wrong", [(2, 0, 2), (0, 2, 0), (0, 0, 4)])
def test_wrong_bytes_of_a_parameter_are_seen(wrong, first_ranks, monkeypatch):
    """Of its gradient, of its state, and of its state on the host."""
    rule = memory_use.optimizer_bytes
    monkeypatch.setattr(
        memory_use, "optimizer_bytes", lambda *given: [a + b for a, b in zip(rule(*given), wrong)]
    )
    assert held_wrong(first_ranks)


def test_a_tensor_of_another_shape_is_found(first_ranks):
    (rank,) = first_ranks[OTHER]
    assert any("expected [2880, 5632]" in misfit for misfit in rank["misfits"])  # two widths


# float32 parameters with an optimizer on the host: what ended a recipe once
IN_CI = ("qwen3_5_35b_a3b_one_node",)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, id=r.file, marks=[pytest.mark.ci] * (r.file in IN_CI)) for r in RECIPES],
)
def test_the_stages_of_a_recipe_hold_every_tensor_once(recipe, tmp_path):
    """The first rank of every stage reads all but other ranks' experts; the last that reads has the last experts."""
    parallel = RunConfig.from_toml(recipe.path).parallel
    stages = parallel.pipeline_model_parallel_size
    ranks = [stage * recipe.num_gpus // stages for stage in range(stages)]
    last = ranks[-1] + parallel.expert_ranks // stages - 1
    word = f"{recipe.file}:{','.join(map(str, [*ranks, last]))}"
    found = rehearsed(tmp_path, word)[word]
    hf = facts_of(recipe, tmp_path)
    for rank in found:
        check_rank(rank, recipe, hf)
    firsts = [name for rank in found[:-1] for name in rank["names"]]
    assert len(set(firsts)) == len(firsts)
    missing = tensor_names(hf) - set(firsts)
    assert all(_of_one(name) for name in missing), sorted(missing)[:4]
    assert len(found) == stages + 1
