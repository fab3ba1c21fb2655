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
from r3train.engine.publish import WeightPublisher
from r3train.families import quantised_tensors, tensor_shapes
from r3train.fp8_blocks import as_served
from r3train.hf_checkpoint import WeightIndex
from r3train.host_group import rank_zero_alone
from r3train.loop.canaries import Canaries
from r3train.loop.device_turns import Disaggregated, Sent
from r3train.loop.distribute import broadcast_json, gather_json
from r3train.loop.rank_zero import RankZero
from r3train.loop.held_weights import HeldWeights
from r3train.loop.recovery import FAILED, Recovery
from r3train.loop.rollout_source import RolloutSource
from r3train.loop.run_state import RunState

# with fp8 every eighth layer is exported again and compared, another eighth at the next update; fewer of a model of
# which an eighth is more than this
_EXPORTED_AGAIN = 8
_EXPORTED_AGAIN_BYTES = 8 << 30

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor


def compared_every(num_layers: int, num_bytes: int) -> int:
    """Return n: of servers of fp8, whose layers are so many bytes, each nth layer is compared at an update.

    >>> [compared_every(48, 30 << 30), compared_every(92, 350 << 30), compared_every(61, 670 << 30)]
    [8, 44, 61]
    """
    return min(num_layers, max(_EXPORTED_AGAIN, -(-num_bytes // _EXPORTED_AGAIN_BYTES)))


@dataclass(eq=False)
class WeightUpdate:
    """Publishes weight versions; all ranks call its methods together.

    rank_zero: None on other ranks; sender: of this rank's own part of the weights, where it sends one next to
    rank 0; canaries, held: None where they are off.
    """

    config: RunConfig
    hf: HfModelFacts
    actor: MegatronActor
    rank_zero: RankZero | None
    turns: Disaggregated
    recovery: Recovery
    run_state: RunState
    sender: WeightPublisher | None
    canaries: Canaries | None = None
    held: HeldWeights | None = None

    def __post_init__(self) -> None:
        self._source: RolloutSource | None = None
        self._began = False
        self._export: Path | None = None  # on rank 0: written of the newest update, to compare with
        self._servers_hold_base = False  # with LoRA: all tensors without an adapter were sent
        self._quantised = quantised_tensors(self.hf) if self.config.serves_fp8 else frozenset()
        shapes = tensor_shapes(self.hf) if self._quantised else {}
        num_bytes = sum(math.prod(shapes[name]) for name in self._quantised)
        self._compared_every = compared_every(self.hf.num_hidden_layers, num_bytes)
        in_parts = any(gather_json(self.sender is not None))
        in_memory = self.config.trainer.update_weight_transfer_mode == "shared_memory"
        self._gather_to = "rank_0" if not in_parts else "owners" if in_memory else "leaders"
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
        if self.recovery.needed(failure):
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
            if not self.recovery.needed(failure):
                self._servers_hold_base = self.turns.servers_keep_weights
                if self.rank_zero is not None:
                    self.rank_zero.rollouts.resume()
                    self.rank_zero.servers.restored(weight_version)
                return metrics

    def _serve(self, weight_version: int, quiet: AbstractContextManager[None]) -> Sent:
        """Begin the servers' turn with the weights of ``weight_version``, and send them canaries."""
        metrics, failure = self.turns.serve(lambda: self._send(weight_version, quiet))
        sent = self.rank_zero is not None and failure is None and self.recovery.fatal is None
        if self.canaries is not None and sent:
            self.canaries.send(weight_version)
        return metrics, failure

    def _send(self, weight_version: int, quiet: AbstractContextManager[None]) -> Sent:
        """Publish while nothing is generated: rank 0 sends; other ranks join gathers or send their own weights.

        Returns metrics, or on rank 0 a failure of the servers.  Nothing is sent if
        the source has failed meanwhile.  Raises ValueError where the tensors that went out are not those
        of the checkpoint, and NotServed.
        """
        adapters = self.config.serves_adapters
        targets_only = self._servers_hold_base and self.config.may_send_targets_alone
        if adapters:
            weights = self.actor.adapter_weights()
        else:
            weights = self.actor.hf_weights(targets_alone=targets_only, gather_to=self._gather_to)
            weights = as_served(weights, self._quantised)
        if self.held is not None:
            weights = self.held.over(weights)
        again, comparison = [], None
        checks_all = self.config.trainer.check_weight_update_equal and not adapters
        if checks_all or (self._quantised and self.held is not None):
            layers = None if checks_all else self._layers_again(weight_version)
            # the servers' tensors are compared with a second export
            again = [as_served(self.actor.hf_weights(layers=layers), self._quantised)]
        self._export = None
        quietly, failure = ExitStack(), None
        with rank_zero_alone():  # requests in flight may take long to end
            if self.rank_zero is not None:
                try:
                    quietly.enter_context(self.rank_zero.servers.unchanged())
                    quietly.enter_context(quiet)
                except Exception as error:  # noqa: BLE001 - the other ranks go on first
                    failure = error
        if self.rank_zero is None:
            if self.sender is not None:
                self.sender.send(weights, version=weight_version)
            for _ in chain(weights, *again):
                raise AssertionError("only rank 0 holds whole tensors")
            if self.held is not None:
                self.held.judge(weight_version)
            return {}, None
        published = None
        held_metrics: dict[str, Any] | None = None

        def drain() -> None:
            """Let the other ranks go on, which are sending."""
            for _ in weights:  # first: others that send may wait for these
                pass
            if published is None:
                self.rank_zero.weights.publisher.abandon()
            for _ in chain(*again):
                pass
            if self.held is not None and held_metrics is None:
                self.held.judge(weight_version, sent=False)

        try:
            with quietly:
                if failure is not None:
                    raise failure
                self.turns.onload_server_weights()
                published = self.rank_zero.weights.publisher.publish(
                    weights, version=weight_version
                )
                if not adapters:  # adapters are compared with the checkpoint when they are written
                    self._weight_index.require(
                        published.sent,
                        published.num_bytes,
                        version=weight_version,
                        targets_alone=targets_only,
                    )
                for export in again:
                    comparison = self.rank_zero.weights.compare(export, weight_version)
                    if self._quantised:
                        shutil.rmtree(comparison.checkpoint)
                    else:
                        self._export = comparison.checkpoint
                    if checks_all:
                        comparison.require_equal(weight_version)
                if self.held is not None:
                    held_metrics = self.held.judge(weight_version, comparison=comparison)
                if self._source is not None:
                    self._source.set_version(weight_version)
        except Exception as error:
            generating_failed = self._source is not None and error is self._source.failure
            if not generating_failed and not isinstance(error, FAILED):
                raise
            drain()
            changes = self.config.rollout.rollout_engines_file is not None
            if changes and self._source is not None and not generating_failed:
                # requests that wait for a server may be answered before the next try has ended
                self._source.set_version(weight_version)
                if self.rank_zero.servers.is_deserted:  # ``revive`` brings them to the next servers
                    return {}, None
            if generating_failed and not isinstance(error, self.recovery.caught):
                self.recovery.fatal = error  # the ranks come together at the next rollout
                return {}, None
            return {}, error
        return {
            "perf/published_bytes": published.num_bytes,
            "perf/published_tensors": published.num_tensors,
            "rollout/weight_version": weight_version,
            **(held_metrics or {}),
        }, None

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
