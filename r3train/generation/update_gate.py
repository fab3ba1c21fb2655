"""The gate between generation and a weight update: drain, freeze or abort what is in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from r3train.config.rollout_settings import RolloutSection
from r3train.generation.evaluation_runner import EvaluationRunner
from r3train.generation.recheck import AWAITED_S, Rechecking
from r3train.generation.shared import Shared, Slots

_ABORT_EVERY_S = 0.3


class UpdateGate:
    """Closes for a weight update, in the way that ``pause_generation_mode`` says.

    mode_freezes: the mode is ``in_place`` or ``retract`` (servers keep their requests, with their KV cache or
    without; a server that is short of memory retracts one too): a request goes on under a newer version.
    frozen: the servers are told to pause now.  aborting: requests are aborted by an update, to be resumed
    after it.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        shared: Shared,
        slots: Slots,
        evaluation: EvaluationRunner,
        rechecking: Rechecking,
    ) -> None:
        self._mode = rollout.pause_generation_mode
        self._shared = shared
        self._slots = slots
        self._evaluation = evaluation
        self._rechecking = rechecking
        self.mode_freezes = self._mode in ("in_place", "retract")
        self.frozen = False
        self.aborting = False
        self._updates = (
            0  # under way, or failed until ``reopen_for_new_servers``: no new episode is sent
        )

    @property
    def open(self) -> bool:
        """True while no update is under way."""
        return not self._updates

    async def close(self, expire: Callable[[], None]) -> None:
        """Let no call take a slot, and drain, freeze or abort the requests in flight; calls with a slot go on.

        expire: drops the groups that would be too stale then.  An evaluation ends
        first, so that one weight version answers all of it.
        """
        shared = self._shared
        try:
            if self._mode != "drain":  # draining leaves time enough for rechecks
                await self._rechecks_with_generation()
        finally:
            self._updates += 1
        await shared.until(lambda: self._evaluation.is_done)
        expire()
        await shared.until(lambda: shared.backend is not None)
        shared.raise_failure()
        if self.mode_freezes:
            await self.end_rechecks()
            self.frozen = True
            await shared.backend.pause_generation(self._mode)
        elif self._mode == "abort":
            await self.end_rechecks()  # an abort ends these too
            self.aborting = True
            while self._slots.in_flight:
                # repeated: an abort misses a request that is still on its way to the server
                await shared.backend.abort()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_EVERY_S):
                        await shared.until(lambda: self._slots.in_flight == 0)
        else:
            await shared.until(lambda: self._slots.in_flight == 0)
            await self.end_rechecks()

    async def thaw(self) -> None:
        """Let paused servers compute again."""
        if self.frozen:
            await self._shared.backend.continue_generation()
            self.frozen = False

    async def reopen(self) -> None:
        """Go on after an update."""
        await self.thaw()
        self.aborting = False
        self._updates -= 1
        if self.open:
            self._rechecking.reopen()
        self._shared.changed()

    def reopen_for_new_servers(self) -> None:
        """Go on after an update that failed: the servers that were paused have ended."""
        self._updates = 0
        self.frozen = self.aborting = False
        self._rechecking.reopen()
        self._shared.changed()

    async def end_rechecks(self) -> None:
        """Cancel the rechecks under way; servers that generate nothing may go on for a while."""
        await self._rechecking.close(idle=self._slots.in_flight == 0 and not self._shared.closing)

    async def _rechecks_with_generation(self) -> None:
        """Wait a little for the rechecks under way, while tokens are generated."""
        under_way = self._rechecking.under_way
        for task in under_way:
            task.add_done_callback(lambda _: self._shared.changed())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AWAITED_S):
                await self._shared.until(
                    lambda: not self._slots.in_flight or all(task.done() for task in under_way)
                )
