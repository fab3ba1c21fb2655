"""Weights of later pipeline stages, broadcast to the servers by their stages' leaders.

Each leader has a publisher and a group with the servers, as rank 0 has for the first stage.  Rank 0 only
speaks to the servers: it makes the leaders' calls, over the host group.  SGLang receives and loads one
bucket at a time, so the leaders have their turns one after another, each with its first bucket at hand.

    rank 0            begin | go    calls ........ | go    calls ........ | own buckets and the version | end
    stage 1's leader  gather      buckets .... done
    stage 2's leader  gather                             buckets .... done
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from typing import Any

from r3train.engine.backend import EngineError
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher, Published, WeightUpdateError, in_a_thread
from r3train.hf_checkpoint import NamedTensors, TensorKind
from r3train.loop.distribute import recv_json, send_json

_OF_LEADERS = (ValueError, WeightUpdateError)  # what a leader's weights or its broadcast may raise


class PerStagePublisher(DistributedPublisher):
    """Rank 0's publisher: before it sends the first stage, each of ``leaders`` sends its own."""

    def __init__(self, engine: EngineControl, leaders: Sequence[int], **settings: Any) -> None:
        super().__init__(engine, **settings)
        self._leaders = leaders
        self._waiting = list(leaders)  # for their turn of this update, or of the next one
        self._groups: dict[int, tuple[str, list[int]]] = {}  # of leaders, with the servers in each

    def publish(self, named_tensors: NamedTensors, *, version: int) -> Published:
        """Send all stages' tensors; as ``DistributedPublisher.publish``, and raises what a leader raised."""
        published = super().publish(named_tensors, version=version)
        self._waiting = list(self._leaders)
        return published

    def abandon(self) -> None:
        """Tell the leaders that wait for their turn that there is none."""
        send_json(dict.fromkeys(self._waiting, {"error": "the update has failed"}))
        self._waiting = list(self._leaders)

    def _other_stages(self) -> Iterator[Published]:
        while self._waiting:
            yield self._turn(self._waiting.pop(0))

    def _turn(self, leader: int) -> Published:
        """Make a leader's calls until its stage is sent; tell it of an error and raise that."""
        sent: dict[str, TensorKind] = {}
        num_buckets = 0
        send_json({leader: {"answer": self._engine.present()}})
        while True:
            name, arguments = recv_json(leader)
            try:
                answer = self._made(leader, name, arguments)
            except BaseException as error:
                send_json({leader: {"error": str(error)}})
                raise
            send_json({leader: {"answer": answer}})
            if name == "done":
                return Published(0, sent, arguments["num_bytes"], num_buckets, 0.0)
            if name == "update_weights_from_distributed":
                kinds = map(TensorKind, map(tuple, arguments["shapes"]), arguments["dtypes"])
                sent |= zip(arguments["names"], kinds)
                num_buckets += 1

    def _made(self, leader: int, name: str, arguments: dict[str, Any]) -> Any:
        """Make a leader's call and wait for the result of it."""
        if name == "done":
            return None
        if name == "failed":
            raise _OF_LEADERS[arguments["kind"]](arguments["text"])
        if name == "init_weights_update_group":
            self._leave_group_of(leader)  # for other servers
            self._groups[leader] = arguments["group_name"], arguments["servers"]
        result = getattr(self._engine, name)(**arguments)
        if not isinstance(result, Future):
            return result
        self._wait(lambda: True, result, "weights of a later pipeline stage were not loaded")
        return None

    def reconnect(self) -> None:
        """Drop the groups; the leaders drop theirs."""
        super().reconnect()
        self._groups.clear()

    def close(self) -> None:
        """Leave the group, and let the servers leave those of the leaders. Idempotent."""
        super().close()
        for leader in list(self._groups):
            self._leave_group_of(leader)

    def _leave_group_of(self, leader: int) -> None:
        if leader in self._groups:
            with suppress(RuntimeError):  # the servers are gone already
                self._engine.destroy_weights_update_group(*self._groups.pop(leader))


class StageLeaderPublisher(DistributedPublisher):
    """The publisher of a later stage's leader."""

    def __init__(self, **settings: Any) -> None:
        self._calls = _CallsOfRankZero()
        super().__init__(self._calls, **settings)

    def connect(self) -> None:
        """Wait: the servers are told with the turn, for which the first bucket is at hand."""

    def _other_stages(self) -> Iterator[Published]:
        super().connect()
        return iter(())

    def send(self, weights: Iterator[tuple[str, Any]], *, version: int) -> None:
        """Send the stage's weights in its turn, and drain them in any case: the stage's other ranks give them.

        Rank 0 raises what the servers refuse, and what is wrong with the weights.
        """
        self._calls.begin()
        num_bytes = 0
        try:
            first = next(weights, None)
            if first is not None:  # a stage may have no layer
                num_bytes = self.publish(chain([first], weights), version=version).num_bytes
            self._calls.make("done", num_bytes=num_bytes)
        except EngineError:
            pass  # rank 0 knows
        except _OF_LEADERS as error:
            kind = [isinstance(error, kind) for kind in _OF_LEADERS].index(True)
            with suppress(EngineError):
                self._calls.make("failed", kind=kind, text=str(error))
        self._drop_failed()  # before rank 0 has servers answer its next call
        for _ in weights:
            pass


class _CallsOfRankZero:
    """The servers as a leader's publisher knows them: rank 0 makes its calls, in its turn.

    The version and the flush come with rank 0's own last bucket, and rank 0 sees whether servers live.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_turn = False
        self._refused: str | None = None
        self._servers: list[int] = []

    def begin(self) -> None:
        """Note that the turn of an update is to come."""
        self._has_turn, self._refused = False, None

    def make(self, name: str, **arguments: Any) -> Any:
        """Let rank 0 make a call.  Raises EngineError where it failed; then the turn is over."""
        with self._lock:
            self._take_turn()
            send_json({0: [name, arguments]})
            return self._answer()

    def _take_turn(self) -> None:
        """Wait for the turn, if it has not come yet."""
        if self._refused is not None:
            raise EngineError(self._refused)
        if not self._has_turn:
            self._servers = self._answer()
            self._has_turn = True

    def present(self) -> list[int]:
        """The servers that are members, once the turn has come."""
        with self._lock:
            self._take_turn()
        return self._servers

    def _answer(self) -> Any:
        answer = recv_json()
        self._refused = answer.get("error")
        if self._refused is not None:
            raise EngineError(self._refused)
        return answer["answer"]

    def update_group_sizes(self, servers: Sequence[int]) -> list[int]:
        return self.make("update_group_sizes", servers=servers)

    def init_weights_update_group(self, **arguments: Any) -> Future[Any]:
        return in_a_thread(lambda: self.make("init_weights_update_group", **arguments))

    def update_weights_from_distributed(
        self, *, weight_version: int | None, flush_cache: bool, **arguments: Any
    ) -> Future[Any]:
        with self._lock:
            self._take_turn()  # nothing is broadcast before it
        name = "update_weights_from_distributed"
        return in_a_thread(lambda: self.make(name, flush_cache=False, **arguments))

    def check_alive(self) -> None:
        """Leave it to rank 0, whose answer says so."""

    begin_weight_update = end_weight_update = check_alive

    def destroy_weights_update_group(self, group_name: str, servers: Sequence[int]) -> None:
        """Leave it to rank 0, when it closes or makes another group."""
