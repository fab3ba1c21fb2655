"""Bring all servers to the actor's weights, restart lost ones, and check what they hold."""

from __future__ import annotations

import math
import shutil
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3train.config import RunConfig
from r3train.families.hf_facts import HfModelFacts
from r3train.engine.publish import Published, WeightPublisher
from r3train.engine.publish_disk import Comparison
from r3train.families import quantised_tensors, tensor_shapes
from r3train.fp8_blocks import as_servers_store
from r3train.hf_checkpoint import NamedTensors, WeightIndex
from r3train.host_group import rank_zero_alone
from r3train.loop.canaries import Canaries
from r3train.loop.device_turns import DeviceTurns, Sent
from r3train.loop.distribute import broadcast_json, gather_json
from r3train.loop.server_checksums import ServerChecksums
from r3train.loop.rank_zero import RankZero
from r3train.loop.recovery import SERVER_ERRORS, Recovery
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.run_state import RunState

# with fp8 every eighth layer is exported again and compared, another eighth at the next update; fewer of a model of
# which an eighth is more than this
_EXPORTED_AGAIN = 8
_EXPORTED_AGAIN_BYTES = 8 << 30
# where tensors are gathered to, by the transport, if other ranks than 0 send their own
_SENDERS = {"distributed": "leaders", "shared_memory": "owners"}

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor


