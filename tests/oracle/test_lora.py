"""LoRA of a real actor against transformers with the adapters merged, and against world size 1.

The adapters come from a PEFT directory in which no factor is zero: with the usual B of zeros every
gradient of A is zero, and a reduction that is missing shows nowhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.config.hf_facts import read_hf_facts
from r3train.config.lora import LoraSection
from r3train.hf_checkpoint import read_headers
from r3train.peft_files import write_adapter
from r3train.routing.fingerprint import token_uids
from tests.hf_reference import HfReference
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.oracle.test_families import make

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

LORA = dict(lora_rank=4, lora_alpha=8.0)
SCALE = 2.0
LENGTHS = [(3, 9), (5, 14), (2, 6), (4, 11)]
LR = 0.05
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "moonlight")
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
# by number of ranks
TOPOLOGIES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {},
        "recompute": RECOMPUTE,
        "recompute_moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    },
    2: {
        "tp2": TP2 | dict(expert_tensor_parallel_size=1),
        "tp2etp2": TP2 | dict(expert_tensor_parallel_size=2),
        "tp2ep2": TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        "etp2": dict(expert_tensor_parallel_size=2),
        "ep2": dict(expert_model_parallel_size=2),
        "dp2_overlap": OVERLAP,
        "cp2": dict(context_parallel_size=2),
        "pp2": RECOMPUTE
        | dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1),
    },
    4: {
        "tp2ep2etp2": TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        "ep2dp4": OVERLAP | dict(expert_model_parallel_size=2),
        "tp2etp2dp2": TP2 | OVERLAP | dict(expert_tensor_parallel_size=2),
        "cp2tp2": TP2 | dict(context_parallel_size=2),
        "tp2pp2": TP2 | dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1),
    },
}


def settings(directory: Path, family: str, **fields: Any):
    return configuration(
        directory / family,
        rollout_batch_size=len(LENGTHS),
        max_tokens_per_gpu=24,
        use_rollout_routing_replay=True,
        enable_r3_correctness_check=True,
        r3_mismatch_threshold=1.0,
        clip_grad=1e9,
        **{**LORA, **dict(optimizer="sgd", lr=LR), **fields},
    )


def trained(directory: Path, cases: list[tuple[str, str | None]]) -> dict[str, Any]:
    """The outcome of each case (family and topology, planted bug), whole on rank 0; in a rank."""
    from r3train.verify.mutations import MUTATIONS

    found: dict[str, Any] = {}
    for case, bug in cases:
        family, topology = case.split()
        config = settings(
            directory,
            family,
            lora_adapter_path=directory / f"{family} adapter",
            **TOPOLOGIES[torch.distributed.get_world_size()][topology],
        )
        hf = read_hf_facts(config.model.hf_checkpoint)
        with MUTATIONS[bug or "null"].planted(config, hf):
            found[bug or case] = outcome(config, hf, steps=1 if bug else 3)
    return found


def outcome(config: Any, hf: Any, *, steps: int) -> dict[str, Any]:
    """The passes, the gradients, and steps of SGD; or the error that ends them."""
    from r3train.trainer.megatron import lora
    from r3train.verify.watch import whole_gradients

    out: dict[str, Any] = {"norms": [], "error": ""}
    with actor_of(config) as actor:
        out["merged"] = {n: t.clone() for n, t in actor.hf_weights()}
        out["targets"] = [n for n, _ in actor.hf_weights(targets_alone=True)]
        before = {n: t.clone() for n, t in actor.adapter_weights()}
        slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
        out["reference"] = by_uid(slices, actor.compute_log_probs(slices, "ref_log_prob"))
        old = actor.compute_log_probs(slices, "old_log_prob")
        out["log_probs"] = by_uid(slices, old)
        actor.backward(slices, old, None)
        records = actor.collect_evidence(0)
        assert not any(r.rows_native + r.duplicate_rows + r.rows_recompute_differ for r in records)
        whole_gradients(actor)
        gradients = lora.export_adapters(actor.model.chunks, lambda p: p.main_grad)
        out["gradients"] = {n: t.clone() for n, t in gradients}
        try:
            for step in range(steps):
                out["norms"].append(actor.train_step(slices, old, None)["grad_norm"])
                actor.collect_evidence(step)
        except AssertionError as error:
            out["error"] = str(error)
        out["deltas"] = {n: t - before[n] for n, t in actor.adapter_weights()}
    return out


def by_uid(slices: list, log_probs: dict[int, torch.Tensor]) -> dict[int, float]:
    """Log-probs of this rank's rows, if it is of the last pipeline stage."""
    out: dict[int, float] = {}
    for s in slices:
        if s.microbatch_id in log_probs:
            out |= dict(zip(s.token_uids.tolist(), log_probs[s.microbatch_id].tolist()))
    return out


