"""Microbatches and slices as messages: they come out as they went in."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.samples import sample_of_routes
from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
from r3train.loop.distribute import pack_records, unpack_records
from r3train.types import MicroBatch, RankTopology, RouteShape

PLACE = RankTopology(tp_size=2, tp_rank=1, sequence_parallel=True, moe_layer_numbers=((2, 3),))


def microbatch_of(lengths: list[int], routes: bool) -> MicroBatch:
    rng = np.random.default_rng(0)
    samples = [
        sample_of_routes(7 * i, rng.integers(0, 300, (n - 1, 3, 2)).astype(np.uint16))
        for i, n in enumerate(lengths)
    ]
    shape = RouteShape(3, 2, 300) if routes else None
    return build_microbatch(5, samples, Streams(shape), cp_size=1, tp_size=2)


def same_array(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def differences(a: Any, b: Any) -> list[str]:
    """Names of the fields of two records that are not the same to the byte."""
    assert type(a) is type(b)
    found = []
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if is_dataclass(x):
            found += [f"{f.name}.{name}" for name in differences(x, y)]
        elif isinstance(x, np.ndarray):
            found += [] if same_array(x, y) else [f.name]
        elif isinstance(x, tuple):
            found += [] if len(x) == len(y) and all(map(same_array, x, y)) else [f.name]
        else:
            found += [] if x == y and type(x) is type(y) else [f.name]
    return found


@pytest.mark.parametrize("lengths", [[2], [3, 17, 8], [1, 5]])
@pytest.mark.parametrize("routes", [True, False])
def test_every_field_comes_out_as_it_went_in(lengths, routes):
    microbatch = microbatch_of(lengths, routes)
    sent = [microbatch, slice_microbatch(microbatch, PLACE)]
    came = unpack_records(pack_records(sent))
    assert [differences(a, b) for a, b in zip(sent, came, strict=True)] == [[], []]
    if routes:  # they lie as the routers read them, layer by layer
        assert came[1].routes[:, 1].flags.c_contiguous
    # they are this rank's own: a trainer may write to them
    came[1].tokens[:] = 1
    # the comparison can fail, in a nested field too
    other = replace(microbatch, layout=replace(microbatch.layout, rows=microbatch.layout.rows + 1))
    assert differences(other, came[0]) == ["layout.rows"]
    if routes:
        other = replace(microbatch, routes=(*microbatch.routes[:-1], microbatch.routes[-1] - 1))
        assert differences(other, came[0]) == ["routes"]


def test_a_message_that_ends_early_or_goes_on_is_no_message():
    message = pack_records([microbatch_of([4], True)])
    for wrong in (message[:-1], np.append(message, np.uint8(0))):
        with pytest.raises((AssertionError, ValueError)):
            unpack_records(wrong)
