"""The table of docs/guide/models.md says of each family what tests of real ranks and servers take from its record."""

from __future__ import annotations

import re
from pathlib import Path

from r3train.families import FAMILIES
from r3train.families.family import Family

PAGE = Path(__file__).parents[3] / "docs/guide/models.md"
HEAD = """\
| `model_type` | models | replayed | LoRA, merged | LoRA, as adapters | servers of fp8 | never split by |
|---|---|---|---|---|---|---|
"""
SIZES = {"expert_tensor_parallel_size": "ETP", "context_parallel_size": "CP"}


def cells(family: Family) -> list[str]:
    """The cells of a family: its record, by which the oracle, the adapters' and the servers' tests choose families."""
    replayed = "experts" if family.has_experts else "no experts"
    if family.layers == "sparse_latent_attention":
        replayed += ", indexer"
    flags = (family.lora, family.adapters_served, family.fp8_served)
    alone = ", ".join(SIZES[size] for size in family.alone)
    return [replayed, *("yes" if flag else "refused" for flag in flags), alone]


def test_the_page_says_what_each_family_can():
    """The right table is printed where it does not; names of models are the page's own."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.partition(HEAD)[2].partition("\n\n")[0]
    names = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", lines, re.M))
    assert names.keys() == FAMILIES.keys()
    rows = (f"| `{name}` | {names[name]} | {' | '.join(cells(FAMILIES[name]))} |" for name in names)
    table = HEAD + "\n".join(rows).replace("|  |", "| |")
    assert table in page, table
