"""Rules of LoRA against the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.families.hf_facts import HfModelFacts
from r3train.config.lora_settings import linear_of, LINEARS
from r3train.config.run import RunConfig
from r3train.families import FAMILIES, sent_together, tensor_names, weights_of


def model_lora_conflicts(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for each target that the checkpoint's model cannot have."""
    lora = config.lora
    if not lora.enabled or hf.model_type not in FAMILIES:  # which check_family refuses
        return
    if not FAMILIES[hf.model_type].lora:
        able = ", ".join(name for name, family in sorted(FAMILIES.items()) if family.lora)
        yield f"--lora-rank: no adapters of {hf.model_type}; there are those of {able}"
        return
    if config.serves_adapters and not FAMILIES[hf.model_type].adapters_served:
        able = [name for name, family in sorted(FAMILIES.items()) if family.adapters_served]
        yield (
            f"--lora-serving adapter: SGLang was not seen to serve adapters of {hf.model_type} right"
            f" (it was with {', '.join(able) or 'no family yet'}); use --lora-serving merged"
        )
    names = tensor_names(hf)
    targets = lora.targets(names)
    leaves = {linear_of(name) for name in names}
    if config.serves_adapters and "kv_a_proj_with_mqa" in leaves and "q_a_proj" not in leaves:
        yield (
            "--lora-serving adapter: SGLang looks for the adapters of q_proj and kv_a_proj_with_mqa in"
            f" joined linears, and {hf.path}, whose queries are not compressed, has none; use"
            " --lora-serving merged"
        )
    for leaf in (n for n in lora.target_modules if n in LINEARS and n not in leaves):
        has = ", ".join(n for n in LINEARS if n in leaves)
        yield f"target_modules: {hf.path} has no {leaf}; it has {has}"
    paths = [f".{name}" for name in names]
    for module in lora.exclude_modules:
        if not any(f".{module}." in path for path in paths):
            yield f"exclude_modules: {hf.path} has no module {module}"
    if not targets:
        yield "--target-modules and --exclude-modules leave no linear with an adapter"
        return
    yield from _parts_of_a_matrix(targets, hf)
    yield from _apart(targets, hf)
    tp, heads = config.parallel.tensor_model_parallel_size, hf.num_key_value_heads
    if heads % tp and any(name.split(".")[-2] == "k_proj" for name in targets):
        yield (
            f"{hf.path}: num_key_value_heads {heads} does not divide by tensor_model_parallel_size {tp},"
            " which adapters on attention need"
        )


def _apart(targets: frozenset[str], hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for the first two tensors that a server takes together, one a target only."""
    for pair in sent_together(hf):
        if len(targets.intersection(pair)) == 1:
            names = " and ".join(name.split(".")[-2] for name in pair)
            yield (f"target_modules: SGLang holds {names} as one tensor: target both or none")
            return


def _parts_of_a_matrix(targets: frozenset[str], hf: HfModelFacts) -> Iterator[str]:
    """Yield the first targets that are only a part of what must be adapted as one."""
    weights = weights_of(hf)
    for weight, prefix in weights.rows():
        every = [weights.names(prefix, tensor) for tensor in weight.disk]
        for matrix in zip(*every):
            found = [name for name in matrix if name in targets]
            if found and len(found) < len(matrix):
                missing = ", ".join(linear_of(name) for name in matrix if name not in targets)
                yield (
                    f"target_modules: {found[0].rsplit('.', 2)[0]} has {linear_of(found[0])} and not"
                    f" {missing}: Megatron holds them in one matrix, target all or none of them"
                )
                return
        for name, experts in zip((tensor.name for tensor in weight.disk), every):
            adapted = len(targets.intersection(experts))
            if 0 < adapted < len(experts):
                layer = prefix + name.replace("{e}", "*")
                yield (
                    f"exclude_modules: {adapted} of the {len(experts)} experts of {layer} have an"
                    " adapter: all experts of a layer or none"
                )
                return
