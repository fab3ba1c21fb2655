"""Linear attention of sequences that are cut over ranks, beside tensor ranks and pipeline stages.

Of the local layers against transformers in float32.  Transformer Engine attends to cut sequences in bfloat16 only: so
its layers are compared with the local ones, in the same topology, and those in float32 with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from tests.oracle import actors, test_families as oracle
from tests.oracle.actors import in_ranks

# four key heads of linear attention, for two tensor ranks times two context-parallel ones
NAME = "qwen3_5_moe with four key heads of linear attention"
HEADS = dict(linear_num_key_heads=4, linear_num_value_heads=8)
CP2 = dict(context_parallel_size=2)
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "CP2": (2, CP2),
    "TP2 CP2": (4, oracle.TOPOLOGIES["TP2"][1] | CP2),
    "PP2 CP2": (4, oracle.TOPOLOGIES["PP2"][1] | CP2),
}
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
each = pytest.mark.parametrize(
    "topology",
    [
        pytest.param(t, marks=() if t == "CP2" else (pytest.mark.slow, pytest.mark.ci))
        for t in TOPOLOGIES
    ],
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> tuple[Path, tuple[dict, dict]]:
    """The checkpoint, and what transformers computes of it."""
    directory = tmp_path_factory.mktemp("families") / NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(oracle.CASES, NAME, HEADS)
        oracle.make(directory, NAME)
    assert read_hf_facts(directory).model_type == "qwen3_5_moe"
    return directory, oracle.reference(directory, tmp_path_factory.mktemp("gradients"))


@each
def test_cut_sequences_give_the_log_probs_and_gradients_of_transformers(
    topology, expected, tmp_path
):
    (model, transformers_result), (ranks, parallel) = expected, TOPOLOGIES[topology]
    assert oracle.takes(NAME, parallel)
    found = in_ranks(ranks, tmp_path, oracle.replayed, [str(model)], parallel)
    error, off = oracle.errors([rank[str(model)] for rank in found], *transformers_result)
    worst = max(off, key=lambda tensor: off[tensor] / oracle.gradient_error(tensor))
    print(topology, f"{error:.1e} {off[worst]:.1e} {worst}")
    assert error < oracle.LOG_PROB_ERROR
    assert not {name: e for name, e in off.items() if not e <= oracle.gradient_error(name)}


def replayed_with_heads_astray(directories: list[str], parallel: dict) -> dict[str, dict[str, Any]]:
    """``replayed``, where each rank gets the first channels of a projection and not its heads; in a rank."""
    from megatron.core.ssm.gated_delta_net import gdn

    gdn._build_head_perm_for_split_sections = lambda sections, *_: torch.arange(sum(sections))
    return oracle.replayed(directories, parallel)


def test_heads_that_go_to_another_rank_are_seen(expected, tmp_path):
    (model, transformers_result), (ranks, parallel) = expected, TOPOLOGIES["CP2"]
    found = in_ranks(ranks, tmp_path, replayed_with_heads_astray, [str(model)], parallel)
    error, _ = oracle.errors([rank[str(model)] for rank in found], *transformers_result)
    assert error > 0.1


@each
def test_transformer_engines_layers_agree_with_the_local_ones_in_bfloat16(
    topology, expected, tmp_path, monkeypatch
):
    (model, _), (ranks, parallel) = expected, TOPOLOGIES[topology]
    layer_errors = {}
    for layers in ("local", "te"):
        monkeypatch.setattr(actors, "SEARCHED", [str(oracle.STAND_INS)] if layers == "te" else [])
        given = parallel | dict(bf16=True, attention_backend=layers)
        found = in_ranks(ranks, tmp_path / layers, oracle.replayed, [str(model)], given)
        layer_errors[layers] = [rank[str(model)] for rank in found]
    local, te = (layer_errors[layers] for layers in ("local", "te"))
    gap = max(
        float((mine["log_probs"] - theirs["log_probs"]).abs().max())
        for mine, theirs in zip(local, te)
        if "log_probs" in mine
    )
    gradients = {n: t for n, t in local[0].items() if n.startswith(("model.", "lm_head"))}
    scale = torch.stack([t.float().square().mean() for t in gradients.values()]).mean().sqrt()
    off = {
        name: float((te[0][name] - t).float().norm())
        / max(float(t.float().norm()), 1e-3 * float(scale) * t.numel() ** 0.5)
        for name, t in gradients.items()
    }
    worst = max(off, key=off.__getitem__)
    print(topology, f"{gap:.1e} {off[worst]:.1e} {worst}")
    assert len(off) > 60 and gap <= 1e-6 and off[worst] < 0.05
