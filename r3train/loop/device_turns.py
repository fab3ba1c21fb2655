"""Turns on the devices: servers and actor have their own, or share the same ones (--colocate).

With --colocate a step goes: servers generate | servers offload | the actor comes back, trains, saves |
gradients and optimizer leave | the servers' weights come back and are sent | the actor leaves | the KV
cache comes back | servers generate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from r3train.config import RunConfig
from r3train.host_group import host_barrier, rank_zero_alone
from r3train.loop.rank_zero import Servers
from r3train.loop.recovery import SERVER_ERRORS, Recovery
from r3train.loop.rollout_source import RolloutSource

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor

_TRAINING = ("weights", "gradients", "optimizer")  # what the actor needs on the device to train

# metrics of an update; and on rank 0 a failure of the servers
Sent = tuple[dict[str, Any], BaseException | None]


class DeviceTurns:
    """Turns of servers and actor; without --colocate each has its devices: nothing moves, and each step saves last."""

    saves_before_publish = False
    servers_keep_weights = True  # between two updates

    def quiet(self, source: RolloutSource) -> AbstractContextManager[None]:
        """Rank 0: a block for an update, in which no request is answered: they have ended, or are frozen."""
        return source.quiesced()

    def servers_offload(self, source: RolloutSource) -> None:
        """Rank 0: end the servers' turn, once a rollout is complete."""

    def actor_onloads(self) -> None:
        """Begin the actor's turn: it has all that training needs on its device."""

    def actor_offloads(self) -> None:
        """Move away what is left on the device: after ``revive``, or for --check-weight-update-equal."""

    def serve(self, send: Callable[[], Sent]) -> Sent:
        """Have ``send`` bring the weights to the servers, and begin their turn; a collective."""
        return send()

    def onload_server_weights(self) -> None:
        """Rank 0: give the servers room for the weights that are sent next."""

    def replace_servers(self) -> None:
        """Prepare for new servers, which take all of their memory at once; a collective."""

    def end(self) -> None:
        """End the run's last turn: what a checkpoint or an export needs is on the actor's device."""


class ColocatedTurns(DeviceTurns):
    """Servers and actor take turns on the same devices (--colocate); a step saves before it publishes."""

    saves_before_publish = True
    servers_keep_weights = False

    def __init__(
        self,
        config: RunConfig,
        actor: MegatronActor,
        servers: Servers | None,
        recovery: Recovery,
    ) -> None:
        self._config = config
        self._memory = actor.memory
        self._servers = servers
        self._recovery = recovery
        # on rank 0: no request is sent until the servers have their memory back
        self._quiet = ExitStack()

    def quiet(self, source: RolloutSource) -> AbstractContextManager[None]:
        """Return an empty block: nothing was in flight since ``servers_offload``."""
        return nullcontext()

    def servers_offload(self, source: RolloutSource) -> None:
        """Rank 0: let the servers release their memory, once nothing is in flight.

        The last batch waits for another turn where one of the servers is lost.
        """
        try:
            with ExitStack() as quiet:
                quiet.enter_context(source.quiesced())
                self._servers.keep_onloaded()
                self._quiet = quiet.pop_all()
        except BaseException:
            source.put_back()
            raise

    def actor_onloads(self) -> None:
        """Bring weights, gradients (as zeros) and optimizer state back to the device."""
        self._memory.hold(*_TRAINING)

    def actor_offloads(self) -> None:
        """Move all of the actor's memory to the host."""
        self._memory.hold()

    def serve(self, send: Callable[[], Sent]) -> Sent:
        """Swap turns around ``send``.

        The actor's weights leave the device after the last tensor, and then the servers' KV cache comes back.  For
        --check-weight-update-equal they stay until that check has ended.
        """
        failure: BaseException | None = None
        with rank_zero_alone():
            if self._servers is not None:
                try:
                    self._servers.keep_onloaded()
                except SERVER_ERRORS as error:
                    failure = error
        if self._recovery.rank_zero_failed(failure):
            return {}, failure
        self._memory.hold("weights")
        host_barrier()
        metrics, failure = send()
        if not self._config.trainer.check_weight_update_equal:
            self._memory.hold()
        host_barrier()
        if self._servers is not None and failure is None and self._recovery.fatal is None:
            try:
                self._servers.keep_onloaded("weights", "kv_cache")
                self._quiet.close()
            except SERVER_ERRORS as error:
                failure = error
        return metrics, failure

    def onload_server_weights(self) -> None:
        """Rank 0: bring the servers' weights back, undefined until they are sent."""
        self._servers.keep_onloaded("weights")

    def replace_servers(self) -> None:
        """Move the actor away: a new server takes all of its memory at its start."""
        self._quiet.pop_all()  # not left: the servers that it would resume have ended
        self._memory.hold()
        host_barrier()

    def end(self) -> None:
        """Stop the servers where the actor is away, and bring the actor back."""
        if self._memory.is_whole:
            return
        with rank_zero_alone():
            if self._servers is not None:
                self._servers.stop()
        self._memory.hold(*_TRAINING)
