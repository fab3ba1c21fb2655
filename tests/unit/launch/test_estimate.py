"""Bytes on paper: parameters, activations of a pipeline, the pool of a server, evidence."""

from __future__ import annotations

import json
from math import prod

import pytest

from r3train.families.read_facts import read_hf_facts
from r3train.families import tensor_shapes
from r3train.families.published import PUBLISHED, published_names
from r3train.launch.estimate import memory_use
from r3train.launch.estimate.memory_use import Model, estimate_server, layer_bytes, stages
from r3train.launch.estimate.topology_search import search
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions
from tests.unit.doctor_setups import config_of

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SPLIT = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}


@pytest.fixture(scope="module")
def qwen3() -> Model:
    return Model(read_hf_facts(PUBLISHED / "Qwen3-30B-A3B"))


@pytest.fixture
def model(tiny) -> Model:
    return Model(read_hf_facts(tiny / "model"))


def with_server(config, **flags):
    """The configuration with these flags of SGLang and no others."""
    rollout = config.rollout.model_copy(update={"sglang": flags})
    return config.model_copy(update={"rollout": rollout})


def test_parameters_follow_the_shapes(tiny, model):
    total, head = model.total, model.table.sizes["head"]
    assert total.expert == 4 * 8 * 3 * 64 * 32
    norms = 4 * (2 * 64 + 2 * head) + 64
    assert total.whole == norms + 4 * 8 * 64  # routers
    # 2 ranks, experts over both: weight, gradient and, over 2 data ranks for dense, two moments
    (stage,) = stages(config_of(tiny), model, 2)
    dense = total.split + total.whole
    assert stage.held.rank == dense * (8 + 8 / 2) + total.expert / 2 * (8 + 8)
    # tensor ranks have norms and routers whole, and not half of them
    (split,) = stages(config_of(tiny, tensor_model_parallel_size=2), model, 2)
    assert split.held.weights == (total.split / 2 + total.whole + total.expert / 2) * 4


@pytest.mark.parametrize("name", published_names())
def test_every_tensor_of_a_published_model_is_counted_once(name, tiny):
    model = Model(read_hf_facts(PUBLISHED / name))
    whole = sum(prod(shape) for shape in tensor_shapes(model.hf).values())
    assert model.total.total == whole
    layers = range(1, model.hf.num_hidden_layers + 1)
    parts = [
        model.stage_parameters(part, is_first=i == 0, is_last=i == 2)
        for i, part in enumerate((layers[:1], layers[1:5], layers[5:]))
    ]
    # a tied output layer is a copy of the embedding on the last stage
    copied = model.hf.tie_word_embeddings * model.hf.vocab_size * model.hf.hidden_size
    assert sum(part.total for part in parts) == whole + copied
    config = config_of(
        tiny,
        expert_model_parallel_size=1,
        rollout_max_context_len=model.hf.index_topk,
        use_rollout_routing_replay=model.hf.is_moe,
    )
    (fit,) = search(config, model, 1, 1e15, 1)
    assert fit.fullest.held.weights == whole * 4 and 0 < fit.fullest.passes < fit.fullest.total
    assert estimate_server(config, model, 80e9).token_bytes > 0


def test_a_dense_model_has_no_experts_to_split(dense):
    hf = read_hf_facts(dense / "model")
    model = Model(hf)
    config = config_of(dense, expert_model_parallel_size=1, use_rollout_routing_replay=False)
    fits = search(config, model, 4, 1e15, 1000)
    assert model.total.expert == 0 and len(fits) > 4
    assert {fit.config.parallel.expert_ranks for fit in fits} <= {1, 2, 4}
    assert not any("EP" in fit.name or "ETP" in fit.name for fit in fits)


