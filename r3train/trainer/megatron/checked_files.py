"""Checksums that the ranks check together: each reads its share of the files."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from r3train.checksums import Sums, first_fault, part_of
from r3train.host_group import host_group


def check_together(directory: Path, sums: Sums, source: Path) -> None:
    """Raise ValueError on every rank, naming the first file of another content; a collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    faults: list[str | None] = [None] * world_size
    local = first_fault(directory, sums, part_of(sums, rank, world_size), source)
    if world_size > 1:
        dist.all_gather_object(faults, local, group=host_group())
    else:
        faults = [local]
    if found := sorted(filter(None, faults)):
        raise ValueError(found[0])
