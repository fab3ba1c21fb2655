"""Parameters that training leaves as they are: --freeze-moe-router, --freeze-params.

A frozen parameter has no gradient and no place in the optimizer, so weight decay does not move it
either.  Every weight update still sends it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.families.weights import ModelWeights
from r3train.hf_checkpoint import read_headers

if TYPE_CHECKING:
    import torch


def check_freezing(config: RunConfig, hf: HfModelFacts) -> None:
    """Raise ValueError for a --freeze-params that no tensor of the checkpoint matches.

    With --save also for one that matches some experts of a layer: a checkpoint of Megatron has the
    moments of a layer's experts as one tensor.  Reads the checkpoint's headers only.
    """
    patterns = config.trainer.freeze_params
    names = read_headers(hf.path) if patterns else {}
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            shown = ", ".join(sorted(names)[:2])
            raise ValueError(
                f"--freeze-params {pattern!r} matches none of the {len(names)} tensors of {hf.path} "
                f"({shown}, ...)"
            )
    if patterns and config.checkpoint.save is not None:
        _check_whole_layers(patterns, names)


def _check_whole_layers(patterns: Sequence[str], names: Collection[str]) -> None:
    frozen: dict[str, list[bool]] = {}
    for name in names:
        layer = re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
        frozen.setdefault(layer, []).append(any(re.search(r, name) for r in patterns))
    for layer, experts in frozen.items():
        if any(experts) and not all(experts):
            raise ValueError(
                f"--freeze-params matches {sum(experts)} of the {len(experts)} tensors {layer}: --save "
                "holds their moments as one, match all or none of them"
            )


def freeze(config: RunConfig, weights: ModelWeights, chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze parameters of this rank's chunks; call it before they are wrapped for data parallelism.

    Raises ValueError where an expression matches some of the tensors that Megatron holds in one
    parameter (query, key and value; gate and up), and where nothing is left to train.
    """
    trainer = config.trainer
    if not (trainer.freeze_moe_router or trainer.freeze_params):
        return
    # it imports megatron-core, which the checks of a start do without
    from r3train.trainer.megatron.hf_weights import chunk_weights

    for chunk in chunks:
        for one in chunk_weights(weights, chunk):
            names = one.hf.names
            matched = [n for n in names if any(re.search(r, n) for r in trainer.freeze_params)]
            if matched and matched != names:
                rest = ", ".join(n for n in names if n not in matched)
                raise ValueError(
                    f"--freeze-params matches {', '.join(matched)} and not {rest}: Megatron holds them "
                    "in one parameter, match all or none of them"
                )
            if matched and one.is_parameter:
                one.tensor.requires_grad_(False)
        if trainer.freeze_moe_router:
            for name, parameter in chunk.named_parameters():
                if ".mlp.router." in name or name.endswith(".shared_experts.gate_weight"):
                    parameter.requires_grad_(False)
        let_gradients_pass(chunk)
    if not any(p.requires_grad for chunk in chunks for p in chunk.parameters()):
        raise ValueError(
            "--freeze-params and --freeze-moe-router leave a rank without a parameter to train"
        )


def let_gradients_pass(chunk: torch.nn.Module) -> None:
    """Make the output of a frozen embedding require a gradient.

    Megatron recomputes a layer only if its input requires one: after a frozen embedding all layers of
    the stage would silently train on no gradient at all.
    """
    import torch

    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
        embedding.register_forward_hook(
            lambda module, args, out: out.requires_grad_() if torch.is_grad_enabled() else None
        )
