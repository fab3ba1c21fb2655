"""Seconds of a step on paper, against figures that were summed apart from the code."""

from __future__ import annotations

import pytest

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.config.recipes import recipe_path
from r3train.families.published import PUBLISHED
from r3train.launch.estimate.memory_use import Model, estimate_server, stages
from r3train.launch.estimate.step_time import step_time, StepTime


def of(recipe: str, model: str = "Qwen3-30B-A3B", *, gpus: int = 8, gb: int = 80, **fields):
    config = RunConfig.from_toml(recipe_path(recipe), fields)
    found = Model(read_hf_facts(PUBLISHED / model), config.lora)
    fullest = max(stages(config, found, gpus), key=lambda stage: stage.total)
    server = estimate_server(config, found, gb * 1e9)
    return step_time(config, found, fullest.held, server, gpus, gb * 1e9)


def seconds(time: StepTime) -> dict[str, float]:
    return {name: part for name, part, _ in time.parts}


@pytest.mark.parametrize("tp, expected", [(2, 101.2), (4, 70.2), (8, 64.0)])
def test_larger_servers_end_the_longest_answer_sooner(tp, expected):
    """256 answers up to 8,192 tokens on 8 H100s: each token reads the weights once, each GPU its part of them."""
    flags = {"tp_size": tp, "mem_fraction_static": 0.9}
    time = of("qwen3_30b_a3b_colocated", sglang=flags, rollout_num_engines=8 // tp)
    assert time.card == "H100"
    assert seconds(time)["generation"] == pytest.approx(expected, rel=0.01)


def test_answers_beyond_a_servers_pool_wait():
    """Servers of one GPU hold the weights, and keys and values for two thirds of their answers: 125 s if for all."""
    flags = {"tp_size": 1, "mem_fraction_static": 0.9}
    time = of("qwen3_30b_a3b_colocated", sglang=flags, rollout_num_engines=8)
    assert seconds(time)["generation"] == pytest.approx(138.4, rel=0.01)


def test_requests_beyond_a_servers_limit_wait_and_cost_more():
    whole, half, quarter = (
        seconds(of("qwen3_30b_a3b_colocated", rollout_max_concurrency=most))["generation"]
        for most in (256, 128, 64)
    )
    assert whole < half < quarter


def test_training_is_the_arithmetic_of_its_passes():
    """Of a token 6.6e9 FLOPs by weights and 3.1e9 by attention on average; 148 TFLOP/s a GPU."""
    train = {
        name: seconds(of("qwen3_30b_a3b_colocated", **fields))["training"]
        for name, fields in (
            ("recomputed", {}),
            ("kept", {"recompute_granularity": None}),
            ("old pass too", {"reuse_log_probs": "off"}),
            ("twice the peak", {"peak_tflops": 2 * 989}),
        )
    }
    assert train["recomputed"] == pytest.approx(29.1, rel=0.01)
    assert train["kept"] == pytest.approx(train["recomputed"] * 3 / 4)
    assert train["old pass too"] == pytest.approx(train["recomputed"] * 5 / 4)
    assert train["twice the peak"] == pytest.approx(train["recomputed"] / 2)


def test_parts_in_turn_add_up_and_parts_side_by_side_hide_the_shorter():
    colocated = of("qwen3_30b_a3b_colocated")
    assert colocated.seconds == pytest.approx(sum(seconds(colocated).values()))
    assert colocated.rate == pytest.approx(256 * 4096 / colocated.seconds / 8)
    apart = of("qwen3_30b_a3b_two_nodes")  # 512 answers, 8 GPUs train and 8 serve
    parts = seconds(apart)
    serving, training = parts["generation"] + parts["routes out"], parts["training"]
    training += parts["Adam on the host"]
    assert parts["turns"] == 0 and parts["Adam on the host"] > 1
    assert apart.seconds == pytest.approx(max(serving, training) + parts["publish"])
    assert apart.rate == pytest.approx(512 * 4096 / apart.seconds / 16)
    in_turn = of("qwen3_30b_a3b_two_nodes", max_weight_staleness=0)
    assert in_turn.seconds == pytest.approx(serving + training + parts["publish"])


@pytest.mark.parametrize("gb, card", [(24, "RTX 4090"), (95, "H100"), (141, "H200"), (180, "B200")])
def test_a_gpus_card_is_that_of_the_nearest_memory(gb, card):
    assert of("olmoe_1b_7b_one_gpu", "OLMoE-1B-7B", gpus=1, gb=gb).card == card
