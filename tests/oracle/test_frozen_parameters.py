"""Frozen parameters of a real actor: they do not move, all others do, and servers are sent all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.config.sources import ConfigError
from r3train.hf_checkpoint import read_headers
from r3train.verify.tiny import random_model, save
from r3train.families.tiny_options import TinyOptions
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

FROZEN = (
    r"^model\.embed_tokens\.",
    r"layers\.1\.self_attn\.[qkv]_proj",
    r"experts\.\d+\.down_proj",
)
GLM = VARIANTS["glm"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(GLM, tmp_path_factory.mktemp("glm") / "model")


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family whose shared expert has a gate of its own."""
    directory = tmp_path_factory.mktemp("qwen2_moe") / "model"
    options = TinyOptions(family="qwen2_moe", num_layers=2)
    save(random_model(options), directory, options)
    return directory


def train(checkpoint: Path, frozen: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Two steps of AdamW with weight decay; weights before and after by name, and gradient norms."""
    config = configuration(
        checkpoint,
        weight_decay=0.1,
        transformer_overrides=overrides,
        use_rollout_routing_replay=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **frozen,
    )
    hf = read_hf_facts(checkpoint)
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, [(30, 60), (20, 70)]))
        before = {name: tensor.clone() for name, tensor in actor.hf_weights()}
        for _ in range(2):
            old = actor.compute_log_probs(slices, None)
            metrics = actor.train_step(slices, old, None)
        assert metrics["update_successful"]
        after = {name: tensor.clone() for name, tensor in actor.hf_weights()}
        (chunk,) = actor.model.unwrapped
        gradients = {n: p.main_grad.norm() for n, p in chunk.named_parameters() if p.requires_grad}
    moved = {name: not torch.equal(before[name], after[name]) for name in before}
    return {"moved": moved, "gradients": gradients}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "frozen, still",
    [
        ({"freeze_moe_router": True}, r"mlp\.gate\."),
        ({"freeze_params": FROZEN}, "|".join(FROZEN)),
        ({}, "nothing at all"),
    ],
    ids=["router", "params", "none"],
)
def test_frozen_parameters_stay_and_all_others_learn(frozen, still, checkpoint, tmp_path):
    # of the expert biases; without it they move by Megatron's default, unless they are frozen
    overrides = {} if "freeze_moe_router" in frozen else GLM.overrides
    are_as_expected(in_ranks(1, tmp_path, train, checkpoint, frozen, overrides), checkpoint, still)


@pytest.mark.ranks
def test_a_frozen_router_keeps_the_shared_experts_gate_too(gated, tmp_path):
    found = in_ranks(1, tmp_path, train, gated, {"freeze_moe_router": True}, {})
    still = r"mlp\.(gate|shared_expert_gate)\."
    gates = [name for name in found[0]["moved"] if re.search(still, name)]
    assert len(gates) == 2 * 2  # of each layer the router and the shared expert's
    are_as_expected(found, gated, still)


def are_as_expected(found: list[dict[str, Any]], checkpoint: Path, still: str) -> None:
    (got,) = found
    assert got["moved"].keys() == read_headers(checkpoint).keys()  # all are sent
    wrong = {n: m for n, m in got["moved"].items() if m == bool(re.search(still, n))}
    assert not wrong
    # by their gradients too, behind a frozen embedding and through recomputation
    dead = [n for n, norm in got["gradients"].items() if not norm > 0]
    assert not dead


def test_an_expression_that_matches_nothing_or_is_none_is_refused_before_a_server_starts(
    checkpoint,
):
    from r3train.trainer.megatron.freezing import check_freezing
    from r3train.trainer.megatron.overrides import check_overrides

    hf = read_hf_facts(checkpoint)
    check_freezing(configuration(checkpoint, freeze_params=FROZEN), hf)
    config = configuration(checkpoint, freeze_params=[r"layers\.1\.", r"decoder\.layers"])
    with pytest.raises(
        ValueError, match=r"--freeze-params 'decoder.* matches none of the \d+ tensors"
    ):
        check_freezing(config, hf)
    with pytest.raises(ConfigError, match="is no regular expression"):
        configuration(checkpoint, freeze_params=["layers.(1"])
    with pytest.raises(ConfigError, match="holds still"):
        check_overrides(
            configuration(checkpoint, freeze_moe_router=True, transformer_overrides=GLM.overrides)
        )


def freeze_query(checkpoint: Path) -> str:
    config = configuration(
        checkpoint, transformer_overrides=GLM.overrides, freeze_params=["q_proj"]
    )
    try:
        with actor_of(config):
            return ""
    except ValueError as error:
        return str(error)


@pytest.mark.ranks
def test_a_part_of_what_megatron_holds_in_one_parameter_is_refused(checkpoint, tmp_path):
    (text,) = in_ranks(1, tmp_path, freeze_query, checkpoint)
    assert "--freeze-params matches model.layers.0.self_attn.q_proj" in text
    assert "match all or none" in text
