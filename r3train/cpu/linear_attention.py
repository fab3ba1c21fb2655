"""The kernels of flash-linear-attention that Megatron's gated delta net calls, in plain torch.

The library has triton kernels only.  Names, arguments and results are those of flash-linear-attention 0.5.2, as far
as megatron-core 0.19.2 asks for them.  tests/rehearsal compares them with the library's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from r3train.patches import patch

_CHUNK = 64  # tokens that the delta rule takes at once


def install() -> None:
    """Give them to Megatron's gated delta net."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    why = "flash-linear-attention has triton kernels only"
    for module, name, twin in (
        (common, "HAVE_FLA", True),
        (common, "l2norm", l2norm),
        (gdn, "causal_conv1d", causal_conv1d),
        (gdn, "chunk_gated_delta_rule", chunk_gated_delta_rule),
    ):
        patch(module, name, twin, expects=None, why=why)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Divide [..., d] by its length, in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel of a pack [1, n, d] with its window [d, w] of rows before and its own, then silu.

    cu_seqlens: int[sequences + 1]; no window reaches into the sequence before.
    """
    assert initial_state is None and not output_final_state
    assert activation == "silu", activation
    channels, width = weight.shape

    def convolve(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.float().transpose(1, 2)
        added = None if bias is None else bias.float()
        out = F.conv1d(rows, weight[:, None].float(), added, padding=width - 1, groups=channels)
        return F.silu(out[..., : rows.shape[-1]]).transpose(1, 2).to(x.dtype)

    return in_batches(convolve, cu_seqlens, x), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Attend in each sequence of a pack from an empty state; [1, n, heads, value].

    q, k: [1, n, heads, key].  v: [1, n, heads, value].  g: float32[1, n, heads], the logarithm of the decay.  beta:
    [1, n, heads].
    """
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    assert initial_state is None and not (output_final_state or use_qk_l2norm_in_kernel)

    def attend(*batch: torch.Tensor) -> torch.Tensor:
        return torch_chunk_gated_delta_rule(*batch)[0]

    return in_batches(attend, cu_seqlens, q, k, v, g, beta), None


def in_batches(
    function: Callable[..., torch.Tensor], cu_seqlens: torch.Tensor, *packs: torch.Tensor
) -> torch.Tensor:
    """Call ``function`` with packs [1, n, ...] as batches [sequences, longest, ...], padded with zeros; returns a pack.

    A batch has the sequences of as many chunks: equal ones at once, and none with much padding.  A row may depend on
    rows before it only: those of zeros come after a sequence's last.
    """
    ends = cu_seqlens.tolist()
    batches: dict[int, list[tuple[int, int]]] = {}
    outputs: dict[int, torch.Tensor] = {}  # by the first row
    for sequence in zip(ends, ends[1:]):
        batches.setdefault(-(-(sequence[1] - sequence[0]) // _CHUNK), []).append(sequence)
    for batch in batches.values():
        padded = (
            pad_sequence([pack[0, a:b] for a, b in batch], batch_first=True) for pack in packs
        )
        outputs |= {a: rows[: b - a] for (a, b), rows in zip(batch, function(*padded))}
    return torch.cat([outputs[a] for a in ends[:-1]])[None]