def drawn(names: list[str], kinds: dict) -> dict[str, torch.Tensor]:
    """Factors of rank 4 for every target, none of them zero."""
    factors = {}
    for i, name in enumerate(sorted(names)):
        generator = torch.Generator().manual_seed(i)
        (rows, columns), path = kinds[name].shape, name.removesuffix(".weight")
        factors[f"{path}.lora_A"] = 0.2 * torch.randn(4, columns, generator=generator)
        factors[f"{path}.lora_B"] = 0.2 * torch.randn(rows, 4, generator=generator)
    return factors


class Expected:
    """transformers with the adapters merged: log-probs by row, gradients of every factor."""

    def __init__(self, directory: Path, family: str):
        base = directory / family
        make(base, family)
        kinds = read_headers(base)
        self.targets = LoraSection(**LORA).targets(kinds)
        self.factors = drawn(list(self.targets), kinds)
        write_adapter(
            self.factors.items(),
            directory / f"{family} adapter",
            LoraSection(**LORA),
            read_hf_facts(base),
        )
        self.merged = load_file(base / "model.safetensors")
        for name in self.targets:
            a, b = self._pair(name)
            self.merged[name] = (self.merged[name].double() + SCALE * b @ a).float()
        whole = directory / f"{family} merged"
        whole.mkdir()
        (whole / "config.json").write_text((base / "config.json").read_text())
        save_file(self.merged, whole / "model.safetensors", {"format": "pt"})
        self.reference, _ = self._log_probs(HfReference(base))
        model = HfReference(whole)
        self.by_uid, loss = self._log_probs(model)
        loss.backward()
        of_weights = model.gradients(directory / f"{family} gradients")
        self.gradients = {}
        for name in self.targets:
            (a, b), path = self._pair(name), name.removesuffix(".weight")
            gradient = of_weights[name].double()
            self.gradients[f"{path}.lora_A"] = SCALE * b.T @ gradient
            self.gradients[f"{path}.lora_B"] = SCALE * gradient @ a.T

    def _log_probs(self, model: HfReference) -> tuple[dict[int, float], torch.Tensor]:
        """Log-probs of the batch by row, in float64, and the policy loss."""
        model.model.set_experts_implementation("eager")  # the grouped kernels have no float64
        model.model.double()
        found, losses = {}, []
        for s in samples(read_hf_facts(model.model.config._name_or_path), LENGTHS):
            log_probs = model.log_probs(s.sample.token_ids, s.sample.routed_experts)
            uids = token_uids(s.sample.sample_id, s.sample.num_tokens)
            found |= dict(zip(uids[:-1].tolist(), log_probs.tolist()))
            mask = torch.from_numpy(s.sample.loss_mask[1:])
            losses.append((torch.from_numpy(s.advantages[1:])[mask] * log_probs[mask]).sum())
        return found, -sum(losses) / sum(response for _, response in LENGTHS)

    def _pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        path = name.removesuffix(".weight")
        return self.factors[f"{path}.lora_A"].double(), self.factors[f"{path}.lora_B"].double()

    def norm(self) -> float:
        return float(torch.stack([g.norm() for g in self.gradients.values()]).norm())


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative L2 distance, floored for factors that are next to nothing, and its name."""
    assert found.keys() == wanted.keys()
    found, wanted = ({n: t.detach() for n, t in x.items()} for x in (found, wanted))
    scale = torch.stack([w.double().square().mean() for w in wanted.values()]).mean().sqrt()
    return max(
        (
            float((found[n].double() - w).norm())
            / max(float(w.double().norm()), 1e-3 * float(scale) * w.numel() ** 0.5),
            n,
        )
        for n, w in wanted.items()
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> tuple[Path, dict[str, Expected]]:
    directory = tmp_path_factory.mktemp("lora")
    return directory, {family: Expected(directory, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def one_rank(worlds, tmp_path_factory) -> list[dict[str, Any]]:
    cases = [f"{family} one" for family in FAMILIES]
    cases += [f"glm4_moe {topology}" for topology in TOPOLOGIES[1] if topology != "one"]
    ranks = tmp_path_factory.mktemp("one")
    return in_ranks(1, ranks, trained, worlds[0], [(case, None) for case in cases])


def complaints(ranks: list[dict], expected: Expected, baseline: dict | None) -> dict[str, Any]:
    """The names of what is not as it should be in the ranks' outcomes of one case, with the worst.

    baseline: one rank's outcome, None where the steps are not compared.
    """
    out, found = ranks[0], {}
    for name, wanted in (("log_probs", expected.by_uid), ("reference", expected.reference)):
        seen = {uid: value for rank in ranks for uid, value in rank[name].items()}
        gap = max(abs(seen.get(uid, np.inf) - value) for uid, value in wanted.items())
        if not gap < 2e-5:
            found[name] = gap
    if set(out["targets"]) != expected.targets:
        found["targets"] = len(out["targets"])
    compared = [("merged", expected.merged, 1e-6), ("gradients", expected.gradients, 1e-4)]
    if baseline is not None:
        compared.append(("deltas", baseline["deltas"], 1e-4))
    for name, wanted, threshold in compared:
        if out[name].keys() != wanted.keys():
            found[name] = "names"
        elif not (off := worst(out[name], wanted))[0] < threshold:
            found[name] = off
    norms = [expected.norm()] if baseline is None else baseline["norms"]
    if out["norms"][:1] != pytest.approx([expected.norm()], rel=1e-5):
        found["norm"] = out["norms"][:1], expected.norm()
    if out["norms"] != pytest.approx(norms, rel=1e-5):
        found["norms"] = out["norms"], norms
    return found | ({"error": out["error"]} if out["error"] else {})


def test_adapters_of_every_family_compute_and_learn_what_transformers_does_with_them_merged(
    worlds, one_rank
):
    for case in one_rank[0]:
        family = case.split()[0]
        baseline = one_rank[0][f"{family} one"]
        assert not complaints([one_rank[0][case]], worlds[1][family], baseline), case


# of two ranks: each reduction, each way to gather, and a stage of dense layers
QUICK = ("tp2etp2", "tp2ep2", "dp2_overlap", "pp2")


@pytest.mark.parametrize(
    "family, topologies",
    [
        ("glm4_moe", QUICK),  # dense, shared and routed, and a bias beside the adapter
        pytest.param("glm4_moe", tuple(TOPOLOGIES[2]), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", tuple(TOPOLOGIES[2]), marks=pytest.mark.slow),
        pytest.param("glm4_moe", tuple(TOPOLOGIES[4]), marks=pytest.mark.slow),
    ],
    ids=["quick", "glm4_moe on 2", "qwen3_moe on 2", "glm4_moe on 4"],
)
def test_adapters_are_the_same_in_every_topology(family, topologies, worlds, one_rank, tmp_path):
    world_size = 4 if topologies[0] in TOPOLOGIES[4] else 2
    cases = [(f"{family} {topology}", None) for topology in topologies]
    ranks = in_ranks(world_size, tmp_path, trained, worlds[0], cases)
    for case, _ in cases:
        baseline = one_rank[0][f"{family} one"]
        found = complaints([rank[case] for rank in ranks], worlds[1][family], baseline)
        assert not found, (case, found)


# -- planted bugs ----------------------------------------------------------------------------------

# bug -> the topology that shows it, what must not be as it should be
CAUGHT = {
    "embedding_asks_for_no_gradient": ("recompute", "error"),
    "scale_not_merged": ("one", "merged"),
    "qkv_joined_as_on_disk": ("one", "log_probs"),
    "gate_and_up_swapped": ("one", "log_probs"),
    "adapters_in_the_reference": ("one", "reference"),
    "adapter_gradients_not_finalised": ("tp2", "gradients"),
    "qkv_a_not_summed": ("tp2", "gradients"),
    "o_proj_b_not_summed": ("tp2", "gradients"),
    "o_proj_not_reduced": ("tp2", "log_probs"),
    "o_proj_averaged": ("tp2", "log_probs"),
    "expert_tp_not_summed": ("etp2", "gradients"),
    "expert_input_summed_twice": ("etp2", "gradients"),
    "norm_counts_naively": ("etp2", "norm"),
    "local_expert_ids_exported": ("ep2", "gradients"),
    # bugs of full training too
    "expert_group_confused": ("tp2", "gradients"),
    "tp_mean_instead_of_sum": ("tp2", "gradients"),
    "local_token_normalisation": ("cp2", "gradients"),
}
ELSEWHERE = ("replicas_drawn_by_rank", "shards_saved_as_replicas")
SIZES = {"one": 1, "recompute": 1}  # the others need two ranks


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_planted_bug_is_caught_by_name(world_size, worlds, tmp_path):
    bugs = {b: c for b, c in CAUGHT.items() if SIZES.get(c[0], 2) == world_size}
    cases = [(f"glm4_moe {topology}", bug) for bug, (topology, _) in bugs.items()]
    ranks = in_ranks(world_size, tmp_path, trained, worlds[0], cases)
    for bug, (_, what) in bugs.items():
        found = complaints([rank[bug] for rank in ranks], worlds[1]["glm4_moe"], None)
        assert what in found, (bug, found)
    if 1 in ranks[0]:
        assert "no gradient reached them" in ranks[0]["embedding_asks_for_no_gradient"]["error"]


def test_every_bug_of_adapters_is_planted_here():
    from r3train.verify.mutations import planted_by

    mine = {bug.name for bug in planted_by("tests/oracle/test_lora.py")}
    assert mine <= {*CAUGHT, *ELSEWHERE} and {*ELSEWHERE} <= mine


def begun(directory: Path, bug: str | None) -> dict[str, Any]:
    """Random adapters in each topology of this size: whole, and are replicas equal; in a rank."""
    from r3train.trainer.megatron import lora
    from r3train.verify.mutations import MUTATIONS

    out = {}
    for name in ("one",) if torch.distributed.get_world_size() == 1 else ("tp2ep2", "tp2etp2"):
        topology = TOPOLOGIES[torch.distributed.get_world_size()][name]
        config = settings(directory, "glm4_moe", **topology)
        hf = read_hf_facts(config.model.hf_checkpoint)
        with MUTATIONS[bug or "null"].planted(config, hf), actor_of(config) as actor:
            unlike = 0
            for adapter in lora.adapters(actor.model.chunks):
                for p in (p for p in adapter.parameters() if p.sharded_dim is None):
                    copies = [torch.empty_like(p) for _ in range(adapter.group.size())]
                    torch.distributed.all_gather(copies, p.detach(), group=adapter.group)
                    unlike += any(not torch.equal(copies[0], other) for other in copies)
            factors = {n: t.clone() for n, t in actor.adapter_weights()}
            merged = {n: t.clone() for n, t in actor.hf_weights()}
            out[name] = {"factors": factors, "unlike": unlike, "merged": merged}
    return out


@pytest.mark.slow
def test_adapters_begin_alike_in_every_topology_and_add_nothing(worlds, tmp_path):
    base = load_file(worlds[0] / "glm4_moe" / "model.safetensors")
    (one,) = in_ranks(1, tmp_path / "one", begun, worlds[0], None)
    two = in_ranks(2, tmp_path / "two", begun, worlds[0], None)[0]
    factors = one["one"]["factors"]
    assert all((t == 0).all() == n.endswith("lora_B") for n, t in factors.items())
    for got in (one["one"], *two.values()):
        assert not got["unlike"] and got["factors"].keys() == factors.keys()
        assert all(torch.equal(t, factors[n]) for n, t in got["factors"].items())
        assert all(torch.equal(t, base[n]) for n, t in got["merged"].items())
    bug = in_ranks(2, tmp_path / "bug", begun, worlds[0], "replicas_drawn_by_rank")[0]
    assert all(got["unlike"] for got in bug.values())


# -- checkpoints -----------------------------------------------------------------------------------

# the state is saved in each of these and loaded in each of the others; PP has a stage without experts
RESHARDED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one_sharded": dict(use_distributed_optimizer=True)},
    2: {
        "tp2etp2": TOPOLOGIES[2]["tp2etp2"],
        "tp2ep2_sharded": TOPOLOGIES[2]["tp2ep2"] | dict(use_distributed_optimizer=True),
        "pp2": TOPOLOGIES[2]["pp2"],
    },
}


def adam(directory: Path, parallel: dict[str, Any]):
    adapter = directory / "glm4_moe adapter"
    return settings(
        directory, "glm4_moe", lora_adapter_path=adapter, **parallel, optimizer="adam", lr=1e-3,
        adam_eps=1e-4,
    )  # fmt: skip


def steps(actor: Any, config: Any, count: int) -> dict[str, torch.Tensor]:
    """Adam's steps; the factors after them, whole on rank 0."""
    hf = read_hf_facts(config.model.hf_checkpoint)
    slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
    for step in range(count):
        actor.train_step(slices, actor.compute_log_probs(slices, "old_log_prob"), None)
        actor.collect_evidence(step)
    return {n: t.clone() for n, t in actor.adapter_weights()}


