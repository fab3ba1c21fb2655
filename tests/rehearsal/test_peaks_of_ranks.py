"""A rank's whole peak, pipeline and loss and recomputed layers together, is within 15% of the estimate of its stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.families.published import PUBLISHED
from r3train.launch.estimate import memory_use
from tests.published import RECIPES

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1900)]

# stages of twelve layers, of which all but one or two are kept whole; and the same in eight chunks
STAGED = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "expert_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "recompute_method": "block",
}
# as `r3train estimate` proposes them: experts that are split, context parallelism, nothing recomputed
KEPT = {
    name: None for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")
}
SPLIT_EXPERTS = KEPT | {"pipeline_model_parallel_size": 1, "expert_tensor_parallel_size": 2}
OF_CONTEXT = KEPT | {"context_parallel_size": 2, "max_tokens_per_gpu": 10240}
INTERLEAVED = STAGED | {"virtual_pipeline_model_parallel_size": 2}
# recipe, a rank of each stage that is counted, and settings next to the recipe's
CASES = (
    ("glm_4_5_air", (0, 48), {}),
    ("deepseek_v3", (224,), {}),
    ("minimax_m2", (16,), {}),
    ("mixtral_8x7b", (0, 8), {}),
    ("gpt_oss_20b_one_node", (0,), {}),
    ("qwen3_5_35b_a3b_one_node", (0,), {}),
    ("olmoe_1b_7b_one_gpu", (0,), {}),
    ("mixtral_8x7b", (0,), SPLIT_EXPERTS),
    ("qwen3_30b_a3b", (0,), OF_CONTEXT),
    ("qwen3_30b_a3b", (0, 6), STAGED),
    ("qwen3_30b_a3b", (0, 2, 6), INTERLEAVED),
)


def word(file: str, ranks: tuple[int, ...], settings: dict) -> str:
    return f"{file}:{','.join(map(str, ranks))}?{json.dumps(settings)}"


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, list[dict[str, int]]]:
    """Bytes of each case's ranks."""
    report = tmp_path_factory.mktemp("peaks") / "report.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.rank_memory", str(report)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(STAND_INS)}
    words = [word(*case) for case in CASES]
    done = subprocess.run([*command, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def ratios(counted: dict[str, list[dict[str, int]]]) -> list[float]:
    """The estimate over the count of each rank's whole peak."""
    found = []
    for file, ranks, settings in CASES:
        (recipe,) = (recipe for recipe in RECIPES if recipe.file == file)
        config = RunConfig.from_toml(recipe.path, settings)
        model = memory_use.Model(read_hf_facts(PUBLISHED / recipe.model))
        stages = memory_use.stages(config, model, recipe.num_gpus)
        for rank in counted[word(file, ranks, settings)]:
            paper = stages[rank["stage"]]
            assert rank["rank"] in paper.ranks and rank["step"] < rank["passes"]
            found.append((paper.held.rank + paper.passes) / (rank["held"] + rank["passes"]))
    return found


def test_a_ranks_peak_is_within_15_percent_of_the_estimate(counted):
    assert 0.85 < min(ratios(counted)) and max(ratios(counted)) < 1.15, ratios(counted)


@pytest.mark.parametrize("formula", ["_in_flight", "value_bytes"])
def test_a_wrong_formula_is_seen(formula, counted, monkeypatch):
    """One microbatch too many in flight, or a byte too many a value."""
    right = getattr(memory_use, formula)
    monkeypatch.setattr(memory_use, formula, lambda *given: right(*given) + 1)
    assert max(ratios(counted)) > 1.15
