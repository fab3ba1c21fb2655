"""LoRA of a real actor against transformers with the adapters merged, and against world size 1.

The adapters come from a PEFT directory in which no factor is zero: with the usual B of zeros every
gradient of A is zero, and a reduction that is missing shows nowhere.  PEFT has no names for those of
experts in one tensor a layer: they are put in the place of the random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.families import DENSE_NAMES, FAMILIES, TINY_NAMES, tensor_names
from r3train.peft_files import write_adapter
from r3train.ids import token_uids
from tests.drawn_adapters import as_linears, drawn, in_one_tensor, pairs_of, write_merged
from tests.hf_reference import HfReference
from tests.oracle import actors
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of
from tests.oracle.test_families import family_of, make

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

STAND_INS = Path(__file__).parents[1] / "rehearsal/stand_ins"
LORA: dict[str, Any] = dict(lora_rank=4, lora_alpha=8.0)
SCALE = 2.0
LENGTHS = [(3, 9), (5, 14), (2, 6), (4, 11)]
LR = 0.05
# a family's tiny model of four layers, where pipeline ranks have two pieces each; Moonlight is DeepSeek-V3's
# architecture with whole queries
LAYERS = 4
DENSE = [name for name in DENSE_NAMES if family_of(name).lora]
SPARSE = [name for name in TINY_NAMES if family_of(name).lora]
HELD = [*DENSE, *SPARSE]
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
PP2 = dict(pipeline_model_parallel_size=2)
UNEVEN = PP2 | dict(decoder_first_pipeline_num_layers=1)
VPP2 = PP2 | dict(virtual_pipeline_model_parallel_size=2)
BF16 = dict(bf16=True)
# by number of ranks
TOPOLOGIES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {},
        "recompute": RECOMPUTE,
        "recompute_moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
        "one_bf16": BF16,
    },
    2: {
        "tp2": TP2 | dict(expert_tensor_parallel_size=1),
        "tp2_recompute": TP2 | RECOMPUTE | dict(expert_tensor_parallel_size=1),
        "tp2etp2": TP2 | dict(expert_tensor_parallel_size=2),
        "tp2ep2": TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        "etp2": dict(expert_tensor_parallel_size=2),
        "ep2": dict(expert_model_parallel_size=2),
        "dp2": {},
        "dp2_sharded": dict(use_distributed_optimizer=True),
        "dp2_overlap": OVERLAP,
        "cp2": dict(context_parallel_size=2),
        "pp2": PP2,
        "pp2_uneven": RECOMPUTE | UNEVEN,
        "vpp2pp2": VPP2,
        "tp2_bf16": TP2 | BF16 | dict(expert_tensor_parallel_size=1),
        "tp2etp2_bf16": TP2 | BF16 | dict(expert_tensor_parallel_size=2),
    },
    4: {
        "tp2ep2etp2": TP2 | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        "ep2dp4": OVERLAP | dict(expert_model_parallel_size=2),
        "etp2_sharded": dict(use_distributed_optimizer=True, expert_tensor_parallel_size=2),
        "tp2etp2dp2": TP2 | OVERLAP | dict(expert_tensor_parallel_size=2),
        "tp2ep2_overlap": TP2
        | OVERLAP
        | dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        "cp2tp2": TP2 | dict(context_parallel_size=2),
        "tp2pp2": TP2 | UNEVEN,
        "vpp2pp2dp2": VPP2,
    },
}


# over Transformer Engine's layers too, on plain torch
TE_SHAPED = {
    1: ("one", "recompute"),
    2: (
        "tp2",
        "tp2_recompute",
        "tp2etp2",
        "tp2ep2",
        "dp2_sharded",
        "dp2_overlap",
        "pp2_uneven",
    ),
}
for size, names in TE_SHAPED.items():
    TOPOLOGIES[size] |= {
        f"{name}_te": TOPOLOGIES[size][name] | dict(attention_backend="te") for name in names
    }


def has_delta_nets(family: str) -> bool:
    return family_of(family).layers == "gated_delta_net"


def settings(directory: Path, family: str, **fields: Any):
    # at a higher rate the steps make rounding of delta nets many times larger
    lr = LR / 10 if has_delta_nets(family) else LR
    return configuration(
        directory / family,
        rollout_batch_size=len(LENGTHS),
        max_tokens_per_gpu=24,
        use_rollout_routing_replay=family not in DENSE,
        enable_r3_correctness_check=family not in DENSE,
        r3_mismatch_threshold=1.0,
        clip_grad=1e9,
        **{**LORA, **dict(optimizer="sgd", lr=lr), **fields},
    )


def beginning(directory: Path, family: str) -> dict[str, Any]:
    """The settings by which an actor begins with the family's drawn adapters; see ``drawn_ones``."""
    if in_one_tensor(family):
        return {}
    return dict(lora_adapter_path=directory / f"{family} adapter")


