"""Planted bugs of --plant-bug and of ``r3train verify``, and the faults of --plant-fault.

Production has no bug by name.  A planted bug changes a rollout's samples through the ``plant`` hook of
``loop.prepare``, after the rollout side has taken their fingerprints, or it replaces functions and
methods where production looks them up, for as long as its context is open.

Those with a topology are verify's: it must fail the phase that they name by at least ten times the phase's
threshold (phase 0 is exact: any difference fails it).  Tests plant many more: ``tests/oracle/planted.py``.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.engine import client, publish, publish_disk, publish_memory
from r3train.engine.backend import Request, Segment
from r3train.ids import is_of_rollout
from r3train.hf_checkpoint import weight_files
from r3train.loop import canaries
from r3train.loop.prepare import Plant
from r3train.trainer.megatron import actor, checkpoint
from r3train.types import TrainSample
from r3train.verify.compare_outcomes import GRADIENTS, ROUTES

# (configuration, model) -> the bug, planted while the context is open
Patch = Callable[[RunConfig, HfModelFacts], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """A named bug; ``phase`` None means that nothing may fail (a null mutation).

    module: where it is registered.  caught_by: the test file that plants it, of a bug without a topology.
    spoil: changes the routes of all samples in place, a list of [T-1, L, K].  decoy_pass: a
    forward-only pass over another rollout runs first.  overrides: TransformerConfig fields.
    expect_error: part of the message of the error that is the catch.
    """

    name: str
    claim: str
    module: str
    topology: str | None = None
    phase: int | None = None
    caught_by: str = ""
    patch: Patch = lambda config, hf: nullcontext()
    spoil: Callable[[list[np.ndarray], HfModelFacts], None] | None = None
    decoy_pass: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    expect_error: str = ""

    @property
    def address(self) -> str:
        """The module and the name, by which another process finds it."""
        return f"{self.module}:{self.name}"

    @property
    def last_phase(self) -> int:
        return max(GRADIENTS, self.phase or 0)

    @contextmanager
    def planted(self, config: RunConfig, hf: HfModelFacts) -> Iterator[Plant | None]:
        """Plant the bug; yields the hook for ``prepare``, or None where samples stay as they are."""

        def plant(rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
            routes = [s.sample.routed_experts.copy() for s in samples]
            self.spoil(routes, hf)
            return [
                replace(s, sample=replace(s.sample, routed_experts=r))
                for s, r in zip(samples, routes, strict=True)
            ]

        with self.patch(config, hf):
            yield plant if self.spoil is not None else None


MUTATIONS: dict[str, Mutation] = {}


def mutation(*shown: Any, role: str = "patch", **fields: Any) -> Callable[[Callable], Callable]:
    """Register a function as the mutation of its name; its docstring is the claim.

    shown: topology and phase.  role: the field that the function becomes.
    """

    def register(plant: Callable) -> Callable:
        name = plant.__name__
        assert name not in MUTATIONS, name
        claim = plant.__doc__.splitlines()[0].rstrip(".")
        MUTATIONS[name] = Mutation(name, claim, plant.__module__, *shown, **{role: plant}, **fields)
        return plant

    return register


def spoils_routes(topology: str) -> Callable[[Callable], Callable]:
    """Register a change of all samples' routes."""
    return mutation(topology, ROUTES, role="spoil")


def planted_by(test: str) -> list[Mutation]:
    """The bugs that a test file catches, by its path in the repository."""
    return [m for m in MUTATIONS.values() if m.caught_by == test]


def planted_at(address: str) -> Mutation:
    """The bug of an address, of the module that registers it."""
    module, name = address.split(":")
    import_module(module)
    return MUTATIONS[name]


