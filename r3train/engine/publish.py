"""New weights to the rollout engines: what all transports have in common, and the broadcast in buckets.

Other transports: ``publish_disk``, ``publish_memory``, and ``adapters`` of LoRA.  Each takes an iterator of
(HF name, full tensor) on one rank.  At the end every server
holds those weights under a new version label.  With pipeline stages each stage's first rank broadcasts
its weights, by a publisher of its own (``loop.stage_weight_sync``).

Example: tensors of 3, 1, 6 and 2 MB in buckets of 4 MB go out as [3, 1], [6] and [2].  Of each bucket the servers get the
names, dtypes and shapes by HTTP and the bytes by broadcast, in this order; the last one brings the version, with which
they drop their caches.  A server that failed before it holds a mixture, under its old version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from r3train.engine.addresses import host_of, is_loopback
from r3train.engine.backend import EngineError, GroupBroken
from r3train.engine.control import EngineControl
from r3train.hf_checkpoint import NamedTensors, TensorKind, check_name, kind_of

logger = logging.getLogger(__name__)

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_POLL_S = 0.0005
ALIVE_EVERY_S = 0.5


class WeightUpdateError(RuntimeError):
    """A weight update failed half-way: the servers may hold a mixture of two versions."""


@dataclass(frozen=True, slots=True)
class Published:
    """One update: the tensors that were announced, the bytes that went out, and the time."""

    version: int
    sent: dict[str, TensorKind]
    num_bytes: int
    num_buckets: int
    seconds: float

    @property
    def num_tensors(self) -> int:
        return len(self.sent)


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A bucket that is sent: its bytes, our side of the broadcast and the servers' side."""

    flat: torch.Tensor
    work: Any
    loaded: Future[Any]


