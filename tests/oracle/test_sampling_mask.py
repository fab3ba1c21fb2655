"""Log-probs among the tokens that sampling kept: against float64, proved, and with bugs that must be caught."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3train.families.hf_facts import HfModelFacts
from r3train.families.read_facts import read_hf_facts
from r3train.audit.audit_run import audit_run
from r3train.types import TrainSample
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from tests.hf_reference import HfReference
from tests.oracle.actors import actor_of, configuration, in_ranks, samples

PASSES = ("old_log_prob", "ref_log_prob", "train")
TEMPERATURE = 0.7
TOPOLOGIES = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
}
LENGTHS = [(9, 20), (5, 30), (1, 7)]
CHUNK_SIZES = (-1, 7, 1)


def with_sampling_mask(hf: HfModelFacts, batch: list[TrainSample]) -> list[TrainSample]:
    """The samples, each token of an answer drawn among 1 to 6 tokens in any order."""
    random, out = np.random.default_rng(5), []
    for s in batch:
        rows = [
            random.permutation(
                np.unique([y, *random.integers(0, hf.vocab_size, random.integers(6))])
            )
            for y in s.sample.token_ids[s.sample.loss_mask]
        ]
        counts = np.zeros(s.sample.num_tokens, np.int32)
        counts[s.sample.loss_mask] = [len(row) for row in rows]
        ids = np.concatenate(rows).astype(np.int32)
        part = (s.sample.prompt_len, counts[s.sample.prompt_len :], ids)
        sample = replace(s.sample, mask_counts=counts, mask_ids=ids, decoded_masks=(part,))
        out.append(replace(s, sample=sample))
    return out


def cases(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Of each topology: old log-probs by token uid, and of each bug the quantities that failed."""
    from r3train.launch.start.build_actor import build_routes
    from r3train.loop.prepare import Preparation
    from r3train.loop.distribute import broadcast_json, gather_topologies
    from r3train.proof.live import LiveProof
    from r3train.proof.writer import EvidenceWriter
    from tests.oracle.planted import planted_by

    hf, out = read_hf_facts(checkpoint), {}
    bugs = {bug.name: bug for bug in planted_by("tests/oracle/test_sampling_mask.py")}
    for name, parallel in TOPOLOGIES.items():
        config = configuration(
            checkpoint,
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            r3_mismatch_threshold=1.0,
            n_samples_per_prompt=len(LENGTHS),
            max_tokens_per_gpu=48,
            log_probs_chunk_size=7,  # the evidence of a microbatch is a sum over several chunks
            rollout_top_k=6,
            rollout_top_p=0.9,
            rollout_temperature=TEMPERATURE,
            entropy_coef=0.01,
            kl_loss_coef=0.1,
            **parallel,
        )
        with actor_of(config) as actor:
            topologies = gather_topologies(actor.topology)
            routes = build_routes(config, hf)
            routes.open(actor.topology)
            for step, bug in enumerate(["", *bugs]):
                planted = bugs[bug].planted(config, hf) if bug else nullcontext()
                with planted:
                    prepared = None
                    if actor.topology.rank == 0:
                        batch = with_sampling_mask(hf, samples(hf, LENGTHS))
                        given = (config, hf, routes.row_shape, topologies, PASSES)
                        prepared = Preparation(*given).prepare(step, batch)
                    count = broadcast_json(prepared and prepared.counts[0])
                    slices = routes.slices(prepared, count)
                    old, ref = (
                        actor.compute_log_probs(slices, name, weight_version=v, loss_rows_only=True)
                        for name, v in (("old_log_prob", step), ("ref_log_prob", None))
                    )
                    actor.train_step(slices, old, ref, weight_version=step)
                recorded = routes.recorded(prepared)
                evidence = EvidenceWriter(scratch / f"{name}{bug}", actor.topology.rank)
                verdict = LiveProof(evidence, hf.route_shape, PASSES, 1.0).prove_step(
                    actor.collect_evidence(step), prepared and prepared.expectation(recorded)
                )
                evidence.close()
                if verdict is not None:
                    out[name, bug] = sorted({(f.stream, f.what) for f in verdict.failures})
                if not bug:
                    uids = np.concatenate([s.token_uids for s in slices])
                    values = torch.cat([old[s.microbatch_id] for s in slices])
                    out[name] = torch.from_numpy(uids), values
                    out[name, "formula"] = formula(slices[0], hf.vocab_size)
    return out


