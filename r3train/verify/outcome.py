"""The outcome of one way of computing the batch, in tables that any two ways share.

Tables are aligned by flat batch row (sample and position), layer and canonical Hugging Face name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from r3train.verify.model_zoo import ModelVariant
from r3train.verify.oracle import ADAM, BIAS, SGD, Weights, loss_terms, run_batch
from r3train.verify.rollouts import RolloutBatch

# the passes whose routers are watched
OLD, TRAIN, RECOMPUTE = "old_log_prob", "train", "recompute"
TERMS = ("loss", "pg_loss", "kl", "entropy", "ratio", "ppo_kl", "clipped", "tis_weight")


@dataclass
class Outcome:
    """F batch rows, L layers, E experts.  Rows or layers that were not seen hold NaN (or False).

    chosen: pass -> bool[F, L, E]; seen: pass -> int[F, L], how often the row was routed there;
    logits, probs: pass -> float[F, L, E]; blocks: pass -> float[F, L, hidden]; log_probs: float[F];
    terms: sums of the loss's terms; deltas: "adam1", ... -> name -> tensor.
    """

    chosen: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    probs: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    log_probs: Tensor | None = None
    terms: dict[str, float] = field(default_factory=dict)
    num_tokens: float = 0.0
    gradients: Weights = field(default_factory=dict)
    grad_norm: float = 0.0
    deltas: dict[str, Weights] = field(default_factory=dict)
    exported: Weights = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)  # layer numbers expected in RECOMPUTE
    # layer number -> tokens counted for each expert's bias, summed over ranks
    loads: dict[int, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    route_bytes: list[int] = field(default_factory=list)  # sent to each rank


@dataclass(frozen=True)
class Scales:
    """Sums of absolute values: what an error in a sum of signed terms is measured against."""

    terms: dict[str, float]


def oracle_outcome(
    variant: ModelVariant, batch: RolloutBatch, source: Weights
) -> tuple[Outcome, Scales]:
    """Oracle (b): everything in float64, gradients by autograd, steps by torch.optim.

    source: float64 weights by Hugging Face name; they are left as they are.
    """
    out = Outcome()
    scales: dict[str, float] = {}
    for name in ("adam", "sgd"):
        weights = {n: t.clone().requires_grad_(not n.endswith(BIAS)) for n, t in source.items()}
        optimizer = _optimizer(name, [w for w in weights.values() if w.requires_grad])
        for step in (1, 2):
            if name == "sgd" and step == 1:  # the same weights, so the same gradients
                for n, gradient in out.gradients.items():
                    weights[n].grad = gradient.clone()
            else:
                for w in weights.values():  # experts without tokens have a gradient too: zero
                    w.grad = torch.zeros_like(w) if w.requires_grad else None
                new, entropy, traces = run_batch(weights, variant, batch)
                total, sums, scale = loss_terms(new, entropy, batch)
                num_tokens = int(batch.loss_mask.sum())
                (total / num_tokens).backward()
            if name == "adam" and step == 1:
                scales, first_traces = scale, traces
                _fill_tables(out, variant, traces)
                out.log_probs = new.detach()
                out.terms, out.num_tokens = sums, num_tokens
                out.gradients = {n: w.grad.clone() for n, w in weights.items() if w.requires_grad}
                squares = [g.square().sum() for g in out.gradients.values()]
                out.grad_norm = float(torch.stack(squares).sum().sqrt())
            optimizer.step()
            _update_expert_bias(weights, variant, first_traces if step == 1 else traces)
            out.deltas[f"{name}{step}"] = {n: w.detach() - source[n] for n, w in weights.items()}
    return out, Scales(scales)


def _optimizer(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]  # not decayed
    if name == "sgd":
        return torch.optim.SGD(matrices + vectors, lr=SGD.lr)
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=ADAM.lr,
        betas=(ADAM.adam_beta1, ADAM.adam_beta2),
        eps=ADAM.adam_eps,
        weight_decay=ADAM.weight_decay,
    )


def _update_expert_bias(weights: Weights, variant: ModelVariant, traces: list) -> None:
    """Auxiliary-loss-free balancing: bias += rate * sign(mean load - load), real rows alone.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    rate = variant.overrides.get("moe_router_bias_update_rate", 0.0)
    for name in weights:
        if name.endswith(BIAS):
            layer = int(name.split(".")[2])
            chosen = torch.cat([t.experts[layer].flatten() for t in traces])
            load = torch.bincount(chosen, minlength=variant.num_experts).double()
            weights[name] = weights[name] + rate * torch.sign(load.mean() - load)


