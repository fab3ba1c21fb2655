"""A run estimated: activations of a pipeline, the pool of a server, the seconds of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from r3train.config.hf_facts import read_hf_facts
from r3train.doctor import memory, run_estimate
from r3train.doctor.finding import PROBLEM
from r3train.doctor.model_checks import read_stages
from tests.published import write_checkpoint
from tests.unit.doctor_setups import config_of, diagnose

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "Qwen3-30B-A3B"
    write_checkpoint(directory, directory.name)
    return directory


def with_server(config, **flags):
    """The configuration with these flags of SGLang and no others."""
    rollout = config.rollout.model_copy(update={"sglang": flags})
    return config.model_copy(update={"rollout": rollout})


def test_a_stage_keeps_a_microbatch_for_every_stage_behind_it(tiny):
    hf = read_hf_facts(tiny / "model")
    split = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}
    config = config_of(tiny, **split)
    first, last = memory.stages(config, hf, 4)
    assert (first.ranks, last.ranks) == (range(2), range(2, 4))
    # what one layer makes in passing is there once
    kinds = {n: kind for stage in read_stages(config, hf) for n, kind in stage.items()}
    kept, made = memory.layer_bytes(config, hf, 1, kinds)
    layer_input = 1024 * 64 * 4
    on_the_way = 3 * layer_input
    assert last.activations == pytest.approx(2 * kept + layer_input + on_the_way)
    assert first.activations == pytest.approx(2 * 2 * kept + on_the_way)
    assert last.layer == first.layer == pytest.approx(made)
    # the inputs of two layers, of two microbatches and of one; what was sent is dropped, the head's input not
    again, least = memory.stages(config_of(tiny, **split, **FULL), hf, 4)
    assert again.activations == pytest.approx(2 * 2 * layer_input + on_the_way)
    assert least.activations == pytest.approx(3 * layer_input + on_the_way)
    assert least.layer == again.layer == pytest.approx(kept + made)
    assert least.passes == least.activations + max(least.layer, least.logits)


def test_layers_that_are_computed_again_come_when_those_kept_whole_are_gone(tiny):
    hf = read_hf_facts(tiny / "model")
    block = FULL | {"recompute_method": "block", "expert_model_parallel_size": 1}
    (some,) = memory.stages(config_of(tiny, **block), hf, 1)
    (every,) = memory.stages(config_of(tiny, **block | {"recompute_num_layers": 4}), hf, 1)
    kinds = {n: kind for stage in read_stages(config_of(tiny), hf) for n, kind in stage.items()}
    kept, made = memory.layer_bytes(config_of(tiny), hf, 1, kinds)
    assert (some.layer, every.layer) == (pytest.approx(made), pytest.approx(kept + made))
    assert some.activations - every.activations == pytest.approx(3 * (kept - 1024 * 64 * 4))


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last(tiny):
    hf = read_hf_facts(tiny / "model")
    split = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}
    first, last = memory.stages(config_of(tiny, **split), hf, 2)
    vocabulary = hf.vocab_size * hf.hidden_size * 4
    assert first.held.weights == pytest.approx(last.held.weights, abs=hf.hidden_size * 4)
    (whole,) = memory.stages(config_of(tiny, expert_model_parallel_size=1), hf, 1)
    assert whole.held.weights == first.held.weights + last.held.weights > 2 * vocabulary


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
    server = run_estimate.estimate_server(config, read_hf_facts(qwen3), 2048, 80e9)
    assert (server.gpus, server.is_given) == (4, True)
    assert server.token_bytes == 24 * 1024
    weights = 30_532_122_624 * 2 / 4
    assert server.weights == pytest.approx(weights)
    assert server.pool_tokens == int((0.8 * 80e9 - (2 << 30) - weights) / (24 * 1024))
    assert server.needed_tokens == 64 * 10240
    # 8 heads' worth of GPUs hold every key head twice
    wide = with_server(config, tp_size=8)
    assert (
        run_estimate.estimate_server(wide, read_hf_facts(qwen3), 8, 80e9).token_bytes == 24 * 1024
    )
    unset = run_estimate.estimate_server(with_server(config), read_hf_facts(qwen3), 8, 80e9)
    assert (unset.gpus, unset.is_given) == (2, False)
    told = run_estimate.estimate_server(
        with_server(config, max_total_tokens=5000), read_hf_facts(qwen3), 8, 80e9
    )
    assert told.pool_tokens == 5000


@pytest.mark.parametrize(
    "flags, share",
    [({}, 0.8), ({"swa_full_tokens_ratio": 0.1}, 0.1), ({"disable_hybrid_swa_memory": True}, 1.0)],
)
def test_a_pool_holds_fewer_tokens_of_layers_with_a_sliding_window(tiny, tmp_path, flags, share):
    """gpt-oss-20b: 12 of 24 layers slide; each has 8 key heads of 64 in bfloat16."""
    write_checkpoint(tmp_path / "gpt", "gpt-oss-20b")
    config = with_server(config_of(tiny, bf16=True), tp_size=1, **flags)
    server = run_estimate.estimate_server(config, read_hf_facts(tmp_path / "gpt"), 8, 80e9)
    assert server.token_bytes == pytest.approx(12 * (1 + share) * 2 * 8 * 64 * 2)


def test_seconds_of_training_follow_the_arithmetic_and_its_ranks(tiny, qwen3):
    config = config_of(
        tiny,
        hf_checkpoint=str(qwen3),
        bf16=True,
        rollout_batch_size=64,
        n_samples_per_prompt=8,
        global_batch_size=256,
        peak_tflops=1000.0,
    )
    hf = read_hf_facts(qwen3)
    step = run_estimate.estimate_step(config, hf, 8, 10240, None)
    tokens = 512 * 10240
    # 3.04e9 active parameters but for the embedding, 4 forwards (3 of a step, 1 for old log-probs)
    least = 4 * 2 * 3.03e9 * tokens / (8 * 1000e12 * run_estimate.TRAIN_SHARE)
    assert least < step.train_s < 3 * least  # attention of long samples on top
    assert run_estimate.estimate_step(config, hf, 16, 10240, None).train_s == step.train_s / 2
    again = config_of(tiny, **{**config.model.model_dump(exclude_defaults=True), **FULL})
    again = config.model_copy(update={"model": again.model})
    assert run_estimate.estimate_step(again, hf, 8, 10240, None).train_s == pytest.approx(
        step.train_s * 5 / 4
    )


def test_the_doctor_says_the_same_lines(tiny):
    findings = list(diagnose(config_of(tiny, estimate=True), 2))
    assert not [f for f in findings if f.level == PROBLEM]
    found = [f.text for f in findings if f.subject == "estimated"]
    assert any(text.startswith("each of ranks 0 to 1 (layers 1 to 4)") for text in found)
    assert any(text.startswith("a rollout: generation") for text in found)


@pytest.mark.parametrize(
    "world_size, split, reason",
    [
        (1, {}, "world size 1 does not divide by pipeline_model_parallel_size 2"),
        (2, {"pipeline_model_parallel_layout": "Et|tL"}, "no pipeline stage has layer 3"),
    ],
)
def test_a_split_that_cannot_be_is_told_and_ends_nothing(tiny, world_size, split, reason):
    split = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1, **split}
    findings = list(diagnose(config_of(tiny, estimate=True, **split), world_size))
    assert any(f.level == PROBLEM for f in findings)
    (*_, last) = [f.text for f in findings if f.subject == "estimated"]
    assert last.startswith("nothing more: ") and last.endswith(reason)


def test_the_longest_sample_ends_with_the_context_and_a_replayed_one_has_an_answer(tiny):
    hf = read_hf_facts(tiny / "model")
    fields = {"rollout_max_context_len": None, "rollout_max_response_len": 50}
    servers = config_of(tiny, **fields)
    context = hf.max_position_embeddings
    server = run_estimate.estimate_server(servers, hf, context, 80e9)
    assert server.needed_tokens == servers.rollout.most_in_flight * context
    replayed = config_of(tiny, replay_rollouts=str(tiny), **fields)
    for prompt, tokens in ((100, 150), (context, context)):
        for config in (servers, replayed):
            text = "\n".join(run_estimate.paper(config, hf, 2, prompt))
            assert f" samples of {tokens:,} tokens" in text


def colocated(tiny, qwen3, **fields):
    """The recipe of Qwen3-30B-A3B in turns, as far as servers and their weights go."""
    config = config_of(
        tiny,
        hf_checkpoint=str(qwen3),
        bf16=True,
        **({"colocate": True, "max_weight_staleness": 0, "rollout_num_engines": 4} | fields),
    )
    return with_server(config, tp_size=2)


def test_weights_by_gloo_to_servers_in_turns_take_minutes_and_by_shared_memory_seconds(tiny, qwen3):
    """61 GB, to 4 servers of 2 GPUs: the sender of gloo's tree sends all of it four times."""
    hf = read_hf_facts(qwen3)
    num_bytes = 30_532_122_624 * 2
    found, lines = {}, {}
    for mode in ("distributed", "shared_memory", "disk"):
        config = colocated(tiny, qwen3, update_weight_transfer_mode=mode)
        server = run_estimate.estimate_server(config, hf, 8, 80e9)
        step = run_estimate.estimate_step(config, hf, 8, 1024, server)
        found[mode] = step.update_s
        assert step.total_s == pytest.approx(step.generation_s + step.train_s + step.update_s)
        lines[mode] = "\n".join(run_estimate.paper(config, hf, 8, 8))
    assert found["distributed"] == pytest.approx(4 * num_bytes / 0.9e9)
    assert found["distributed"] > 120
    assert found["shared_memory"] == pytest.approx(num_bytes / 3.2e9)
    assert found["disk"] == pytest.approx(num_bytes / 1.5e9)
    gloo = "weights go by gloo to 8 receivers, 4 sends of 0.9 GB/s, 0.23 GB/s"
    assert gloo in lines["distributed"] and "weights 271.4 s" in lines["distributed"]
    assert "weights go by shared_memory, 3.2 GB/s" in lines["shared_memory"]
    # on GPUs of their own
    apart = colocated(tiny, qwen3, colocate=False)
    server = run_estimate.estimate_server(apart, hf, 8, 80e9)
    assert run_estimate.estimate_step(apart, hf, 8, 1024, server).update_s == pytest.approx(
        num_bytes / 40e9
    )


