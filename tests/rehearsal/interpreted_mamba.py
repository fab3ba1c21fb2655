"""The triton kernels of Mamba-2 mixers in Triton's interpreter, against their twins in plain torch.

    TRITON_INTERPRET=1 python -m tests.rehearsal.interpreted_mamba REPORT

SGLang's convolution, scan and single step; mamba-ssm's scan, forward and backward, where its files are found.  Without
compiling; of each kernel that has candidates of block sizes the first is taken.  Writes to REPORT {case: {output,
state or argument: error}}: the largest difference, as a part of the largest value.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor as T
from triton.runtime import autotuner

_init = autotuner.Autotuner.__init__


def _init_with_one(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.configs = self.configs[:1]
    self.best_config = self.configs[0]


autotuner.Autotuner.__init__ = _init_with_one
# what the kernels' callers ask of a device
torch.cuda.device = lambda *_: contextlib.nullcontext()
torch.get_device_module = lambda *_: torch.cuda
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=8)

from sglang.kernels.ops.mamba.causal_conv1d_triton import (  # noqa: E402
    causal_conv1d_fn,
    causal_conv1d_update,
)
from sglang.kernels.ops.mamba.triton_ops import mamba_chunk_scan_combined  # noqa: E402
from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update  # noqa: E402
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata  # noqa: E402

from r3train.cpu import linear_attention, mamba_twin  # noqa: E402
from r3train.families.nemotron_h import mix  # noqa: E402

HEADS, SIZE, GROUPS, STATE, CHUNK = 4, 16, 2, 16, 16
INNER, CHANNELS = HEADS * SIZE, HEADS * SIZE + 2 * GROUPS * STATE
# lengths of sequences: within a chunk, over several, of one token; and which begin from an empty state
PACK, FRESH = (9, 23, 1, 31), (True, False, True, False)
ENDS = torch.tensor((0, *PACK)).cumsum(0).int()
SEQUENCES = torch.arange(len(PACK), dtype=torch.int32).repeat_interleave(torch.tensor(PACK))[None]

torch.manual_seed(0)
WINDOW, BIAS = torch.randn(CHANNELS, 4) / 2, torch.randn(CHANNELS) / 5
STEP_BIAS, SKIP, DECAY = torch.randn(HEADS), torch.randn(HEADS), -torch.rand(HEADS) - 0.1


def error(found: T, expected: T) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def parts(convolved: T) -> list[T]:
    """Inputs, B and C of [n, channels], by heads and groups."""
    shapes = (HEADS, SIZE), (GROUPS, STATE), (GROUPS, STATE)
    rows = convolved.split([a * b for a, b in shapes], -1)
    return [part.unflatten(-1, shape).contiguous() for part, shape in zip(rows, shapes)]


def run_twin(rows: T, cache: SimpleNamespace, metadata: SimpleNamespace) -> T:
    """Outputs [n, heads * size] of the server's twin, without its projections and its norm."""
    mixer = SimpleNamespace(
        **{"intermediate_size": INNER, "conv_dim": CHANNELS, "num_heads": HEADS},
        **{"groups_ssm_state_size": GROUPS * STATE, "n_groups": GROUPS},
        **{"A": DECAY, "D": SKIP, "dt_bias": STEP_BIAS},
        conv1d=SimpleNamespace(weight=WINDOW[:, None], bias=BIAS),
        in_proj=lambda rows: (rows, None),
        norm=lambda rows, gate: rows,
        out_proj=lambda rows: (rows, None),
    )
    return mix(mixer, hidden_states=rows, layer_cache=cache, metadata=metadata)[0]