def _fill_tables(out: Outcome, variant: ModelVariant, traces: list) -> None:
    def table(name: str) -> Tensor:
        layers = []
        for i in range(variant.num_layers):
            if i in getattr(traces[0], name):
                layers.append(torch.cat([getattr(t, name)[i].detach() for t in traces]))
            else:
                layers.append(None)
        some = next(x for x in layers if x is not None)
        empty = torch.full_like(some.double(), float("nan"))
        return torch.stack([empty if x is None else x.double() for x in layers], 1)

    experts = table("experts")
    chosen = torch.zeros(*experts.shape[:2], variant.num_experts, dtype=torch.bool)
    moe = [n - 1 for n in variant.moe_layer_numbers]
    chosen[:, moe] = chosen[:, moe].scatter(2, experts[:, moe].long(), True)
    for name in (OLD, TRAIN, RECOMPUTE):
        out.chosen[name] = chosen
        out.logits[name], out.probs[name] = table("logits"), table("probs")
        out.blocks[name] = table("blocks")


def read_outcome(
    directory: Path, variant: ModelVariant, batch: RolloutBatch, recompute: str
) -> Outcome:
    """Put together what the ranks of one case wrote down."""
    out = Outcome()
    ranks = [torch.load(p, weights_only=True) for p in sorted(directory.glob("rank*.pt"))]
    out.route_bytes = [rank["route_bytes"] for rank in ranks]
    num_rows, layers = len(batch.tokens), variant.num_layers
    row_of_token = torch.from_numpy(batch.row_of_token)
    rows = _rows_by_place(ranks, row_of_token)
    for name in (OLD, TRAIN, RECOMPUTE):
        out.chosen[name] = torch.zeros(num_rows, layers, variant.num_experts, dtype=torch.bool)
        out.seen[name] = torch.zeros(num_rows, layers, dtype=torch.int64)
        out.logits[name] = torch.full((num_rows, layers, variant.num_experts), float("nan"))
        out.probs[name] = out.logits[name].clone()
        out.blocks[name] = torch.full((num_rows, layers, 64), float("nan"))
    for rank in ranks:
        out.problems += [f"rank {rank['place']['rank']}: {p}" for p in rank["problems"]]
        for number, load in rank["loads"].items():
            out.loads[number] = out.loads.get(number, 0) + load
        if recompute != "none":
            out.recomputed |= _recomputed_layers(rank, recompute)
        for call in rank["calls"]:
            where = _batch_rows(out, rows, rank, call, call["logits"].shape[0])
            if where is not None:
                _add_call(out, call, where, variant)
        for block in rank["blocks"]:
            where = _batch_rows(out, rows, rank, block, block["output"].shape[0])
            if where is not None:
                real = where >= 0
                table = out.blocks[block["replay_pass"]]
                table[where[real], block["layer_number"] - 1] = block["output"][real]
    out.log_probs = torch.full((num_rows,), float("nan"))
    for rank in ranks:
        for part in rank["log_probs"]:
            where = row_of_token[part["tokens"]]
            out.log_probs[where[where >= 0]] = part["log_probs"][where >= 0]
    _read_step(out, directory)
    return out


def _read_step(out: Outcome, directory: Path) -> None:
    metrics = json.loads((directory / "adam.json").read_text())
    out.num_tokens = metrics[0]["num_loss_tokens"]
    out.terms = {name: metrics[0][name] * out.num_tokens for name in TERMS}
    out.grad_norm = metrics[0]["grad_norm"]
    files = {p.stem: load_file(p) for p in directory.glob("*.safetensors")}
    out.gradients = files.pop("grads", {})
    out.exported = files.pop("export", {})
    for name, weights in files.items():
        out.deltas[name] = {n: w.double() - out.exported[n].double() for n, w in weights.items()}


