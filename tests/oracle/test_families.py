"""Every family that is not refused computes what transformers does, from the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from safetensors.torch import load_file

from r3train.config.checkpoint_settings import CheckpointSection
from r3train.families.read_facts import read_hf_facts
from r3train.families import FAMILIES, TINY_MODELS, TINY_NAMES, Family, tensor_names
from r3train.hf_checkpoint import is_trained, read_headers
from r3train.ids import token_uids
from r3train.verify.tiny import random_model, save
from r3train.families.tiny_options import TinyOptions
from tests.hf_reference import HfReference
from tests.oracle import actors
from tests.oracle.actors import (
    actor_log_probs,
    actor_of,
    configuration,
    in_ranks,
    samples,
    slices_of,
)

TOKENS = 24
SMALL = TinyOptions(num_layers=3, hidden_size=32, head_dim=8, moe_intermediate_size=16)
# of scaled positions, each unlike the tiny models' (Kimi-K2's beta_fast is 1), and such that each shows in heads
# of which 8 dimensions rotate
OTHER_YARN = dict(
    rope_type="yarn", rope_theta=100.0, factor=8.0, mscale=0.707, mscale_all_dim=0.707
)
OTHER_YARN |= dict(beta_fast=1.0, beta_slow=0.25, original_max_position_embeddings=64)
# name, which begins with the family -> keys of its configuration that differ from the tiny model's
CASES = {
    **dict.fromkeys(TINY_MODELS, {}),
    "qwen3_moe without normalised gates": dict(norm_topk_prob=False),
    "qwen2_moe with normalised gates": dict(norm_topk_prob=True),
    "glm4_moe without qk norms, a quarter rotated": dict(
        use_qk_norm=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    ),
    "deepseek_v32 of long sequences": dict(index_topk=5),
    "glm_moe_dsa of long sequences": dict(index_topk=5),
    "glm_5_2 of long sequences": dict(
        index_topk=5, num_hidden_layers=5, indexer_types="full full shared full shared".split()
    ),
    "kimi_k2 with other scaled positions": dict(qk_rope_head_dim=8, rope_parameters=OTHER_YARN),
    "qwen2 with a tied output layer": dict(tie_word_embeddings=True),
    "llama of plain positions, with a tied output layer": dict(
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e4)
    ),
    "ernie4_5_moe with a tied output layer": dict(tie_word_embeddings=True),
}


# written with the keys of releases, which are older than transformers 5's: of scaled positions, of a part
# of a head that rotates by rotary_dim alone, of heads without a size
AS_RELEASED = ("kimi_k2", "llama", "minimax_m2", "mixtral", "qwen2")


def with_keys_of_releases(file: Path) -> None:
    content = json.loads(file.read_text())
    rope = content.pop("rope_parameters")
    content["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    for keys in (rope, content):
        keys.pop("partial_rotary_factor", None)
    content["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    content["torch_dtype"] = content.pop("dtype")
    if content.get("head_dim") is None:
        content.pop("head_dim", None)
    file.write_text(json.dumps(content))


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(2, SMALL.vocab_size, TOKENS).astype(np.int32)


def family_of(name: str) -> Family:
    """The family of a tiny model, or of a case."""
    return next(f for f in FAMILIES.values() if name.split()[0] in f.tiny)


def options_of(name: str) -> TinyOptions:
    family = name.split()[0]
    # in a hybrid model the fourth layer has another attention
    kinds = TINY_MODELS[family].published.get("full_attention_interval", 0)
    return replace(SMALL, num_layers=max(SMALL.num_layers, kinds), family=family)


def make(directory: Path, name: str, **changes: Any) -> np.ndarray:
    """Write a checkpoint with every weight random; returns transformers' log-probs, float32[T]."""
    options = replace(options_of(name), **changes)
    model = random_model(options, **CASES[name]).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in tensor_name:  # norms too: one in the place of another must show
                noise = 0.2 * torch.randn_like(tensor)
                # positive, as published ones: transformers' groups of experts know no negative score
                tensor.add_(noise.abs() if "e_score" in tensor_name else noise)
        ids = torch.from_numpy(text()).long()
        every = model(ids[None]).logits[0].log_softmax(-1)
    save(model, directory, options)
    if name in AS_RELEASED:
        with_keys_of_releases(directory / "config.json")
    return np.concatenate([[0.0], every[:-1].gather(1, ids[1:, None])[:, 0].numpy()])


