"""The policy table of a step's outcome: what is counted, written and saved before an error is raised."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from r3train.host_group import join_ranks, leave_ranks
from r3train.loop.outcome import POLICIES, settle
from r3train.loop.train_rollout import Trained
from r3train.proof.step_verdict import Failure, StepVerdict
from r3train.user_code import UserCodeFailed

REPLAY = StepVerdict(
    3, [Failure("train", "routes", "replay_forward", 2, "rows_native", 1, 0)], [], None, {}
)
THRESHOLD = StepVerdict(3, [], [], "R3 mismatch tokens (9) > threshold (1)", {})
PASSED = StepVerdict(3, [], [], None, {})


class Recorded:
    """A run state which records the calls, in order."""

    def __init__(self, bad=None, idle=None):
        self.calls, self._bad, self._idle = [], bad, idle

    def put_back(self):
        self.calls.append("put back")

    def count_trained(self, rollout_id, skipped):
        self.calls.append(f"counted {rollout_id}, {skipped} skipped")
        return self._bad

    def learned_nothing(self, rollout_id, low_ess_steps):
        return self._idle

    def save_failed(self, next_rollout_id, cause, what):
        self.calls.append(f"saved for {next_rollout_id}: {what}: {cause}")


@pytest.fixture(autouse=True)
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


def settled(trained, verdict, state):
    """Settle step 3; returns the calls in order, the report among them, and the error or None."""
    try:
        settle(3, trained, verdict, state, report=lambda: state.calls.append("reported"))
    except Exception as error:  # noqa: BLE001 - the outcome's
        return state.calls, error
    return state.calls, None


BAD, IDLE = FloatingPointError("not finite"), RuntimeError("ess too low")
COUNTED = "counted 3, 0 skipped"
CASES = {
    "goes on": (Trained({}), PASSED, Recorded(), [COUNTED], None),
    "not checked": (Trained({}), None, Recorded(), [COUNTED], None),
    "untrained": (
        Trained({}, loss_error="loss raised", first_step_done=False),
        None,
        Recorded(),
        ["put back", "saved for 3: a rollout could not be trained: loss raised"],
        UserCodeFailed,
    ),
    # weights of a wrong replay are in no checkpoint, and the rollout does not count
    "claim": (Trained({}), REPLAY, Recorded(), ["reported"], AssertionError),
    "replay, and all else": (
        Trained({}, loss_error="loss raised"),
        REPLAY,
        Recorded(BAD, IDLE),
        ["reported"],
        AssertionError,
    ),
    "trained in part": (
        Trained({}, loss_error="loss raised"),
        PASSED,
        Recorded(BAD),
        ["reported", COUNTED, "saved for 4: a rollout was trained in part: loss raised"],
        UserCodeFailed,
    ),
    "not finite": (
        Trained({}, skipped_steps=2),
        PASSED,
        Recorded(BAD),
        ["counted 3, 2 skipped", "reported"],
        FloatingPointError,
    ),
    "not finite, above the threshold": (
        Trained({}, skipped_steps=2),
        THRESHOLD,
        Recorded(BAD),
        ["reported", "counted 3, 2 skipped"],
        FloatingPointError,
    ),
    "nothing trained": (
        Trained({}, low_ess_steps=2),
        THRESHOLD,
        Recorded(idle=IDLE),
        ["reported", COUNTED, "saved for 4: rollouts were not trained: ess too low"],
        RuntimeError,
    ),
    "threshold": (
        Trained({}),
        THRESHOLD,
        Recorded(),
        [
            "reported",
            COUNTED,
            "saved for 4: the R3 check failed: R3 mismatch tokens (9) > threshold (1)",
        ],
        AssertionError,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_outcome_counts_reports_saves_and_raises_as_its_policy_says(name):
    trained, verdict, state, expected, error = CASES[name]
    calls, raised = settled(trained, verdict, state)
    assert calls == expected
    assert type(raised) is (error or type(None))


def test_every_policy_has_its_case():
    assert set(POLICIES) <= set(CASES)