@contextmanager
def drawn_ones(directory: Path, family: str) -> Iterator[None]:
    """Begin with the drawn adapters also where no PEFT directory can hold them."""
    from r3train.trainer.megatron import lora
    from tests.oracle.planted import patched

    if not in_one_tensor(family):
        yield
        return
    factors = load_file(directory / f"{family} factors")
    with patched(lora, "random_factors", lambda original, seed: lambda name, shape: factors[name]):
        yield


def trained(directory: Path, cases: list[tuple[str, str | None]]) -> dict[str, Any]:
    """The outcome of each case (family and topology, planted bug), whole on rank 0; in a rank."""
    from r3train.trainer.megatron import model
    from tests.oracle.planted import MUTATIONS, patched

    found: dict[str, Any] = {}
    for case, bug in cases:
        family, topology = case.split()
        fields = TOPOLOGIES[torch.distributed.get_world_size()][topology]
        config = settings(directory, family, **fields, **beginning(directory, family))
        hf = read_hf_facts(config.model.hf_checkpoint)
        with MUTATIONS[bug or "null"].planted(config, hf), drawn_ones(directory, family):
            # several buckets, as a model of billions has, where reductions overlap
            with patched(model, "DistributedDataParallelConfig", with_small_buckets):
                steps_too = not (bug or config.model.bf16)  # of bfloat16 they go apart
                found[bug or case] = out = outcome(config, hf, steps=3 if steps_too else 1)
                if steps_too or bug and CAUGHT[bug][1] == "adam":
                    adams = adam(directory, family, **fields)
                    with actor_of(adams) as actor:
                        before = {n: t.clone() for n, t in actor.adapter_weights()}
                        after = steps(actor, adams, 3)
                    out["adam"] = {n: after[n] - t for n, t in before.items()}
    return found


def with_small_buckets(original, **fields):
    return original(**fields, bucket_size=2000)


def outcome(config: Any, hf: Any, *, steps: int) -> dict[str, Any]:
    """The passes, the gradients, and steps of SGD; or the error that ends them."""
    from r3train.trainer.megatron import lora
    from r3train.verify.watch import whole_gradients

    out: dict[str, Any] = {"norms": [], "error": ""}
    with actor_of(config) as actor:
        out["merged"] = {n: t.clone() for n, t in actor.hf_weights()}
        out["targets"] = [n for n, _ in actor.hf_weights(targets_alone=True)]
        exported = [(n, t.clone()) for n, t in actor.adapter_weights()]
        before = dict(exported)
        try:
            if torch.distributed.get_rank() == 0 and config.lora.lora_adapter_path is not None:
                # as --save-hf does
                write_adapter(exported, config.model.hf_checkpoint / "saved", config.lora, hf)
        except AssertionError as error:
            out["error"] = str(error)
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
        if not config.model.bf16:
            out["sgd"] = {n: t - before[n] for n, t in actor.adapter_weights()}
    return out


def by_uid(slices: list, log_probs: dict[int, torch.Tensor]) -> dict[int, float]:
    """Log-probs of this rank's rows, if it is of the last pipeline stage."""
    out: dict[int, float] = {}
    for s in slices:
        if s.microbatch_id in log_probs:
            out |= dict(zip(s.token_uids.tolist(), log_probs[s.microbatch_id].tolist()))
    return out


