"""A LoRA adapter as PEFT's two files: written for other programs, and read back by the trainer.

Each routed expert has factors of its own, under the names that the checkpoint gives its linears.  PEFT
reads that form, and so does SGLang.  Nothing is taken from a file that was not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from r3train.families.hf_facts import HfModelFacts
from r3train.config.files import load_json_object
from r3train.config.lora_settings import linear_of, LoraSection
from r3train.families import FAMILIES, tensor_names, weights_of
from r3train.hf_checkpoint import (
    check_export,
    read_header,
    replaced_directory,
    write_marker,
)

if TYPE_CHECKING:
    import torch

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_EXPERT_LINEARS = ("gate_proj", "up_proj", "down_proj")
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
# what another value than its first would add to B A x; keys that are missing have PEFT's default
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "init_lora_weights": (True, False, "gaussian", None),  # others have changed the base as well
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
}


def write_adapter(
    factors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    settings: LoraSection,
    hf: HfModelFacts,
    *,
    packed: bool = False,
) -> None:
    """Write an adapter's directory; one that is there is replaced once the new one is whole.

    factors: (PATH.lora_A, [rank, in]) and (PATH.lora_B, [out, rank]), PATH a linear's on disk: each of
    the base's targets once.  packed: for SGLang only, see ``_packed``; without it experts of one tensor on disk
    have no name.
    """
    from safetensors.torch import save_file

    assert packed or _without_name(settings, hf) is None
    expected = _expected(settings, hf)
    with replaced_directory(directory) as partial:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in factors:
            key = f"{_PREFIX}{name}{_SUFFIX}"
            shape = tuple(tensor.shape)
            assert (
                key not in tensors and expected.get(key) == shape
            ), f"{name} {shape}: twice, or wrong"
            tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
        assert len(tensors) == len(expected), f"{min(expected.keys() - tensors.keys())} is missing"
        if packed:
            tensors = _packed(tensors)
        save_file(tensors, partial / TENSORS, {"format": "pt"})
        config = dict(
            peft_type="LORA",
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(hf.path),
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules=sorted({name.split(".")[-3] for name in tensors}),
            inference_mode=True,
            fan_in_fan_out=False,
            init_lora_weights=True,
            modules_to_save=None,
            use_rslora=False,
            use_dora=False,
        )
        text = json.dumps(config, indent=1) + "\n"
        (partial / CONFIG).write_text(text, encoding="utf-8")
        facts = {"num_tensors": len(tensors), "num_bytes": sum(t.nbytes for t in tensors.values())}
        write_marker(partial, facts)


# Mixtral's names of what SGLang calls gate, up and down in every family
_SERVED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT_ID = re.compile(r"\.experts\.(\d+)\.")


def packed_name(name: str) -> str:
    """Return a tensor's name without its expert, and with SGLang's name of its linear."""
    parts = _EXPERT_ID.sub(".experts.", name).split(".")
    return ".".join(_SERVED.get(part, part) for part in parts)


def _packed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts of a layer: lora_A [experts, rank, in], lora_B [experts, out, rank].

    SGLang 0.5.23 serves both forms alike, bit for bit, and loads this one about 12 times as fast (48
    layers of 128 experts: 672 tensors and not 37,248).  PEFT does not read it.
    """
    import torch

    packed: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT_ID.search(name)
        if expert is None:
            packed[packed_name(name)] = tensor
        else:
            experts.setdefault(packed_name(name), {})[int(expert[1])] = tensor
    for name, expert_tensors in experts.items():
        packed[name] = torch.stack([expert_tensors[e] for e in range(len(expert_tensors))])
    return packed


def _without_name(settings: LoraSection, hf: HfModelFacts) -> str | None:
    """Return why an adapter's files could not hold one of these settings, or None."""
    whole_layers = [n for n in settings.targets(tensor_names(hf)) if not n.endswith(_SUFFIX)]
    if not whole_layers:
        return None
    return f"PEFT's files have no name for one expert's part of {min(whole_layers)}"


