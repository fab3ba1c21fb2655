"""Model FLOPs, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from r3train.loop.throughput import TrainSpeed, active_parameters, attention_width
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.unit.config.test_config import config
from tests.unit.hf_model import facts

SHAPES = {
    "model.embed_tokens.weight": (100, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (12, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 12),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.shared_expert.up_proj.weight": (5, 8),
    **{f"model.layers.0.mlp.experts.{i}.up_proj.weight": (6, 8) for i in range(4)},
    "lm_head.weight": (100, 8),
}


def test_an_expert_counts_by_its_share_of_the_tokens_and_the_embedding_not_at_all():
    hf = facts(num_experts=4, num_experts_per_tok=2)
    expected = 12 * 8 + 8 * 12 + 4 * 8 + 5 * 8 + 2 * 6 * 8 + 100 * 8
    assert active_parameters(SHAPES, hf) == expected
    fused = {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 12)}
    assert active_parameters(fused, hf) == 2 * 8 * 12
    tied = {"model.embed_tokens.weight": (100, 8)}
    assert active_parameters(tied, facts(tie_word_embeddings=True)) == 800
    assert attention_width(SHAPES) == 12


@pytest.mark.parametrize(
    "settings, forwards",
    [
        ({}, 3),
        ({"kl_loss_coef": 0.1}, 4),
        ({"kl_coef": 0.1}, 5),
        ({"lora_rank": 4}, 2),
    ],
)
def test_the_speed_is_that_of_all_passes_over_the_time_of_all_ranks(settings, forwards, tmp_path):
    model = write_checkpoint(VARIANTS["moe4"], tmp_path)
    made = config(hf_checkpoint=model, peak_tflops=2.0, **settings)
    hf = facts(num_experts=4, num_experts_per_tok=2, path=model)
    speed = TrainSpeed(made, hf, 4)
    active, attention, head = speed._params, speed._attention, hf.vocab_size * hf.hidden_size
    got = speed.metrics(np.array([3, 5]), 2, 10.0)
    # of the 8 tokens 2 go through the output layer
    flops = forwards * (2 * (active - head) * 8 + 2 * head * 2 + 2 * attention * (9 + 25))
    assert got["perf/train_tflops_per_gpu"] == pytest.approx(flops / 10 / 4 / 1e12)
    assert got["perf/mfu"] == pytest.approx(flops / 10 / 4 / 1e12 / 2.0)
    assert got["perf/train_tokens_per_s_per_gpu"] == pytest.approx(8 / 10 / 4)
    assert active > 0 and attention > 0


def test_without_a_peak_there_is_no_share_of_it(tmp_path):
    model = write_checkpoint(VARIANTS["moe4"], tmp_path)
    speed = TrainSpeed(config(hf_checkpoint=model), facts(path=model), 1)
    assert "perf/mfu" not in speed.metrics(np.array([4]), 3, 1.0)
