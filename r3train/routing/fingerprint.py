"""A commutative fingerprint of routes: equal sums mean that the same choices were dispatched.

The fingerprint of a set of choices is the sum, mod 2^64, over every (token, layer, expert) of a
64-bit hash of the three: an odd factor of the token times a word of layer and expert.  Sums over ranks are exact whatever the topology, and a single wrong
expert, a shift by one token or layer, or two swapped samples each change the number.

The rollout side (numpy, from the bytes that the engine sent) and the trainer side (torch, from the
map that the router returned) are separate implementations on purpose: they share only the constants
below.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from r3train.ids import token_uids
from r3train.types import MOST_EXPERTS, MOST_LAYERS, missing_marker

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
    experts = _layer_routes(routed_experts, layer_numbers)
    words = _words(tuple(np.asarray(layer_numbers).tolist()), experts.dtype)
    num_layers, places = words.shape
    if places <= np.iinfo(experts.dtype).max:
        experts = np.minimum(experts, places - 1, dtype=experts.dtype)
    first_of_layer = np.arange(num_layers) * places
    sums = np.zeros(experts.shape[:2], np.uint64)
    for slot in range(
        experts.shape[2]
    ):  # every index is in the table: "clip" spares numpy a second look
        sums += words.reshape(-1).take(experts[:, :, slot] + first_of_layer, mode="clip")
    factors = _mixed((uids.view(np.uint64) + np.uint64(1)) * np.uint64(_UID)) | np.uint64(1)
    return (sums * factors[:, None]).sum(axis=0, dtype=np.uint64)


@cache
def _words(layer_numbers: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The word of each expert of each layer, uint64[l, places]; the last place, 0, is of missing slots."""
    places = min(missing_marker(dtype), MOST_EXPERTS) + 1
    layers = np.array([number * _LAYER & _MASK64 for number in layer_numbers], np.uint64)
    words = _mixed(layers[:, None] + np.arange(1, places + 1, dtype=np.uint64) * np.uint64(_EXPERT))
    words[:, -1] = 0
    return words


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
    return _mixed(x).sum(dtype=np.uint64)


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
    experts = _layer_routes(routed_experts, layer_numbers)
    num_rows, num_layers, topk = experts.shape
    missing = np.flatnonzero(experts == missing_marker(experts.dtype))  # few, most often none
    broken = np.unique(missing // topk) % num_layers
    return num_rows - np.bincount(broken, minlength=num_layers)


def _layer_routes(routed_experts: np.ndarray, layer_numbers: np.ndarray) -> np.ndarray:
    """The routes of some layers, [R, l, K]; not a copy where they follow one another."""
    columns = np.asarray(layer_numbers) - 1
    first = int(columns[0]) if len(columns) else 0
    if np.array_equal(columns, np.arange(first, first + len(columns))):
        return routed_experts[:, first : first + len(columns)]
    return routed_experts[:, columns]


def _signed(x: int) -> int:
    """A 64-bit constant as the int64 that has the same bits (torch has no uint64 arithmetic)."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    # >> on int64 drags the sign along; the mask makes it a logical shift
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def _finished(x: torch.Tensor) -> torch.Tensor:
    """Finish a hash, int64[...]."""
    x = _xor_shift(x, 30) * _signed(_MIX1)
    x = _xor_shift(x, 27) * _signed(_MIX2)
    return _xor_shift(x, 31)


@cache
def _word_table(device: torch.device) -> torch.Tensor:
    """The word of each expert of each layer number from 0 on, int64[layers, experts]."""
    layers = torch.arange(MOST_LAYERS + 1, device=device) * _signed(_LAYER)
    experts = torch.arange(1, MOST_EXPERTS + 1, device=device) * _signed(_EXPERT)
    return _finished(layers[:, None] + experts)


def route_hashes(
    uids: torch.Tensor, experts: torch.Tensor, layer_number: int | torch.Tensor
) -> torch.Tensor:
    """Hash every (token, layer, expert) on the device: a factor of the token times a word of layer and expert.

    uids: int64[m]; experts: int64[m, K] of one layer, or int64[l, m, K] of layers int64[l].  Returns the
    bits of the uint64 hash as int64, shaped as experts.  int64 products wrap on CPU and CUDA alike.
    """
    first_of_layer = layer_number * MOST_EXPERTS
    if isinstance(layer_number, torch.Tensor):
        first_of_layer = first_of_layer[:, None, None]
    words = _word_table(experts.device).view(-1)[experts + first_of_layer]
    return words * (_finished((uids + 1) * _signed(_UID)) | 1)[:, None]


def kept_hashes(uids: torch.Tensor, ids: torch.Tensor, layer_number: int) -> torch.Tensor:
    """Hash every token that sampling kept, as ``kept_fingerprint`` does: int64[m, W].

    uids: int64[m]; ids: int64[m, W].  A vocabulary is too long for a table of words.
    """
    x = (ids + 1) * _signed(_EXPERT)
    return _finished(x + (uids * _signed(_UID) + _signed(layer_number * _LAYER))[:, None])


def indexer_hashes(uids: torch.Tensor, words: torch.Tensor, layer_number: int) -> torch.Tensor:
    """Hash the words of an indexer's choices of one layer on the device: int64[n, W], 0 for a word without bits.

    uids: int64[n]; words: int64[n, W], the bits of ``indexer_fingerprint``'s.
    """
    places = torch.arange(1, words.shape[1] + 1, device=words.device) * _signed(_EXPERT)
    x = (uids * _signed(_UID) + _signed(layer_number * _LAYER))[:, None] + places
    for added in (0, words * _signed(_UID)):
        x = _finished(x + added)
    return x * (words != 0)


def to_unsigned(fingerprint: int) -> int:
    """An int64 sum as the unsigned 64-bit number that people compare."""
    return fingerprint & _MASK64