def patched(owner: Any, name: str, replacement: Callable) -> AbstractContextManager[Any]:
    """Put ``replacement`` in the place of ``owner.name``; its first argument is the original."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return mock.patch.object(owner, name, call)


def replaces(owner: Any, name: str, *shown: Any, **fields: Any) -> Callable[[Callable], Patch]:
    """Register a replacement for ``owner.name``; its first argument is the original."""

    def register(replacement: Callable) -> Patch:
        @mutation(*shown, **fields)
        @wraps(replacement)
        def patch(config: RunConfig, hf: HfModelFacts) -> AbstractContextManager[Any]:
            return patched(owner, name, replacement)

        return patch

    return register


# -- in jobs -----------------------------------------------------------------------------------

# value of the first sample's advantages, and the rollouts that it is planted in
_POISONS = {
    "nan_once": (math.nan, range(1, 2)),
    "nan_always": (math.nan, range(1, sys.maxsize)),
    "inf_once": (math.inf, range(1, 2)),
}
FAULTS = (*_POISONS, "disk_full")


@contextmanager
def planted_in_job(config: RunConfig, hf: HfModelFacts) -> Iterator[Plant]:
    """Plant what --plant-bug and --plant-fault ask for; yields the hook for the loop."""
    bug, fault = config.replay.plant_bug, config.faults.plant_fault
    with ExitStack() as planted:
        hooks: list[Plant | None] = []
        if bug is not None:
            hooks.append(planted.enter_context(MUTATIONS[bug].planted(config, hf)))
        if fault in _POISONS:
            hooks.append(partial(_poisoned, *_POISONS[fault]))
        if fault == "disk_full":
            planted.enter_context(_full_disk())

        def plant(rollout_id: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
            for hook in filter(None, hooks):
                samples = hook(rollout_id, samples)
            return list(samples)

        yield plant


def _poisoned(
    value: float, rollouts: range, rollout_id: int, samples: Sequence[TrainSample]
) -> list[TrainSample]:
    """The samples, the first one's advantages as a broken reward or kernel would leave them."""
    if rollout_id not in rollouts:
        return list(samples)
    first = samples[0]
    spoiled = np.where(first.sample.loss_mask, np.float32(value), first.advantages)
    return [replace(first, advantages=spoiled), *samples[1:]]


def _full_disk() -> AbstractContextManager[Any]:
    """From the second checkpoint on, the disk is full half-way through."""
    saves = 0

    def save(original, self, next_rollout_id, facts, write_extra=None):
        nonlocal saves
        saves += 1
        is_full = saves > 1

        def write(directory):
            if write_extra is not None:
                write_extra(directory)
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

        original(self, next_rollout_id, facts, write)

    return patched(checkpoint.Checkpointer, "save", save)


# -- nothing -----------------------------------------------------------------------------------


@mutation("tp2")
def null(config, hf):
    """No change at all."""
    return nullcontext()


# -- the samples' routes -----------------------------------------------------------------------


@spoils_routes("tp2")
def token_shift(routes, hf):
    """Every token gets the route of the token before it."""
    for r in routes:
        r[:] = np.roll(r, 1, axis=0)


@spoils_routes("ep2")
def layer_swap(routes, hf):
    """Two adjacent layers get each other's routes."""
    a, b = (n - 1 for n in hf.moe_layer_numbers[:2])
    for r in routes:
        r[:, [a, b]] = r[:, [b, a]]


