"""Every family that is not refused computes what transformers does, from the same checkpoint."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3train.config.families import FAMILIES, tensor_names
from r3train.config.hf_facts import read_hf_facts
from r3train.hf_checkpoint import read_headers
from r3train.torchvision_stub import declare_torchvision_ops
from r3train.routing.fingerprint import token_uids
from tests.oracle.actors import actor_of, configuration, in_ranks, samples, slices_of

TOKENS = 24
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    eos_token_id=1,
)
MOE = SIZES | dict(moe_intermediate_size=16, num_experts_per_tok=2, norm_topk_prob=True)
GLM = MOE | dict(
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    attention_bias=True,
    partial_rotary_factor=0.5,
)
QWEN2 = MOE | dict(num_experts=8, norm_topk_prob=False, shared_expert_intermediate_size=24)
# name -> (transformers' model, its configuration)
CASES = {
    "qwen3": ("Qwen3", SIZES),
    "qwen3_moe": ("Qwen3Moe", MOE | dict(num_experts=8)),
    "qwen3_moe without normalised gates": (
        "Qwen3Moe",
        MOE | dict(num_experts=8, norm_topk_prob=False),
    ),
    "qwen2_moe": ("Qwen2Moe", QWEN2),
    "qwen2_moe with normalised gates": ("Qwen2Moe", QWEN2 | dict(norm_topk_prob=True)),
    # published without head_dim
    "mixtral": (
        "Mixtral",
        SIZES | dict(num_local_experts=8, num_experts_per_tok=2, head_dim=None),
    ),
    "glm4_moe": ("Glm4Moe", GLM | dict(use_qk_norm=True)),
    "glm4_moe without qk norms": ("Glm4Moe", GLM | dict(use_qk_norm=False)),
}


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(2, SIZES["vocab_size"], TOKENS).astype(np.int32)


def make(directory: Path, kind: str, sizes: dict) -> np.ndarray:
    """Write a checkpoint with every weight random; returns transformers' log-probs, float32[T]."""
    declare_torchvision_ops()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:  # norms too: one in the place of another must show
                tensor.add_(0.2 * torch.randn_like(tensor))
        ids = torch.from_numpy(text()).long()
        every = model(ids[None]).logits[0].log_softmax(-1)
    model.save_pretrained(directory)
    return np.concatenate([[0.0], every[:-1].gather(1, ids[1:, None])[:, 0].numpy()])


def actors_log_probs(directories: list[str]) -> dict[str, torch.Tensor]:
    """The actor's log-probs of the text and the names that it exports, by directory; in a rank."""
    from r3train.loop import weight_probe

    found = {}
    for directory in directories:
        with actor_of(configuration(Path(directory))) as actor:
            log_probs = weight_probe.actor_log_probs(actor, [actor.topology], text())
            found[directory] = (
                torch.from_numpy(log_probs),
                sorted(n for n, _ in actor.hf_weights()),
            )
    return found


@pytest.mark.ranks
def test_an_actor_of_every_verified_family_gives_the_log_probs_of_transformers(tmp_path):
    expected = {name: make(tmp_path / name, *case) for name, case in CASES.items()}
    (got,) = in_ranks(
        1, tmp_path / "ranks", actors_log_probs, [str(tmp_path / name) for name in CASES]
    )
    assert {name.split()[0] for name in CASES} == FAMILIES.keys()
    for name in CASES:
        log_probs, exported = got[str(tmp_path / name)]
        error = np.abs(log_probs.numpy() - expected[name]).max()
        assert error < 1e-4, (name, error)
        hf = read_hf_facts(tmp_path / name)
        assert set(exported) == tensor_names(hf) == read_headers(tmp_path / name).keys(), name


# -- replayed routes, and gradients --------------------------------------------------------------

SPARSE = {name: case for name, case in CASES.items() if name != "qwen3"}
LENGTHS = [(3, 9), (5, 14), (2, 6), (4, 11)]
# by number of ranks
TOPOLOGIES = {
    1: {"one rank": {}},
    2: {
        "tp2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
        "ep2": dict(expert_model_parallel_size=2),
        "cp2": dict(context_parallel_size=2),
    },
}


def replayed(directories: list[str], topologies: dict) -> dict[str, dict[str, torch.Tensor]]:
    """Log-probs under random routes by row uid, and the policy loss's gradients; in a rank.

    By topology and directory.
    """
    from r3train.trainer.megatron.export import export_hf_weights

    found = {}
    for (topology, parallel), directory in product(topologies.items(), directories):
        config = configuration(
            Path(directory),
            rollout_batch_size=len(LENGTHS),
            max_tokens_per_gpu=24,
            use_rollout_routing_replay=True,
            enable_r3_correctness_check=True,
            r3_mismatch_threshold=1.0,
            **parallel,
        )
        hf = read_hf_facts(directory)
        with actor_of(config) as actor:
            slices, _ = slices_of(actor, config, hf, samples(hf, LENGTHS))
            old = actor.compute_log_probs(slices, "old_log_prob")
            actor.backward(slices, old, None)
            gradients = export_hf_weights(
                actor.model.bridge, actor.model.chunks, lambda p: getattr(p, "main_grad", p)
            )
            own = {name: g.detach().clone() for name, g in gradients}
            records = actor.collect_evidence(0)
        assert records and not any(
            r.rows_native + r.duplicate_rows + r.rows_recompute_differ for r in records
        )
        uids = torch.from_numpy(np.concatenate([s.token_uids for s in slices]))
        log_probs = torch.cat([old[s.microbatch_id] for s in slices])
        found[topology, directory] = {"uids": uids, "log_probs": log_probs, **own}
    return found