class Expected:
    """transformers with the adapters merged: log-probs by row, gradients of every factor."""

    def __init__(self, directory: Path, family: str):
        self.family, base, section = family, directory / family, LoraSection(**LORA)
        make(base, family, num_layers=LAYERS)
        hf = read_hf_facts(base)
        trained = tensor_names(hf)
        self.targets = section.targets(trained)
        self.factors = drawn(base, section)
        if "lora_adapter_path" in beginning(directory, family):
            place = directory / f"{family} adapter"
            write_adapter(self.factors.items(), place, section, hf)
        else:
            save_file(self.factors, directory / f"{family} factors")
        whole = directory / f"{family} merged"
        merged = write_merged(base, self.factors, section, whole)
        self.merged = {name: tensor for name, tensor in merged.items() if name in trained}
        self.reference, _ = self._log_probs(HfReference(base))
        model = HfReference(whole)
        self.by_uid, loss = self._log_probs(model)
        loss.backward()
        weight_gradients = model.gradients(directory / f"{family} gradients")
        self.gradients = {}
        for name in self.targets:
            whole = weight_gradients[name].double()
            pairs = pairs_of(self.factors, name, whole.shape, family)
            for (path, a, b), gradient in zip(pairs, as_linears(name, whole, family)):
                self.gradients[f"{path}.lora_A"] = SCALE * b.T @ gradient
                self.gradients[f"{path}.lora_B"] = SCALE * gradient @ a.T

    def _log_probs(self, model: HfReference) -> tuple[dict[int, float], torch.Tensor]:
        """Log-probs of the batch by row, in float64, and the policy loss."""
        model.model.set_experts_implementation("eager")  # the grouped kernels have no float64
        model.model.double()
        found, losses = {}, []
        for s in samples(read_hf_facts(model.model.config._name_or_path), LENGTHS):
            choices = s.sample.routed_experts, s.sample.indexer_topk
            log_probs = model.log_probs(s.sample.token_ids, *choices)
            uids = token_uids(s.sample.sample_id, s.sample.num_tokens)
            found |= dict(zip(uids[:-1].tolist(), log_probs.tolist()))
            mask = torch.from_numpy(s.sample.loss_mask[1:])
            losses.append((torch.from_numpy(s.advantages[1:])[mask] * log_probs[mask]).sum())
        return found, -sum(losses) / sum(response for _, response in LENGTHS)

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


# of the largest error of a log-prob in nats, and of the relative errors of tensors
EXACT = dict(
    log_probs=2e-5,
    reference=2e-5,
    merged=1e-6,
    gradients=1e-4,
    sgd=1e-3,
    adam=1e-3,
    norm=1e-5,
    norms=1e-3,
)
# the recurrence of a delta net: transformers' own float32 is off by 2.4e-5
DELTA_NET = EXACT | dict(
    log_probs=1e-4, reference=1e-4, gradients=3e-4, sgd=1e-2, adam=3e-3, norm=1e-4, norms=1e-2
)
ROUNDED = dict(log_probs=0.4, reference=0.4, merged=0.01, gradients=0.4, norm=0.05, norms=0.05)


