"""Model families whose numbers were compared with transformers; every other one is refused by name.

A family is one file here, found by its name.  It says what config.json must have, which weights there are
(``weights``, ``weight_rows``) and what its tiny model is; names, shapes, loading, export and the cases of the tests
follow from that.  Never imports torch: the doctor and a dry run read it.
"""

from __future__ import annotations

from collections.abc import Set
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from r3train.config.files import load_json_object
from r3train.families.hf_facts import HfModelFacts
from r3train.families.family import Family, model_weights
from r3train.families.tiny_options import TinyModel, TinyOptions
from r3train.families.weights import ModelWeights, Shape, Weight

# modules of this room that are no family
_SHARED = set("family hf_facts read_facts weight_rows tiny_options transformer weights".split())


def _registered() -> dict[str, Family]:
    """Return every family by its file's name: config.json's model_type, and in capitals its record."""
    names = sorted({m.name for m in iter_modules(__path__) if not m.ispkg} - _SHARED)
    return {name: getattr(import_module(f"{__name__}.{name}"), name.upper()) for name in names}


FAMILIES = _registered()
# a family may have several
TINY_MODELS: dict[str, TinyModel] = {
    name: model for family in FAMILIES.values() for name, model in family.tiny.items()
}
# a matrix in fp8 has a scale for each block of so many rows and columns, in the tensor NAME + FP8_SCALE
FP8_BLOCK, FP8_SCALE = 128, "_scale_inv"
# those of families without experts, and with
DENSE_NAMES = tuple(name for f in FAMILIES.values() for name in f.tiny if not f.has_experts)
TINY_NAMES = tuple(name for name in TINY_MODELS if name not in DENSE_NAMES)


def tiny_model_of(options: TinyOptions) -> TinyModel:
    """Return what the options make; of a family with experts, without any, a dense Qwen3."""
    is_qwen3 = options.family in TINY_NAMES and not options.num_experts
    return TINY_MODELS["qwen3" if is_qwen3 else options.family]


def weights_of(hf: HfModelFacts) -> ModelWeights:
    """Return the weights of a checkpoint of a verified family."""
    return model_weights(FAMILIES[hf.model_type], hf)


def tensor_shapes(hf: HfModelFacts) -> dict[str, Shape]:
    """Return the shape of every tensor that the actor loads and exports, by its name on disk."""
    return weights_of(hf).shapes()


def float32_tensors(hf: HfModelFacts) -> Set[str]:
    """Return the names of the tensors that keep float32 in an actor of bfloat16."""
    weights = weights_of(hf)
    rows = ((prefix, t) for weight, prefix in weights.rows() if weight.float32 for t in weight.disk)
    return {name for prefix, tensor in rows for name in weights.names(prefix, tensor)}


def is_quantised(weight: Weight) -> bool:
    """Return True for a linear of attention, an MLP or experts: servers of fp8 hold it in blocks, and nothing else.

    SGLang folds kv_b_proj into queries and values, and would round it once more.
    """
    return weight.lora and not any("kv_b_proj" in tensor.name for tensor in weight.disk)


def quantised_tensors(hf: HfModelFacts) -> Set[str]:
    """Return the names of the tensors that servers of fp8 hold in blocks."""
    weights = weights_of(hf)
    rows = (
        (prefix, t)
        for weight, prefix in weights.rows()
        if is_quantised(weight)
        for t in weight.disk
    )
    return {name for prefix, tensor in rows for name in weights.names(prefix, tensor)}


def tensor_names(hf: HfModelFacts) -> Set[str]:
    """Return the names of all tensors that the actor loads and exports, for a verified family."""
    return tensor_shapes(hf).keys()


def sent_together(hf: HfModelFacts) -> tuple[tuple[str, ...], ...]:
    """Return the tensors, two and more, that one call of a weight update must bring."""
    return tuple(weights_of(hf).bundles())


def has_sinks(model_type: str) -> bool:
    """Return True for a verified family whose attention has sinks."""
    rows = FAMILIES[model_type].weights.layer_weights if model_type in FAMILIES else ()
    return any(weight.name.endswith("softmax_offset") for weight in rows)


def is_of_text_and_images(model_type: str | None) -> bool:
    """Return True for a verified family that is the language model of a model of text and images."""
    family = FAMILIES.get(model_type or "")
    return family is not None and family.is_multimodal


def cpu_attention_of(model_type: str) -> str:
    """Return SGLang's attention backend for the family on a CPU; "" for SGLang's own choice."""
    return FAMILIES[model_type].cpu_attention if model_type in FAMILIES else ""


def has_linear_attention(model_type: str) -> bool:
    """Return True for a family with layers of linear attention, whose states SGLang keeps."""
    return model_type in FAMILIES and FAMILIES[model_type].layers in ("gated_delta_net", "mamba")


def model_type_of(hf_checkpoint: Path) -> str:
    """Return the model_type in a directory's config.json; "" without one."""
    if not (hf_checkpoint / "config.json").is_file():
        return ""
    return load_json_object(hf_checkpoint / "config.json").get("model_type", "")


def has_fused_experts(hf_checkpoint: Path) -> bool:
    """Return True where all experts of a layer are one tensor on disk, and SGLang loads it so."""
    family = FAMILIES.get(model_type_of(hf_checkpoint))
    return family is not None and family.weights.has_fused_experts
