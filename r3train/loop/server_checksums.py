"""WEIGHTS on the running job: what was sent is summed on its way, and servers' checksums are read in every update's pause."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from r3train.config import RunConfig
from r3train.engine.backend import AnswerLate, EngineDied, EngineError
from r3train.engine.publish_disk import Comparison
from r3train.hf_checkpoint import NamedTensors
from r3train.loop.canaries import NotServed
from r3train.loop.distribute import broadcast_json, gather_json
from r3train.loop.rank_zero import RankZero
from r3train.proof.weights_verdict import weights_records, WeightsHistory
from r3train.proof.writer import EvidenceWriter

logger = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
# of each server the checksums of its tensors, and each server's layout
Held = tuple[dict[int, dict[str, str]], dict[int, str]]


class SentSum:
    """Adds up the words of tensors on their way to the servers.

    dtype: in which servers store them.  The sum stays on the tensors' device until it is asked for.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._tensors = 0

    def over(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, each added to the sum."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor's words, weighted by its name: one that takes another's place is another."""
        flat = tensor.detach().to(self._dtype).contiguous().view(-1)
        size = (
            8 if flat.nbytes % 8 == 0 else flat.itemsize
        )  # of the tensor alone: equal ones have equal sums
        if flat.storage_offset() * flat.itemsize % size:
            flat = flat.clone()
        words = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[size])
        weight = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") | 1
        total = words.sum(dtype=torch.int64) * weight
        self._sums[tensor.device] = self._sums.get(tensor.device, 0) + total
        self._tensors += 1

    def result(self) -> tuple[str, int]:
        """The sum, in hexadecimal, and the number of tensors."""
        total = sum(int(value) for value in self._sums.values()) & _MASK
        return f"{total:016x}", self._tensors


@dataclass(eq=False)
class ServerChecksums:
    """Judges what servers hold after each update; all ranks call ``judge`` together.

    rank_zero: None on other ranks; evidence: None without the R3 check.
    """

    config: RunConfig
    rank_zero: RankZero | None
    evidence: EvidenceWriter | None

    def __post_init__(self) -> None:
        self._history = WeightsHistory()
        self._counts: dict[int, int] = {}  # records by weight version
        self._is_open = False
        self._summed = self._sum()

    def _sum(self) -> SentSum:
        return SentSum(getattr(torch, self.config.server_dtype))

    def begin(self, version: int) -> None:
        """Rank 0: read what the servers of this run were started with, before anything is sent.

        External ones may hold anything, even weights that this run will send.  Raises NotServed where one server holds
        other tensors than another, and EngineUnreachable where all are lost.
        """
        weights = self.rank_zero.weights
        asked = weights.present()
        try:
            held = weights.checksums(None)
        except EngineError as error:
            lost = isinstance(error, EngineDied) or not set(asked).intersection(weights.present())
            if lost and not isinstance(error, AnswerLate):
                raise
            logger.warning("servers do not say the checksums of their weights: %s", error)
            return
        self._is_open = True
        if self.config.rollout.has_external_servers:
            return
        if failed := self._judge(version, ("", 0), held):
            raise NotServed(f"not served: {failed[0]}", version, {"served/passed": False})

    def over(self, tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors of an update, and sum them up."""
        self._summed = self._sum()
        return self._summed.over(tensors)

    def judge(
        self, version: int, *, sent: bool = True, comparison: Comparison | None = None
    ) -> dict[str, Any]:
        """Read what servers hold in an update's pause; returns metrics on rank 0.  A collective.

        sent: False on rank 0 where the update has failed, and the other ranks are to go on.  comparison: with a second
        export, where there was one.  Raises NotServed on all ranks.
        """
        began, held, failed = time.monotonic(), None, []
        if self._is_open and sent:
            held = self.rank_zero.weights.checksums(version)
        sums = gather_json(self._summed.result())
        if held is not None:
            total = sum(int(words, 16) for words, _ in sums) & _MASK
            sum_and_count = f"{total:016x}", sum(n for _, n in sums)
            failed = self._judge(version, sum_and_count, held, comparison)
            for text in failed[1:]:
                logger.error("%s", text)
        seconds = time.monotonic() - began
        if first := broadcast_json(failed[0] if failed else ""):
            raise NotServed(f"not served: {first}", version, {"served/passed": False})
        return {"perf/checksums_s": seconds} if self._is_open else {}

    def count(self, version: int) -> int | None:
        """Rank 0: the servers whose weights were judged under a version; None where they say no checksums."""
        return self._counts.get(version, 0) if self._is_open else None

    def _judge(
        self,
        version: int,
        sent: tuple[str, int],
        held: Held,
        comparison: Comparison | None = None,
    ) -> list[str]:
        """Rank 0: write the records of an update, and return its faults."""
        again = (comparison.sent, comparison.unlike) if comparison else ()
        records = weights_records(version, sent, *held, *again)
        if self.config.rollout.rollout_engines_file is not None:
            # no request went to it under this version
            for record in (r for r in records if r.unlike):
                self.rank_zero.servers.drop(
                    record.server, f"UNLIKE: {', '.join(record.unlike)} are not as sent"
                )
            records = [record for record in records if not record.unlike]
        newer = {v: n for v, n in self._counts.items() if v >= version - 1}
        self._counts = newer | {version: newer.get(version, 0) + len(records)}
        if self.evidence is not None:
            self.evidence.write_weights(records)
        return self._history.judge(records)
