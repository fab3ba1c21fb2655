"""A checkpoint of the local layers goes on with Transformer Engine's and its Adam, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from r3train.config.checkpoint_settings import CheckpointSection
from r3train.families.read_facts import read_hf_facts
from tests.oracle import actors
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.oracle.test_families import make
from tests.oracle.test_optimizer_resume import whole
from tests.rehearsal.test_optimizer_offload import STAND_INS, build_as_on_cuda, unlike

pytestmark = pytest.mark.ranks

TWO_RANKS: dict[str, Any] = dict(
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    expert_model_parallel_size=2,
    use_distributed_optimizer=True,
)
# a dense layer before those with experts; latent attention; sinks, and biases of experts; linear attention
CASES = {"glm4_moe": {}, "glm4_moe bf16": dict(bf16=True), "deepseek_v3": {}, "gpt_oss": {}}
CASES |= {"qwen3_next": {}}


# as checkpoints have them since before there were any of Transformer Engine's layers
NAMES = {
    "glm4_moe": "mlp.linear_fc1.layer_norm_weight",
    "deepseek_v3": "self_attention.kv_layernorm.weight",
    "qwen3_next": "self_attention.linear_qkv.layer_norm_weight",
}


def resumed(scratch: Path, source: str | None, target: str) -> dict[str, dict[str, Any]]:
    """Of each case: the state as loaded, or after two steps, which is saved; then one step more."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    layers, found = "te" if target == "te" else "local", {}
    if layers == "te":
        build_as_on_cuda()
    for case, fields in CASES.items():
        model = scratch / case.split()[0]
        config = configuration(model, **TWO_RANKS, **fields, attention_backend=layers)
        hf, loaded = read_hf_facts(model), source and scratch / f"{case} {source}/iter_0000002"
        with actor_of(config, loaded) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, [(5, 9), (4, 12), (6, 7)]))
            if source is None:
                for _ in range(2):
                    actor.train_step(slices, actor.compute_log_probs(slices, None), None)
            saver = Checkpointer(actor, CheckpointSection(save=scratch / f"{case} {target}"))
            saver.save(2, {})
            state, log_probs = whole(actor), actor.compute_log_probs(slices, None)
            norm = actor.train_step(slices, log_probs, None)["grad_norm"]
            found[case] = {
                "state": state,
                "log_probs": log_probs,
                "norm": norm,
                "after": {f"weight.{n}": t.float().clone() for n, t in actor.hf_weights()},
                "adam": type(actor.optimizer.chained_optimizers[0].optimizer).__module__,
            }
    return found


def test_weights_moments_and_the_next_step_are_those_of_the_run_that_was_saved(
    tmp_path, monkeypatch
):
    for family in dict.fromkeys(case.split()[0] for case in CASES):
        make(tmp_path / family, family)
    saved, _ = in_ranks(2, tmp_path / "saved", resumed, tmp_path, None, "local")
    with monkeypatch.context() as patch:
        patch.setattr(actors, "SEARCHED", [str(STAND_INS)])
        te, _ = in_ranks(2, tmp_path / "te", resumed, tmp_path, "local", "te")
    back, _ = in_ranks(2, tmp_path / "back", resumed, tmp_path, "te", "back")
    for layers in ("local", "te"):
        for case, name in NAMES.items():
            kept = FileSystemReader(tmp_path / f"{case} {layers}/iter_0000002").read_metadata()
            assert f"decoder.layers.1.{name}" in kept.state_dict_metadata, (case, layers)
    for case in CASES:
        was, there = saved[case], te[case]
        assert (was["adam"], there["adam"]) == ("torch.optim.adamw", "transformer_engine")
        assert {n.split(".")[0] for n in was["state"]} == {"weight", "exp_avg", "exp_avg_sq"}
        for found in (there, back[case]):
            assert unlike(found["state"], was["state"]) == 0, case
        assert unlike(back[case]["after"], was["after"]) == 0, case
        for n, log_probs in was["log_probs"].items():
            assert (there["log_probs"][n] - log_probs).abs().max() <= 1e-6, case
        rounded = "bf16" in case
        assert there["norm"] == pytest.approx(was["norm"], rel=1e-3 if rounded else 1e-6), case
        if rounded:
            assert unlike(there["after"], was["after"]) < 0.01
            continue
        for name, after in was["after"].items():
            step = (after - was["state"][name]).norm()
            assert (there["after"][name] - after).norm() <= 1e-3 * step, (case, name)