def _rows_by_place(ranks: Sequence[dict], row_of_token: Tensor) -> dict[tuple, list[Tensor]]:
    """(dp, cp, tp, pass) -> the batch rows (-1 padding) of each microbatch's router rows."""
    return {
        (*_place(rank), name): [row_of_token[tokens] for tokens in microbatches]
        for rank in ranks
        for name, microbatches in rank["rows"].items()
    }


def _place(rank: dict) -> tuple[int, int, int]:
    place = rank["place"]
    return place["dp_rank"], place["cp_rank"], place["tp_rank"]


def _batch_rows(out: Outcome, rows: dict, rank: dict, record: dict, num_rows: int) -> Tensor | None:
    microbatches = rows.get((*_place(rank), record["replay_pass"]), [])
    n = record["microbatch"]
    if not 0 <= n < len(microbatches) or len(microbatches[n]) != num_rows:
        out.problems.append(
            f"rank {rank['place']['rank']} layer {record['layer_number']}: {num_rows} rows of "
            f"microbatch {n} are not those of the first stage"
        )
        return None
    return microbatches[n]


def _add_call(out: Outcome, call: dict, where: Tensor, variant: ModelVariant) -> None:
    name = RECOMPUTE if call["stage"] == "recompute" else call["replay_pass"]
    layer = call["layer_number"] - 1
    real = where >= 0
    routing_map = call["routing_map"]
    out.seen[name].index_put_((where[real], torch.tensor(layer)), torch.tensor(1), accumulate=True)
    out.chosen[name][where[real], layer] |= routing_map[real]
    out.logits[name][where[real], layer] = call["logits"][real]
    out.probs[name][where[real], layer] = call["probs"][real]
    if not bool((routing_map[~real].sum(1) == variant.topk).all()):
        out.problems.append(f"layer {layer + 1}: a padding row without {variant.topk} experts")


def _recomputed_layers(rank: dict, recompute: str) -> set[int]:
    """Layers of this rank that run again in backward, from the blocks that its chunks hold."""
    chunks: dict[int, list[int]] = {}
    for block in rank["blocks"]:
        layers = chunks.setdefault(block["vp_stage"], [])
        if block["layer_number"] not in layers:
            layers.append(block["layer_number"])
    first = None if recompute == "all" else int(recompute.split()[1])
    return {n for layers in chunks.values() for n in sorted(layers)[:first]}


def route_errors(
    found: Outcome, reference: Outcome, variant: ModelVariant, rows: Tensor
) -> tuple[int, str]:
    """Phase 0: (row, layer) places whose experts are not exactly the reference's, and an example.

    rows: bool[F], whose experts are compared; every row must be routed exactly once all the same.
    """
    moe = np.array(variant.moe_layer_numbers) - 1
    errors, example = len(found.problems), next(iter(found.problems), "")
    for name in (OLD, TRAIN, RECOMPUTE):
        expected = [i for i in moe if name != RECOMPUTE or i + 1 in found.recomputed]
        times = torch.zeros_like(found.seen[name])
        times[:, expected] = 1
        wrong = found.seen[name] != times
        # the reference need not recompute: it must have chosen the same in its forward
        expected_sets = reference.chosen[TRAIN if name == RECOMPUTE else name]
        differs = (found.chosen[name] != expected_sets).any(-1)
        differs[~rows] = False
        wrong[:, expected] |= differs[:, expected]
        count = int(wrong.sum())
        if count and not example:
            row, layer = wrong.nonzero()[0].tolist()
            want = expected_sets[row, layer].nonzero().flatten().tolist()
            got = found.chosen[name][row, layer].nonzero().flatten().tolist()
            example = (
                f"{name}: row {row} layer {layer + 1}: experts {got}, expected {want}, routed "
                f"{int(found.seen[name][row, layer])} times"
            )
        errors += count
    for number, load in found.loads.items():
        expected_load = reference.chosen[TRAIN][:, number - 1].sum(0)
        # without all rows compared, those left out may differ
        if bool(rows.all()) and not torch.equal(load.long(), expected_load):
            errors += 1
            example = example or (
                f"layer {number} counts {load.long().tolist()} tokens for the expert biases, "
                f"expected {expected_load.tolist()}"
            )
    return errors, example