@spoils_routes("ep2")
def one_expert(routes, hf):
    """One expert of one row of one layer is another."""
    row = routes[0][len(routes[0]) // 2, hf.moe_layer_numbers[0] - 1]
    row[0] = next(e for e in range(hf.num_experts) if e not in row)


@replaces(actor.MegatronActor, "__init__", "dp2", ROUTES)
def bypass(original, self, *args, **kwargs):
    """The actor replays nothing."""
    original(self, *args, **kwargs)
    self.replay.uninstall()


# -- between a server's forward and its answer -------------------------------------------------

# the answers' own server, asked again, is what shows these
ANSWERS = "tests/e2e/test_recheck.py"


def is_rollout_request(request: Request) -> bool:
    """False for the draws that measure the noise: the server breaks after its start."""
    return is_of_rollout(request.sample_id)


def without_second_stage(segment: Segment) -> Segment:
    if segment.rows is None:
        return segment
    rows = segment.rows.copy()
    rows[:, rows.shape[1] // 2 :] = 0
    return replace(segment, rows=rows)


@mutation(caught_by=ANSWERS)
def answer_with_rows_of_another(config, hf):
    """Every answer comes with the rows of the answer before it."""
    last: list[np.ndarray] = []

    def read_answer(original, answer, request, sent, **how):
        segment = original(answer, request, sent, **how)
        if segment.rows is None or not len(segment.rows) or not is_rollout_request(request):
            return segment
        rows = np.resize(last[-1], segment.rows.shape) if last else segment.rows
        last[:] = [segment.rows]
        return replace(segment, rows=rows)

    return patched(client, "read_answer", read_answer)


@replaces(client, "read_answer", caught_by=ANSWERS)
def answer_without_second_stage(original, answer, request, sent, **how):
    """The second half of the layers never reached the answer, as of a pipeline stage."""
    segment = original(answer, request, sent, **how)
    return without_second_stage(segment) if is_rollout_request(request) else segment


# -- publishing --------------------------------------------------------------------------------

PUBLISHING = "tests/e2e/test_weights_are_proved.py"


def _with_old(
    hf: HfModelFacts, tensors: Iterable[tuple[str, torch.Tensor]], is_old: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors; those that ``is_old`` names have the checkpoint's values, from before any step."""
    before = {n: t for file in weight_files(hf.path) for n, t in load_file(file).items()}
    for name, tensor in tensors:
        yield name, before[name].to(tensor) if is_old(name) else tensor


def _some_expert(hf: HfModelFacts) -> str:
    return f"model.layers.{hf.moe_layer_numbers[-1] - 1}.mlp.experts.{hf.num_experts - 1}."


def changes_transport(change: Callable) -> Patch:
    """Register a change of (hf, tensors) where the configured transport takes them."""

    @mutation(caught_by=PUBLISHING)
    @wraps(change)
    def patch(config: RunConfig, hf: HfModelFacts) -> AbstractContextManager[Any]:
        owner, name = {
            "distributed": (publish, "buckets"),
            "disk": (publish_disk, "write_shards"),
            "shared_memory": (publish_memory, "buckets"),
        }[config.trainer.update_weight_transfer_mode]
        return patched(owner, name, lambda original, t, *a, **k: original(change(hf, t), *a, **k))

    return patch


def changes_export(change: Callable) -> Patch:
    """Register a change of (hf, tensors) where the actor exports them, for whatever use."""

    @mutation(caught_by=PUBLISHING)
    @wraps(change)
    def patch(config: RunConfig, hf: HfModelFacts) -> AbstractContextManager[Any]:
        def changed(original, *args, **how):
            return change(hf, original(*args, **how))

        return patched(actor, "export_hf_weights", changed)

    return patch


@changes_transport
def expert_never_sent(hf, tensors):
    """One expert is never sent."""
    return ((n, t) for n, t in tensors if _some_expert(hf) not in n)


@changes_transport
def tensor_of_last_version(hf, tensors):
    """One tensor is sent as it was in the version before."""
    return _with_old(hf, tensors, lambda name: name == _some_expert(hf) + "down_proj.weight")


@changes_transport
def weights_frozen(hf, tensors):
    """Every version is sent as the first one."""
    return _with_old(hf, tensors, lambda name: True)


@changes_export
def export_frozen(hf, tensors):
    """Every version is exported as the first one, to the transport and to its check."""
    return _with_old(hf, tensors, lambda name: True)


@mutation(caught_by=PUBLISHING)
@contextmanager
def canaries_of_itself(config, hf):
    """The weights are frozen, and canaries compare the actor with itself."""

    def compare(original, now, *args, **kwargs):
        scores = [
            replace(server_scores.whole, log_probs=actor_log_probs)
            for server_scores, actor_log_probs in zip(now.scores, now.actor)
        ]
        canary_scores = [
            replace(server_scores, whole=one) for server_scores, one in zip(now.scores, scores)
        ]
        return original(replace(now, scores=canary_scores), *args, **kwargs)

    with patched(canaries, "compare_servers", compare):
        with MUTATIONS["weights_frozen"].patch(config, hf):
            yield


@changes_export
def expert_bias_not_exported(hf, tensors):
    """The expert biases are not exported."""
    return ((n, t) for n, t in tensors if not n.endswith("e_score_correction_bias"))


@replaces(publish, "_with_last", caught_by=PUBLISHING)
def version_with_first_bucket(original, items):
    """The version label goes out with the first bucket instead of the last."""
    return ((item, i == 0) for i, item in enumerate(items))


@mutation(caught_by=PUBLISHING)
@contextmanager
def cache_not_flushed(config, hf):
    """The servers keep what they cached under the weights before."""

    def kept(original, *args, **kwargs):
        return original(*args, **{**kwargs, "flush_cache": False})

    control = publish.EngineControl
    with patched(control, "update_weights_from_distributed", kept):
        with patched(control, "update_weights_from_disk", kept):
            yield
