"""LoRA: low-rank adapters are trained, and the checkpoint's own weights stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from r3train.config.requirements import excludes, only_with, Requirement, requires
from r3train.config.section import Section

ALL_LINEAR = "all-linear"
# names on disk: of attention; of latent attention, where the first of each two compresses queries, or keys with
# values, and the second spreads them; of delta nets and Mamba mixers; of MLPs and experts, Mixtral's w1 (gate), w3
# (up) and w2 (down); of experts in one tensor a layer
LINEARS = tuple(
    "q_proj k_proj v_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
    " in_proj in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj"
    " gate_proj up_proj down_proj w1 w3 w2 gate_up_proj".split()
)


def linear_of(name: str) -> str:
    """Return the last part of a linear's name, given its weight's; of a tensor of experts there is no more."""
    return name.removesuffix(".weight").rpartition(".")[2]


class LoraSection(Section):
    """Low-rank adapters instead of the weights themselves."""

    title: ClassVar[str] = "LoRA"
    every_field: ClassVar[tuple[Requirement, ...]] = (only_with("lora_rank > 0"),)

    lora_rank: Annotated[
        int,
        excludes("transformer_overrides.moe_router_bias_update_rate: it moves routers"),
        excludes("transformer_overrides.moe_shared_expert_overlap: it leaves adapters out"),
    ] = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the weights themselves."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """An adapter adds lora_alpha / lora_rank * B A x to its linear's output."""
    target_modules: tuple[str, ...] = Field(default=(ALL_LINEAR,), strict=False, min_length=1)
    """Linears that get an adapter, by their names on disk (q_proj, o_proj, gate_proj, ...), or
    all-linear: attention, delta nets, Mamba mixers, dense layers, shared experts, and one adapter for
    each routed expert."""
    exclude_modules: tuple[str, ...] = Field(default=(), strict=False)
    """Linears that get none: their names, or those of modules above them (experts, self_attn,
    layers.0)."""
    lora_adapter_path: Path | None = Field(default=None, strict=False)
    """Directory of a PEFT adapter to start from."""
    lora_serving: Annotated[
        Literal["merged", "adapter"],
        requires("has_engines", when="adapter"),
        excludes(
            "rollout_external_engine_addrs or rollout_engines_file: they may hold another base"
        ),
    ] = "merged"
    """Form in which servers get the adapters.  merged: merged into the weights.  adapter: as adapters, one
    per weight version; an update pauses nothing, and every answer keeps one version."""
    lora_save_hf: Annotated[Literal["both", "merged", "adapter"], requires("save_hf")] = "both"
    """Form that save_hf writes: a merged checkpoint with the PEFT adapter in its directory adapter,
    or one of the two only."""

    @field_validator("target_modules")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = (ALL_LINEAR, *LINEARS)
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"{unknown[0]} is unknown; known: {', '.join(known)}")
        return value

    @property
    def enabled(self) -> bool:
        """True when adapters are trained."""
        return self.lora_rank > 0

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.lora_alpha / self.lora_rank

    def targets(self, names: Iterable[str]) -> frozenset[str]:
        """Return those tensors of a checkpoint that get an adapter, by their names on disk."""
        return frozenset(name for name in names if self._is_target(name))

    def _is_target(self, name: str) -> bool:
        path, leaf = name.removesuffix(".weight"), linear_of(name)
        wanted = leaf in (LINEARS if ALL_LINEAR in self.target_modules else self.target_modules)
        if leaf not in LINEARS or not wanted:
            return False
        return not any(f".{module}." in f".{path}." for module in self.exclude_modules)
