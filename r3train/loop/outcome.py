"""The outcome of a trained step, and what follows from it: one broadcast, one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3train.host_group import host_barrier
from r3train.loop.distribute import broadcast_json
from r3train.loop.run_state import RunState
from r3train.loop.train_rollout import Trained
from r3train.proof.step_verdict import StepVerdict
from r3train.user_code import UserCodeFailed


@dataclass(frozen=True)
class Policy:
    """The acts of the ranks before the error of an outcome is raised.

    reports: the step's metrics are written.  counts: the rollout counts as trained: its prompts are
    logged, its bad steps counted.  resumes_after: a checkpoint is saved that resumes so many rollouts
    later (0: this rollout again, 1: the next one); None: none is saved.  what: begins the line for people.
    """

    reports: bool
    counts: bool
    resumes_after: int | None
    what: str = ""


# In order of priority; with "" the run goes on.  `settle` looks twice, before and after it counts:
# "not finite" and "nothing trained" are known only then, and go before "threshold".
POLICIES = {
    # the user's loss failed before a weight moved: the rollout waits in the checkpoint
    "untrained": Policy(False, False, 0, "a rollout could not be trained"),
    # replay was not exact, or recheck or custody failed: the weights may be wrong, so no checkpoint has them
    "claim": Policy(True, False, None),
    # the user's loss failed later: the rollout's first steps cannot be taken back
    "trained in part": Policy(True, True, 1, "a rollout was trained in part"),
    # max_bad_steps rollouts in a row with a step that was not finite; the batch is dumped
    "not finite": Policy(True, True, None),
    # --min-ess left nothing to train, rollout after rollout
    "nothing trained": Policy(True, True, 1, "rollouts were not trained"),
    # every route was replayed: the weights are as they should be
    "threshold": Policy(True, True, 1, "the R3 check failed"),
}


def settle(
    rollout_id: int,
    trained: Trained,
    verdict: StepVerdict | None,
    run_state: RunState,
    report: Callable[[], Any],
) -> None:
    """Follow the policy of the step's outcome, and raise its error; return if the run goes on.

    A collective.  verdict: on rank 0 only, and None for a step that is not checked; report: writes the
    step's metrics on rank 0.
    """
    errors = _errors(trained, verdict)
    outcome = next((name for name in POLICIES if name in errors), "")
    if reported := bool(outcome) and POLICIES[outcome].reports:
        report()  # first: what counts the rollout may fail, for example on a full disk
    if not outcome or POLICIES[outcome].counts:
        errors |= _count(rollout_id, trained, run_state)
        if trained.skipped_steps:
            host_barrier()  # rank 0 has dumped the batch, with rows of the other ranks' stores
        outcome = next((name for name in POLICIES if name in errors), "")
    if not outcome:
        return
    policy, error = POLICIES[outcome], errors[outcome]
    if policy.reports and not reported:
        report()
    if policy.resumes_after == 0:
        run_state.put_back()
    if policy.resumes_after is not None:
        run_state.save_failed(rollout_id + policy.resumes_after, str(error), policy.what)
    if verdict is None and outcome in ("claim", "threshold"):
        host_barrier()  # ranks other than 0 wait: rank 0 ends the job with its verdict, and would be hidden
    raise error


def _errors(trained: Trained, verdict: StepVerdict | None) -> dict[str, Exception]:
    """Return the errors of training and of the proof by outcome, on all ranks; one broadcast."""
    if trained.loss_error and not trained.first_step_done:
        return {"untrained": UserCodeFailed(trained.loss_error)}
    failed, error = broadcast_json(verdict.failed_claim() if verdict is not None else ["", ""])
    errors: dict[str, Exception] = {failed: AssertionError(error)} if failed else {}
    if trained.loss_error:
        errors["trained in part"] = UserCodeFailed(trained.loss_error)
    return errors


def _count(rollout_id: int, trained: Trained, run_state: RunState) -> dict[str, Exception]:
    """Count the rollout as trained; return what the counts end the run for."""
    found = {
        "not finite": run_state.count_trained(rollout_id, trained.skipped_steps),
        "nothing trained": run_state.learned_nothing(rollout_id, trained.low_ess_steps),
    }
    return {name: error for name, error in found.items() if error is not None}
