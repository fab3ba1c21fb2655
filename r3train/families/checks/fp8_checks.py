"""Rules of --rollout-weights fp8 against the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.families.hf_facts import HfModelFacts
from r3train.config.run import RunConfig
from r3train.families import FAMILIES, FP8_BLOCK, is_quantised, weights_of
from r3train.families.weights import Sizes, Weight, number


def model_fp8_conflicts(config: RunConfig, hf: HfModelFacts) -> Iterator[str]:
    """Yield a complaint for a family that was not served so, or for the first matrix that blocks do not divide."""
    if config.rollout.rollout_weights == "same" or hf.model_type not in FAMILIES:
        return  # check_family refuses another one
    if not FAMILIES[hf.model_type].fp8_served:
        able = ", ".join(name for name, family in sorted(FAMILIES.items()) if family.fp8_served)
        yield (
            f"--rollout-weights fp8: SGLang was not seen to serve {hf.model_type} right in fp8 (it was with"
            f" {able}); use --rollout-weights same"
        )
        return
    servers, weights = config.rollout.sglang, weights_of(hf)
    tp, ep = (int(servers.get(name) or 1) for name in ("tp_size", "ep_size"))
    for weight, prefix in weights.rows():
        if not is_quantised(weight):
            continue
        for axis, size in _sizes_on_a_rank(
            weight, weights.sizes, tp // ep if weight.is_expert else tp
        ):
            if size % FP8_BLOCK:
                name = prefix + weight.disk[0].name
                yield (
                    f"--rollout-weights fp8: {hf.path}: {size:g} {axis} of {name} on a rank of a server, expected a"
                    f" multiple of {FP8_BLOCK}, the side of a block"
                )
                return


def _sizes_on_a_rank(weight: Weight, sizes: Sizes, ranks: int) -> Iterator[tuple[str, float]]:
    """Yield the rows and columns that SGLang needs whole blocks of: of what it joins or cuts, and of all columns."""
    by_rows, by_columns = (ranks if weight.sharded == axis else 1 for axis in ("rows", "columns"))
    for part, rows in weight.parts.items():
        # fewer key heads than ranks are repeated
        cut = min(by_rows, sizes["kv_heads"]) if part in ("k", "v") else by_rows
        if len(weight.parts) > 1 or cut > 1:
            yield "rows", number(rows, sizes) / cut
    yield "columns", number(weight.columns[0], sizes) / by_columns
