"""Rank 0 restarts lost servers, while all ranks wait to send the weights."""

from __future__ import annotations

from r3train.host_group import rank_zero_alone
from r3train.loop.rank_zero import Servers
from r3train.loop.distribute import broadcast_json
from r3train.engine.backend import EngineError, EngineUnreachable
from r3train.engine.publish import WeightUpdateError

LOST = (EngineUnreachable, WeightUpdateError)
# they leave the actor right: a restart replaces lost servers, the others end the run
SERVER_ERRORS = (EngineError, WeightUpdateError)


class Recovery:
    """Each rank's part in a restart; ``servers`` is None on ranks other than 0.

    Without ``enabled`` there is none.  ``fatal``: any error of rank
    0's that ends the run, also without ``enabled``; all ranks raise in the next ``Intake.take``, or rank 0 at the end
    of ``run``.
    """

    def __init__(self, servers: Servers | None, *, enabled: bool):
        self._servers = servers
        self._enabled = enabled
        self.fatal: BaseException | None = None

    @property
    def caught(self) -> tuple[type[BaseException], ...]:
        """The exceptions that a restart fixes."""
        return LOST if self._enabled else ()

    def rank_zero_failed(self, failure: BaseException | None) -> bool:
        """True on every rank where rank 0's servers failed; a collective.  failure: on rank 0."""
        return bool(broadcast_json(failure is not None))

    def restart(self, cause: BaseException | None) -> BaseException | None:
        """Start the servers again after rank 0's ``cause``; a collective.

        Returns None after a restart, else the error that prevents it; where a restart would not fix the cause, the cause.
        """
        failure: BaseException | None = None
        with rank_zero_alone():
            if self._servers is not None and not isinstance(cause, self.caught):
                failure = cause
            elif self._servers is not None:
                try:
                    self._servers.restart(str(cause))
                except RuntimeError as error:
                    failure = error
        text = broadcast_json(None if failure is None else str(failure))
        return failure or (RuntimeError(f"rank 0's servers failed: {text}") if text else None)
