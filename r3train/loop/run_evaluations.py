"""Evaluations of a run on rank 0: begun after a weight update, ended before the next one.

An evaluation runs while the next rollout is generated and trained; with --colocate it ends before the servers
release their memory.  A set is written as a whole or not
at all, so a crash loses the sets that were not complete, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3train.generation.eval_sets import EvalSet, Row, evaluation_metrics
from r3train.loop.stop import StopRequested
from r3train.observe.console import RunDisplay
from r3train.observe.metrics import MetricsWriter, eval_words

if TYPE_CHECKING:
    from r3train.loop.run_state import WatchedSource


@dataclass(eq=False)
class Evaluations:
    """Begins and ends the evaluations of a run; without ``sets`` it does nothing.

    settings: a fingerprint for each set of all that its answers depend on, apart from the weights.
    """

    sets: Sequence[EvalSet]
    settings: Mapping[str, str]
    metrics: MetricsWriter
    display: RunDisplay
    _version: int | None = None  # of the evaluation that is under way

    def begin(self, source: WatchedSource, version: int, *, at_start: bool = False) -> None:
        """Begin to evaluate ``version``, which the servers hold.

        at_start: leave out the sets that an earlier start of this run has evaluated.  Later versions
        are evaluated again: the weights that had their numbers are lost.
        """
        sets = [
            eval_set
            for eval_set in self.sets
            if not at_start
            or not self.metrics.evaluated(version, eval_set.name, self.settings[eval_set.name])
        ]
        if sets:
            self._version = version
            source.begin_evaluation(sets)

    def end(self, source: WatchedSource) -> None:
        """Wait for the evaluation under way, and write the sets that are complete.

        A failed set is logged and skipped; the run goes on without its numbers.  The same holds on a stop
        and when a server is lost.
        """
        if self._version is None:
            return
        version, self._version = self._version, None
        ended_by: Exception | None = None
        self.display.train_update("waiting for the evaluation")
        try:
            source.await_evaluation()
        except StopRequested as error:
            ended_by = StopRequested(f"stopped by {error}")
        except Exception as error:  # noqa: BLE001 - the next rollout or update says more
            ended_by = error
        outcomes = source.take_evaluation()
        for eval_set in self.sets:
            name, outcome = eval_set.name, outcomes.get(eval_set.name)
            if isinstance(outcome, Exception):
                cause = ended_by or outcome
                text = f"warning: weight version {version} was not evaluated on {name}: {cause}"
                self.display.note(text, style="yellow")
            elif outcome is not None:
                settings = self.settings[name]
                self.display.note(
                    write_evaluation(self.metrics, eval_set, version, settings, outcome)
                )


def write_evaluation(
    metrics: MetricsWriter, eval_set: EvalSet, version: int, settings: str, rows: list[Row]
) -> str:
    """Write the rows and numbers of a set that was evaluated; returns a line for people."""
    numbers = evaluation_metrics(rows, eval_set.num_samples)
    metrics.write_evaluation(version, eval_set.name, settings, rows, numbers)
    mean = eval_words(
        {f"eval/{eval_set.name}/{key}": v for key, v in numbers.items()}, eval_set.name
    )
    passes = {k: v for k, v in numbers.items() if k.startswith("pass_at_")}
    shares = [f"pass@{k.removeprefix('pass_at_')} {v:.3f}" for k, v in passes.items()]
    shares.append(f"truncated {numbers['truncated_share']:.1%}")
    count = f"{numbers['num_samples']:,} answers to {numbers['num_prompts']:,} prompts"
    heading = f"evaluation of weight version {version} on {eval_set.name}"
    return f"{heading}: {mean}, {', '.join(shares)}; {count}"
