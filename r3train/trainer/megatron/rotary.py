"""Rotary positions of packed sequences without waiting for the device.

Megatron's unfused path reads the packs' lengths back to the host for queries and for keys, in every layer and forward:
families whose rotation no fused kernel computes (``Family.refused_overrides``) stop the device's queue four to six
times per layer.  Here every row looks up its own frequencies.  The values are the same to the bit.

Source: megatron-core 0.19.2, ``models/common/embeddings/rope_utils.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

from r3train.patches import patch


def install() -> None:
    """Let Megatron rotate packed sequences by ``rotate_packed``; raises as ``patch`` does."""
    patch(
        rope_utils,
        "_apply_rotary_pos_emb_thd",
        rotate_packed,
        expects="(t, cu_seqlens, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0,"
        " cp_group=None, multi_latent_attention=None)",
        why="it waits for the device in every layer",
    )


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """Rotate queries or keys [rows, heads, size] of this context-parallel rank's share of a pack.

    cu_seqlens: int32[sequences + 1], of the whole pack.  freqs: [positions, 1, 1, rotated]; where there are as many
    as the pack has tokens they are the tokens' own, else each sequence begins at the first.
    Source of the signature: megatron-core 0.19.2 rope_utils._apply_rotary_pos_emb_thd.
    """
    if cp_group is None:
        raise ValueError("cp_group must be provided for THD format RoPE")
    positions = packed_positions(
        cu_seqlens, t.size(0), freqs.size(0), cp_group.rank(), cp_group.size()
    )
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs.index_select(0, positions),
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


def packed_positions(
    cu_seqlens: torch.Tensor, rows: int, num_freqs: int, cp_rank: int, cp_size: int
) -> torch.Tensor:
    """Return each row's place among the frequencies, int[rows] on the device of ``cu_seqlens``.

    Of a sequence cut into 2 cp_size chunks, context-parallel rank r holds chunk r and the r-th from the end.  A row
    beyond the last sequence ends in an index error.
    """
    starts = cu_seqlens // cp_size  # of this rank's shares, and their end
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:], row, right=True)
    place = row - starts[:-1][sequence]
    if cp_size > 1:
        share = (starts[1:] - starts[:-1])[sequence]
        chunk = share // 2
        from_end = cp_size * share - (cp_rank + 1) * chunk
        place = torch.where(place < chunk, cp_rank * chunk + place, from_end + place - chunk)
    # compared on the device: a host that asked would wait for it
    is_whole_pack = cu_seqlens[-1] == num_freqs
    return place + torch.where(is_whole_pack, cu_seqlens[:-1][sequence], 0)