class WeightPublisher:
    """Sends one version of the weights to all servers; nothing may be generated meanwhile, and no server may join.

    overwrites: no update may come while ``give`` goes on either.
    """

    overwrites = False

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Send every tensor; ``version`` is the servers' new label."""
        raise NotImplementedError

    def send(self, weights: Iterator[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send this rank's part of an update, on a rank other than 0."""
        self.publish(weights, version=version)

    def give(self, server: int) -> int | None:
        """Bring a server that joins to the newest version, which is returned; None: only an update can."""
        return None

    def require_reach(self, addr: str) -> None:
        """Raise ValueError for a server at which an update would not arrive."""

    def abandon(self) -> None:
        """Let ranks go on that wait to send their part of an update, which failed."""

    def reconnect(self) -> None:
        """Note a restart of the servers; nothing to do where no connection to them is kept."""

    def close(self) -> None:
        """End what is kept between updates."""


def buckets(
    named_tensors: NamedTensors,
    bucket_bytes: int,
    together: Iterable[tuple[str, str]] = (),
    fused_experts: bool = False,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group tensors, in order, into buckets of at most ``bucket_bytes``.

    A tensor larger than that is a bucket of its own.  A bucket ends where the next tensor would not be
    aligned inside the flattened bytes, which the receiving side insists on.  The first of a pair of
    ``together`` waits for the second: no bucket ends between them.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    checked = ((check_name(name, fused_experts), tensor) for name, tensor in named_tensors)
    for unit in _units(checked, together):
        unit_bytes = sum(tensor.nbytes for _, tensor in unit)
        if bucket and (size + unit_bytes > bucket_bytes or size % unit[0][1].itemsize):
            yield bucket
            bucket, size = [], 0
        bucket.extend(unit)
        size += unit_bytes
    if bucket:
        yield bucket


def _units(
    named_tensors: NamedTensors, together: Iterable[tuple[str, str]]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield tensors only, and those of a pair at once.

    Raises ValueError for the half of a pair that came alone.
    """
    partner = {a: b for pair in together for a, b in (pair, pair[::-1])}
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        pair_name = partner.get(name)
        if pair_name is None:
            yield [(name, tensor)]
        elif pair_name in waiting:
            yield [(pair_name, waiting.pop(pair_name)), (name, tensor)]
        else:
            waiting[name] = tensor
    for name in waiting:
        raise ValueError(
            f"weight {name!r} came without {partner[name]!r}: SGLang loads the two as one tensor,"
            " and would forget it"
        )


@torch.no_grad()
def flatten(bucket: Sequence[tuple[str, torch.Tensor]], memory: torch.Tensor) -> torch.Tensor:
    """Copy the bytes of every tensor of the bucket, in order, into ``memory``; returns the part that they fill.

    memory: uint8, at least as long as the bucket.  Tensors of a GPU may be copied to the host's.
    Source: SGLang 0.5.23, ``FlattenedTensorBucket.empty`` computes the same offsets.
    """
    sizes = [tensor.nbytes for _, tensor in bucket]
    flat = memory[: sum(sizes)]
    for place, (_, tensor) in zip(flat.split(sizes), bucket, strict=True):
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
    if bucket[0][1].is_cuda and not flat.is_cuda:
        torch.cuda.current_stream().synchronize()
    return flat


_NO_MEMORY = torch.empty(0, dtype=torch.uint8)


class _BucketMemory:
    """Memory for two buckets: one is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [_NO_MEMORY, _NO_MEMORY]

    def fill(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Return the bucket's bytes as ``flatten``; they stay until the next bucket but one."""
        self._pieces.reverse()
        size = sum(tensor.nbytes for _, tensor in bucket)
        if self._pieces[0].nbytes < size:
            pinned = bucket[0][1].is_cuda and self._device.type == "cpu"
            self._pieces[0] = _NO_MEMORY  # not the old and the new one at once
            self._pieces[0] = torch.empty(
                size, dtype=torch.uint8, device=self._device, pin_memory=pinned
            )
        return flatten(bucket, self._pieces[0])


@dataclass(frozen=True)
class BroadcastGroup:
    """The process group of this rank and every rank of the servers."""

    backend: str = "gloo"
    """``"gloo"``: tensors travel on the CPU; ``"nccl"``: on ``device``."""
    device: torch.device | str = "cpu"
    """Of a bucket's memory."""
    master_address: str = "127.0.0.1"
    """Servers reach this rank there, and the group's store listens there only, on a port that the system chooses."""
    interface: str | None = None
    """Network interface of that address: gloo would take the one that the host's name means, often loopback.
    GLOO_SOCKET_IFNAME wins over it."""
    timeout_s: float = 600.0


class DistributedPublisher(WeightPublisher):
    """Broadcast from this rank to every rank of every server, bucket by bucket.

    The group is made at the first ``publish``, and anew where other servers are present.  ``flush_cache`` drops prefixes that the
    servers cached under the old weights; they refuse that while requests are running.  ``together``
    are pairs of names that one bucket must bring, ``fused_experts`` is for ``check_name``.
    """

    def __init__(
        self,
        engine: EngineControl,
        *,
        bucket_bytes: int,
        group: BroadcastGroup = BroadcastGroup(),
        flush_cache: bool = True,
        together: Sequence[tuple[str, str]] = (),
        fused_experts: bool = False,
    ) -> None:
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._together = together
        self._fused_experts = fused_experts
        self._backend, self._interface = group.backend, group.interface
        self._device = torch.device(group.device)
        self._master_address = group.master_address
        self._timeout = timedelta(seconds=group.timeout_s)
        self._flush_cache = flush_cache
        self._group_name = ""
        self._group: dist.ProcessGroup | None = None
        self._is_warm = False  # the group has sent something
        self._failed: tuple[dist.ProcessGroup, BaseException] | None = None  # with its error
        self._store: dist.TCPStore | None = None
        self._memory = _BucketMemory(self._device)
        self._servers: list[int] = []  # of the group

    def require_reach(self, addr: str) -> None:
        """Raise ValueError for a server on another host, where the group's store listens on loopback."""
        if is_loopback(self._master_address) and not is_loopback(host_of(addr)):
            raise ValueError(
                f"{addr}: weights are sent from {self._master_address}, which it cannot reach: start the run with"
                " --update-weight-master-address"
            )

    def connect(self) -> None:
        """Join a process group with every rank of the servers that are present; this rank is its rank 0.

        Raises ValueError where ``master_address`` is none of this node's.
        """
        servers = self._engine.present()
        if self._group is not None and self._servers == servers:
            return
        self._leave()
        self._drop_failed()
        # A new name: servers may outlive this trainer, and neither side takes a name again.
        self._group_name = f"r3train_weights_{secrets.token_hex(4)}"
        self._servers = servers
        sizes = self._engine.update_group_sizes(servers)
        world_size = 1 + sum(sizes)
        self._store = _open_store(self._master_address, world_size, self._timeout)
        joined = self._engine.init_weights_update_group(
            servers=servers,
            master_address=self._master_address,
            master_port=self._store.port,
            rank_offsets=[1 + sum(sizes[:i]) for i in range(len(sizes))],
            world_size=world_size,
            group_name=self._group_name,
            backend=self._backend,
        )
        store = self._store

        def join() -> dist.ProcessGroup:
            with gloo_on(self._interface):
                return _join_as_rank_0(
                    store, world_size, self._group_name, self._backend, self._timeout
                )

        # Joining cannot be interrupted, and waits for servers that may have refused or died.
        joining = in_a_thread(join)
        self._wait(joining.done, joined, "the weight-update group was not made")
        self._group, self._is_warm = joining.result(), False
        logger.info(
            "weight-update group %s: this rank and %d of the servers", self._group_name, sum(sizes)
        )

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Send every tensor; the version label changes with the last bucket.

        A bucket is gathered and laid out while the one before it is sent and loaded: two are in memory,
        next to the tensors of a third.  On a host that memory is kept for the next update, pinned where the
        weights are on a GPU: pages that are new cost more than what is written into them.
        Raises EngineError or EngineDied from the engine, ValueError for a fused expert name or no
        tensor at all, and WeightUpdateError when the broadcast itself fails.
        """
        began = time.monotonic()
        self.connect()
        sent: dict[str, TensorKind] = {}
        num_bytes = num_buckets = 0
        stage_results: list[Published] = []
        on_its_way: _OnItsWay | None = None
        self._engine.begin_weight_update()
        try:
            grouped = buckets(
                named_tensors, self._bucket_bytes, self._together, self._fused_experts
            )
            for bucket, is_last in _with_last(grouped):
                flat = self._memory.fill(bucket)
                kinds = {name: kind_of(tensor) for name, tensor in bucket}
                if on_its_way is not None:
                    self._arrive(on_its_way)
                else:
                    with self._kept_in_step():
                        stage_results = list(self._other_stages())
                on_its_way = None
                on_its_way = self._send(kinds, flat, version if is_last else None)
                num_bytes += flat.nbytes
                sent |= kinds
                num_buckets += 1
            if on_its_way is None:
                raise ValueError("there was no weight to publish")
            self._arrive(on_its_way)
        except BaseException:
            if self._group is not None:
                with contextlib.suppress(RuntimeError):
                    # the export failed between broadcasts: finish the pending one, so that the group stays usable
                    if on_its_way is not None:
                        self._arrive(on_its_way)
                    self._engine.end_weight_update()
            raise
        self._engine.end_weight_update()
        if self._device.type == "cuda":  # its allocator gives it to the next step, and is quick
            self._memory = _BucketMemory(self._device)
        for stage in stage_results:
            sent |= stage.sent
            num_bytes += stage.num_bytes
            num_buckets += stage.num_buckets
        return Published(version, sent, num_bytes, num_buckets, time.monotonic() - began)

    def _other_stages(self) -> Iterable[Published]:
        """Let other ranks send their parts of the update; returns those, without a version."""
        return ()

    def _send(
        self, kinds: dict[str, TensorKind], flat: torch.Tensor, version: int | None
    ) -> _OnItsWay:
        """Start a bucket on its way; kinds: of its tensors, flat: as ``flatten`` gives it."""
        loaded = self._engine.update_weights_from_distributed(
            names=list(kinds),
            dtypes=[kind.dtype for kind in kinds.values()],
            shapes=[list(kind.shape) for kind in kinds.values()],
            group_name=self._group_name,
            load_format="flattened_bucket",
            servers=self._servers,
            weight_version=version,
            # The cache is dropped once, with the version; one flush per bucket would be waste.
            flush_cache=self._flush_cache and version is not None,
        )
        with self._kept_in_step():
            work = self._broadcast(flat, loaded)
        return _OnItsWay(flat, work, loaded)

    def _broadcast(self, flat: torch.Tensor, loaded: Future[Any]) -> Any:
        """Start the broadcast; the first of a group in a thread of its own.

        NCCL makes its communicators there, and the call returns only when every server takes part: of one
        that died this thread must learn meanwhile.
        """

        def begin() -> Any:
            if flat.is_cuda:  # a new thread's device is the first
                torch.cuda.set_device(flat.device)
            return dist.broadcast(flat, src=0, group=group, async_op=True)

        group = self._group
        if self._is_warm:
            return begin()
        beginning = in_a_thread(begin)
        failure = "the servers' ranks could not be reached for a first bucket"
        self._wait(beginning.done, loaded, failure, begins=True)
        self._is_warm = True
        return beginning.result()

    def _arrive(self, bucket: _OnItsWay) -> None:
        """Wait until every server has loaded the bucket."""
        with self._kept_in_step():
            self._wait(bucket.work.is_completed, bucket.loaded, "a bucket was not loaded")
            bucket.work.wait()

    @contextlib.contextmanager
    def _kept_in_step(self) -> Iterator[None]:
        """Give up the group after an error: it is out of step with the servers, and never used again."""
        try:
            yield
        except BaseException as error:
            if self._group is not None:
                self._failed, self._group, self._store = (self._group, error), None, None
            self._memory = _BucketMemory(
                self._device
            )  # the pending broadcast may still read this buffer
            raise

    def _wait(
        self,
        is_sent: Callable[[], bool],
        loaded: Future[None],
        failure: str,
        *,
        begins: bool = False,
    ) -> None:
        """Wait until both sides are done, or where it only ``begins`` ours; raise at once if a server refuses or dies."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        next_alive = time.monotonic() + ALIVE_EVERY_S
        while not (is_sent() and (begins or loaded.done())):
            if loaded.done():
                _raise(loaded)  # a server refused: its ranks will never take part
            now = time.monotonic()
            if now > deadline:
                raise WeightUpdateError(f"{failure} within {self._timeout}")
            if now > next_alive:
                next_alive = now + ALIVE_EVERY_S
                self._engine.check_alive()
            time.sleep(_POLL_S)
        if not begins:
            _raise(loaded)

    def reconnect(self) -> None:
        """Drop the group, after a restart of servers: the next ``publish`` makes a new one."""
        self._drop_failed()  # first: until then a server that waits there answers no call
        self.close()

    def close(self) -> None:
        """Leave the group, on both sides where they still answer. Idempotent."""
        self._leave()
        self._store = None

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            try:
                self._engine.destroy_weights_update_group(self._group_name, self._servers)
            except RuntimeError:
                pass  # the servers are gone already, and the group with them
            dist.destroy_process_group(group)

    def _drop_failed(self) -> None:
        """Close the connections of a group that has failed: a server that lives waits at them for the bucket.

        Where a server hangs, gloo closes them at its timeout: a thread waits for that.
        """
        if self._failed is None:
            return
        (group, error), self._failed = self._failed, None
        # neither destroy nor abort closes gloo's: the last reference does, and the error's frames hold one
        traceback.clear_frames(error.__traceback__)
        dist.destroy_process_group(group)
        last = [group]
        del group
        threading.Thread(target=last.clear, name="failed-group", daemon=True).start()


def _raise(loaded: Future[None]) -> None:
    """Raise what the servers' side of a broadcast raised: WeightUpdateError where another one broke it."""
    try:
        loaded.result()
    except GroupBroken as error:
        raise WeightUpdateError(str(error)) from error


def in_a_thread(work: Callable[[], Any]) -> Future[Any]:
    """Return the result to come of a call that cannot be interrupted."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return result


def _open_store(address: str, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Open the store at which a group's ranks meet, listening at this address only.

    ``rendezvous("tcp://...")`` would not do: under torchrun it looks for an agent's store instead
    of opening one.  TCPStore listens at every address by default, and serves anybody who connects.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((address, 0))  # port 0: the system chooses a free one, without a race
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(
            f"update_weight_master_address {address}: this node cannot listen there: {error}"
        ) from error
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def gloo_on(interface: str | None) -> Iterator[None]:
    """Make gloo groups that are created meanwhile use this network interface.

    torch 2.13 passes gloo no options, so this sets the variable that gloo reads for a new group.
    """
    if interface is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def _join_as_rank_0(
    store: dist.Store, world_size: int, group_name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group next to the trainer's default one, as SGLang makes its side.

    Both sides must prefix the store alike, and torch has no public call that does.
    Source: SGLang 0.5.23, ``init_custom_process_group``.
    """
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    group, _ = _new_process_group_helper(
        world_size,
        0,
        [],
        dist.Backend(backend),
        dist.PrefixStore(group_name, store),
        group_name=group_name,
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item with False, the last one with True."""
    iterator = iter(items)
    try:
        previous = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield previous, False
        previous = item
    yield previous, True
