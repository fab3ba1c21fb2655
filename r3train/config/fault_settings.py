"""Faults: how many a run survives, and planted ones."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from r3train.config.requirements import excludes, requires
from r3train.config.section import Section


class FaultsSection(Section):
    """Limits on what may break before the run ends."""

    title: ClassVar[str] = "Faults"
    test_hooks = ("plant_fault",)

    max_bad_steps: int = Field(default=3, ge=1)
    """The run ends after this many rollouts in a row with a non-finite loss or gradient."""
    max_bad_answers: int = Field(default=3, ge=1)
    """A request is sent again when its answer is late, is cut short or contradicts the request.  The run ends
    after this many bad answers in a row to one request."""
    signal_grace_s: float = Field(default=120.0, gt=0)
    """Seconds that the run gets after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C to write a checkpoint and end.
    torchrun ends its ranks 30 s after a Ctrl-C."""
    max_engine_restarts: Annotated[
        int,
        requires("has_engines"),
        excludes(
            "rollout_external_engine_addrs or rollout_engines_file: those servers belong to somebody else"
        ),
    ] = Field(default=0, ge=0)
    """Restarts of crashed servers that the whole run may use; 0: the first crash ends the run."""
    engine_restart_backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first restart; each further one waits twice as long, 60 at most."""
    engine_health_timeout_s: float = Field(default=60.0, gt=0)
    """A server counts as hung after this many seconds without a sign of life, plus those that it may need
    to encode the routes of all its requests at once, at 100 MB/s."""
    plant_fault: Annotated[
        Literal["nan_once", "nan_always", "inf_once", "disk_full"] | None,
        excludes("kl_coef > 0: it makes the advantages again", when="nan_once|nan_always|inf_once"),
    ] = None
    """Plant a deliberate fault from the second rollout on, to test that the run copes."""
