"""A commutative fingerprint of routes: equal sums mean that the same choices were dispatched.

The fingerprint of a set of choices is the sum, mod 2^64, over every (token, layer, expert) of a
64-bit hash of the three.  Sums over ranks are exact whatever the topology, and a single wrong
expert, a shift by one token or layer, or two swapped samples each change the number.

The rollout side (numpy, from the bytes that the engine sent) and the trainer side (torch, from the
map that the router returned) are separate implementations on purpose: they share only the constants
below.
"""

from __future__ import annotations

import numpy as np
import torch

from r3train.ids import token_uids
from r3train.types import missing_marker

# odd 64-bit constants; the finaliser is splitmix64's (Steele, Lea, Flood 2014)
_UID = 0x9E3779B97F4A7C15
_LAYER = 0xC2B2AE3D27D4EB4F
_EXPERT = 0x165667B19E3779F9
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


def rollout_fingerprint(
    uids: np.ndarray, routed_experts: np.ndarray, layer_numbers: np.ndarray
) -> np.ndarray:
    """Fingerprint of recorded rows, a number per layer; those of parts add up to the whole's.

    uids: int64[R] names of the rows' tokens; routed_experts: uint8/uint16 [R, L, K] as decoded from the engine, whose
    missing slots count as nothing; layer_numbers: int[l], 1-based MoE layers.  Returns uint64[l].
    """
    experts = routed_experts[:, np.asarray(layer_numbers) - 1]
    layers = np.array([int(n) * _LAYER & _MASK64 for n in layer_numbers], dtype=np.uint64)
    x = experts.astype(np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_EXPERT)
    x += ((uids.view(np.uint64) * np.uint64(_UID))[:, None] + layers)[:, :, None]
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    x[experts == missing_marker(experts.dtype)] = 0
    return x.sum(axis=(0, 2), dtype=np.uint64)


def kept_fingerprint(
    sample_id: int, counts: np.ndarray, ids: np.ndarray, layer_number: int, first_position: int = 0
) -> np.uint64:
    """Fingerprint of the tokens that sampling kept, as if they were experts of layer ``layer_number``.

    counts: int32[R] of the tokens from index ``first_position`` on; ids: int32[counts.sum()].  Sampling masks
    belong to the row that predicts their token: the one before.
    """
    last = first_position + len(counts)
    uids = token_uids(sample_id, last)[first_position:].view(np.uint64) - np.uint64(1)
    x = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_EXPERT)
    x += np.repeat(uids, counts) * np.uint64(_UID) + np.uint64(layer_number * _LAYER & _MASK64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    return x.sum(dtype=np.uint64)


def indexer_fingerprint(
    sample_id: int, bits: np.ndarray, layer_numbers: np.ndarray, first_position: int
) -> np.ndarray:
    """Fingerprint of one sample's choices of an indexer, a number per layer: uint64[i].

    bits: uint64[R, L, W], the rows from token ``first_position`` on.  Every word with a bit counts, hashed with its
    row, its place and its layer, so that added words without bits change nothing.
    layer_numbers: int[i], those of the evidence; layer ``layer_numbers[j]`` of the evidence is index j of the bits.
    """
    uids = token_uids(sample_id, first_position + len(bits))[first_position:].view(np.uint64)
    places = (np.arange(bits.shape[2], dtype=np.uint64) + np.uint64(1)) * np.uint64(_EXPERT)
    rows = (uids * np.uint64(_UID))[:, None] + places
    out = np.zeros(len(layer_numbers), dtype=np.uint64)
    for i, number in enumerate(layer_numbers):
        words = bits[:, i]
        x = _mixed(rows + np.uint64(int(number) * _LAYER & _MASK64))
        x = _mixed(x + words * np.uint64(_UID))
        x[words == 0] = 0
        out[i] = x.sum(dtype=np.uint64)
    return out


def _mixed(x: np.ndarray) -> np.ndarray:
    """Finish a hash, uint64[...]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


def recorded_rows(routed_experts: np.ndarray, layer_numbers: np.ndarray) -> np.ndarray:
    """int64[l] rows whose every slot the engine reported, a number per layer."""
    layer_routes = routed_experts[:, np.asarray(layer_numbers) - 1]
    return (
        (layer_routes != missing_marker(layer_routes.dtype))
        .all(axis=2)
        .sum(axis=0)
        .astype(np.int64)
    )


def _signed(x: int) -> int:
    """A 64-bit constant as the int64 that has the same bits (torch has no uint64 arithmetic)."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    # >> on int64 drags the sign along; the mask makes it a logical shift
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def route_hashes(
    uids: torch.Tensor, experts: torch.Tensor, layer_number: int | torch.Tensor
) -> torch.Tensor:
    """Hash every (token, layer, expert) on the device.

    uids: int64[m]; experts: int64[m, K] of one layer, or int64[l, m, K] of layers int64[l].  Returns the
    bits of the uint64 hash as int64, shaped as experts.  int64 products wrap on CPU and CUDA alike.
    """
    if isinstance(layer_number, torch.Tensor):
        layer_part = (layer_number * _signed(_LAYER))[:, None]
    else:
        layer_part = _signed(layer_number * _LAYER)
    x = (experts + 1) * _signed(_EXPERT)
    x = x + (uids * _signed(_UID) + layer_part)[..., None]
    x = _xor_shift(x, 30) * _signed(_MIX1)
    x = _xor_shift(x, 27) * _signed(_MIX2)
    return _xor_shift(x, 31)


def indexer_hashes(uids: torch.Tensor, words: torch.Tensor, layer_number: int) -> torch.Tensor:
    """Hash the words of an indexer's choices of one layer on the device: int64[n, W], 0 for a word without bits.

    uids: int64[n]; words: int64[n, W], the bits of ``indexer_fingerprint``'s.
    """
    places = torch.arange(1, words.shape[1] + 1, device=words.device) * _signed(_EXPERT)
    x = (uids * _signed(_UID) + _signed(layer_number * _LAYER))[:, None] + places
    for added in (0, words * _signed(_UID)):
        x = x + added
        x = _xor_shift(x, 30) * _signed(_MIX1)
        x = _xor_shift(x, 27) * _signed(_MIX2)
        x = _xor_shift(x, 31)
    return x * (words != 0)


def to_unsigned(fingerprint: int) -> int:
    """An int64 sum as the unsigned 64-bit number that people compare."""
    return fingerprint & _MASK64
