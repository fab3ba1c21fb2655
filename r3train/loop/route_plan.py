"""What each leader must fetch: references of a step's samples as plain numbers (JSON).

Pure, and done by rank 0 alone.  A leader's plan holds

    microbatches  [{lengths, parts}, ...] of its data-parallel rank, all optimizer steps in order;
                  a part is [sample, first row, store, key, start, stop], store -1 for missing rows
    recorded      [data rank, sample id, position, key, start, stop] of rows that its store keeps:
                  the rollout side of the evidence is computed from them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from r3train.layout.microbatch import checked_routes
from r3train.loop.prepare import StepSamples, data_rank_of_samples
from r3train.loop.recorded import decoded_rows
from r3train.types import RouteRef, RouteShape, TrainSample


def leader_plans(
    samples: Sequence[TrainSample], steps: Sequence[StepSamples], route_shape: RouteShape
) -> list[dict[str, Any]]:
    """One plan a leader, by data-parallel rank.

    samples: as the rollout left them, for the evidence; steps: as they are trained.
    Raises ValueError naming the sample whose routes are absent or misshapen.
    """
    plans: list[dict[str, Any]] = [{"microbatches": [], "recorded": []} for _ in steps[0]]
    for step in steps:
        for plan, groups in zip(plans, step, strict=True):
            plan["microbatches"] += [_microbatch(group, route_shape) for group in groups]
    data_rank_of = data_rank_of_samples(steps)
    for s in samples:
        # a sample that nobody trains counts too: the check must miss it
        data_rank = data_rank_of.get(s.sample.sample_id, 0)
        for start, routes in decoded_rows(s.sample):
            for first, (store, *place) in _places(routes):
                if store >= 0:
                    row = [data_rank, s.sample.sample_id, start + first, *place]
                    plans[store]["recorded"].append(row)
    return plans


def _microbatch(group: Sequence[TrainSample], route_shape: RouteShape) -> dict[str, Any]:
    parts = [
        [index, first, *place]
        for index, s in enumerate(group)
        for first, place in _places(checked_routes(s, route_shape))
    ]
    return {"lengths": [s.sample.num_tokens for s in group], "parts": parts}


def _places(routes: np.ndarray | RouteRef) -> Iterator[tuple[int, list[int]]]:
    """The places of a sample's rows: (first row, [store, key, start, stop]), in order."""
    assert isinstance(routes, RouteRef), "adopt samples first"
    first = 0
    for segment in routes.segments:
        rows = segment.rows
        place = [rows.store, rows.key] if rows is not None else [-1, -1]
        yield first, [*place, segment.start, segment.stop]
        first += len(segment)


def parts_of(plan: Mapping[str, Any]) -> Iterator[tuple[int, int, tuple[int, int, int, int]]]:
    """A planned microbatch's parts: (sample, first row, (store, key, start, stop))."""
    for sample, first, *place in plan["parts"]:
        yield sample, first, tuple(place)