class Worlds:
    """The measures of cases, each made for the first that asks."""

    def __init__(self, directory: Path, searched: Sequence[Path] = ()):
        self.directory = directory
        self.searched = [str(path) for path in searched]  # where ranks look for packages first
        self.expected: dict[str, Expected] = {}
        self.one: dict[str, Any] = {}  # one rank's outcome, by case

    def prepare(self, cases: Sequence[str]) -> None:
        for family in dict.fromkeys(case.split()[0] for case in cases):
            if family not in self.expected:
                self.expected[family] = Expected(self.directory, family)

    def run(self, world_size: int, scratch: Path, cases: Sequence[str]) -> dict[str, dict]:
        """The ranks' outcomes of the cases, and what is not as it should be in them."""
        self.prepare(cases)
        alone = {of_one_rank(case) for case in cases} - self.one.keys()
        if world_size == 1:
            alone |= {*cases} - self.one.keys()
        if alone:
            planned = [(case, None) for case in sorted(alone)]
            self.one |= self.in_ranks(1, scratch / "1", planned)[0]
        ranks = [self.one]
        if world_size > 1:
            planned = [(case, None) for case in cases]
            ranks = self.in_ranks(world_size, scratch / "all", planned)
        return {
            case: errors(
                [rank[case] for rank in ranks],
                self.expected[case.split()[0]],
                self.one[of_one_rank(case)],
            )
            for case in cases
        }

    def in_ranks(self, world_size: int, scratch: Path, planned: Any) -> list[Any]:
        """Train planned cases; returns each rank's outcome of each."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(actors, "SEARCHED", self.searched)
            return in_ranks(world_size, scratch, trained, self.directory, planned)


def of_one_rank(case: str) -> str:
    kind = next((kind for kind in ("_bf16", "_te") if case.endswith(kind)), "")
    return f"{case.split()[0]} one{kind}"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("lora"))


def errors(ranks: list[dict], expected: Expected, baseline: dict | None) -> dict[str, Any]:
    """Each quantity's largest error with its place; inf where names differ.

    baseline: one rank's outcome, None where the steps are not compared.
    """
    out, found = ranks[0], {}
    for name, wanted in (("log_probs", expected.by_uid), ("reference", expected.reference)):
        seen = {uid: value for rank in ranks for uid, value in rank[name].items()}
        found[name] = max(abs(seen.get(uid, np.inf) - value) for uid, value in wanted.items()), ""
    if set(out["targets"]) != expected.targets:
        found["targets"] = np.inf, str(len(out["targets"]))
    compared = {"merged": expected.merged, "gradients": expected.gradients}
    if baseline is not None:
        compared |= {name: baseline[name] for name in ("sgd", "adam") if name in out}
    for name, wanted in compared.items():
        same = out[name].keys() == wanted.keys()
        found[name] = worst(out[name], wanted) if same else (np.inf, "names")
    norms = [expected.norm()] if baseline is None else baseline["norms"]
    for name, pairs in (
        ("norm", zip(out["norms"][:1], [expected.norm()])),
        ("norms", zip(out["norms"], norms)),
    ):
        found[name] = max((abs(got / wanted - 1) for got, wanted in pairs), default=np.inf), ""
    return found | ({"error": (np.inf, out["error"])} if out["error"] else {})


def complaints(case: str, found: dict[str, Any]) -> dict[str, Any]:
    """The errors that are larger than rounding; a case is a family and its topology."""
    bounds = DELTA_NET if has_delta_nets(case) else EXACT
    if case.endswith("bf16"):
        bounds = ROUNDED
    return {name: e for name, e in found.items() if not e[0] < bounds.get(name, 0)}


def check(found: dict[str, dict]) -> None:
    """Hold every case's errors against their bounds."""
    for case, case_errors in found.items():
        wrong = complaints(case, case_errors)
        assert not wrong, (case, wrong)


@pytest.mark.parametrize("families", [HELD[i::4] for i in range(4)], ids=lambda value: value[0])
def test_adapters_of_every_family_compute_and_learn_what_transformers_does_with_them_merged(
    families, worlds, tmp_path
):
    check(worlds.run(1, tmp_path, [f"{family} one" for family in families]))


def test_recomputed_layers_behind_frozen_embeddings_give_the_same(worlds, tmp_path):
    cases = [f"glm4_moe {topology}" for topology in ("recompute", "recompute_moe", "one_bf16")]
    check(worlds.run(1, tmp_path, cases))


# of two ranks: each reduction, each way to gather, and a stage of dense layers
QUICK = ("tp2etp2", "tp2ep2", "dp2_overlap", "pp2_uneven")
WHOLE = ("glm4_moe", "qwen3_moe", "moonlight", "qwen3_5_moe", "nemotron_h")