@pytest.mark.parametrize("receivers, sends", [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_the_sender_of_a_tree_sends_once_a_level(tiny, receivers, sends):
    config = config_of(tiny, colocate=True, max_weight_staleness=0)
    update = run_estimate.update_on_paper(config, receivers)
    assert update.gb_s == pytest.approx(0.9 / sends) and f", {sends} sends" in update.way


def test_an_adam_on_the_host_takes_its_time(tiny, qwen3):
    """Four ranks of a node, experts over all: a fourth of the experts and of the rest a rank."""
    hf = read_hf_facts(qwen3)
    fields = dict(
        hf_checkpoint=str(qwen3),
        bf16=True,
        expert_model_parallel_size=4,
        tensor_model_parallel_size=4,
        rollout_batch_size=64,
        n_samples_per_prompt=4,
        global_batch_size=128,
    )
    on_host = {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    }
    config = config_of(tiny, **fields, optimizer_overrides=on_host)
    step = run_estimate.estimate_step(config, hf, 4, 1024, None)
    assert config.steps_per_rollout == 2
    # 300 GB/s of a node over 4 ranks, 28 bytes per parameter: 2.7 G parameters/s, below 24 threads' 4.6
    rate = 300e9 / 28 / 4
    assert step.optimizer_s == pytest.approx(2 * 30.53e9 / 4 / rate, rel=0.01)
    assert step.total_s == step.train_s + step.optimizer_s
    (line, assumed) = list(run_estimate.paper(config, hf, 4, 8))[-2:]
    assert ", Adam on the host 5.7 s" in line and "0.19 G parameters/s a thread" in assumed
    device = run_estimate.estimate_step(config_of(tiny, **fields), hf, 4, 1024, None)
    assert device.optimizer_s == 0 and device.train_s == step.train_s
    # ranks of several nodes have the cores of their own
    wide = config_of(tiny, **fields, optimizer_overrides=on_host)
    assert run_estimate.host_adam_s(wide, memory.stages(wide, hf, 16), 16) == pytest.approx(
        run_estimate.host_adam_s(wide, memory.stages(wide, hf, 8), 8) / 2, rel=0.1
    )
