"""Hold one outcome against another, phase by phase; the largest error counts, never the mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from r3train.verify.model_zoo import ModelVariant
from r3train.verify.training_outcome import PASSES, RECOMPUTE, TRAIN, Outcome, route_errors

ROUTES, FORWARD, LOSS, GRADIENTS, DELTAS, EXPORT = range(6)
PHASE_NAMES = ("routes", "forward", "loss", "gradients", "deltas", "export")
# Float32: relative L2, the maximum over layers and parameters.  The threshold is NOISE_FACTOR times
# the noise measured in the same run, and never above the gate.  Phases 0 and 5 are exact.
GATES = {FORWARD: 1e-5, LOSS: 1e-6, GRADIENTS: 1e-4, DELTAS: 1e-3}
NOISE_FACTOR = 10.0
# bfloat16 weights and activations; steps are not compared (their size is below bfloat16's)
BF16_THRESHOLDS = {ROUTES: 0.0, FORWARD: 0.05, LOSS: 0.02, GRADIENTS: 0.3, EXPORT: 0.0}
# a planted bug must miss the threshold of its phase by this factor
REQUIRED_FACTOR = 10.0
# a parameter that hardly moves is measured against this share of the typical size per element
_SMALL = 1e-3
# and a step against no less than this many float32 roundings of the weight that it changed
_ROUNDINGS = 1e4 * 2.0**-24


@dataclass(frozen=True)
class PhaseError:
    """The largest relative error of a phase and where it is."""

    phase: int
    error: float
    where: str


def compare(
    found: Outcome,
    reference: Outcome,
    variant: ModelVariant,
    scales: dict[str, float],
    checkpoint: dict[str, Tensor],
    *,
    last_phase: int,
    rows: Tensor | None = None,
) -> dict[int, PhaseError]:
    """Errors of ``found`` against ``reference`` in every phase that was run.

    rows: bool[F], the batch rows whose routes and activations count; all unless given.
    """
    if rows is None:
        rows = torch.ones(found.log_probs.shape, dtype=torch.bool)
    count, example = route_errors(found, reference, variant, rows)
    errors = {
        ROUTES: PhaseError(ROUTES, float(count), example),
        FORWARD: worst(FORWARD, _forward(found, reference, variant, rows)),
        LOSS: worst(LOSS, _loss(found, reference, scales)),
        GRADIENTS: worst(GRADIENTS, _gradients(found, reference)),
    }
    if last_phase >= DELTAS:
        errors[DELTAS] = worst(DELTAS, _deltas(found, reference, checkpoint))
    if found.exported:
        errors[EXPORT] = _export(found, checkpoint)
    return errors


def worst(phase: int, errors: Iterable[tuple[float, str]]) -> PhaseError:
    """NaN is the worst of all: something was not computed."""
    error, where = max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0])
    return PhaseError(phase, math.inf if math.isnan(error) else error, where)


def relative_l2(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference| in float64; NaN where a row was not seen."""
    found, reference = found.double(), reference.double()
    return float((found - reference).norm() / reference.norm().clamp_min(1e-30))


def _forward(
    found: Outcome, reference: Outcome, variant: ModelVariant, rows: Tensor
) -> Iterator[tuple[float, str]]:
    yield relative_l2(found.log_probs[rows], reference.log_probs[rows]), "log-probs"
    layers = range(1, variant.num_layers + 1)
    routers = variant.moe_layer_numbers
    for name in PASSES:
        numbers_of = dict(logits=routers, probs=routers, blocks=layers)
        if name == RECOMPUTE:
            numbers_of = dict(logits=found.recomputed, probs=found.recomputed)
        for table, numbers in numbers_of.items():
            mine, theirs = getattr(found, table)[name], getattr(reference, table)[TRAIN]
            for n in numbers:
                label = "output" if table == "blocks" else table
                error = relative_l2(mine[rows, n - 1], theirs[rows, n - 1])
                yield error, f"{name} {label} of layer {n}"


def _loss(
    found: Outcome, reference: Outcome, scales: dict[str, float]
) -> Iterator[tuple[float, str]]:
    """Sums of the terms, against the sums of their absolute values; the token count exactly."""
    for name in found.terms:
        if scales[name] > 0:
            yield abs(found.terms[name] - reference.terms[name]) / scales[name], name
    yield abs(found.num_tokens - reference.num_tokens), "token count"


def relative_by_name(
    found: dict[str, Tensor],
    reference: dict[str, Tensor],
    label: str,
    weights: dict[str, Tensor] | None = None,
) -> list[tuple[float, str]]:
    """Relative L2 of every parameter; names missing on either side are infinitely wrong."""
    total = torch.stack([t.double().square().sum() for t in reference.values()]).sum()
    elements = sum(t.numel() for t in reference.values())
    typical = float((total / elements).sqrt())
    errors = [(math.inf, f"{label}{name} is missing") for name in set(found) ^ set(reference)]
    for name in set(found) & set(reference):
        a, b = found[name].double(), reference[name].double()
        size = max(float(b.norm()), _SMALL * typical * b.numel() ** 0.5)
        if weights is not None:
            size = max(size, _ROUNDINGS * float(weights[name].double().norm()))
        errors.append((float((a - b).norm()) / size, label + name))
    return errors


def _gradients(found: Outcome, reference: Outcome) -> Iterator[tuple[float, str]]:
    yield from relative_by_name(found.gradients, reference.gradients, "")
    yield abs(found.grad_norm - reference.grad_norm) / reference.grad_norm, "grad norm"


def _deltas(
    found: Outcome, reference: Outcome, checkpoint: dict[str, Tensor]
) -> Iterator[tuple[float, str]]:
    for step, deltas in reference.deltas.items():
        yield from relative_by_name(found.deltas[step], deltas, f"{step} ", checkpoint)


def _export(found: Outcome, checkpoint: dict[str, Tensor]) -> PhaseError:
    """Exported tensors that are not the checkpoint's, bit for bit."""
    wrong = [
        name
        for name in set(found.exported) | set(checkpoint)
        if name not in found.exported
        or name not in checkpoint
        or found.exported[name].dtype != checkpoint[name].dtype
        or not torch.equal(found.exported[name], checkpoint[name])
    ]
    return PhaseError(EXPORT, float(len(wrong)), min(wrong, default=""))