def actors_log_probs(directories: list[str]) -> dict[str, torch.Tensor]:
    """The actor's log-probs of the text and the names that it exports, by directory; in a rank."""
    found = {}
    for directory in directories:
        with actor_of(configuration(Path(directory))) as actor:
            log_probs = actor_log_probs(actor, [actor.topology], text())
            found[directory] = (
                torch.from_numpy(log_probs),
                sorted(n for n, _ in actor.hf_weights()),
            )
    return found


def test_every_family_has_a_case():
    assert {read_name for read_name, family in FAMILIES.items() if family.tiny} == FAMILIES.keys()


@pytest.fixture(scope="module")
def checkpoints(request, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """Checkpoints of the cases that this run asks for (-k), and transformers' log-probs of the text."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    directory = tmp_path_factory.mktemp("families")
    return directory, {name: make(directory / name, name) for name in CASES if name in asked}


@pytest.fixture(scope="module")
def live(checkpoints, tmp_path_factory) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """``actors_log_probs`` of one rank, by case."""
    directory, names = checkpoints
    models = [str(directory / name) for name in names]
    (found,) = in_ranks(1, tmp_path_factory.mktemp("ranks"), actors_log_probs, models)
    return {name: found[model] for name, model in zip(names, models)}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_an_actor_gives_the_log_probs_of_transformers_and_exports_what_it_read(
    name, checkpoints, live
):
    directory, expected = checkpoints
    log_probs, exported = live[name]
    assert np.abs(log_probs.numpy() - expected[name]).max() < 1e-4
    hf = read_hf_facts(directory / name)
    on_disk = {t for t in read_headers(directory / name) if is_trained(t, hf)}
    assert set(exported) == tensor_names(hf) == on_disk


# -- replayed routes, and gradients --------------------------------------------------------------

LENGTHS = [(3, 9), (5, 14), (2, 6), (4, 11)]
# name -> (number of ranks, settings)
TOPOLOGIES = {
    "1": (1, {}),
    "TP2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "TP2 ETP2": (
        2,
        dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True),
    ),
    "TP2 of whole sequences": (2, dict(tensor_model_parallel_size=2)),
    "EP2": (2, dict(expert_model_parallel_size=2)),
    "CP2": (2, dict(context_parallel_size=2)),
    "PP2": (
        2,
        dict(
            pipeline_model_parallel_size=2,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            decoder_first_pipeline_num_layers=1,
        ),
    ),
}
TE = "TP2 TE"  # with Transformer Engine's layers, on plain torch
TOPOLOGIES[TE] = 2, TOPOLOGIES["TP2"][1] | dict(attention_backend="te")
STAND_INS = Path(__file__).parents[1] / "rehearsal/stand_ins"
# what the delta rule's decay is made of: an exponent of sums over many tokens, of less precision
DECAY = ("A_log", "dt_bias", "in_proj_a.", "in_proj_ba.")
# the topology in which most of what is wrong shows
FAST = "TP2"


def takes(name: str, parallel: dict[str, Any]) -> bool:
    """Return whether a run takes the case's family in the topology."""
    family = family_of(name)
    if not family.has_experts and any(size.startswith("expert") for size in parallel):
        return False
    whole = "tensor_model_parallel_size" in parallel and "sequence_parallel" not in parallel
    return not (family.alone.keys() & parallel.keys() or family.has_experts and whole)


def replayed(directories: list[str], parallel: dict) -> dict[str, dict[str, Any]]:
    """Log-probs under random routes by row uid, and the policy loss's gradients; in a rank.

    By directory, with the names of tensors that differ from those on disk; the log-probs on the last
    pipeline stage only.
    """
    from r3train.trainer.megatron.export import export_hf_weights

    found = {}
    for directory in directories:
        hf = read_hf_facts(directory)
        config = configuration(
            Path(directory),
            rollout_batch_size=len(LENGTHS),
            max_tokens_per_gpu=24,
            use_rollout_routing_replay=hf.is_moe,
            enable_r3_correctness_check=hf.is_moe,
            r3_mismatch_threshold=1.0,
            **parallel,
        )
        with actor_of(config) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
            old = actor.compute_log_probs(slices, "old_log_prob" if hf.is_moe else None)
            none = {s.microbatch_id: torch.zeros(len(s.tokens)) for s in slices}
            actor.backward(slices, none | old, None)
            gradients = export_hf_weights(
                actor.model.weights,
                actor.model.chunks,
                # an indexer's parameters have none
                lambda p: getattr(p, "main_grad", torch.zeros_like(p)),
            )
            own = {name: g.detach().clone() for name, g in gradients}
            # after the backward: an expert bias that moves does so at its end
            disk = load_file(Path(directory) / "model.safetensors")
            own["unlike disk"] = [n for n, t in actor.hf_weights() if not torch.equal(t, disk[n])]
            actor.optimizer.prepare_grads()
            own["norm"] = torch.tensor(actor.optimizer.get_grad_norm())
            records = actor.collect_evidence(0) if hf.is_moe else []
        assert not any(r.rows_native + r.duplicate_rows + r.rows_recompute_differ for r in records)
        own["replayed rows"] = torch.tensor(sum(r.rows_replayed for r in records))
        last = [s for s in slices if s.microbatch_id in old]
        found[directory] = own
        if last:
            uids = torch.from_numpy(np.concatenate([s.token_uids for s in last]))
            found[directory] |= {
                "uids": uids,
                "log_probs": torch.cat([old[s.microbatch_id] for s in last]),
            }
    return found


@pytest.fixture(scope="module")
def forced(checkpoints, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """Of each case {uid: log-prob} and the gradients under random routes and choices."""
    directory, names = checkpoints
    scratch = tmp_path_factory.mktemp("gradients")
    return {name: reference(directory / name, scratch / name) for name in names}


def reference(checkpoint: Path, scratch: Path) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """transformers' log-probs by row uid under random routes and choices, and the policy loss's gradients."""
    model, by_uid, loss = HfReference(checkpoint), {}, 0.0
    for s in samples(read_hf_facts(checkpoint), LENGTHS):
        given = s.sample.routed_experts, s.sample.indexer_topk
        log_probs = model.log_probs(s.sample.token_ids, *given)
        uids = token_uids(s.sample.sample_id, s.sample.num_tokens)
        by_uid |= dict(zip(uids[:-1].tolist(), log_probs.tolist()))
        mask = torch.from_numpy(s.sample.loss_mask[1:])
        loss = loss - (torch.from_numpy(s.advantages[1:])[mask] * log_probs[mask]).sum()
    (loss / sum(response for _, response in LENGTHS)).backward()
    return by_uid, model.gradients(scratch)


@pytest.fixture(scope="module")
def in_topology(checkpoints, tmp_path_factory) -> Callable[[str], dict[str, list[dict[str, Any]]]]:
    """Results of ``replayed`` of each rank of a topology, by case: all cases in one start of ranks."""

    @cache
    def run(topology: str) -> dict[str, list[dict[str, Any]]]:
        (world_size, parallel), (directory, names) = TOPOLOGIES[topology], checkpoints
        taken = {name: str(directory / name) for name in names if takes(name, parallel)}
        scratch = tmp_path_factory.mktemp("ranks")
        with mock.patch.object(actors, "SEARCHED", [str(STAND_INS)] if topology == TE else []):
            ranks = in_ranks(world_size, scratch, replayed, list(taken.values()), parallel)
        return {name: [rank[model] for rank in ranks] for name, model in taken.items()}

    return run


def cases() -> Iterator[Any]:
    """Yield every topology with every case that takes it."""
    for topology, (_, parallel) in TOPOLOGIES.items():
        marks = () if topology in (FAST, TE) else pytest.mark.slow
        for name in CASES:
            if takes(name, parallel):
                yield pytest.param(topology, name, marks=marks, id=f"{name}, {topology}")


@pytest.mark.ranks
@pytest.mark.parametrize("topology, name", cases())
def test_replayed_routes_give_the_log_probs_and_gradients_of_transformers(
    topology, name, in_topology, forced
):
    rank_results, (by_uid, gradients) = in_topology(topology)[name], forced[name]
    is_moe = family_of(name).has_experts
    assert (sum(int(rank["replayed rows"]) for rank in rank_results) > 0) is is_moe
    assert not any(rank["unlike disk"] for rank in rank_results), rank_results[0]["unlike disk"]
    error, off = errors(rank_results, by_uid, gradients)
    assert error < LOG_PROB_ERROR
    assert len(off) == len([t for t in gradients if not t.endswith(EXPERT_BIAS)])
    wrong = {tensor: e for tensor, e in off.items() if not e <= gradient_error(tensor)}
    assert not wrong
    norm = sum(float(g.square().sum()) for n, g in gradients.items() if n in off) ** 0.5
    assert all(float(rank["norm"]) == pytest.approx(norm, rel=1e-5) for rank in rank_results)


# on disk: buffers, of which there is no gradient
EXPERT_BIAS = tuple(
    {
        t.name
        for f in FAMILIES.values()
        for w in f.weights.layer_weights
        if w.name.endswith("expert_bias")
        for t in w.disk
    }
)
LOG_PROB_ERROR = 2e-5


def gradient_error(tensor: str) -> float:
    """The largest error of a tensor's gradient that is allowed, as a part of its norm."""
    return 3e-4 if any(part in tensor for part in DECAY) else 1e-4


def errors(
    rank_results: list[dict[str, Any]], by_uid: dict, gradients: dict[str, torch.Tensor]
) -> tuple[float, dict[str, float]]:
    """The largest error of a log-prob, and of each gradient that there is its error as a part of its norm."""
    seen = {}
    for rank in rank_results:
        if "uids" in rank:
            seen |= dict(zip(rank["uids"].tolist(), rank["log_probs"].tolist()))
    assert seen.keys() >= by_uid.keys()
    scale = torch.stack([g.square().mean() for g in gradients.values()]).mean().sqrt()
    off = {}
    for tensor, wanted in gradients.items():
        if tensor in rank_results[0] and not tensor.endswith(EXPERT_BIAS):
            size = max(float(wanted.norm()), 1e-3 * float(scale) * wanted.numel() ** 0.5)
            off[tensor] = float((rank_results[0][tensor] - wanted).norm() / size)
    return max(abs(seen[uid] - wanted) for uid, wanted in by_uid.items()), off


# -- planted bugs -----------------------------------------------------------------------------------


def sharded_down_projections(layers: Any, weights: Any, first_layer: int, use_te: bool) -> None:
    """Latent attention as Megatron's local layers have it."""
    from r3train.trainer.megatron.layers.latent_attention import adapt_latent_attention

    parts = [layer.submodules.self_attention.submodules for layer in layers.layer_specs]
    before = [(part.linear_q_down_proj, part.linear_kv_down_proj) for part in parts]
    adapt_latent_attention(layers, weights, first_layer, use_te)
    for part, modules in zip(parts, before, strict=True):
        part.linear_q_down_proj, part.linear_kv_down_proj = modules


DOWN = "self_attention.linear_kv_down_proj.weight", "self_attention.linear_q_down_proj.weight"


def norms_of_own_heads(layers: Any, weights: Any, first_layer: int, use_te: bool) -> None:
    """Norms over the heads of one tensor rank."""
    from r3train.trainer.megatron.layers.whole_width_norm import WholeWidthNormAttention

    class Own(WholeWidthNormAttention):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for norm in (self.q_layernorm, self.k_layernorm):
                norm.width, norm.tp_size = norm.width // norm.tp_size, 1

    for layer in layers.layer_specs:
        layer.submodules.self_attention.module = Own


def one_state_for_all_sequences(layers: Any, weights: Any, first_layer: int, use_te: bool) -> None:
    """Mamba mixers that take a pack for one sequence."""
    from r3train.trainer.megatron.layers.mamba import PackedMambaMixer, adapt_mamba

    class Leaking(PackedMambaMixer):
        def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
            ends = packed_seq_params.cu_seqlens_q
            return super()._ssm_training(
                zxBCdt, replace(packed_seq_params, cu_seqlens_q=ends[[0, -1]])
            )

    adapt_mamba(layers, weights, first_layer, use_te)
    for layer in layers.layer_specs:
        if getattr(layer.submodules.self_attention, "module", None) is PackedMambaMixer:
            layer.submodules.self_attention = replace(
                layer.submodules.self_attention, module=Leaking
            )


# the bug -> the case that has it, fields of Megatron's configuration or the layers' hook, what shows it
PLANTED: dict[str, tuple[str, dict[str, Any] | Callable, str]] = {
    "gates over all experts": ("mixtral", {"moe_router_pre_softmax": True}, "log-probs"),
    "norm_topk_prob not read": (
        "qwen3_moe without normalised gates",
        {"moe_router_pre_softmax": False},
        "log-probs",
    ),
    "expert biases move": ("minimax_m2", {"moe_router_bias_update_rate": 1e-3}, "weights"),
    "down projections cut": ("deepseek_v3", sharded_down_projections, "gradients"),
    "norms of own heads": ("minimax_m2", norms_of_own_heads, "log-probs"),
    "one state for all sequences": ("nemotron_h", one_state_for_all_sequences, "log-probs"),
    "attention to all tokens": (
        "deepseek_v32 of long sequences",
        {"dsa_indexer_topk": TOKENS},
        "log-probs",
    ),
}


@contextmanager
def planted(model_type: str, change: dict[str, Any] | Callable) -> Iterator[None]:
    """Build the family with one thing wrong."""
    from r3train.trainer.megatron.layers import ADAPTATIONS

    right = FAMILIES[model_type]
    wrong, adaptations = right, {}
    if isinstance(change, dict):
        wrong = replace(right, transformer=lambda keys: right.transformer(keys) | change)
    else:
        adaptations = {right.layers: change}
    if change is sharded_down_projections:  # and loaded so
        rows = (
            replace(w, sharded="rows") if w.name in DOWN else w for w in right.weights.layer_weights
        )
        wrong = replace(right, weights=replace(right.weights, layer_weights=tuple(rows)))
    with (
        mock.patch.dict(ADAPTATIONS, adaptations),
        mock.patch.dict(FAMILIES, {model_type: wrong}),
    ):
        yield


def replayed_with_bugs(directory: str, bugs: list[str], parallel: dict) -> dict[str, Any]:
    """``replayed`` by the bug that was planted; in a rank."""
    found = {}
    for bug in bugs:
        name, change, _ = PLANTED[bug]
        model = str(Path(directory) / name)
        with planted(read_hf_facts(model).model_type, change):
            found[bug] = replayed([model], parallel)[model]
    return found


@pytest.fixture(scope="module")
def with_bugs(checkpoints, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Results of ``replayed`` of each rank, by the bug that was planted."""
    (directory, names), (world_size, parallel) = checkpoints, TOPOLOGIES[FAST]
    bugs = [bug for bug, (name, _, _) in PLANTED.items() if name in names]
    scratch = tmp_path_factory.mktemp("ranks")
    ranks = in_ranks(world_size, scratch, replayed_with_bugs, str(directory), bugs, parallel)
    return {bug: [rank[bug] for rank in ranks] for bug in bugs}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "bug, name",
    [pytest.param(bug, case[0], id=f"{case[0]}, {bug}") for bug, case in PLANTED.items()],
)
def test_what_a_familys_file_corrects_shows_where_it_is_left_out(bug, name, with_bugs, forced):
    rank_results, shows = with_bugs[bug], PLANTED[bug][2]
    error, off = errors(rank_results, *forced[name])
    moved = rank_results[0]["unlike disk"]
    assert {
        "log-probs": error > 0.1,
        "gradients": error < LOG_PROB_ERROR and max(off.values()) > 0.1,
        "weights": error < LOG_PROB_ERROR and moved,
    }[shows], (error, max(off.values()), moved)
    assert all(tensor.endswith(EXPERT_BIAS) for tensor in moved)


# the family -> what its fields leave out, or make besides, and the row or parameter that the error names
WRONG_ROWS = {
    "qwen2_moe": (
        {"moe_shared_expert_gate": False},
        "mlp.shared_experts.gate_weight is no parameter",
    ),
    "llama": (
        {"qk_layernorm": True},
        "no row of the table is decoder.layers.0.self_attention.q_layernorm",
    ),
}


def error_of_a_wrong_row(directory: str, name: str) -> str:
    """The error of an actor whose table does not fit Megatron's model; in a rank."""
    with planted(name, WRONG_ROWS[name][0]), pytest.raises(AssertionError) as refused:
        actors_log_probs([directory])
    return str(refused.value)


@pytest.mark.ranks
@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_row_without_a_parameter_and_a_parameter_without_a_row_are_named(name, tmp_path):
    model = tmp_path / "model"
    make(model, name)
    (found,) = in_ranks(1, tmp_path / "ranks", error_of_a_wrong_row, str(model), name)
    assert WRONG_ROWS[name][1] in found


def with_pairs_of_neighbours(directory: str) -> dict[str, Any]:
    """``actors_log_probs`` with an indexer that is rotated otherwise; in a rank."""
    with planted(read_hf_facts(directory).model_type, {"dsa_indexer_rope_interleaved": True}):
        return actors_log_probs([directory])


@pytest.mark.ranks
def test_an_indexer_that_is_rotated_otherwise_chooses_other_tokens(tmp_path):
    # where its choice is replayed it would not show
    model = tmp_path / "model"
    expected = make(model, "deepseek_v32 of long sequences")
    (got,) = in_ranks(1, tmp_path / "ranks", with_pairs_of_neighbours, str(model))
    assert np.abs(got[str(model)][0].numpy() - expected).max() > 0.1


def choices_of_an_older_indexer(layers: Any, weights: Any, first_layer: int, use_te: bool) -> None:
    """Layers without an indexer that all look for the second layer's choice."""
    from r3train.trainer.megatron.layers import sparse_attention

    class Stale(sparse_attention.SparseAttention):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            if self.skip_topk:
                self.source_layer = 2

    sparse_attention.adapt_sparse_attention(layers, weights, first_layer, use_te)
    for layer in layers.layer_specs:
        layer.submodules.self_attention.submodules.core_attention.module = Stale


def error_of_an_older_choice(directory: str) -> str:
    """The error of an actor that asks for a choice whose last reader is through; in a rank."""
    with (
        planted("glm_moe_dsa", choices_of_an_older_indexer),
        pytest.raises(KeyError) as missing,
    ):
        actors_log_probs([directory])
    return str(missing.value)


@pytest.mark.ranks
def test_an_indexers_choice_is_gone_behind_the_last_layer_that_shares_it(tmp_path):
    model = tmp_path / "model"
    make(model, "glm_5_2 of long sequences")
    (error,) = in_ranks(1, tmp_path / "ranks", error_of_an_older_choice, str(model))
    assert error == "2"  # which the third layer has read, and the fifth has not


# -- Megatron's checkpoints ------------------------------------------------------------------------

# of the families with modules of ours, or with whole ones in the place of sharded ones, one of each table
OWN_MODULES = list(
    {
        (family_of(name).layers, id(family_of(name).weights)): name
        for name in TINY_NAMES
        if family_of(name).layers
    }.values()
)


def weights_of(directories: list[str], saved: str, parallel: dict, resume: bool):
    """Weights by directory: after a step, and saved, or resumed from there; in a rank."""
    from r3train.trainer.megatron.checkpoint import Checkpointer

    found = {}
    for directory in directories:
        config = configuration(Path(directory), rollout_batch_size=len(LENGTHS), **parallel)
        hf, own = read_hf_facts(directory), Path(saved) / Path(directory).name
        with actor_of(config, own / "iter_0000001" if resume else None) as actor:
            if not resume:
                slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
                actor.train_step(slices, actor.compute_log_probs(slices, None), None)
                Checkpointer(actor, CheckpointSection(save=own)).save(1, {})
            found[directory] = {name: t.detach().clone() for name, t in actor.hf_weights()}
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_a_checkpoint_of_two_tensor_ranks_is_resumed_by_one(tmp_path):
    for name in OWN_MODULES:
        make(tmp_path / name, name)
    models, saved = [str(tmp_path / name) for name in OWN_MODULES], str(tmp_path / "saved")
    (before, _) = in_ranks(2, tmp_path / "2", weights_of, models, saved, TOPOLOGIES[FAST][1], False)
    (after,) = in_ranks(1, tmp_path / "1", weights_of, models, saved, {}, True)
    for model in models:
        first = load_file(Path(model) / "model.safetensors")
        first = {t: first[t] for t in before[model]}  # a vision tower is not trained
        assert before[model].keys() == after[model].keys()
        for tensor, expected in before[model].items():
            assert torch.equal(after[model][tensor], expected), (model, tensor)
        moved = [t for t in first if not torch.equal(first[t], before[model][t])]
        assert any("norm" in t for t in moved)
        assert any("self_attn" in t or "mixer" in t for t in moved)
        assert not any(t.endswith(EXPERT_BIAS) for t in moved)