def is_verified(family: str, topology: dict[str, Any]) -> bool:
    """The dry run takes them: gpt-oss has no expert-tensor ranks, Mamba mixers no context-parallel ones."""
    return not any(topology.get(name, 1) > 1 for name in family_of(family).alone)


OTHERS = [
    f"{family} {topology}"
    for family in SPARSE
    for topology in ("tp2etp2", "tp2ep2")
    if family not in WHOLE and is_verified(family, TOPOLOGIES[2][topology])
] + [f"{family} tp2" for family in DENSE]


def halves(family: str, world_size: int) -> list[tuple[int, list[str]]]:
    every = TOPOLOGIES[world_size].items()
    names = [name for name, fields in every if is_verified(family, fields)]
    if has_delta_nets(family):  # whose bfloat16 is off by more than the bounds, on one rank too
        names = [name for name in names if not name.endswith("bf16")]
    cases = [f"{family} {name}" for name in names if not name.endswith("_te")]
    middle = len(cases) // 2
    return [(world_size, cases[:middle]), (world_size, cases[middle:])]


SLOW = [group for family in WHOLE for group in halves(family, 2)]
SLOW += [(2, OTHERS[i : i + 6]) for i in range(0, len(OTHERS), 6)]
SLOW += [group for family in ("glm4_moe", "moonlight") for group in halves(family, 4)]


@pytest.mark.parametrize(
    "world_size, cases",
    [
        (2, [f"glm4_moe {topology}" for topology in QUICK]),  # a bias next to the adapter too
        (2, ["deepseek_v3 tp2ep2"]),  # latent attention, whose down projections every rank has
        # linears of several parts, and experts of one tensor
        (2, ["qwen3_next tp2ep2", "nemotron_h tp2etp2", "qwen3_5_moe tp2etp2"]),
        *(pytest.param(*group, marks=pytest.mark.slow) for group in SLOW),
    ],
    ids=lambda value: value[0] + " and on" if isinstance(value, list) else str(value),
)
def test_adapters_are_the_same_in_every_topology(world_size, cases, worlds, tmp_path):
    check(worlds.run(world_size, tmp_path, cases))


@pytest.fixture(scope="module")
def te_worlds(tmp_path_factory) -> Worlds:
    """Worlds whose ranks find Transformer Engine's layers on plain torch."""
    return Worlds(tmp_path_factory.mktemp("lora_te"), [STAND_INS])


TE_CASES = [
    (size, [f"{family} {topology}_te" for topology in names])
    for family in WHOLE
    for size, names in TE_SHAPED.items()
] + [(1, [f"{family} one_te" for family in HELD if family not in WHOLE])]


@pytest.mark.parametrize(
    "world_size, cases",
    [
        (1, ["glm4_moe one_te", "gpt_oss one_te", "qwen3_next one_te", "nemotron_h one_te"]),
        (2, ["glm4_moe tp2etp2_te", "moonlight tp2ep2_te"]),
        *(pytest.param(*group, marks=pytest.mark.slow) for group in TE_CASES),
    ],
    ids=lambda value: value[0] + " and on" if isinstance(value, list) else str(value),
)
def test_adapters_of_transformer_engines_layers_are_the_same_in_every_topology(
    world_size, cases, te_worlds, tmp_path
):
    check(te_worlds.run(world_size, tmp_path, cases))