def server_errors() -> dict[str, dict[str, float]]:
    """Errors of the server's twin: sequences that begin, or go on from a state, and then a token of each."""
    slots, has_state = torch.arange(len(PACK), dtype=torch.int32), ~torch.tensor(FRESH)
    windows, states = torch.randn(len(PACK), CHANNELS, 3), torch.randn(4, HEADS, SIZE, STATE)
    cache = SimpleNamespace(conv=[windows.clone()], temporal=states.clone())
    extended = SimpleNamespace(extend_seq_lens_cpu=PACK, has_initial_states=has_state)
    metadata = SimpleNamespace(num_decodes=0, mixed_metadata=extended, mamba_cache_indices=slots)
    rows = torch.randn(sum(PACK), INNER + CHANNELS + HEADS)
    expected = run_twin(rows, cache, metadata)
    _, mixed, steps = rows.split([INNER, CHANNELS, HEADS], -1)
    convolved = causal_conv1d_fn(
        mixed.T.contiguous(),
        WINDOW,
        BIAS,
        windows,
        ENDS,
        list(PACK),
        cache_indices=slots,
        has_initial_state=has_state,
        activation="silu",
    ).T
    x, b, c = (part[None] for part in parts(convolved))
    indices, offsets = Mamba2Metadata._query_start_loc_to_chunk_indices_offsets(
        ENDS, CHUNK, sum(PACK)
    )
    out = torch.empty_like(x)
    _, states, _ = mamba_chunk_scan_combined(
        x,
        steps[None].contiguous(),
        DECAY,
        b,
        c,
        CHUNK,
        D=SKIP,
        dt_bias=STEP_BIAS,
        dt_softplus=True,
        seq_idx=SEQUENCES,
        chunk_indices=indices,
        chunk_offsets=offsets,
        cu_seqlens=ENDS,
        initial_states=torch.where(has_state[:, None, None, None], states, 0),
        return_varlen_states=True,
        return_track_states=True,
        out=out,
        state_dtype=torch.float32,
    )
    found = {
        "output": error(out.flatten(2)[0], expected),
        "window": error(windows, cache.conv[0]),
        "state": error(states, cache.temporal),
    }

    rows = torch.randn(len(PACK), INNER + CHANNELS + HEADS)
    metadata = SimpleNamespace(num_decodes=4, mixed_metadata=None, mamba_cache_indices=slots)
    expected = run_twin(rows, cache, metadata)
    _, mixed, steps = rows.split([INNER, CHANNELS, HEADS], -1)
    convolved = causal_conv1d_update(
        mixed.clone(), windows, WINDOW, BIAS, "silu", conv_state_indices=slots
    )
    x, b, c = parts(convolved)
    out = torch.empty_like(x)
    skip, step_bias = (v[:, None].expand(-1, SIZE) for v in (SKIP, STEP_BIAS))
    selective_state_update(
        states,
        x,
        steps[..., None].expand(-1, -1, SIZE),
        DECAY[:, None, None].expand(-1, SIZE, STATE),
        b,
        c,
        skip,
        dt_bias=step_bias,
        dt_softplus=True,
        state_batch_indices=slots,
        out=out,
    )
    decoded = {
        "output": error(out.flatten(1), expected),
        "window": error(windows, cache.conv[0]),
        "state": error(states, cache.temporal),
    }
    return {"server extends": found, "server decodes": decoded}


def trainer_errors() -> dict[str, dict[str, float]]:
    """Errors of the actor's twin and its gradients, and of one whose state outlives its sequence."""
    spec = find_spec("mamba_ssm")
    if spec is None:
        return {}
    package = ModuleType("mamba_ssm")  # its own __init__ imports compiled libraries
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as scan

    given = {
        "zxbcdt": torch.randn(1, sum(PACK), INNER + CHANNELS + HEADS),
        "window": WINDOW,
        "bias": BIAS,
        "dt_bias": STEP_BIAS,
        "A": DECAY,
        "D": SKIP,
    }

    def kernel(zxbcdt: T, window: T, bias: T, dt_bias: T, A: T, D: T, sequences: T) -> T:
        z, mixed, steps = zxbcdt.split([INNER, CHANNELS, HEADS], -1)
        convolved, _ = linear_attention.causal_conv1d(
            mixed, window, bias, "silu", None, False, ENDS
        )
        x, b, c = parts(convolved)
        more = dict(D=D, dt_bias=dt_bias, dt_softplus=True, seq_idx=sequences)
        z = z.unflatten(-1, (HEADS, SIZE)).contiguous()
        return scan(x, steps.contiguous(), A, b, c, CHUNK, z=z, **more).flatten(2)

    def twin(zxbcdt: T, window: T, bias: T, dt_bias: T, A: T, D: T, sequences: T) -> T:
        fixed = CHUNK, "silu", SIZE, GROUPS, False, sequences
        return mamba_twin.mamba_split_conv1d_scan_combined(
            zxbcdt, window, bias, dt_bias, A, D, *fixed
        )

    out = []
    for function, sequences in (
        (twin, SEQUENCES),
        (kernel, SEQUENCES),
        (kernel, torch.zeros_like(SEQUENCES)),
    ):
        own = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        result = function(**own, sequences=sequences)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        (result * weights).sum().backward()
        out.append({"output": result.detach()} | {name: t.grad for name, t in own.items()})
    expected, right, planted = out
    return {
        case: {name: error(found[name], expected[name]) for name in expected}
        for case, found in (("trainer", right), ("planted", planted))
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(server_errors() | trainer_errors()))
