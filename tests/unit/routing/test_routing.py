"""Fingerprints and agreement: both sides' numbers, and what each mistake does to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3train.routing.agreement import (
    chance_levels,
    drift_of_layer,
    overlap_counts,
    shared_experts,
)
from r3train.ids import split_uids, token_uids
from r3train.routing.fingerprint import (
    recorded_rows,
    rollout_fingerprint,
    route_hashes,
    to_unsigned,
)
from r3train.types import MOST_EXPERTS

LAYERS = np.array([1, 2, 4])


def make_routes(rows: int = 6, layers: int = 4, topk: int = 2) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.random((rows, layers, 8)).argsort(-1)[..., :topk].astype(np.uint8)


def of_sample(sample_id: int, routes: np.ndarray) -> np.ndarray:
    """The rollout's side of a sample."""
    return rollout_fingerprint(token_uids(sample_id, len(routes)), routes, LAYERS)


def on_the_device(sample_id: int, routes: np.ndarray, uids: np.ndarray | None = None) -> list[int]:
    """The trainer's side of the same sample, a number per layer."""
    uids = token_uids(sample_id, len(routes)) if uids is None else uids
    out = []
    missing = np.iinfo(routes.dtype).max
    for number in LAYERS.tolist():
        experts = torch.from_numpy(routes[:, number - 1].astype(np.int64))
        recorded = experts != missing
        hashes = route_hashes(torch.from_numpy(uids), torch.where(recorded, experts, 0), number)
        out.append(to_unsigned(int((hashes * recorded).sum())))
    return out


def test_the_two_sides_written_apart_give_the_same_numbers():
    routes = make_routes()
    routes[2, 1, 0] = 255
    assert of_sample(9, routes).tolist() == on_the_device(9, routes)


def finished(x: int) -> int:
    """splitmix64's finaliser on a number of any size."""
    x %= 1 << 64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def in_whole_numbers(uids: list[int], routes: np.ndarray, layer: int) -> int:
    """The fingerprint as its definition reads: over tokens and experts, the token's factor times the expert's word."""
    missing, total = np.iinfo(routes.dtype).max, 0
    for uid, experts in zip(uids, routes[:, layer - 1].tolist()):
        words = [
            finished(layer * 0xC2B2AE3D27D4EB4F + (e + 1) * 0x165667B19E3779F9)
            for e in experts
            if e != missing
        ]
        total += (finished((uid + 1) * 0x9E3779B97F4A7C15) | 1) * sum(words)
    return total % (1 << 64)


@pytest.mark.parametrize("dtype, most", [(np.uint8, 254), (np.uint16, MOST_EXPERTS - 1)])
@pytest.mark.parametrize("share_missing", [0.0, 0.2])
def test_both_sides_are_the_sum_of_the_definition(dtype, most, share_missing):
    generator = np.random.default_rng(1)
    routes = generator.integers(0, most + 1, (50, 4, 3)).astype(dtype)
    routes[0, :, 0], routes[1, :, 0] = 0, most
    routes[generator.random(routes.shape) < share_missing] = np.iinfo(dtype).max
    uids = token_uids((1 << 39) - 1, len(routes))
    expected = [in_whole_numbers(uids.tolist(), routes, layer) for layer in LAYERS.tolist()]
    assert rollout_fingerprint(uids, routes, LAYERS).tolist() == expected
    assert on_the_device((1 << 39) - 1, routes) == expected
    recorded = [int((routes[:, n - 1] != np.iinfo(dtype).max).all(1).sum()) for n in LAYERS]
    assert recorded_rows(routes, LAYERS).tolist() == recorded


@pytest.mark.parametrize(
    "mistake",
    [
        lambda r: np.roll(r, 1, axis=0),
        lambda r: np.roll(r, -1, axis=0),
        lambda r: np.roll(r, 1, axis=1),
        lambda r: r[:, [1, 0, 2, 3]],
        lambda r: np.concatenate([r[:-1], (r[-1:] + 1) % 8]),
        lambda r: np.concatenate([r[:-1], np.full_like(r[-1:], 255)]),
        lambda r: r[[1, 0, 2, 3, 4, 5]],
        lambda r: np.concatenate([r[..., :1], r[..., :1]], axis=-1),
        lambda r: np.concatenate([r, r[-1:]]),
    ],
    ids=[
        "token +1",
        "token -1",
        "layer +1",
        "layers swapped",
        "one row",
        "row lost",
        "rows swapped",
        "an expert twice",
        "a row twice",
    ],
)
def test_every_mistake_changes_the_fingerprint(mistake):
    routes = make_routes()
    assert (of_sample(1, mistake(routes)) != of_sample(1, routes)).any()


def test_two_samples_with_each_others_routes_change_the_sum():
    a, b = make_routes(), make_routes()[::-1].copy()
    right = of_sample(1, a) + of_sample(2, b)
    swapped = of_sample(1, b) + of_sample(2, a)
    assert (right != swapped).all()


def test_the_order_of_tokens_and_of_slots_does_not_matter():
    routes = make_routes()
    uids = token_uids(3, len(routes))
    order = np.array([4, 0, 5, 2, 1, 3])
    assert on_the_device(3, routes[order][:, :, ::-1].copy(), uids[order]) == on_the_device(
        3, routes
    )


def test_overlap_counts_add_up_over_the_counted_rows():
    live = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    replayed = torch.tensor([[1, 0], [1, 2], [2, 3], [0, 1]])
    counted = torch.tensor([True, True, True, False])
    assert [int(x) for x in overlap_counts(shared_experts(live, replayed), 2, counted)] == [1, 1, 1]


@pytest.mark.parametrize(
    "num_experts, topk, mismatch",
    [(64, 4, 0.7675), (8, 2, 15 / 28), (4, 4, 0), (4, 2, 1 / 6), (5, 3, 0)],
)
def test_chance_levels_are_the_hypergeometric_ones(num_experts, topk, mismatch):
    levels = chance_levels(num_experts, topk)
    assert levels["mismatch"] == pytest.approx(mismatch, abs=1e-4)
    assert sum(levels.values()) == pytest.approx(1)


def test_the_drift_of_a_layer_is_by_rows_and_its_load_by_experts():
    drift = drift_of_layer(8, 2, 6.0, torch.tensor([4.0, 4.0, 0.0, 8.0]))
    assert (drift["left"], drift["gate_mass"], drift["dead_experts"]) == (0.25, 0.75, 1.0)
    # shares of 1/4, 1/4 and 1/2: 1.5 bits of 2
    assert drift["load_entropy"] == pytest.approx(0.75)
    assert drift_of_layer(1, 0, 1.0, torch.ones(4))["load_entropy"] == pytest.approx(1)
    assert drift_of_layer(1, 0, 1.0, torch.ones(1))["load_entropy"] == 1.0


def test_uids_hold_every_sample_and_position_that_fits():
    last = (1 << 39) - 1
    assert token_uids(0, 1).tolist() == [0]
    samples, positions = split_uids(token_uids(last, 3))
    assert samples.tolist() == [last] * 3 and positions.tolist() == [0, 1, 2]
    assert len(token_uids(1, 1 << 24)) == 1 << 24
    for sample_id, tokens in ((-1, 1), (last + 1, 1), (0, (1 << 24) + 1)):
        with pytest.raises(ValueError):
            token_uids(sample_id, tokens)