class Forced:
    """transformers in float32 with the experts that it is given, whatever its router chose."""

    def __init__(self, directory: Path, kind: str):
        declare_torchvision_ops()
        import transformers

        family = getattr(transformers, f"{kind}ForCausalLM")
        self.model = family.from_pretrained(directory, dtype=torch.float32).eval()
        self.routes = np.zeros(0)  # int[T, L, K]
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("Experts"):
                layer, block = int(name.split(".")[2]), name.rpartition(".")[0]
                gate = self.model.get_submodule(block).gate
                module.register_forward_pre_hook(self._force(layer, gate))

    def _force(self, layer: int, gate: torch.nn.Module):
        config = self.model.config

        def hook(module, given):
            hidden, index, weights = given
            chosen = torch.from_numpy(self.routes[:, layer].astype(np.int64))
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            if config.model_type == "glm4_moe":
                gates = logits.sigmoid().gather(1, chosen)
                gates = gates / gates.sum(-1, keepdim=True) * config.routed_scaling_factor
            elif getattr(config, "norm_topk_prob", True):
                gates = logits.gather(1, chosen).softmax(-1)
            else:
                gates = logits.softmax(-1).gather(1, chosen)
            return hidden, chosen.view(index.shape), gates.view(weights.shape)

        return hook

    def log_probs(self, tokens: np.ndarray, routes: np.ndarray) -> torch.Tensor:
        """Log-prob of each token but the first, float32[T-1]."""
        # the last token was never an input: any experts, nobody looks at its row
        self.routes = np.concatenate([routes, routes[-1:]])
        ids = torch.from_numpy(tokens).long()
        every = self.model(ids[None]).logits[0].log_softmax(-1)
        return every[:-1].gather(1, ids[1:, None])[:, 0]

    def gradients(self, directory: Path) -> dict[str, torch.Tensor]:
        """The gradients under the hub's names: saving takes fused experts apart."""
        for parameter in self.model.parameters():
            parameter.data = parameter.grad
        self.model.save_pretrained(directory)
        return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def forced(tmp_path_factory) -> tuple[Path, dict[str, tuple[dict, dict]]]:
    """Checkpoints, and of each {uid: log-prob} and the gradients under random routes."""
    directory, out = tmp_path_factory.mktemp("families"), {}
    for name, (kind, sizes) in SPARSE.items():
        make(directory / name, kind, sizes)
        batch = samples(read_hf_facts(directory / name), LENGTHS)
        model, by_uid, loss = Forced(directory / name, kind), {}, 0.0
        for s in batch:
            log_probs = model.log_probs(s.sample.token_ids, s.sample.routed_experts)
            uids = token_uids(s.sample.sample_id, s.sample.num_tokens)
            by_uid |= dict(zip(uids[:-1].tolist(), log_probs.tolist()))
            mask = torch.from_numpy(s.sample.loss_mask[1:])
            loss = loss - (torch.from_numpy(s.advantages[1:])[mask] * log_probs[mask]).sum()
        (loss / sum(response for _, response in LENGTHS)).backward()
        out[name] = by_uid, model.gradients(directory / f"{name} gradients")
    return directory, out


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", TOPOLOGIES)
def test_replayed_routes_give_the_log_probs_and_gradients_of_transformers(
    world_size, forced, tmp_path
):
    directory, expected = forced
    topologies, checkpoints = TOPOLOGIES[world_size], [str(directory / name) for name in SPARSE]
    ranks = in_ranks(world_size, tmp_path, replayed, checkpoints, topologies)
    for topology, (name, (by_uid, gradients)) in product(topologies, expected.items()):
        of_ranks = [rank[topology, str(directory / name)] for rank in ranks]
        seen = {}
        for rank in of_ranks:
            seen |= dict(zip(rank["uids"].tolist(), rank["log_probs"].tolist()))
        assert seen.keys() >= by_uid.keys(), (name, topology)
        error = max(abs(seen[uid] - wanted) for uid, wanted in by_uid.items())
        assert error < 2e-5, (name, topology, error)
        scale = torch.stack([g.square().mean() for g in gradients.values()]).mean().sqrt()
        for tensor, wanted in gradients.items():
            if tensor.endswith("e_score_correction_bias"):
                continue
            off = (of_ranks[0][tensor] - wanted).norm()
            size = max(float(wanted.norm()), 1e-3 * float(scale) * wanted.numel() ** 0.5)
            assert off <= 1e-4 * size, (name, topology, tensor, float(off / size))
