"""Bring routes from the engines' answers to the slices of every rank.

Rank 0's records hold an array with a row for each token, and cut, merge and pack it without knowing
its meaning.  Rows are the routes themselves (``RoutesOnRank0``), or with --route-stores handles for
routes that other ranks keep (``route_stores.RouteStores``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from r3train.engine.client import DirectTransport, Transport
from r3train.loop.prepare import Plant, Prepared, data_rank_of_samples, record_samples
from r3train.loop.recorded import Recorded
from r3train.loop.distribute import gather_topologies, distribute_slices
from r3train.types import RankSlice, RankTopology, RolloutSample, RouteShape, TrainSample


class Routes:
    """One object on every rank; ``prepared`` is None on ranks other than 0.

    row_shape: the size of a row in rank 0's records; None without R3.  The methods with a body are those of
    rows that are the routes themselves.
    """

    row_shape: RouteShape | None

    def open(self, topology: RankTopology) -> None:
        """Start it, once the actor is built; a collective."""
        raise NotImplementedError

    def transport(self) -> Transport:
        """Make the client's transport; call it on rank 0, in the client's event loop."""
        return DirectTransport()

    def require_reach(self, addrs: Sequence[str], api_key: str | None) -> None:
        """Raise ValueError if a node that must reach a server cannot; on rank 0."""

    def keep(self, sample: RolloutSample) -> RolloutSample:
        """Turn a sample with its routes into the form of rank 0's records; on rank 0."""
        return sample

    def read(self, sample: RolloutSample) -> RolloutSample:
        """Return a sample of rank 0's records with its routes; the inverse of ``keep``."""
        return sample

    def ended(self, group_id: int) -> None:
        """Free the routes of a group that is trained or dropped; thread-safe."""

    def slices(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """This rank's slices of a rollout's ``count`` microbatches; a collective."""
        raise NotImplementedError

    def recorded(self, prepared: Prepared | None) -> Recorded | None:
        """The totals of the recorded routes, on rank 0 at least; a collective after ``slices``."""
        raise NotImplementedError

    def metrics(self) -> dict[str, Any]:
        """The step's traffic; a collective."""
        return {}

    def close(self) -> None:
        """End what ``open`` began. Idempotent."""


class RoutesOnRank0(Routes):
    """Rank 0 holds the routes themselves, and cuts every rank its slices."""

    def __init__(self, row_shape: RouteShape | None, moe_layers: Sequence[int]) -> None:
        self.row_shape = row_shape
        self._moe_layers = moe_layers
        self._topologies: list[RankTopology] = []

    def open(self, topology: RankTopology) -> None:
        """Ask all ranks for their places; a collective."""
        self._topologies = gather_topologies(topology)

    def slices(self, prepared: Prepared | None, count: int) -> list[RankSlice]:
        """Cut slices on rank 0 and send the others theirs; a collective."""
        microbatches = prepared.microbatches if prepared is not None else None
        return distribute_slices(microbatches, self._topologies, count)

    def recorded(self, prepared: Prepared | None) -> Recorded | None:
        """The totals on rank 0, None elsewhere."""
        if prepared is None:
            return None
        return record_samples(
            [s.sample for s in prepared.samples],
            data_rank_of_samples(prepared.steps),
            self._topologies[0].dp_size,
            self._moe_layers,
        )


def planted_in_routes(plant: Plant, routes: Routes) -> Plant:
    """Wrap a planted bug so that it gets samples with their routes, not with handles."""

    def planted(rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
        whole = [replace(s, sample=routes.read(s.sample)) for s in samples]
        spoiled = plant(rollout_id, whole)
        return [replace(s, sample=routes.keep(s.sample)) for s in spoiled]

    return planted
