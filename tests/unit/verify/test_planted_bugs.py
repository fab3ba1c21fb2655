"""The home of planted bugs: the names that a job may ask for, and the hook that a job gets."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from r3train.config.fault_settings import FaultsSection
from r3train.families.read_facts import read_hf_facts
from r3train.config.replay_settings import ReplaySection
from r3train.cpu.device import prepare_device
from r3train.layout import microbatch
from r3train.loop.route_transport import planted_in_routes
from r3train.types import TrainSample
from r3train.verify.model_zoo import VARIANTS, write_checkpoint
from r3train.verify.rollouts import make_rollouts, train_samples
from r3train.verify.topologies import TOPOLOGIES

prepare_device()
from r3train.trainer.megatron.checkpoint import Checkpointer  # noqa: E402
from r3train.verify.mutations import FAULTS, planted_at, planted_in_job  # noqa: E402
from tests.oracle.planted import MUTATIONS, planted_by  # noqa: E402

VARIANT = VARIANTS["dense6"]
ROOT = Path(__file__).parents[3]


class Config:
    """The sections that planting looks at, only."""

    def __init__(self, bug: str | None = None, fault: str | None = None):
        self.replay = ReplaySection(plant_bug=bug)
        self.faults = FaultsSection(plant_fault=fault)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return read_hf_facts(write_checkpoint(VARIANT, tmp_path_factory.mktemp("model")))


@pytest.fixture
def samples() -> list[TrainSample]:
    return train_samples(make_rollouts(VARIANT, "ragged"), VARIANT)


def names_of(section: type, field: str) -> set[str]:
    return {n for arg in get_args(section.model_fields[field].annotation) for n in get_args(arg)}


def test_the_package_has_the_bugs_that_a_job_may_ask_for_and_no_other():
    packaged = {b.name for b in MUTATIONS.values() if b.module == "r3train.verify.mutations"}
    assert packaged == {*names_of(ReplaySection, "plant_bug"), "null"}
    assert names_of(FaultsSection, "plant_fault") == set(FAULTS)


def changed(before: list[TrainSample], after: list[TrainSample]) -> np.ndarray:
    """[total rows, L] whether the experts of a row differ."""
    pairs = zip(before, after, strict=True)
    return np.concatenate(
        [(a.sample.routed_experts != b.sample.routed_experts).any(-1) for a, b in pairs]
    )


def test_one_expert_is_one_row_of_one_layer_with_experts(hf, samples):
    with planted_in_job(Config("one_expert"), hf) as plant:
        found = changed(samples, plant(0, samples))
    assert found.sum() == 1 and found.any(0).nonzero()[0].tolist() == [1]  # layer 0 is dense


def test_a_layer_swap_leaves_all_layers_but_two_alone(hf, samples):
    with planted_in_job(Config("layer_swap"), hf) as plant:
        found = changed(samples, plant(0, samples))
    assert found.any(0).nonzero()[0].tolist() == [1, 2]


def test_a_token_shift_moves_every_sample_and_leaves_what_the_rollout_recorded(hf, samples):
    before = [s.sample.routed_experts.copy() for s in samples]
    with planted_in_job(Config("token_shift"), hf) as plant:
        after = plant(0, samples)
    for was, sample, spoiled in zip(before, samples, after, strict=True):
        np.testing.assert_array_equal(sample.sample.routed_experts, was)
        np.testing.assert_array_equal(spoiled.sample.routed_experts, np.roll(was, 1, axis=0))


def test_routes_that_lie_in_a_store_are_read_spoiled_and_kept_again(hf, samples):
    held: dict[int, np.ndarray] = {}

    def keep(sample):
        held[len(held)] = sample.routed_experts
        return replace(sample, routed_experts=np.array([len(held) - 1]))

    routes = SimpleNamespace(
        keep=keep,
        read=lambda sample: replace(sample, routed_experts=held[int(sample.routed_experts[0])]),
    )
    stored = [replace(s, sample=keep(s.sample)) for s in samples]
    with planted_in_job(Config("token_shift"), hf) as plant:
        direct, via = plant(0, samples), planted_in_routes(plant, routes)(0, stored)
    whole = [replace(s, sample=routes.read(s.sample)) for s in via]
    assert not changed(direct, whole).any()


@pytest.mark.parametrize(
    "fault, spoiled", [("nan_once", [1]), ("inf_once", [1]), ("nan_always", [1, 2, 3])]
)
def test_a_poisoned_advantage_comes_in_its_rollouts_alone(fault, spoiled, hf, samples):
    with planted_in_job(Config(fault=fault), hf) as plant:
        rollouts = [plant(rollout_id, samples) for rollout_id in range(4)]
    finite = [math.isfinite(float(r[0].advantages.sum())) for r in rollouts]
    assert [i for i, is_finite in enumerate(finite) if not is_finite] == spoiled
    assert all(np.isfinite(s.advantages).all() for r in rollouts for s in r[1:])


def test_the_disk_is_full_from_the_second_checkpoint_on_and_never_after_the_job(hf, monkeypatch):
    def save(self, next_rollout_id, facts, write_extra=None):
        write_extra("directory")

    monkeypatch.setattr(Checkpointer, "save", save)
    written = []
    with planted_in_job(Config(fault="disk_full"), hf):
        Checkpointer.save(None, 1, {}, written.append)
        with pytest.raises(OSError, match="No space left"):
            Checkpointer.save(None, 2, {}, written.append)
    Checkpointer.save(None, 3, {}, written.append)
    assert len(written) == 3


@pytest.mark.parametrize("bug", planted_by(""), ids=lambda m: m.name)
def test_every_bug_is_planted_where_it_says_and_changes_routes_or_code(bug, tmp_path):
    topology = TOPOLOGIES[bug.topology]
    variant = VARIANTS[topology.variant]
    facts = read_hf_facts(write_checkpoint(variant, tmp_path))
    config = Config()
    config.parallel = topology.parallel_section()
    samples = train_samples(make_rollouts(variant, topology.batch), variant)
    with bug.planted(config, facts) as plant:
        assert (plant is None) == (bug.spoil is None)
        if plant is not None:
            assert changed(samples, plant(0, samples)).any()


def test_a_bug_is_found_at_its_address():
    assert all(planted_at(bug.address) is bug for bug in MUTATIONS.values())


def test_a_bug_is_verifys_or_names_the_test_that_plants_it():
    for bug in MUTATIONS.values():
        assert (bug.topology is None) == bool(bug.caught_by), bug.name
        if bug.caught_by:
            test = (ROOT / bug.caught_by).read_text()
            assert bug.name in test or "planted_by(" in test, bug.name


@pytest.mark.parametrize(
    "bug", planted_by("tests/oracle/test_algorithm.py"), ids=lambda bug: bug.name
)
def test_a_bug_of_the_learning_rule_finds_what_it_replaces(bug):
    with bug.patch(None, None):  # as the job plants it
        pass


def test_a_bug_is_gone_when_its_context_ends(hf):
    original = microbatch.sp_rows
    with MUTATIONS["sp_first_share"].planted(None, hf) as plant:
        assert plant is None and microbatch.sp_rows is not original
        assert microbatch.sp_rows(np.arange(4), 2, 1).tolist() == [0, 1]
    assert microbatch.sp_rows is original