def compared_every(num_layers: int, num_bytes: int) -> int:
    """Return n: of servers of fp8, whose layers are so many bytes, each nth layer is compared at an update.

    >>> [compared_every(48, 30 << 30), compared_every(92, 350 << 30), compared_every(61, 670 << 30)]
    [8, 44, 61]
    """
    return min(num_layers, max(_EXPORTED_AGAIN, -(-num_bytes // _EXPORTED_AGAIN_BYTES)))


@dataclass(eq=False)
class Update:
    """One update of the servers, on each rank.

    weights: the actor's, as they are sent; targets_alone: those with an adapter only.  again: a second export, with which
    servers' tensors are compared, of all layers with ``checks_all``; None without a comparison.
    """

    version: int
    weights: NamedTensors
    targets_alone: bool
    again: NamedTensors | None
    checks_all: bool
    # on rank 0, as far as the update has come
    published: Published | None = None
    comparison: Comparison | None = None
    checksum_metrics: dict[str, Any] | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of an update that every server holds."""
        return {
            "perf/published_bytes": self.published.num_bytes,
            "perf/published_tensors": self.published.num_tensors,
            "rollout/weight_version": self.version,
            **(self.checksum_metrics or {}),
        }


@dataclass(eq=False)
class WeightUpdate:
    """Publishes weight versions; all ranks call its methods together.

    rank_zero: None on other ranks; sender: of this rank's part of the weights, where a rank other than 0 sends one;
    canaries, checksums: None where they are off.
    """

    config: RunConfig
    hf: HfModelFacts
    actor: MegatronActor
    rank_zero: RankZero | None
    turns: DeviceTurns
    recovery: Recovery
    run_state: RunState
    sender: WeightPublisher | None
    canaries: Canaries | None = None
    checksums: ServerChecksums | None = None

    def __post_init__(self) -> None:
        self._source: RolloutSource | None = None
        self._began = False
        self._rests = False  # on rank 0: nothing is generated since an update that left no server
        self._export: Path | None = None  # on rank 0: written of the newest update, to compare with
        self._servers_hold_base = False  # with LoRA: all tensors without an adapter were sent
        self._quantised = quantised_tensors(self.hf) if self.config.serves_fp8 else frozenset()
        shapes = tensor_shapes(self.hf) if self._quantised else {}
        num_bytes = sum(math.prod(shapes[name]) for name in self._quantised)
        self._compared_every = compared_every(self.hf.num_hidden_layers, num_bytes)
        in_parts = any(gather_json(self.sender is not None))
        mode = self.config.trainer.update_weight_transfer_mode
        self._gather_to = _SENDERS[mode] if in_parts else "rank_0"
        self._weight_index = None
        if self.rank_zero is not None and self.config.has_engines:
            config = self.config
            self._weight_index = WeightIndex(
                self.hf, config.model.dtype_name, config.lora, self._quantised
            )

    def set_source(self, source: RolloutSource | None) -> None:
        """From now on ``source`` generates, on rank 0; updates let its requests end first."""
        self._source, self._began = source, True

    def publish(self, weight_version: int) -> dict[str, Any]:
        """Bring all servers to the weights of ``weight_version``; returns metrics on rank 0.

        Raises NotServed on all ranks where a server holds other weights; then nothing more is generated.
        """
        if not self.config.has_engines:
            return {}
        if self.rank_zero is not None:
            self.rank_zero.display.train_update("publishing weights")
        quiet: AbstractContextManager[None] = nullcontext()
        if self._source is not None and not self.config.serves_adapters:
            quiet = self.turns.quiet(self._source)
        metrics, failure = self._serve(weight_version, quiet)
        if self.recovery.rank_zero_failed(failure):
            metrics = self.revive(weight_version, failure)
        self._servers_hold_base = self.turns.servers_keep_weights
        if self.config.trainer.check_weight_update_equal:
            if not (self.config.serves_adapters or self._quantised):
                self._check_parameters(weight_version)
            self.turns.actor_offloads()
        return metrics

    def revive(self, weight_version: int, failure: BaseException | None) -> dict[str, Any]:
        """Restart lost servers and give them the weights of ``weight_version``; all ranks together.

        failure: what lost them, on rank 0.  Raises the cause, after a checkpoint, where a restart does not fix it, or
        when there are too many.
        """
        while True:
            self.turns.replace_servers()
            failure = self.recovery.restart(failure)
            if failure is not None:
                self.turns.end()
                if self._began:  # else nothing is new
                    what = "the servers failed"
                    self.run_state.save_failed(weight_version, str(failure), what)
                raise failure
            if self.sender is not None:
                self.sender.reconnect()
            self._servers_hold_base = False  # a new one has the checkpoint's
            if self.canaries is not None:
                self.canaries.restarted()
            # new servers have nothing in flight; waiting requests are sent afterwards
            metrics, failure = self._serve(weight_version, nullcontext())
            if not self.recovery.rank_zero_failed(failure):
                self._servers_hold_base = self.turns.servers_keep_weights
                if self.rank_zero is not None:
                    self.rank_zero.rollouts.resume()
                return metrics

    def _serve(self, weight_version: int, quiet: AbstractContextManager[None]) -> Sent:
        """Begin the servers' turn with the weights of ``weight_version``, and send them canaries."""
        metrics, failure = self.turns.serve(lambda: self._update(weight_version, quiet))
        sent = self.rank_zero is not None and failure is None and self.recovery.fatal is None
        if self.canaries is not None and sent:
            self.canaries.send(weight_version)
        return metrics, failure

    def _update(self, weight_version: int, quiet: AbstractContextManager[None]) -> Sent:
        """Quiet the servers, send, verify and resume; other ranks join gathers or send their own weights.

        Returns metrics, or on rank 0 a failure of the servers.  Nothing is sent if
        the source has failed meanwhile.  Raises ValueError where the tensors that went out are not those
        of the checkpoint, and NotServed.
        """
        update = self._export_for(weight_version)
        quietly, failure = self._quiet(quiet)
        if self.rank_zero is None:
            self._send_part(update)
            return {}, None
        try:
            with quietly:
                if failure is not None:
                    raise failure
                with self.rank_zero.servers.requests_wait():
                    self._send(update)
                    self._verify(update)
                if self._source is not None:
                    self._source.set_version(weight_version)
            if self._rests:
                self.rank_zero.rollouts.resume()
                self._rests = False
        except Exception as error:
            return {}, self._failed(update, error)
        return update.metrics, None

    def _export_for(self, weight_version: int) -> Update:
        """Begin an update: its tensors are gathered as they are sent, each summed on its way."""
        adapters = self.config.serves_adapters
        targets_only = self._servers_hold_base and self.config.may_send_targets_alone
        if adapters:
            weights = self.actor.adapter_weights()
        else:
            weights = self.actor.hf_weights(targets_alone=targets_only, gather_to=self._gather_to)
            weights = as_servers_store(weights, self._quantised)
        if self.checksums is not None:
            weights = self.checksums.over(weights)
        checks_all = self.config.trainer.check_weight_update_equal and not adapters
        again = None
        if checks_all or (self._quantised and self.checksums is not None):
            layers = None if checks_all else self._layers_again(weight_version)
            again = as_servers_store(self.actor.hf_weights(layers=layers), self._quantised)
        self._export = None
        return Update(weight_version, weights, targets_only, again, checks_all)

    def _quiet(
        self, quiet: AbstractContextManager[None]
    ) -> tuple[AbstractContextManager[None], Exception | None]:
        """Rank 0: wait until no server joins and nothing is generated; returns the end of that, and what went wrong.

        A collective: the other ranks wait, for requests in flight may take long to end.
        """
        quietly, failure = ExitStack(), None
        with rank_zero_alone():
            if self.rank_zero is not None:
                try:
                    quietly.enter_context(self.rank_zero.servers.unchanged())
                    quietly.enter_context(quiet)
                except Exception as error:  # noqa: BLE001 - the other ranks go on first
                    failure = error
        return quietly, failure

    def _send_part(self, update: Update) -> None:
        """Ranks other than 0: send their own weights, and join the gathers of rank 0's update."""
        if self.sender is not None:
            self.sender.send(update.weights, version=update.version)
        for _ in chain(update.weights, update.again or ()):
            raise AssertionError("only rank 0 holds whole tensors")
        if self.checksums is not None:
            self.checksums.judge(update.version)

    def _send(self, update: Update) -> None:
        """Rank 0: send the weights; raises ValueError unless every tensor of the checkpoint went out."""
        self.turns.onload_server_weights()
        publisher = self.rank_zero.weights.publisher
        update.published = publisher.publish(update.weights, version=update.version)
        # adapters are compared with the checkpoint when they are written
        if not self.config.serves_adapters:
            self._weight_index.require(
                update.published.sent,
                update.published.num_bytes,
                version=update.version,
                targets_alone=update.targets_alone,
            )

    def _verify(self, update: Update) -> None:
        """Rank 0: hold what servers hold against a second export and their own checksums; raises NotServed."""
        if update.again is not None:
            comparison = self.rank_zero.weights.compare(update.again, update.version)
            update.comparison = comparison
            if self._quantised:
                shutil.rmtree(comparison.checkpoint)
            else:
                self._export = comparison.checkpoint
            if update.checks_all:
                comparison.require_equal(update.version)
        if self.checksums is not None:
            update.checksum_metrics = self.checksums.judge(
                update.version, comparison=update.comparison
            )

    def _failed(self, update: Update, error: Exception) -> BaseException | None:
        """Rank 0: let the other ranks go on after an error, and say what becomes of the update.

        Returns the error where ``revive`` may help.  Returns None where the run goes on without an update: generation
        failed for good (``recovery.fatal``), or no server is there, and the next ``take`` revives, or the next update comes
        first.  Generation rests until ``Rollouts.resume`` then.  Raises an error that is neither the servers' nor the source's.
        """
        generating_failed = self._source is not None and error is self._source.failure
        if not generating_failed and not isinstance(error, SERVER_ERRORS):
            raise error
        self._let_others_go_on(update)
        changes = self.config.servers_change and not self.config.serves_adapters
        if changes and self._source is not None and not generating_failed:
            # requests that wait for a server take the newest weights, maybe before the next try has ended
            self._source.set_version(update.version)
            # ``revive`` or the next update brings them to the next servers
            if self.rank_zero.servers.is_deserted:
                self._rests = True
                return None
        if generating_failed and not isinstance(error, self.recovery.caught):
            self.recovery.fatal = error  # the ranks come together at the next rollout
            return None
        return error

    def _let_others_go_on(self, update: Update) -> None:
        """Rank 0: join what the other ranks, which are sending, still do in an update that has failed."""
        for _ in update.weights:  # first: others that send may wait for these
            pass
        if update.published is None:
            self.rank_zero.weights.publisher.abandon()
        for _ in update.again or ():
            pass
        if self.checksums is not None and update.checksum_metrics is None:
            self.checksums.judge(update.version, sent=False)

    def _layers_again(self, weight_version: int) -> range:
        """Layer ids of which a second export is compared: a share of them, the next share at the next update."""
        every = self._compared_every
        return range(weight_version % every, self.hf.num_hidden_layers, every)

    def _check_parameters(self, weight_version: int) -> None:
        """--check-weight-update-equal, beyond the servers' checksums: every rank's parameters are those exported.

        The export that the servers were compared with is loaded back and compared bit for bit.  Raises AssertionError
        on rank 0.
        """
        update = f"weight update {weight_version}"
        export = broadcast_json(self._export and str(self._export))
        if export is None:  # the source has failed, and nothing was sent
            return
        other = self._unlike(Path(export), update)
        if self.rank_zero is None:
            return
        for rank, names in enumerate(other):
            if names:
                raise AssertionError(
                    f"{update}: {len(names)} parameters of rank {rank} are not what was exported,"
                    f" {names[0]} among them"
                )

    def _unlike(self, export: Path, update: str) -> list[list[str]]:
        """Names of each rank's parameters that are not what an export holds; a collective."""
        if not export.is_dir():
            raise ValueError(
                f"{update}: this rank does not see {export}: --check-weight-update-equal needs a run"
                " directory that all ranks see"
            )
        other = gather_json(self.actor.parameters_unlike(export))
        if self.rank_zero is not None:
            shutil.rmtree(export, ignore_errors=True)
        return other