def saved(directory: Path) -> dict[str, Any]:
    """Two steps, a checkpoint and two more steps in each topology of this size; in a rank."""
    from r3train.config.checkpoint import CheckpointSection
    from r3train.trainer.megatron.checkpoint import Checkpointer

    out = {}
    for name, parallel in RESHARDED[torch.distributed.get_world_size()].items():
        config = adam(directory, parallel)
        with actor_of(config) as actor:
            steps(actor, config, 2)
            Checkpointer(actor, CheckpointSection(save=directory / name)).save(2, {})
            out[name] = steps(actor, config, 2)
    return out


def resumed(directory: Path, sources: list[str]) -> dict[str, Any]:
    """Two more steps from every source in each topology of this size; in a rank."""
    out = {}
    for name, parallel in RESHARDED[torch.distributed.get_world_size()].items():
        for source in sources:
            config = adam(directory, parallel)
            with actor_of(config, directory / source / "iter_0000002") as actor:
                out[f"{source} -> {name}"] = steps(actor, config, 2)
    return out


@pytest.mark.parametrize("sizes", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_adapters_and_moments_resume_in_every_topology(sizes, worlds, tmp_path):
    directory, sources, ends = worlds[0], {}, {}
    for size in sizes:
        sources |= in_ranks(size, tmp_path / f"save{size}", saved, directory)[0]
    for size in sizes:
        ends |= in_ranks(size, tmp_path / f"load{size}", resumed, directory, list(sources))[0]
    assert len(ends) == len(sources) ** 2
    for pair, end in ends.items():
        expected = sources[pair.split(" -> ")[0]]
        wrong = {n: t for n, t in end.items() if (t - expected[n]).abs().max() > 2e-6}
        assert end.keys() == expected.keys() and not wrong, (pair, list(wrong)[:3])


def saved_and_resumed(directory: Path, bug: str | None) -> bool:
    """Save after a step and resume in the same topology: are the factors the same? In a rank."""
    from r3train.config.checkpoint import CheckpointSection
    from r3train.trainer.megatron.checkpoint import Checkpointer
    from r3train.verify.mutations import MUTATIONS

    config = adam(directory, TOPOLOGIES[2]["tp2etp2"])
    place = directory / f"saved {bug}"
    with MUTATIONS[bug or "null"].planted(config, None):
        with actor_of(config) as actor:
            before = steps(actor, config, 1)
            Checkpointer(actor, CheckpointSection(save=place)).save(1, {})
        with actor_of(config, place / "iter_0000001") as actor:
            after = {n: t.clone() for n, t in actor.adapter_weights()}
    return all(torch.equal(t, after[n]) for n, t in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("bug, is_same", [(None, True), ("shards_saved_as_replicas", False)])
def test_shards_that_a_checkpoint_takes_for_replicas_are_seen(bug, is_same, worlds, tmp_path):
    assert in_ranks(2, tmp_path, saved_and_resumed, worlds[0], bug)[0] is is_same