def test_a_tied_output_layer_is_one_and_a_copy_on_another_stage(tmp_path, qwen3):
    content = json.loads((PUBLISHED / "Qwen3-30B-A3B/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}))
    tied = Model(read_hf_facts(tmp_path))
    embedding = tied.hf.vocab_size * tied.hf.hidden_size
    assert tied.total.total == qwen3.total.total - embedding
    assert tied.stage_parameters((), is_first=False, is_last=True).split == embedding


PRECISION_AWARE = {"use_precision_aware_optimizer": True}
ON_HOST = PRECISION_AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize(
    "overrides, gradient, state, on_host",
    [
        ({}, 4, 12, 0),
        (PRECISION_AWARE, 4, 10, 0),
        (PRECISION_AWARE | {"store_param_remainders": False}, 4, 12, 0),
        (PRECISION_AWARE | {"main_grads_dtype": "bf16", "exp_avg_dtype": "fp8"}, 2, 7, 0),
        (ON_HOST, 4, 0, 16),
    ],
)
def test_the_estimate_follows_the_optimizers_overrides(
    overrides, gradient, state, on_host, tiny, model
):
    (stage,) = stages(config_of(tiny, bf16=True, optimizer_overrides=overrides), model, 2)
    dense, expert = model.total.split + model.total.whole, model.total.expert / 2
    held = dense * (2 + gradient + state / 2) + expert * (2 + gradient + state)
    assert stage.held.rank == held and stage.held.offloaded == on_host * (dense / 2 + expert)


def test_logits_are_counted_by_chunks(tiny):
    settings = dict(bf16=True, max_tokens_per_gpu=20480, tensor_model_parallel_size=4)
    chunked = memory_use.logits_bytes(config_of(tiny, **settings), 151936)
    # counted by tests/rehearsal/loss_memory.py
    assert chunked == pytest.approx(2179576844, rel=1e-3)
    whole = memory_use.logits_bytes(config_of(tiny, log_probs_chunk_size=-1, **settings), 151936)
    assert whole == pytest.approx(20480 * 151936 / 4 * 18)


def test_the_kl_reference_is_on_the_host(tiny, model):
    without, with_it = (
        stages(config_of(tiny, bf16=True, kl_loss_coef=coef), model, 2)[0].held
        for coef in (0.0, 0.1)
    )
    assert with_it.rank == without.rank and without.reference == 0
    assert with_it.reference == 2 * without.weights


def test_lora_trains_the_adapters_and_keeps_the_weights_only(tiny):
    """Rank 8 on 4 layers of 8 experts, hidden 64, expert width 32; two ranks share the experts."""
    config = config_of(tiny, lora_rank=8, kl_loss_coef=0.1)
    model = Model(read_hf_facts(tiny / "model"), config.lora)
    total = model.total
    assert total.adapter_expert == 4 * 8 * 3 * 8 * (64 + 32)
    (stage,) = stages(config, model, 2)
    adapters = total.adapter_dense * (8 + 8 / 2) + total.adapter_expert / 2 * (8 + 8)
    whole = (total.split + total.whole + total.expert / 2) * 4
    assert stage.held.rank == whole + adapters
    assert stage.held.reference == 0  # the adapters switched off
    checkpoint = memory_use.training_checkpoint_bytes(config, model)
    assert checkpoint == total.adapters * (4 + 8)
    without = config_of(tiny, lora_rank=8, exclude_modules=["experts", "layers.0"]).lora
    left = Model(model.hf, without).total
    assert left.adapter_expert == 0 and left.adapter_dense == total.adapter_dense * 3 / 4


def test_adapters_of_experts_that_are_one_tensor_a_layer_are_counted_one_an_expert(tmp_path, tiny):
    build(tmp_path, TinyOptions(family="gpt_oss"))
    model = Model(read_hf_facts(tmp_path / "model"), config_of(tiny, lora_rank=8).lora)
    assert model.total.adapter_expert == 4 * 8 * 8 * ((64 + 2 * 32) + (32 + 64))


def test_a_stage_keeps_a_microbatch_for_every_stage_after_it(tiny, model):
    config = config_of(tiny, **SPLIT)
    first, last = stages(config, model, 4)
    assert (first.ranks, last.ranks) == (range(2), range(2, 4))
    kept, passing = layer_bytes(config, model, 1)
    layer_input = 1024 * 64 * 4
    assert first.passes == pytest.approx(2 * 2 * kept + 3 * layer_input + passing)
    assert last.passes == pytest.approx(2 * kept + 3 * layer_input + passing)
    # the inputs of two layers, of two microbatches and of one, and one layer that is computed again
    again, least = stages(config_of(tiny, **SPLIT, **FULL), model, 4)
    assert again.passes == pytest.approx((2 * 2 + 3) * layer_input + kept + passing)
    assert least.passes == pytest.approx((2 + 3) * layer_input + kept + passing)


def test_layers_that_are_not_recomputed_are_kept(tiny, model):
    block = FULL | {"recompute_method": "block", "expert_model_parallel_size": 1}
    (some,) = stages(config_of(tiny, **block), model, 1)
    (every,) = stages(config_of(tiny, **block | {"recompute_num_layers": 4}), model, 1)
    kept, _ = layer_bytes(config_of(tiny, expert_model_parallel_size=1), model, 1)
    assert some.passes - every.passes == pytest.approx(3 * (kept - 1024 * 64 * 4))


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last(tiny, model):
    first, last = stages(config_of(tiny, **SPLIT), model, 2)
    vocabulary = model.hf.vocab_size * 64 * 4
    assert first.held.weights == pytest.approx(last.held.weights, abs=64 * 4)
    (whole,) = stages(config_of(tiny, expert_model_parallel_size=1), model, 1)
    assert whole.held.weights == first.held.weights + last.held.weights > 2 * vocabulary


@pytest.mark.parametrize(
    "world_size, split, reason",
    [
        (1, {}, "world size 1 does not divide by pipeline_model_parallel_size 2"),
        (2, {"pipeline_model_parallel_layout": "Et|tL"}, "stages hold 2 layers, .* has 4"),
    ],
)
def test_a_split_that_cannot_be_is_refused(tiny, model, world_size, split, reason):
    with pytest.raises(ValueError, match=reason):
        stages(config_of(tiny, **SPLIT, **split), model, world_size)


def test_a_pool_is_what_weights_leave_of_the_servers_memory(tiny, qwen3):
    """Qwen3-30B-A3B: 48 layers of 4 key heads of 128 in bfloat16 are 96 KiB a token, over 4 GPUs 24."""
    config = config_of(
        tiny,
        bf16=True,
        rollout_max_context_len=10240,
        rollout_max_response_len=8192,
        rollout_max_concurrency=64,
    )
    config = with_server(config, tp_size=4, mem_fraction_static=0.8)
    server = estimate_server(config, qwen3, 80e9, 2048)
    assert (server.gpus, server.is_given) == (4, True)
    assert server.token_bytes == 24 * 1024
    weights = 30_532_122_624 * 2 / 4
    assert server.weights == pytest.approx(weights)
    assert server.pool_tokens == int((0.8 * 80e9 - (2 << 30) - weights) / (24 * 1024))
    assert server.needed_tokens == 64 * 10240
    # 8 heads' worth of GPUs hold every key head twice
    assert estimate_server(with_server(config, tp_size=8), qwen3, 80e9, 8).token_bytes == 24 * 1024
    unset = estimate_server(with_server(config), qwen3, 80e9, 8)
    assert (unset.gpus, unset.is_given) == (2, False)
    capped = estimate_server(with_server(config, max_total_tokens=5000), qwen3, 80e9, 8)
    assert capped.pool_tokens == 5000


def test_servers_of_fp8_hold_a_byte_for_each_number_of_their_linears(tiny, qwen3):
    bf16 = config_of(tiny, bf16=True)
    fp8 = config_of(tiny, bf16=True, rollout_weights="fp8")
    whole, less = (estimate_server(c, qwen3, 80e9, 8) for c in (bf16, fp8))
    # embedding and output layer, routers, norms
    kept = 2 * 151936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    assert whole.weights * whole.gpus == 30_532_122_624 * 2
    assert less.weights * less.gpus == 30_532_122_624 + kept
    assert less.gpus < whole.gpus


@pytest.mark.parametrize(
    "flags, share",
    [({}, 0.8), ({"swa_full_tokens_ratio": 0.1}, 0.1), ({"disable_hybrid_swa_memory": True}, 1.0)],
)
def test_a_pool_holds_fewer_tokens_of_layers_with_a_sliding_window(tiny, flags, share):
    """gpt-oss-20b: 12 of 24 layers slide; each has 8 key heads of 64 in bfloat16."""
    model = Model(read_hf_facts(PUBLISHED / "gpt-oss-20b"))
    server = estimate_server(
        with_server(config_of(tiny, bf16=True), tp_size=1, **flags), model, 80e9
    )
    assert server.token_bytes == pytest.approx(12 * (1 + share) * 2 * 8 * 64 * 2)


def test_a_pool_of_latent_attention_is_whole_on_every_gpu(tiny):
    """DeepSeek-V3: 61 layers of 512 + 64 numbers."""
    model = Model(read_hf_facts(PUBLISHED / "DeepSeek-V3"))
    config = config_of(tiny, bf16=True)
    for tp in (8, 16):
        server = estimate_server(with_server(config, tp_size=tp), model, 192e9)
        assert server.token_bytes == 61 * (512 + 64) * 2


def test_the_longest_sample_ends_with_the_context(tiny, model):
    config = config_of(tiny, rollout_max_context_len=None, rollout_max_response_len=50)
    context = model.hf.max_position_embeddings
    assert memory_use.longest_sample(config, model.hf, 100) == 150
    assert memory_use.longest_sample(config, model.hf, context) == context
    server = estimate_server(config, model, 80e9, context)
    assert server.needed_tokens == config.rollout.most_in_flight * context


def test_routes_are_a_byte_a_slot(tiny, model):
    """4 layers of top 2, 67 rows of 68 tokens, 128 samples."""
    config = config_of(tiny, rollout_max_context_len=101, rollout_max_prompt_len=60)
    text = memory_use.route_text(config, model.hf)
    assert "8 B per token; a sample of 68 tokens 536 B" in text and "at most 67.0 KiB" in text


def test_the_evidence_of_a_cluster_run_is_known_before_it_is_written(tiny, qwen3):
    """64 ranks, 48 layers, 16 microbatches, 2,000 steps; one pass, each sample a microbatch."""
    given = dict(
        enable_r3_correctness_check=True,
        num_rollout=2000,
        rollout_batch_size=128,
        n_samples_per_prompt=8,
        max_tokens_per_gpu=512,
        rollout_max_context_len=512,
        rollout_max_response_len=500,
    )
    calls, summed = (
        memory_use.evidence_text(config_of(tiny, r3_evidence=e, **given), qwen3.hf, 64)
        for e in ("calls", "summed")
    )
    assert summed == "about 1021.8 MiB of 2,000 steps on 64 ranks, summed"
    assert "at most 34.6 GiB of 2,000 steps" in calls
    assert calls.endswith("; 1021.8 MiB with --r3-evidence summed")
    tenth = config_of(tiny, r3_check_interval=10, r3_evidence="summed", **given)
    text = memory_use.evidence_text(tenth, qwen3.hf, 64)
    assert "of 209 steps on 64 ranks" in text  # 10 at first, and 199 after them
