"""What the parent asks the ranks to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One run of one topology: what to run and where to write.

    ``last_phase``: nothing beyond it is run.  ``order_seed`` shuffles the samples before they are
    packed (the noise measurement).
    """

    job_id: str
    topology: str
    checkpoint: str
    rollouts: str
    output: str
    mutation: str | None = None
    last_phase: int = 5
    bf16: bool = False
    order_seed: int | None = None
