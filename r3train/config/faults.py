"""What the run does when something breaks."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section


class FaultsSection(Section):
    """How much may break before the run ends."""

    title: ClassVar[str] = "Faults"

    max_bad_steps: int = Field(default=3, ge=1)
    """Rollouts in a row with a non-finite loss or gradient that end the run."""
    max_bad_answers: int = Field(default=3, ge=1)
    """Answers to one request that are cut short, late or contradict it: it is sent again, and after so
    many in a row the run ends."""
    signal_grace_s: float = Field(default=120.0, gt=0)
    """Seconds between SIGTERM or SIGUSR1 and a hard end; a checkpoint is written meanwhile."""
    max_engine_restarts: int = Field(default=0, ge=0)
    """Times that servers of our own are restarted in all; 0 ends the run with the first."""
    engine_restart_backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first restart; doubled with each further one, 60 at most."""
    engine_health_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which a server counts as hung."""
    plant_fault: Literal["nan_once", "nan_always", "inf_once", "disk_full"] | None = None
    """Plant a deliberate fault from the second rollout on, to see the run cope."""
