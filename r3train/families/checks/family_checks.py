"""Checks of a checkpoint and a topology against the facts of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from r3train.families.hf_facts import HfModelFacts
from r3train.config.parallel_settings import ParallelSection
from r3train.config.pipeline_layout import layers_by_stage
from r3train.config.sources import raise_all
from r3train.families import FAMILIES
from r3train.families.family import (
    Family,
    keys_of,
    model_arguments,
    model_weights,
    transformer_fields,
)
from r3train.families.transformer import ROPE_KEYS

_MTP_COUNTS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
)


def check_family(hf: HfModelFacts) -> None:
    """Raise ConfigError with every reason why the checkpoint's model was not verified."""
    raise_all(family_conflicts(hf))


def family_conflicts(hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for a family that nobody verified, and for each key that makes it another."""
    content = hf.content
    family = FAMILIES.get(hf.model_type)
    where = f"{hf.path}/config.json"
    if family is None:
        yield (
            f"{where}: model_type {hf.model_type!r} was not verified against transformers, and might"
            f" silently be trained wrongly; verified: {', '.join(sorted(FAMILIES))}"
            " (r3train docs extending tells how to add a family)"
        )
        return
    for key, (verified, default) in family.needs.items():
        value = content.get(key)
        value = default if value is None else value
        if value != verified:
            yield (
                f"{where}: {key} is {value!r}; {hf.model_type} was verified with {verified!r} only,"
                " and the actor would compute something else"
            )
    for key in ROPE_KEYS:
        rope = content.get(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
        if kind not in (None, "default", *family.rope_types):
            expected = " or ".join(("default", *family.rope_types))
            yield (
                f"{where}: {key} has rope_type {kind!r}, by which the actor of {hf.model_type} does"
                f" not rotate; expected {expected}"
            )
    try:
        fields = transformer_fields(family, hf)
        model_arguments(family, hf)
        family.attributes(keys_of(family, hf))
        weights = model_weights(family, hf)
        for weight, _ in weights.rows():
            weights.shapes_of(weight)
    except ValueError as error:  # a key is missing
        yield str(error)
    else:
        shares = fields.get("moe_router_score_function"), fields.get("moe_router_pre_softmax")
        if fields.get("moe_router_topk") == 1 and shares != ("softmax", True):
            why = f"{hf.model_type}'s gate of one chosen expert is 1, which Megatron's cannot be"
            yield f"{where}: num_experts_per_tok is 1, expected 2 or more: {why}"
    for complaint in family.conflicts(content):
        yield f"{where}: {complaint}"
    quantised = content.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield (
            f"{where}: quantization_config is set ({method}): the actor trains weights in float32 or"
            " bfloat16; convert the checkpoint first (r3train docs models tells how)"
        )


def untrained_parts(hf: HfModelFacts) -> str | None:
    """Return words for the layers that SGLang and the actor leave out; None without such."""
    content = hf.content
    count = next(filter(None, map(content.get, _MTP_COUNTS)), None)
    if not isinstance(count, int) or not count:
        return None
    return f"{count} layer(s) of multi-token prediction are neither served nor trained nor exported"


def topology_conflicts(hf: HfModelFacts, parallel: ParallelSection) -> Iterator[str]:
    """Yield a complaint for each size of the topology in which the family was not verified."""
    family = FAMILIES.get(hf.model_type)
    if family is None:
        return
    for name, reason in family.alone.items():
        size = getattr(parallel, name)
        if size not in (None, 1):
            flag = name.replace("_", "-")
            yield f"--{flag} {size}: {hf.model_type} needs 1: {reason}"
    yield from _stages_without_an_indexer(family, hf, parallel)
    if not family.whole_heads:
        return
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    content = hf.content
    for key, reason in family.whole_heads.items():
        heads, context_ranks = content.get(key), cp if key in family.heads_of_contexts else 1
        if isinstance(heads, int) and heads % (tp * context_ranks):
            times = f" times --context-parallel-size {cp}" if context_ranks > 1 else ""
            yield (
                f"--tensor-model-parallel-size {tp}{times} does not divide {key} {heads} of"
                f" {hf.model_type}: {reason}"
            )


def _stages_without_an_indexer(
    family: Family, hf: HfModelFacts, parallel: ParallelSection
) -> Iterator[str]:
    """Yield the stages whose first layer attends to the tokens that another rank's layer chose."""
    if hf.index_topk is None:
        return
    try:
        stages, traits = (
            layers_by_stage(parallel, hf.num_hidden_layers),
            model_weights(family, hf).traits,
        )
    except ValueError:  # of a topology or a config.json that other checks refuse
        return
    chosen = [number for number, layer in enumerate(traits, start=1) if "indexer" in layer]
    first = [chunk[0] for stage in stages for chunk in stage if chunk]
    for number in sorted(set(first) - {*chosen}):
        yield (
            f"a pipeline stage begins with layer {number} of {hf.path}, which has no indexer and attends to what"
            f" one of another stage chose; expected stages that begin with one of {', '.join(map(str, chosen))}"
        )