def formula(s: Any, vocab_size: int) -> list[Any]:
    """Of random logits, by rows at a time: log-probs, entropies, this shard's gradients of a weighted sum."""
    from megatron.core import parallel_state

    from r3train.trainer.megatron.sampling_mask import SamplingMask
    from r3train.trainer.megatron.log_probs import Draw, log_probs_and_entropy

    full, weights = random_logits(s.num_rows, vocab_size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    labels, found = torch.from_numpy(s.labels), {}
    for chunk_size in CHUNK_SIZES:
        shard = full[:, rank * size : (rank + 1) * size].float().requires_grad_()
        kept = SamplingMask.from_slice(s, np.arange(s.num_rows), torch.device("cpu"))
        draw = Draw(labels, TEMPERATURE, kept, chunk_size=chunk_size)
        # a copy, for the backward overwrites its input
        log_probs, entropy = log_probs_and_entropy(shard[None] * 1.0, draw, with_entropy=True)
        (weights[0].float() * log_probs + weights[1].float() * entropy).sum().backward()
        found[chunk_size] = log_probs.detach(), entropy.detach(), shard.grad
    return [found, *(torch.from_numpy(x) for x in (s.labels, s.mask_counts, s.mask_ids))]


def random_logits(rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    return logits, torch.randn(2, rows, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(VARIANTS["moe4"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def found(checkpoint, scratch, tmp_path_factory) -> list[dict[str, Any]]:
    return in_ranks(2, tmp_path_factory.mktemp("ranks"), cases, checkpoint, scratch)


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_vocabulary_parallel_formula_is_that_of_the_whole_vocabulary_in_float64(
    name, found, checkpoint
):
    parts = [rank[name, "formula"] for rank in found]
    shards = [parts] if name == "tp2" else [[part] for part in parts]
    for shard_results in shards:
        founds, (labels, counts, ids) = [part[0] for part in shard_results], shard_results[0][1:]
        full, weights = random_logits(len(labels), read_hf_facts(checkpoint).vocab_size)
        full.requires_grad_()
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        kept = torch.zeros_like(full, dtype=torch.bool)
        kept[rows, ids.long()] = True
        kept |= (counts == 0)[:, None]
        log_p = (full / TEMPERATURE).masked_fill(~kept, -torch.inf).log_softmax(-1)
        own = log_p.gather(1, labels[:, None])[:, 0]
        p_log_p = torch.where(kept, log_p, 0) * log_p.exp()
        entropies = -p_log_p.sum(1)
        (weights[0] * own + weights[1] * entropies).sum().backward()
        for chunk_size in CHUNK_SIZES:
            log_probs, entropy, _ = founds[0][chunk_size]
            torch.testing.assert_close(log_probs.double(), own.detach(), atol=4e-6, rtol=1e-6)
            torch.testing.assert_close(entropy.double(), entropies.detach(), atol=4e-6, rtol=1e-6)
            grad = torch.cat([found[chunk_size][2] for found in founds], 1)
            torch.testing.assert_close(grad.double(), full.grad, atol=4e-6, rtol=1e-5)
            assert (grad[~kept] == 0).all() and (counts > 1).any()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_actors_log_probs_are_those_among_the_sampling_mask(name, found, checkpoint):
    hf, reference, seen = read_hf_facts(checkpoint), HfReference(checkpoint), []
    reference.model.lm_head.register_forward_hook(lambda m, given, out: seen.append(out[0]))
    got = {u: v for r in found for u, v in zip(*(x.tolist() for x in r[name]), strict=True)}
    compared = 0
    for s in with_sampling_mask(hf, samples(hf, LENGTHS)):
        sample, ends = s.sample, np.cumsum(s.sample.mask_counts)
        with torch.no_grad():
            reference.log_probs(sample.token_ids, sample.routed_experts)
        logits = seen.pop()[:-1].double() / TEMPERATURE
        for t in np.flatnonzero(sample.loss_mask):
            kept = sample.mask_ids[ends[t] - sample.mask_counts[t] : ends[t]]
            row = logits[t - 1]
            expected = row[sample.token_ids[t]] - row[kept.astype(np.int64)].logsumexp(0)
            assert abs(got[(sample.sample_id << 24) + int(t) - 1] - expected) < 1e-4
            compared += 1
    assert compared == sum(response for _, response in LENGTHS)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sound_step_is_proved_and_judged_alike_from_its_files(name, found, scratch):
    assert found[0][name, ""] == []
    audit = audit_run(scratch / name)
    assert audit.verdict == "passed", audit.findings
    responses = sum(response for _, response in LENGTHS)
    assert audit.numbers["rows_of_sampling_mask"] == len(PASSES) * responses


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    "bug, quantities",
    [
        ("sampling_mask_of_the_next_row", {"fingerprint", "duplicate_rows"}),
        ("drawn_token_dropped", {"fingerprint", "duplicate_rows", "map_deviation"}),
        ("sampling_mask_not_applied", {"map_deviation"}),
    ],
)
def test_a_planted_bug_fails_the_stage_of_sampling_mask_alone(
    name, bug, quantities, found, scratch
):
    failed = found[0][name, bug]
    assert quantities <= {what for _, what in failed}
    assert {stream for stream, _ in failed} == {"sampling_mask"}
    audit = audit_run(scratch / f"{name}{bug}")
    assert audit.verdict == "failed" and audit.claims["applied"] == "failed"
