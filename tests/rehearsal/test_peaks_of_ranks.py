"""A rank's whole peak, pipeline and loss and recomputed layers together, is what the estimate has for its stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from r3train.config import RunConfig
from r3train.config.hf_facts import read_hf_facts
from r3train.families.published import PUBLISHED
from r3train.launch import estimate
from tests.published import RECIPES

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
pytestmark = pytest.mark.ranks

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


@dataclass(frozen=True)
class Ratio:
    """The estimate over the count, of a rank's whole peak and of what passes take of it."""

    whole: float
    passes: float


def ratios(counted: dict[str, list[dict[str, int]]]) -> list[list[Ratio]]:
    """Those of each case's ranks."""
    found = []
    for file, ranks, settings in CASES:
        (recipe,) = (recipe for recipe in RECIPES if recipe.file == file)
        config = RunConfig.from_toml(recipe.path, settings)
        model = estimate.Model(read_hf_facts(PUBLISHED / recipe.model))
        stages = estimate.stages(config, model, recipe.num_gpus)
        of_case = []
        for rank in counted[word(file, ranks, settings)]:
            paper = stages[rank["stage"]]
            assert rank["rank"] in paper.ranks and rank["step"] < rank["passes"]
            whole = (paper.held.rank + paper.passes) / (rank["held"] + rank["passes"])
            of_case.append(Ratio(whole, paper.passes / rank["passes"]))
        found.append(of_case)
    return found


def off(counted: dict[str, list[dict[str, int]]]) -> list[Ratio]:
    """Ranks whose passes take more than the estimate has, or much less."""
    return [
        one
        for (_, _, settings), of_case in zip(CASES, ratios(counted))
        for one in of_case
        if not 1 <= one.passes < (1.15 if settings.items() >= KEPT.items() else 1.1)
    ]


def test_passes_take_no_more_than_the_estimate_has_and_not_much_less(counted):
    assert not off(counted)
    for ratio in sum(ratios(counted), []):
        assert 0.999 < ratio.whole < 1.05, ratio


def test_a_layer_beside_the_logits_and_forgotten_messages_are_seen(counted, monkeypatch):
    """Logits are gone when the last layer's backward pass begins."""
    with monkeypatch.context() as patch:
        added = property(lambda stage: stage.activations + stage.layer + stage.logits)
        patch.setattr(estimate.StageRanks, "passes", added)
        assert len([ratio for ratio in off(counted) if ratio.passes > 1.2]) == 5
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "_ON_THE_WAY", 0)
        assert min(ratio.passes for ratio in off(counted)) < 1


def spread(of_stages: list[Ratio]) -> float:
    """The largest of the stages' ratios over the least: 1 where the estimate knows each one's microbatches."""
    passes = [ratio.passes for ratio in of_stages]
    return max(passes) / min(passes)


def test_a_stage_holds_as_many_microbatches_as_the_estimate_has(counted, monkeypatch):
    staged, interleaved = ratios(counted)[-2:]
    assert spread(staged) < 1.05 and spread(interleaved) < 1.05
    assert min(ratio.passes for ratio in staged + interleaved) > 1
    rule = estimate._in_flight
    monkeypatch.setattr(estimate, "_in_flight", lambda *given: rule(*given) + 1)
    staged, interleaved = ratios(counted)[-2:]
    assert spread(staged) > 1.05 and spread(interleaved) > 1.05
