"""Replay of the tokens that indexers chose (sparse attention), and its evidence, next to that of routes.

``IndexerReplay`` is ``SparseAttention.choice_replay``.  It asks the ``RoutingReplayManager`` for the microbatch of a call,
as the routers' replay does, and leaves a record of every call with the same recorder.  Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from r3train.ids import split_uids
from r3train.routing.fingerprint import indexer_hashes
from r3train.types import RankSlice

_WORD = 64


@dataclass
class StagedIndexer:
    """One microbatch's choices of this rank's indexers, on the device.

    bits: int64[i, n, W], the words of ``RankSlice.indexer_topk``.  has: bool[i, n], rows with a choice.
    real, current, uids: as in ``StagedRoutes``, of the rows of ``RankSlice.tokens``.  num_chosen: i counts of rows with
    a choice, on the host.  column: layer_number -> index along i.
    """

    bits: torch.Tensor
    has: torch.Tensor
    real: torch.Tensor
    current: torch.Tensor
    uids: torch.Tensor
    num_rows: int
    num_real: int
    num_current: int
    num_chosen: list[int]
    column: dict[int, int]

    @classmethod
    def from_slice(
        cls, s: RankSlice, device: torch.device, weight_version: int | None = None
    ) -> StagedIndexer | None:
        """Bring a slice's choices to the device; None if no indexer is replayed.

        weight_version: as for ``StagedRoutes.from_slice``.
        """
        if s.indexer_topk is None or s.indexer_layers is None or s.token_versions is None:
            return None
        bits = s.indexer_topk.swapaxes(0, 1)  # as it lies in memory
        has = bits.any(axis=2)
        real = s.token_uids >= 0
        current = np.zeros_like(real)
        if weight_version is not None:
            current = real & (s.token_versions == weight_version)

        def to_device(x: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)

        return cls(
            bits=to_device(bits.view(np.int64)),
            has=to_device(has),
            real=to_device(real),
            current=to_device(current),
            uids=to_device(s.token_uids),
            num_rows=len(real),
            num_real=int(real.sum()),
            num_current=int(current.sum()),
            num_chosen=has.sum(axis=1).tolist(),
            column={int(n): i for i, n in enumerate(s.indexer_layers)},
        )

    @cached_property
    def num_choosable(self) -> torch.Tensor:
        """The tokens that each row may choose, int64[n]: p + 1 at position p.

        Two random choices of K of them have K * K / (p + 1) in common on average.
        """
        return split_uids(self.uids)[1] + 1


def flags_of(words: torch.Tensor) -> torch.Tensor:
    """Unpack words int64[n, W] into uint8[n, 64 W], a flag for each token."""
    in_byte = torch.arange(8, device=words.device, dtype=torch.uint8)
    return ((words.contiguous().view(torch.uint8)[..., None] >> in_byte) & 1).flatten(1)


def words_of(flags: torch.Tensor) -> torch.Tensor:
    """Pack flags uint8[n, 64 W] into words int64[n, W]."""
    in_byte = torch.arange(8, device=flags.device, dtype=torch.uint8)
    octets = flags.view(len(flags), -1, 8) << in_byte
    return octets.sum(2, dtype=torch.uint8).view(torch.int64)


def flags_at(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Set a flag for each position in int64[n, K]: uint8[n, 64 width]; what lies outside has none."""
    last = width * _WORD
    places = torch.where((positions < 0) | (positions > last), last, positions)
    flags = torch.zeros(len(positions), last + 1, dtype=torch.uint8, device=positions.device)
    return flags.scatter_(1, places, 1)[:, :last].contiguous()


# (values of the evidence by name, int64 scalars; None where nothing was chosen) -> its record
Recording = Callable[[dict[str, torch.Tensor] | None], None]


@dataclass
class ReplayedCall:
    """One call of one layer's sparse attention (an ``IndexerCall``).

    record: told what was counted, None with the check off.  controls: True where the live choice is
    compared with misaligned ones too.
    """

    staged: StagedIndexer
    layer_number: int
    topk: int
    record: Recording | None
    controls: bool
    _live: torch.Tensor | None = None

    def all_chosen(self) -> None:
        """Record a call in which every row attends to all tokens."""
        if self.record is not None:
            self.record(None)

    @torch.no_grad()
    def replaced(self, live: torch.Tensor) -> torch.Tensor:
        """Return the rollout's choice where it has one, else the indexer's live one: int64[n, K]."""
        staged, column = self.staged, self.staged.column[self.layer_number]
        assert live.shape[0] == staged.num_rows, (
            f"layer {self.layer_number}: the indexer sees {live.shape[0]} rows, "
            f"{staged.num_rows} are staged"
        )
        self._live = live
        if not staged.num_chosen[column]:
            return live
        flags = flags_of(staged.bits[column])
        # the K largest of a 0/1 row are its ones
        ids = flags.topk(self.topk, dim=1).indices
        return torch.where(staged.has[column][:, None], ids, live)

    @torch.no_grad()
    def used(self, tokens: torch.Tensor) -> None:
        """Record the choice that attention is given, int64[n, K]."""
        if self.record is None or self._live is None:
            return
        column = self.staged.column[self.layer_number]
        if self.staged.num_chosen[column]:
            self.record(self._counted(tokens, self._live, column))
        else:
            self.record(None)

    def _counted(
        self, chosen: torch.Tensor, live: torch.Tensor, column: int
    ) -> dict[str, torch.Tensor]:
        """Count the tokens that attention is given, against the rollout's choice and the indexer's live one."""
        staged, width = self.staged, self.staged.bits.shape[2]
        has = staged.has[column] & staged.real
        flags, live_flags = flags_at(chosen, width), flags_at(live, width)
        sizes = flags.sum(1)
        hashes = indexer_hashes(staged.uids, words_of(flags), self.layer_number)
        shared = (flags & live_flags).sum(1)
        equal = has & (shared == self.topk)
        mismatch = has & (shared * staged.num_choosable <= self.topk * self.topk)
        values = {
            "replay_idx_sum": has.sum() * self.topk,
            "map_sum": (sizes * has).sum(),
            "fingerprint": (hashes.sum(1) * has).sum(),
            "duplicate_rows": (has & (sizes != self.topk)).sum(),
            "rows_equal": equal.sum(),
            "rows_overlap": (has & ~equal & ~mismatch).sum(),
            "rows_mismatch": mismatch.sum(),
            "rows_current_equal": (equal & staged.current).sum(),
            "rows_current_mismatch": (mismatch & staged.current).sum(),
        }
        if self.controls:
            layers = len(staged.bits)
            misaligned = {
                "control_token_minus": staged.bits[column].roll(1, 0),
                "control_token_plus": staged.bits[column].roll(-1, 0),
                "control_layer_minus": staged.bits[(column - 1) % layers],
                "control_layer_plus": staged.bits[(column + 1) % layers],
            }
            for name, moved in misaligned.items():
                values[name] = (has & ((flags_of(moved) & live_flags).sum(1) > shared)).sum()
        return values
