"""Transformer Engine's FusedAdam where Megatron's use of it fails or takes too much memory.

Source: transformer_engine 2.12.0, ``pytorch/optimizers/fused_adam.py``; megatron-core 0.19.2, ``DistributedOptimizer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from r3train.patches import patch

# parameters whose moments are in float32 at once, while a step computes
AT_ONCE = 1 << 27


def mend(part: MegatronOptimizer) -> None:
    """Change one of the optimizers that Megatron wraps; one that is no FusedAdam stays as it is."""
    adam = part.optimizer
    if getattr(adam, "store_param_remainders", False):
        _save_whole_weights(part)
    moments = getattr(adam, "name_to_dtype_map", {})
    if any(moments[name] != torch.float32 for name in ("exp_avg", "exp_avg_sq") if moments):
        _step_in_parts(adam)


def create_state(adam: Any) -> None:
    """Create the state that the first step would."""
    for p in (p for group in adam.param_groups for p in group["params"]):
        if not adam.state[p]:
            adam.initialize_state(p, adam.store_param_remainders and p.dtype == torch.bfloat16)


def _save_whole_weights(part: Any) -> None:
    """Give checkpoints float32 weights: FusedAdam keeps the lower half of one, next to a bfloat16 weight.

    Megatron saves those halves as if they were weights.  It cannot load them, and another optimizer takes them
    for weights.
    """
    adam = part.optimizer
    read = part._get_main_param_and_optimizer_states
    write = part._set_main_param_and_optimizer_states

    def shard(p: torch.Tensor) -> torch.Tensor:
        group, place = part.model_param_group_index_map[p]
        return adam.param_groups[group]["params"][place]

    def read_whole(p: torch.Tensor) -> dict[str, torch.Tensor]:
        found = read(p)
        if found["param"].dtype == torch.int16:
            found["param"] = _upper(shard(p)).add_(found["param"]).view(torch.float32)
        return found

    def write_halves(p: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        weight = shard(p)
        if adam.state[weight]["master_param"].dtype == torch.int16:
            bits = states["param"].to(weight.device, torch.float32).view(torch.int32) - _upper(
                weight
            )
            # a weight in the middle of two of bfloat16 may have been rounded down: one bit of it is lost
            half = bits.clamp_(-(1 << 15), (1 << 15) - 1).to(torch.int16)
            states = states | {"param": half}
        write(p, states)

    for name, replacement, expects in (
        ("_get_main_param_and_optimizer_states", read_whole, "(model_param)"),
        ("_set_main_param_and_optimizer_states", write_halves, "(model_param, tensors)"),
    ):
        why = "Megatron saves the lower halves of weights as if they were weights"
        patch(part, name, replacement, expects=expects, why=why)


def _upper(weight: torch.Tensor) -> torch.Tensor:
    """Bits of bfloat16 weights as float32; the half next to them counts from there, up or down."""
    return weight.detach().view(torch.int16).to(torch.int32) << 16


def _step_in_parts(adam: Any) -> None:
    """Let a step compute some parameters after others: it makes float32 of all moments of a group."""
    step = adam.step

    def step_in_parts(*given: Any, **named: Any) -> None:
        groups = adam.param_groups
        adam.param_groups = [
            {**group, "params": part} for group in groups for part in _parts(group["params"])
        ]
        try:
            step(*given, **named)
        finally:
            adam.param_groups = groups
        for group in groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1

    why = "it makes float32 of all moments of a group at once"
    patch(adam, "step", step_in_parts, expects="(closure=None, grad_scaler=None)", why=why)


def _parts(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    size = 0
    for p in params:
        if part and size + p.numel() > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(p)
        size += p.numel()
    yield part
