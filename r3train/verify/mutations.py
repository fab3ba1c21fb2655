"""Deliberate bugs, planted in the production code by name; verification must catch every one.

A mutation patches functions or methods where production looks them up, for as long as its context is
open; nothing is copied.  Each names the topology that shows it and the phase that must fail, by at
least ten times the phase's threshold (phase 0 is exact: any difference fails it).  ``refused``
mutations end in a clear error of production or of Megatron instead, which the report says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from r3train.verify.model_zoo import ModelVariant
from r3train.verify.compare import GRADIENTS
from r3train.verify.rollouts import RolloutBatch
from r3train.verify.topologies import Topology


@dataclass(frozen=True)
class Scene:
    """What a mutation may look at to be a mutation of just this run."""

    topology: Topology
    variant: ModelVariant
    batch: RolloutBatch


@dataclass(frozen=True)
class Mutation:
    """A named bug; ``phase`` None means that nothing may fail (the null mutation).

    decoy_pass: a forward-only pass over another rollout runs first.  overrides: TransformerConfig
    fields.  expect_error: part of the message of the error that is the catch.
    """

    name: str
    claim: str
    topology: str
    phase: int | None
    plant: Callable[[Scene], AbstractContextManager[None]]
    decoy_pass: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    expect_error: str = ""

    @property
    def last_phase(self) -> int:
        return max(GRADIENTS, self.phase or 0)


MUTATIONS: dict[str, Mutation] = {}


def mutation(claim: str, *, topology: str, phase: int | None, **more: Any) -> Callable:
    """Register a context manager as the mutation of its name."""

    def register(plant: Callable[[Scene], Iterator[None]]) -> Callable:
        name = plant.__name__.strip("_")
        assert name not in MUTATIONS, name
        MUTATIONS[name] = Mutation(name, claim, topology, phase, contextmanager(plant), **more)
        return plant

    return register


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``make(original)`` in the place of ``owner.name`` and take it out again."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@mutation("no change at all", topology="tp2", phase=None)
def null(scene: Scene) -> Iterator[None]:
    yield


# the modules register their mutations on import
from r3train.verify import mutations_reduce, mutations_replay, mutations_routes  # noqa: E402, F401