def test_every_family_with_adapters_is_held_here():
    assert {name for name, f in FAMILIES.items() if f.lora} == {*HELD} - {"moonlight", "glm_5_2"}


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
    "o_proj_b_not_summed": ("tp2_bf16", "gradients"),
    "o_proj_not_reduced": ("tp2", "log_probs"),
    "o_proj_averaged": ("tp2", "log_probs"),
    "expert_tp_not_summed": ("etp2", "gradients"),
    "expert_input_summed_twice": ("etp2", "gradients"),
    "norm_counts_replicas": ("etp2", "norm"),
    "local_expert_ids_exported": ("ep2", "gradients"),
    "replicas_exported_twice": ("tp2", "error"),
    "factor_of_another_rank": ("tp2", "log_probs"),
    "parts_cut_as_one": ("tp2", "log_probs"),
    # bugs of full training too
    "expert_group_confused": ("tp2", "gradients"),
    "tp_mean_instead_of_sum": ("tp2", "gradients"),
    "local_token_normalisation": ("cp2", "gradients"),
    "divided_by_dp": ("dp2", "gradients"),
    # the distributed optimizer's, and with SGD there is none
    "b_in_a_list": ("dp2_overlap", "adam"),
    # of Transformer Engine's layers alone
    "norm_left_in_the_linear": ("one_te", "log_probs"),
    "rows_of_another_expert": ("one_te", "log_probs"),
}
ELSEWHERE = (
    "replicas_drawn_by_rank",
    "shards_saved_as_replicas",
    "replicas_saved_by_every_rank",
)
# what glm4_moe does not have
FAMILY_OF = {"parts_cut_as_one": "nemotron_h"}
SIZES = {"one": 1, "recompute": 1, "one_te": 1}  # the others need two ranks


@pytest.mark.parametrize(
    "world_size, layers",
    [(1, "local"), (1, "te"), pytest.param(2, "local", marks=pytest.mark.slow)],
)
def test_every_planted_bug_is_caught_by_name(world_size, layers, request, tmp_path):
    worlds = request.getfixturevalue("te_worlds" if layers == "te" else "worlds")
    bugs = {
        bug: (f"{FAMILY_OF.get(bug, 'glm4_moe')} {topology}", what)
        for bug, (topology, what) in CAUGHT.items()
        if SIZES.get(topology, 2) == world_size and topology.endswith("_te") == (layers == "te")
    }
    worlds.prepare([case for case, _ in bugs.values()])
    if any(what == "adam" for _, what in bugs.values()):
        worlds.run(1, tmp_path, ["glm4_moe one"])
    ranks = worlds.in_ranks(world_size, tmp_path, [(case, bug) for bug, (case, _) in bugs.items()])
    for bug, (case, what) in bugs.items():
        baseline = worlds.one["glm4_moe one"] if what == "adam" else None
        expected = worlds.expected[case.split()[0]]
        bug_errors = errors([rank[bug] for rank in ranks], expected, baseline)
        found = complaints(case, bug_errors)
        assert what in found, (bug, found)
        print(bug, what, *found[what])
    if "embedding_asks_for_no_gradient" in bugs:
        assert "no gradient reached them" in ranks[0]["embedding_asks_for_no_gradient"]["error"]


def test_every_bug_of_adapters_is_planted_here():
    from tests.oracle.planted import planted_by

    mine = {bug.name for bug in planted_by("tests/oracle/test_lora.py")}
    assert mine <= {*CAUGHT, *ELSEWHERE} and {*ELSEWHERE} <= mine


def experts_alone(directory: Path, bug: str | None) -> dict[str, Any]:
    """Factors after two steps by recomputation, or the error that ends them; in a rank.

    No layer's first part has an adapter: nothing before the experts wants a gradient by itself.
    """
    from tests.oracle.planted import MUTATIONS

    found: dict[str, Any] = {}
    for name in ("one", "recompute", "recompute_moe"):
        config = settings(
            directory,
            "glm4_moe",
            **TOPOLOGIES[1][name],
            exclude_modules=["self_attn", "shared_experts", "layers.0"],
        )
        with MUTATIONS[bug or "null"].planted(config, None), actor_of(config) as actor:
            try:
                found[name] = steps(actor, config, 2)
            except AssertionError as error:
                found[name] = str(error)
    return found


def test_recomputed_experts_learn_where_they_alone_have_adapters(worlds, tmp_path):
    """A recomputed piece whose input wants no gradient has none at all, and says nothing."""
    worlds.prepare(["glm4_moe"])
    (right,) = in_ranks(1, tmp_path / "right", experts_alone, worlds.directory, None)
    assert all((t != 0).any() for t in right["one"].values())
    for name in ("recompute", "recompute_moe"):
        assert right[name].keys() == right["one"].keys()
        assert all(torch.equal(t, right["one"][n]) for n, t in right[name].items()), name
    bug = "embedding_asks_for_no_gradient"
    (wrong,) = in_ranks(1, tmp_path / "wrong", experts_alone, worlds.directory, bug)
    for name in ("recompute", "recompute_moe"):
        assert "no gradient reached them" in wrong[name], name


