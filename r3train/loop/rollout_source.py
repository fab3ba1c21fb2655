"""The seam between training and what it trains on: a producer that generates, or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from r3train.generation.eval_sets import EvalSet, Row
from r3train.generation.producer import OnWait
from r3train.types import RecheckedRollout, Scored


class RolloutSource:
    """Complete groups for training: a producer generates them, others read them from disk.

    The methods with a body are those of a source without servers.
    """

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The groups of one rollout; ``on_wait`` gets ``stats`` while they are waited for."""
        raise NotImplementedError

    @contextmanager
    def quiesced(self) -> Iterator[None]:
        """Stop generation inside the context."""
        yield

    def set_version(self, version: int) -> None:
        """Set the weight version that the servers hold."""

    def put_back(self) -> None:
        """Take back the last batch, because it was not trained."""

    def snapshot(self) -> Any:
        """The state that a restart needs; None where nothing is buffered."""
        return None

    def rechecked(self) -> RecheckedRollout | None:
        """All that servers rechecked of the last batch; None where nothing was to be."""
        return None

    @property
    def failure(self) -> BaseException | None:
        """The first error of what runs in the background."""
        return None

    def stats(self) -> dict[str, Any]:
        """The counts that a display asks for."""
        return {"generated_tokens": 0, "buffered_groups": 0}

    def begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        """Begin to evaluate the weights that the servers hold."""
        raise NotImplementedError("a source without servers evaluates nothing")

    def await_evaluation(self, on_wait: OnWait | None = None) -> None:
        """Wait until every set is evaluated or has failed."""
        raise NotImplementedError("a source without servers evaluates nothing")

    def take_evaluation(self) -> dict[str, list[Row] | Exception]:
        """End the evaluation; returns the rows of each set, or its error."""
        raise NotImplementedError("a source without servers evaluates nothing")


class ForwardedSource(RolloutSource):
    """A RolloutSource that asks another one for everything that a subclass does not do itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The inner source's groups."""
        return self._inner.next_batch(rollout_id, on_wait)

    def quiesced(self) -> AbstractContextManager[None]:
        """Stop the inner source's generation inside the context."""
        return self._inner.quiesced()

    def set_version(self, version: int) -> None:
        """Tell the inner source the version that the servers hold."""
        self._inner.set_version(version)

    def put_back(self) -> None:
        """Give the inner source its last batch back."""
        self._inner.put_back()

    def snapshot(self) -> Any:
        """The inner source's state."""
        return self._inner.snapshot()

    def rechecked(self) -> RecheckedRollout | None:
        """All that was rechecked of the inner source's last batch."""
        return self._inner.rechecked()

    @property
    def failure(self) -> BaseException | None:
        """The inner source's first error."""
        return self._inner.failure

    def stats(self) -> dict[str, Any]:
        """The inner source's counts."""
        return self._inner.stats()

    def begin_evaluation(self, sets: Sequence[EvalSet]) -> None:
        """Begin the inner source's evaluation."""
        self._inner.begin_evaluation(sets)

    def await_evaluation(self, on_wait: OnWait | None = None) -> None:
        """Wait for the inner source's evaluation."""
        self._inner.await_evaluation(on_wait)

    def take_evaluation(self) -> dict[str, list[Row] | Exception]:
        """End the inner source's evaluation."""
        return self._inner.take_evaluation()