def not_in_peft(settings: LoraSection, hf: HfModelFacts) -> str | None:
    """Return why PEFT would not read an adapter of these settings, or drop a part of it; or None.

    Source: peft 0.21.2 with transformers 5.19: where a model has fused experts and they are among the
    targets, it takes every gate_proj, up_proj and down_proj for theirs; in some models in any case.
    """
    targets, family = settings.targets(tensor_names(hf)), FAMILIES[hf.model_type]
    for name in sorted(targets):
        if (reason := family.unread_by_peft.get(linear_of(name))) is not None:
            return f"PEFT does not read the adapter of {name.removesuffix(_SUFFIX)}: {reason}"
    routed = family.peft_fuses_experts or any(".experts." in name for name in targets)
    dense_targets = [n for n in targets if linear_of(n) in _EXPERT_LINEARS and ".experts." not in n]
    if dense_targets and routed:
        return f"PEFT drops the adapter of {min(dense_targets).removesuffix(_SUFFIX)}"
    return _without_name(settings, hf)


def saved_forms(settings: LoraSection, hf: HfModelFacts) -> tuple[bool, bool]:
    """Return (is a merged checkpoint written, is a PEFT adapter) by --save-hf."""
    if not settings.enabled:
        return True, False
    form = "merged" if not_in_peft(settings, hf) else settings.lora_save_hf
    return form != "adapter", form != "merged"


def check_adapter(settings: LoraSection, hf: HfModelFacts) -> None:
    """Raise ValueError unless --lora-adapter-path holds what these settings would train.

    Rank, alpha and the adapted linears must be the same.  Headers alone are read, but of an adapter that a run
    has written: its files must be those that were written.
    """
    directory = settings.lora_adapter_path
    if directory is None:
        return
    if (reason := _without_name(settings, hf)) is not None:
        raise ValueError(f"--lora-adapter-path: {reason}; add --exclude-modules experts")
    file = directory / CONFIG
    _check_config(file, load_json_object(file), settings)
    found = {name: kind.shape for name, kind in read_header(directory / TENSORS).items()}
    expected = _expected(settings, hf)
    if any(".base_layer." in name for name in found):
        raise ValueError(
            f"{directory / TENSORS}: holds experts fused as transformers has them in memory; expected"
            " one pair of factors an expert (mlp.experts.0.gate_proj.lora_A)"
        )
    for names, words in (
        (expected.keys() - found.keys(), "missing, and --target-modules wants it"),
        (found.keys() - expected.keys(), "not among --target-modules"),
    ):
        if names:
            first = sorted(names)[0]
            raise ValueError(f"{directory / TENSORS}: {first} is {words} ({len(names)} such)")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{directory / TENSORS}: {name} is {list(found[name])}, expected {list(shape)}"
            )
    check_export(directory, weights=True)


def _check_config(file: Path, config: Mapping[str, Any], settings: LoraSection) -> None:
    for key, ours, flag in (
        ("r", settings.lora_rank, "--lora-rank"),
        ("lora_alpha", settings.lora_alpha, "--lora-alpha"),
    ):
        if config.get(key) != ours:
            raise ValueError(f"{file}: {key} is {config.get(key)!r}, and {flag} is {ours!r}")
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise ValueError(
                f"{file}: {key} is {config[key]!r}: the trainer computes plain LoRA, in which it is"
                f" {plain[0]!r}"
            )


def _expected(settings: LoraSection, hf: HfModelFacts) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the files' tensors."""
    targets, rank, expected = settings.targets(tensor_names(hf)), settings.lora_rank, {}
    for name, path, (rows, columns) in weights_of(hf).linears():
        if name in targets:
            expected[f"{_PREFIX}{path}.lora_A{_SUFFIX}"] = (rank, columns)
            expected[f"{_PREFIX}{path}.lora_B{_SUFFIX}"] = (rows, rank)
    return expected


class AdapterFile:
    """The factors of an adapter's directory, each read when it is asked for."""

    def __init__(self, directory: Path):
        self._file = directory / TENSORS
        self._tensors = safe_open(self._file, "pt")

    def whole(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """Return a factor: PATH.lora_A, [rank, in], or PATH.lora_B, [out, rank]."""
        tensor = self._tensors.get_tensor(f"{_PREFIX}{name}{_SUFFIX}")
        assert tuple(tensor.shape) == shape, (self._file, name, tensor.shape, shape)
        return tensor