def clipped_alone(directory: Path) -> dict[str, float]:
    """The metrics of a step whose every token has moved beyond its bound; in a rank."""
    config = settings(directory, "glm4_moe", **beginning(directory, "glm4_moe"))
    hf = read_hf_facts(config.model.hf_checkpoint)
    with actor_of(config) as actor:
        slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
        old = actor.compute_log_probs(slices, "old_log_prob")
        for s in slices:
            old[s.microbatch_id] -= torch.from_numpy(np.sign(s.advantages))
        metrics = actor.train_step(slices, old, None)
        actor.collect_evidence(0)
    return metrics


def test_a_step_whose_tokens_are_all_clipped_has_no_gradient_and_is_no_error(worlds, tmp_path):
    worlds.prepare(["glm4_moe"])
    (metrics,) = in_ranks(1, tmp_path, clipped_alone, worlds.directory)
    assert metrics["loss"] != 0 and metrics["grad_norm"] == 0 and metrics["clipped"] > 0


def begun(directory: Path, bug: str | None) -> dict[str, Any]:
    """Random adapters in each topology of this size: whole, and are replicas equal; in a rank."""
    from r3train.trainer.megatron import lora
    from tests.oracle.planted import MUTATIONS

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
    worlds.prepare(["glm4_moe"])
    base = load_file(worlds.directory / "glm4_moe" / "model.safetensors")
    (one,) = in_ranks(1, tmp_path / "one", begun, worlds.directory, None)
    two = in_ranks(2, tmp_path / "two", begun, worlds.directory, None)[0]
    factors = one["one"]["factors"]
    assert all((t == 0).all() == n.endswith("lora_B") for n, t in factors.items())
    for got in (one["one"], *two.values()):
        assert not got["unlike"] and got["factors"].keys() == factors.keys()
        assert all(torch.equal(t, factors[n]) for n, t in got["factors"].items())
        assert all(torch.equal(t, base[n]) for n, t in got["merged"].items())
    bug = in_ranks(2, tmp_path / "bug", begun, worlds.directory, "replicas_drawn_by_rank")[0]
    assert all(got["unlike"] for got in bug.values())


# -- checkpoints -----------------------------------------------------------------------------------

# the state is saved in each of these and loaded in each of the others; PP has a stage without experts
RESHARDED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one_sharded": dict(use_distributed_optimizer=True)},
    2: {
        "tp2etp2": TOPOLOGIES[2]["tp2etp2"],
        "tp2ep2_sharded": TOPOLOGIES[2]["tp2ep2"] | dict(use_distributed_optimizer=True),
        "pp2": TOPOLOGIES[2]["pp2_uneven"],
        "vpp2pp2": TOPOLOGIES[2]["vpp2pp2"],
        "cp2": TOPOLOGIES[2]["cp2"],
    },
}


def adam(directory: Path, family: str, **fields: Any):
    """Of a smaller epsilon, elements whose gradient is rounding alone would move like the others."""
    fields |= beginning(directory, family)
    return settings(directory, family, **fields, optimizer="adam", lr=1e-3, adam_eps=1e-4)


def steps(actor: Any, config: Any, count: int) -> dict[str, torch.Tensor]:
    """Adam's steps; the factors after them, whole on rank 0."""
    hf = read_hf_facts(config.model.hf_checkpoint)
    slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
    for step in range(count):
        actor.train_step(slices, actor.compute_log_probs(slices, "old_log_prob"), None)
        actor.collect_evidence(step)
    return {n: t.clone() for n, t in actor.adapter_weights()}


def resharded(family: str) -> dict[str, dict[str, Any]]:
    """This world size's topologies that the family takes, see OTHERS."""
    every = RESHARDED[torch.distributed.get_world_size()]
    return {name: fields for name, fields in every.items() if is_verified(family, fields)}


