"""The kernels of mamba-ssm that Megatron's Mamba-2 mixer calls, in plain torch.

The library has kernels for GPUs only.  Names, arguments and results are those of mamba-ssm 2, as far as megatron-core
0.19.2 asks for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from r3train.cpu.linear_attention import causal_conv1d, in_batches
from r3train.patches import patch


def install() -> None:
    """Give them to Megatron's Mamba-2 mixer."""
    from megatron.core.ssm import mamba_mixer

    why = "mamba-ssm has kernels for GPUs only"
    for name, twin in (
        ("HAVE_MAMBA_SSM", True),
        ("ExtendedRMSNorm", NormOfGroups),
        ("mamba_split_conv1d_scan_combined", mamba_split_conv1d_scan_combined),
    ):
        patch(mamba_mixer, name, twin, expects=None, why=why)
    patch(
        mamba_mixer,
        "_check_mamba_sequence_packing_support",
        lambda **_: (True, None),
        expects="(for_inference_not_training=True)",
        why="the twins know packed sequences",
    )


class NormOfGroups(torch.nn.Module):
    """An RMS norm over each group of numbers of [..., size]."""

    def __init__(
        self,
        size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        y = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (y * self.weight.float()).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight as tensor ranks share it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    activation: str,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: torch.Tensor,
) -> torch.Tensor:
    """Convolve, scan each sequence of a pack from an empty state, and gate; [1, n, heads * headdim].

    zxbcdt: [1, n, ...], gates, inputs, B, C and steps.  A, D, dt_bias: [heads].  seq_idx: int[1, n], the sequence of
    each row.  A row attends to all before it with weights that decay, without chunks: time and memory grow with the
    square of a sequence's length, as those of attention here.
    """
    heads, (channels, _) = len(A), conv1d_weight.shape
    z, convolved, steps = zxbcdt.split([heads * headdim, channels, heads], -1)
    counts = seq_idx[0].unique_consecutive(return_counts=True)[1]
    cu_seqlens = F.pad(counts.cumsum(0), (1, 0))
    window = conv1d_weight, conv1d_bias, activation, None, False, cu_seqlens
    convolved, _ = causal_conv1d(convolved, *window)
    states = (channels - heads * headdim) // 2
    x, b, c = convolved.float().split([heads * headdim, states, states], -1)

    def scan(x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        step = F.softplus(dt + dt_bias.float())
        past = (step * A).cumsum(1)
        n = x.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)[..., None]
        decay = (past[:, :, None] - past[:, None]).masked_fill(later, -torch.inf).exp()
        alike = torch.einsum("stgk,sugk->stug", c, b).repeat_interleave(heads // ngroups, -1)
        return torch.einsum("stuh,suhp->sthp", alike * decay * step[:, None], x) + D[:, None] * x

    x, b, c = (
        y.unflatten(-1, shape)
        for y, shape in ((x, (heads, -1)), (b, (ngroups, -1)), (c, (ngroups, -1)))
    )
    y = in_batches(scan, cu_seqlens, x, steps.float(), b, c).flatten(2)
    return (y * F.silu(z.float())).to(zxbcdt.dtype)
