"""The outcome of one way of computing the batch, in tables that any two ways share.

Tables are aligned by flat batch row (sample and position), layer and canonical Hugging Face name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from r3train.verify.model_zoo import HIDDEN, ModelVariant
from r3train.verify.oracle import ADAM, BIAS, SGD, SampleTrace, Weights, loss_terms, run_batch
from r3train.verify.rollouts import RolloutBatch

# the passes whose routers are watched
PASSES = OLD, TRAIN, RECOMPUTE = "old_log_prob", "train", "recompute"
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


def oracle_outcome(
    variant: ModelVariant, batch: RolloutBatch, source: Weights
) -> tuple[Outcome, dict[str, float]]:
    """Oracle (b): everything in float64, gradients by autograd, steps by torch.optim.

    source: float64 weights by Hugging Face name; they are left as they are.  The second result is
    the sum of absolute values of every term of the loss, which an error in its sum is measured by.
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
    return out, scales


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


def _update_expert_bias(weights: Weights, variant: ModelVariant, traces: list[SampleTrace]) -> None:
    """Auxiliary-loss-free balancing: bias += rate * sign(mean load - load), real rows only.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    rate = variant.overrides.get("moe_router_bias_update_rate", 0.0)
    for name in weights:
        if name.endswith(BIAS):
            layer = int(name.split(".")[2])
            chosen = torch.cat([t.experts[layer].flatten() for t in traces])
            load = torch.bincount(chosen, minlength=variant.num_experts).double()
            weights[name] = weights[name] + rate * torch.sign(load.mean() - load)


def _fill_tables(out: Outcome, variant: ModelVariant, traces: list[SampleTrace]) -> None:
    """The oracle's tables; every pass gives the same, for the weights are the same."""

    def filled(table: Tensor, values: str) -> Tensor:
        for i in getattr(traces[0], values):
            table[:, i] = torch.cat([getattr(t, values)[i].detach() for t in traces])
        return table

    num_rows = sum(len(t.blocks[0]) for t in traces)
    tables = _empty_tables(num_rows, variant, torch.float64)
    logits, probs, blocks = (filled(tables[n], n) for n in ("logits", "probs", "blocks"))
    chosen = tables["chosen"]
    for i in traces[0].experts:
        experts = torch.cat([t.experts[i] for t in traces])
        chosen[:, i] = chosen[:, i].scatter(1, experts, True)
    for name in PASSES:
        out.chosen[name], out.logits[name] = chosen, logits
        out.probs[name], out.blocks[name] = probs, blocks


def _empty_tables(num_rows: int, variant: ModelVariant, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tables of one pass in which nothing was seen."""

    def unseen(width: int) -> Tensor:
        return torch.full((num_rows, variant.num_layers, width), float("nan"), dtype=dtype)

    return dict(
        chosen=torch.zeros(num_rows, variant.num_layers, variant.num_experts, dtype=torch.bool),
        seen=torch.zeros(num_rows, variant.num_layers, dtype=torch.int64),
        logits=unseen(variant.num_experts),
        probs=unseen(variant.num_experts),
        blocks=unseen(HIDDEN),
    )


def read_outcome(
    directory: Path, variant: ModelVariant, batch: RolloutBatch, recomputed: Sequence[int]
) -> Outcome:
    """Put together the records of one case's ranks.

    recomputed: numbers of the layers whose routers run again in backward.
    """
    out = Outcome(recomputed=set(recomputed))
    ranks = [torch.load(p, weights_only=True) for p in sorted(directory.glob("rank*.pt"))]
    out.route_bytes = [rank["route_bytes"] for rank in ranks]
    for name in PASSES:
        for table, values in _empty_tables(len(batch.tokens), variant, torch.float32).items():
            getattr(out, table)[name] = values
    row_of_token = torch.from_numpy(batch.row_of_token)
    # (dp, cp, tp, pass) -> batch rows (-1: padding) of each microbatch, as the first stage saw them
    rows = {
        (*_place(rank), name): [row_of_token[tokens] for tokens in microbatches]
        for rank in ranks
        for name, microbatches in rank["rows"].items()
    }
    out.log_probs = torch.full((len(batch.tokens),), float("nan"))
    for rank in ranks:
        problems = list(rank["problems"])
        for number, load in rank["loads"].items():
            out.loads[number] = out.loads.get(number, 0) + load
        for record in rank["records"]:
            microbatches = rows.get((*_place(rank), record["replay_pass"]), [])
            _add_record(out, record, microbatches, variant, problems)
        for part in rank["log_probs"]:
            where = row_of_token[part["tokens"]]
            out.log_probs[where[where >= 0]] = part["log_probs"][where >= 0]
        out.problems += [f"rank {rank['place']['rank']}: {p}" for p in problems]
    _read_step(out, directory)
    return out


def _add_record(
    out: Outcome,
    record: dict[str, Any],
    microbatches: list[Tensor],
    variant: ModelVariant,
    problems: list[str],
) -> None:
    """Enter the rows of one router call or block into the tables of its pass."""
    number, n = record["layer_number"], record["microbatch"]
    num_rows = len(next(iter(record["tables"].values())))
    if not 0 <= n < len(microbatches) or len(microbatches[n]) != num_rows:
        problems.append(
            f"layer {number}: {num_rows} rows of microbatch {n} are not those of the first stage"
        )
        return
    rows = microbatches[n]
    name = RECOMPUTE if record["is_recomputation"] else record["replay_pass"]
    for table, values in record["tables"].items():
        getattr(out, table)[name][rows[rows >= 0], number - 1] = values[rows >= 0]
    chosen = record["tables"].get("chosen")
    if chosen is not None:
        place = rows[rows >= 0], torch.tensor(number - 1)
        out.seen[name].index_put_(place, torch.tensor(1), accumulate=True)
        if not bool((chosen[rows < 0].sum(1) == variant.topk).all()):
            problems.append(f"layer {number}: a padding row without {variant.topk} experts")


def _read_step(out: Outcome, directory: Path) -> None:
    metrics = json.loads((directory / "adam.json").read_text(encoding="utf-8"))
    out.num_tokens = metrics[0]["num_loss_tokens"]
    out.terms = {name: metrics[0][name] * out.num_tokens for name in TERMS}
    out.grad_norm = metrics[0]["grad_norm"]
    files = {p.stem: load_file(p) for p in directory.glob("*.safetensors")}
    out.gradients = files.pop("grads", {})
    out.exported = files.pop("export", {})
    for name, weights in files.items():
        out.deltas[name] = {n: w.double() - out.exported[n].double() for n, w in weights.items()}


def _place(rank: dict) -> tuple[int, int, int]:
    place = rank["place"]
    return place["dp_rank"], place["cp_rank"], place["tp_rank"]


def route_errors(
    found: Outcome, reference: Outcome, variant: ModelVariant, rows: Tensor
) -> tuple[int, str]:
    """Phase 0: (row, layer) places whose experts are not exactly the reference's, and an example.

    rows: bool[F], whose experts are compared; every row must be routed exactly once all the same.
    """
    moe = np.array(variant.moe_layer_numbers) - 1
    errors, example = len(found.problems), next(iter(found.problems), "")
    for name in PASSES:
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
