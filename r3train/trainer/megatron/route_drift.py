"""The router's drift away from the replayed experts, by layer, for the metrics (--log-route-drift).

Counted in the rollout's first forwards, before a step changes a weight.  Sums stay on the device; they are
added up over ranks and read once per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from r3train.routing.agreement import drift_of_layer, shared_experts

# a layer's sums, before those of its experts' load: rows, rows that left, gate mass
_NUM_SUMS = 3


class RouteDrift:
    """Sums over the router calls of a step; exists only if the drift is logged.

    moe_layers: 1-based numbers of all MoE layers, on whatever rank.  counts_tokens: False on a rank
    that sees a copy of another rank's tokens.
    """

    def __init__(
        self,
        moe_layers: Sequence[int],
        num_experts: int,
        device: torch.device,
        *,
        counts_tokens: bool,
    ):
        self._place = {number: i for i, number in enumerate(moe_layers)}
        self._counts_tokens = counts_tokens
        size = len(moe_layers), _NUM_SUMS + num_experts
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        layer_number: int,
        live: torch.Tensor,
        replayed: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor],
        counted: torch.Tensor,
    ) -> None:
        """Add a call.

        live, replayed: int64[m, K], the live top-k and the rollout's; gates: their gate values,
        float[m, K] each, up to a factor a row; counted: bool[m], rows that the rollout recorded.
        """
        if not self._counts_tokens:
            return
        sums, weight = self._sums[self._place[layer_number]], counted.double()
        live_gates, replayed_gates = (g.double().sum(1) for g in gates)
        sums[0] += weight.sum()
        sums[1] += ((shared_experts(live, replayed) < live.shape[1]) & counted).sum()
        # a row that is not counted may hold anything
        mass = torch.where(counted, replayed_gates / live_gates.clamp_min(1e-30), 0.0)
        sums[2] += mass.sum()
        load = weight[:, None].expand_as(live)
        sums[_NUM_SUMS:].scatter_add_(0, live.reshape(-1), load.reshape(-1))

    def collect(self) -> dict[str, float]:
        """Return the step's metrics, by layer and their means, and begin anew; a collective."""
        dist.all_reduce(self._sums)
        table = self._sums.to("cpu", copy=True)
        self._sums.zero_()
        layers = {}
        for number, i in self._place.items():
            rows, left, mass = table[i, :_NUM_SUMS].tolist()
            if rows:
                layers[number] = drift_of_layer(rows, left, mass, table[i, _NUM_SUMS:])
        if not layers:
            return {}
        names = next(iter(layers.values()))
        means = {
            f"r3/drift_{n}": sum(values[n] for values in layers.values()) / len(layers)
            for n in names
        }
        return means | {
            f"r3/drift_{name}_layer_{number}": value
            for number, values in layers.items()
            for name, value in values.items()
        }
