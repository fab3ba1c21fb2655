"""The estimated step: each part follows its assumption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.step_estimate import COLOCATED, TWO_NODES, Assumed, parts, step_s


@pytest.mark.parametrize(
    "part, setup, changed, ratio",
    [
        ("generation", COLOCATED, {"overlapped": 2 * Assumed().overlapped}, 0.5),
        ("routes leave the servers", COLOCATED, {"answer_stall_s": 0.044}, 2),
        ("old pass, training", TWO_NODES, {"train_flops": 240e12}, 0.5),
        ("Adam on the host", TWO_NODES, {"adam_threads": 4}, 0.25),
        ("memory to the host and back", COLOCATED, {"host_copy": 40e9}, 0.5),
        ("publish", COLOCATED, {"sent_share": 0.1}, 0.1),
        ("publish", TWO_NODES, {"publish_rate": 1e9}, 1),  # NCCL's rate is the setup's
    ],
)
def test_a_part_follows_its_assumption_alone(part, setup, changed, ratio):
    before, after = parts(setup, Assumed()), parts(setup, replace(Assumed(), **changed))
    assert after[part] == pytest.approx(ratio * before[part]) and before[part] > 0
    assert {k: v for k, v in after.items() if k != part} == {
        k: v for k, v in before.items() if k != part
    }


def test_a_step_with_servers_of_its_own_takes_the_longer_of_serving_and_training():
    found = {"generation": 9, "routes leave the servers": 1, "old pass, training": 8, "publish": 2}
    assert (
        step_s(found, TWO_NODES) == 12
        and step_s(found | {"old pass, training": 11}, TWO_NODES) == 13
    )
    assert step_s(found, COLOCATED) == 20
