"""Hugging Face's own model: the log-probs of a text, and the scores by which its routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3train.cpu.torchvision_stub import declare_torchvision_ops
from r3train.doctor.judgement import Expected, Reference
from r3train.hf_checkpoint import read_transformers_config

if TYPE_CHECKING:
    import torch


def model_class(config: Any) -> Any:
    """transformers' class of a language model, or of the whole model of text and images that has it inside."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def load_reference(path: Path, *, bf16: bool) -> Reference:
    """Load a checkpoint of any verified family; returns its forward of int32[T]."""
    declare_torchvision_ops()
    import torch

    config = read_transformers_config(path)
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = (
        model_class(config)
        .from_pretrained(path, config=config, dtype=dtype, local_files_only=True)
        .eval()
    )
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # a Mamba mixer of transformers takes no step below time_step_min; releases' own code and SGLang's do
            module.time_step_limit = (0.0, float("inf"))
    layers: list[torch.Tensor] = []  # of the forward that runs, in the order of the layers
    for name, router in model.named_modules():
        if type(router).__name__.endswith("Router"):
            owner = model.get_submodule(name.rpartition(".")[0])
            router.register_forward_hook(_note_scores(layers, config.get_text_config(), owner))

    @torch.no_grad()
    def forward(ids: np.ndarray) -> Expected:
        layers.clear()
        out = model(torch.from_numpy(ids).long()[None])
        every = out.logits[0].float().log_softmax(-1)[:-1]
        chosen = every.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
        log_probs = np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)
        scores = torch.stack(layers, dim=1)[:-1].numpy() if layers else None
        return Expected(log_probs, scores)

    return forward


def _note_scores(layers: list[torch.Tensor], config: Any, owner: torch.nn.Module):
    """Return a hook for a router of transformers, which gives (logits, gates, experts)."""

    def hook(router: torch.nn.Module, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        logits, _gates, experts = out
        # MiniMax-M2 has the bias next to its router
        bias = getattr(router, "e_score_correction_bias", None)
        bias = getattr(owner, "e_score_correction_bias", None) if bias is None else bias
        layers.append(_scores(logits.flatten(0, -2).float(), bias, config, experts.shape[-1]))

    return hook


def _scores(
    logits: torch.Tensor, bias: torch.Tensor | None, config: Any, topk: int
) -> torch.Tensor:
    """Scores float32[T, E] whose top-k are the experts of router logits float32[T, E].

    A bias float32[E] is added to sigmoids.  With groups, an expert of a group that is not chosen has at
    most the score of the last expert chosen, less the distance of its group to the last one chosen: where two
    groups tie, so do their best experts.
    """
    import torch

    if bias is None:
        return logits
    scores = logits.sigmoid() + bias.float()
    groups = getattr(config, "n_group", None) or 1
    if groups == 1:
        return scores
    of_groups = scores.view(len(scores), groups, -1)
    ranks = of_groups.topk(2, -1).values.sum(-1)
    last = ranks.topk(config.topk_group, -1).values[:, -1:]
    distance = (last - ranks).clamp(min=0).repeat_interleave(of_groups.shape[-1], 1)
    inside = scores.masked_fill(distance > 0, -torch.inf).topk(topk, -1).values[:, -1:]
    return scores.where(distance == 0, torch.minimum(scores, inside) - distance)
