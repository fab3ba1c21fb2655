"""PEFT reads the adapter that the trainer writes, and gives the trainer's log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.peft_files import not_in_peft, write_adapter
from r3train.cpu.torchvision_stub import declare_torchvision_ops
from tests.drawn_adapters import drawn, in_one_tensor
from tests.hf_reference import HfReference
from tests.oracle.actors import (
    actor_log_probs,
    actor_of,
    configuration,
    in_ranks,
    samples,
    slices_of,
)
from tests.oracle.test_families import make, text
from tests.oracle.test_lora import SPARSE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

LENGTHS = [(3, 9), (5, 14)]
ATTENTION = dict(
    exclude_modules=["mlp", "block_sparse_moe", "experts", "shared_experts", "in_proj", "out_proj"]
)


def trained(directory: str, cases: list[tuple[str, dict, dict]]) -> dict[str, torch.Tensor]:
    """Train an adapter for a step and save it, in each case; log-probs of the text after it, in a rank.

    A case: a directory's name, where an adapter begins in FAMILY; fields of LoRA, and of the topology.
    """
    from r3train.loop.distribute import gather_topologies

    found = {}
    for name, targets, parallel in cases:
        base, place = Path(directory) / name.split()[0], Path(directory) / f"{name} adapter"
        config = configuration(
            base,
            **(targets | parallel),
            lora_adapter_path=place,
            rollout_batch_size=len(LENGTHS),
            lr=1e-2,
        )
        hf = read_hf_facts(base)
        with actor_of(config) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
            actor.train_step(slices, actor.compute_log_probs(slices, None), None)
            actor.collect_evidence(0)
            factors = {n: t.clone() for n, t in actor.adapter_weights()}
            if torch.distributed.get_rank() == 0:
                write_adapter(factors.items(), place.with_name(f"{name} saved"), config.lora, hf)
            topologies = gather_topologies(actor.topology)
            found[name] = torch.from_numpy(actor_log_probs(actor, topologies, text()))
    return found


def in_peft(base: Path, adapter: Path) -> np.ndarray:
    """Log-probs of the text by transformers' model with the adapter that PEFT put on it."""
    declare_torchvision_ops()
    from peft import PeftModel

    reference = HfReference(base)
    reference.model = PeftModel.from_pretrained(reference.model, adapter).eval()
    return reference.answer(text())[0]


def gaps(directory: Path, world_size: int, cases: list[tuple[str, dict, dict]]) -> dict[str, float]:
    """The largest difference between the trainer's log-probs and PEFT's, in each case; inf where PEFT refuses."""
    for name, targets, _ in cases:
        base, section = directory / name.split()[0], LoraSection(**targets)
        if not base.exists():
            make(base, name.split()[0])
        factors, place = drawn(base, section), directory / f"{name} adapter"
        write_adapter(factors.items(), place, section, read_hf_facts(base))
    ranks = in_ranks(world_size, directory / "ranks", trained, str(directory), cases)
    found = {}
    for name, log_probs in ranks[0].items():
        try:
            theirs = in_peft(directory / name.split()[0], directory / f"{name} saved")
            found[name] = float(np.abs(log_probs.numpy() - theirs).max())
        except ValueError:
            found[name] = np.inf
    return found


def lora(**fields: Any) -> dict[str, Any]:
    return dict(lora_rank=4, lora_alpha=8.0) | fields


def read_whole(directory: Path, cases: list[tuple[str, dict, dict]]) -> set[str]:
    """Those of the cases in which PEFT gives the trainer's log-probs; asserts that they are known."""
    found = gaps(directory, 1, cases)
    for name, targets, _ in cases:
        lost = not_in_peft(LoraSection(**targets), read_hf_facts(directory / name.split()[0]))
        assert (found[name] < 1e-4) if lost is None else (found[name] > 1e-2), (name, lost, found)
    return {name for name, gap in found.items() if gap < 1e-4}


def test_peft_gives_the_trainers_log_probs_with_attention_adapted_in_every_family(tmp_path):
    whole = read_whole(tmp_path, [(family, lora(**ATTENTION), {}) for family in SPARSE])
    assert whole == {*SPARSE} - {"qwen3_5_moe"}


def test_peft_gives_the_trainers_log_probs_exactly_where_it_drops_no_tensors(tmp_path):
    """Every linear, where experts have names; and the others without the routed experts."""
    cases = [(family, lora(), {}) for family in SPARSE if not in_one_tensor(family)]
    for family in SPARSE:
        excluded = ["experts", "out_proj"] if family == "nemotron_h" else ["experts"]
        cases.append((f"{family} without experts", lora(exclude_modules=excluded), {}))
    whole = read_whole(tmp_path, cases)
    assert whole >= {"qwen3_moe", "mixtral", "olmoe", "minimax_m2"}
    families = ("qwen2_moe", "hy_v3", "kimi_k25", "nemotron_h", "qwen3_vl_moe")
    assert whole >= {f"{family} without experts" for family in families}


@pytest.mark.slow
def test_peft_gives_the_log_probs_of_adapters_that_two_ranks_hold_in_shards(tmp_path):
    tp2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    found = gaps(
        tmp_path,
        2,
        [
            ("qwen3_moe tp2etp2", lora(), tp2 | dict(expert_tensor_parallel_size=2)),
            ("mixtral tp2ep2", lora(), tp2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)),
            ("moonlight tp2", lora(**ATTENTION), tp2),
        ],
    )  # fmt: skip
    assert max(found.values()) < 1e-4, found
