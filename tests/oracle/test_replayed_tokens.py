"""Sparse attention to given tokens: log-probs and gradients of transformers that attends to the same ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from r3train.config.hf_facts import read_hf_facts
from r3train.ids import token_uids
from tests.hf_reference import HfReference
from tests.oracle import actors, test_families
from tests.oracle.actors import in_ranks, samples
from tests.oracle.test_families import (
    FAST,
    LENGTHS,
    LOG_PROB_ERROR,
    SMALL,
    STAND_INS,
    TE,
    TOPOLOGIES,
    errors,
    gradient_error,
    make,
)

NAMES = ("deepseek_v32 of long sequences", "glm_moe_dsa of long sequences")
TOPK = 5


def given(uid: int, layer_number: int) -> list[int]:
    """Tokens for a row that no indexer would choose, positions in its sequence."""
    position = uid & 0xFFFFFF
    random = np.random.default_rng([uid, layer_number])
    return random.permutation(position + 1)[:TOPK].tolist()


class Given:
    """Serves the given tokens to the actor's layers."""

    def __init__(self, slices: list[Any], microbatch: Any):
        self.uids = {s.microbatch_id: s.token_uids for s in slices}
        self.microbatch, self.calls, self.differ = microbatch, 0, 0

    def of_call(self, layer_number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        uids = self.uids[self.microbatch()].tolist()

        def replace(own: torch.Tensor) -> torch.Tensor:
            chosen = own.clone()
            for row, uid in enumerate(uids):
                if uid >= 0:
                    of_row = given(uid, layer_number)
                    chosen[row] = torch.tensor(of_row + [-1] * (TOPK - len(of_row)))
            self.calls += 1
            self.differ += int((chosen.sort(1).values != own.sort(1).values).any(1).sum())
            return chosen

        return replace


def replayed_tokens(directories: list[str], parallel: dict) -> dict[str, dict[str, Any]]:
    """``test_families.replayed`` with given tokens too; in a rank."""
    from r3train.trainer.megatron.layers.sparse_attention import SparseAttention

    served = []
    slices_of = test_families.slices_of

    def serve(actor: Any, *arguments: Any) -> Any:
        slices, ids = slices_of(actor, *arguments)
        # one chunk per rank in these topologies
        served.append(Given(slices, lambda: actor.replay.current_microbatch(0)))
        for chunk in actor.model.unwrapped:
            for module in chunk.modules():
                if isinstance(module, SparseAttention):
                    module.choice_replay = served[-1]
        return slices, ids

    # replay of experts refuses sequences of this length in a run
    with (
        mock.patch.object(test_families, "slices_of", serve),
        mock.patch("r3train.config.cross_checks.check_model"),
    ):
        found = test_families.replayed(directories, parallel)
    for directory, one in zip(directories, served, strict=True):
        assert one.calls and one.differ
        found[directory]["calls"] = torch.tensor(one.calls)
    return found


def with_given_tokens(reference: HfReference, sample_id: int) -> None:
    """Let transformers' indexers choose the given tokens of a sample."""
    for name, module in reference.model.named_modules():
        if type(module).__name__.endswith("Indexer"):
            layer_number = int(name.split(".")[2]) + 1

            def choose(hidden, *_: Any, layer_number: int = layer_number, **__: Any):
                uids = token_uids(sample_id, hidden.shape[1]).tolist()
                rows = [given(uid, layer_number) for uid in uids]
                # of a short row the first once more: a place in the mask has one value
                rows = [row + row[:1] * (TOPK - len(row)) for row in rows]
                return torch.tensor([rows], dtype=torch.int32)

            module.forward = choose


@pytest.fixture(scope="module")
def forced(tmp_path_factory) -> tuple[Path, dict[str, tuple[dict, dict]]]:
    """Checkpoints, and of each {uid: log-prob} and the gradients under random routes and tokens."""
    directory, out = tmp_path_factory.mktemp("families"), {}
    for name in NAMES:
        make(directory / name, name)
        batch = samples(read_hf_facts(directory / name), LENGTHS)
        model, by_uid, loss = HfReference(directory / name), {}, 0.0
        for s in batch:
            with_given_tokens(model, s.sample.sample_id)
            log_probs = model.log_probs(s.sample.token_ids, s.sample.routed_experts)
            uids = token_uids(s.sample.sample_id, s.sample.num_tokens)
            by_uid |= dict(zip(uids[:-1].tolist(), log_probs.tolist()))
            mask = torch.from_numpy(s.sample.loss_mask[1:])
            loss = loss - (torch.from_numpy(s.advantages[1:])[mask] * log_probs[mask]).sum()
        (loss / sum(response for _, response in LENGTHS)).backward()
        out[name] = by_uid, model.gradients(directory / f"{name} gradients")
    return directory, out


@pytest.mark.ranks
@pytest.mark.parametrize(
    "topology",
    [pytest.param(t, marks=() if t == FAST else pytest.mark.slow) for t in TOPOLOGIES],
)
def test_given_tokens_give_the_log_probs_and_gradients_of_transformers(
    topology, forced, tmp_path, monkeypatch
):
    directory, expected = forced
    world_size, parallel = TOPOLOGIES[topology]
    if topology == TE:
        monkeypatch.setattr(actors, "SEARCHED", [str(STAND_INS)])
    models = [str(directory / name) for name in NAMES]
    ranks = in_ranks(world_size, tmp_path, replayed_tokens, models, parallel)
    for name in NAMES:
        of_ranks = [rank[str(directory / name)] for rank in ranks]
        error, off = errors(of_ranks, *expected[name])
        assert error < LOG_PROB_ERROR, (name, error)
        wrong = {tensor: e for tensor, e in off.items() if not e <= gradient_error(tensor)}
        assert not wrong, (name, wrong)


def test_the_sequences_are_longer_than_the_choice():
    assert SMALL.num_layers == 3 and all(sum(lengths) > TOPK for lengths in LENGTHS)