def saved(directory: Path, family: str, checkpoints: Path) -> dict[str, Any]:
    """Two steps, a checkpoint and two more steps in each topology of this size; in a rank."""
    from r3train.config.checkpoint_settings import CheckpointSection
    from r3train.trainer.megatron.checkpoint import Checkpointer

    out = {}
    for name, parallel in resharded(family).items():
        config = adam(directory, family, **parallel)
        with actor_of(config) as actor:
            steps(actor, config, 2)
            Checkpointer(actor, CheckpointSection(save=checkpoints / name)).save(2, {})
            out[name] = steps(actor, config, 2)
    return out


def resumed(directory: Path, family: str, checkpoints: Path, sources: list[str]) -> dict[str, Any]:
    """Two more steps from every source in each topology of this size; in a rank."""
    out = {}
    for name, parallel in resharded(family).items():
        for source in sources:
            config = adam(directory, family, **parallel)
            with actor_of(config, checkpoints / source / "iter_0000002") as actor:
                out[f"{source} -> {name}"] = steps(actor, config, 2)
    return out


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("glm4_moe", (1,)),
        pytest.param("glm4_moe", (1, 2), marks=pytest.mark.slow),
        # every tensor rank has its down projections whole
        pytest.param("moonlight", (1, 2), marks=pytest.mark.slow),
        # an adapter for each expert of one tensor
        pytest.param("gpt_oss", (1, 2), marks=pytest.mark.slow),
        # linears of several parts
        pytest.param("nemotron_h", (1, 2), marks=pytest.mark.slow),
        pytest.param("qwen3_next", (1, 2), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_adapters_and_moments_resume_in_every_topology(family, sizes, worlds, tmp_path):
    worlds.prepare([family])
    case, sources, ends = (worlds.directory, family, tmp_path), {}, {}
    for size in sizes:
        sources |= in_ranks(size, tmp_path / f"save{size}", saved, *case)[0]
    for size in sizes:
        ends |= in_ranks(size, tmp_path / f"load{size}", resumed, *case, list(sources))[0]
    assert len(ends) == len(sources) ** 2
    for pair, end in ends.items():
        expected = sources[pair.split(" -> ")[0]]
        wrong = {n: t for n, t in end.items() if (t - expected[n]).abs().max() > 2e-6}
        assert end.keys() == expected.keys() and not wrong, (pair, list(wrong)[:3])


def saved_and_resumed(directory: Path, bug: str | None) -> bool:
    """Save after a step and resume in the same topology: are the factors the same? In a rank."""
    from r3train.config.checkpoint_settings import CheckpointSection
    from r3train.trainer.megatron.checkpoint import Checkpointer
    from tests.oracle.planted import MUTATIONS

    config = adam(directory, "glm4_moe", **TOPOLOGIES[2]["tp2etp2"])
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
    worlds.prepare(["glm4_moe"])
    assert in_ranks(2, tmp_path, saved_and_resumed, worlds.directory, bug)[0] is is_same


def refusal(directory: Path, bug: str | None) -> str:
    """Megatron's complaint, before it writes, about the ranks' parts of the adapters; in a rank."""
    from megatron.core.dist_checkpointing import validation
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from r3train.trainer.megatron import lora
    from tests.oracle.planted import MUTATIONS

    config = settings(directory, "glm4_moe", **TOPOLOGIES[2]["tp2etp2"])
    with MUTATIONS[bug or "null"].planted(config, None), actor_of(config) as actor:
        state = lora.sharded_state(actor.model.chunks)
        _, parts = validation.determine_global_metadata(state)
        try:
            validation.validate_sharding_integrity(parts)
        except CheckpointingException as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [None, "replicas_saved_by_every_rank"])
def test_a_factor_that_two_ranks_would_save_is_refused_before_anything_is_written(
    bug, worlds, tmp_path
):
    worlds.prepare(["glm4_moe"])
    complaint = in_ranks(2, tmp_path, refusal, worlds.directory, bug)[0]
    assert ("Invalid access pattern" in complaint) if bug else not complaint
