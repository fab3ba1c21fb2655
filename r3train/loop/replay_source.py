"""Write rollouts to disk, and read rollouts or conversations from disk instead of generating."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, KW_ONLY, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from r3train.algo.trajectories import episode_id
from r3train.config.checkpoint_settings import CheckpointSection, rollout_path
from r3train.data.order import MixedOrder, PromptOrder
from r3train.data.sampled import flaw
from r3train.generation.producer import OnWait
from r3train.loop.rollout_source import ForwardedSource, RolloutSource
from r3train.loop.rollout_file import TEMPERATURE, check_temperature, read_samples, write_samples
from r3train.routing import indexer_topk
from r3train.types import RolloutSample, Scored


def dump_rollout(
    directory: Path,
    rollout_id: int,
    groups: Sequence[Sequence[Scored]],
    temperature: float | None = None,
) -> Path:
    """Write one rollout's groups; see ``rollout_file``.  temperature: of their log-probs, if known."""
    path = rollout_path(directory, rollout_id)
    samples = [scored for group in groups for scored in group]
    facts = {"rollout_id": rollout_id, "group_sizes": [len(group) for group in groups]}
    if temperature is not None:
        facts[TEMPERATURE] = temperature
    write_samples(path, samples, facts)
    return path


def load_rollout(
    directory: Path,
    rollout_id: int,
    check: Callable[[Path, Mapping[str, Any]], None] = lambda path, facts: None,
) -> list[list[Scored]]:
    """Read one dumped rollout; raise ValueError if it is missing, broken or of another run.

    check: may refuse the file by its facts.
    """
    path = rollout_path(directory, rollout_id)
    samples, facts = read_samples(path)
    check(path, facts)
    sizes = facts.get("group_sizes")
    if facts.get("rollout_id") != rollout_id or not sizes or sum(sizes) != len(samples):
        raise ValueError(f"{path}: does not hold rollout {rollout_id} in whole groups")
    rest = iter(samples)
    return [list(islice(rest, size)) for size in sizes]


def _check_routes(path: Path, groups: Sequence[Sequence[Scored]]) -> None:
    """Raise ValueError for a dumped sample without routes, naming it and its file."""
    for sample, _ in (scored for group in groups for scored in group):
        if sample.routed_experts is None:
            raise ValueError(
                f"{path}: sample {sample.sample_id} has no routed_experts: the rollouts"
                " were dumped without --use-rollout-routing-replay"
            )


@dataclass
class _OneTemperature:
    """A ``check`` of ``load_rollout``: the files' temperature is the actor's; the first without one is noted.

    temperature: None compares nothing.
    """

    temperature: float | None
    note: Callable[[str], None]
    noted: bool = False

    def __call__(self, path: Path, facts: Mapping[str, Any]) -> None:
        if self.temperature is None:
            return
        warning = check_temperature(path, facts, self.temperature)
        if warning is not None and not self.noted:
            self.noted = True
            self.note(warning)


@dataclass(eq=False)
class DumpedRollouts(RolloutSource):
    """A RolloutSource that reads ``--dump-rollouts`` files; it has no server and no weights.

    group_size counts episodes: of step-wise ones (one sample a turn) a group holds more samples,
    and they are trained in one optimizer step per rollout.
    temperature: of the actor's log-probs, which the files' must be (None: the files' are not used); note:
    told of a file without one.
    """

    directory: Path
    _: KW_ONLY
    temperature: float | None
    note: Callable[[str], None] = lambda text: None
    needs_routes: bool
    num_groups: int
    group_size: int
    vocab_size: int
    index_topk: int | None = None  # of an indexer whose choices are replayed
    steps_per_rollout: int = 1

    def __post_init__(self) -> None:
        self._check = _OneTemperature(self.temperature, self.note)

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The groups of one rollout; raises ValueError naming file and sample."""
        groups = load_rollout(self.directory, rollout_id, self._check)
        path = rollout_path(self.directory, rollout_id)
        sizes = [len({episode_id(sample) for sample, _ in group}) for group in groups]
        if len(sizes) != self.num_groups or set(sizes) != {self.group_size}:
            raise ValueError(
                f"{path}: holds {len(sizes)} groups of {sorted(set(sizes))} episodes, expected"
                f" rollout_batch_size {self.num_groups} of n_samples_per_prompt {self.group_size}"
            )
        if self.steps_per_rollout > 1 and groups[0][0][0].trajectory_id is not None:
            raise ValueError(
                f"{path}: holds one sample a turn, which are trained in one optimizer step a"
                f" rollout, but global_batch_size asks for {self.steps_per_rollout}"
            )
        if self.needs_routes:
            _check_routes(path, groups)
        for sample, _ in (scored for group in groups for scored in group):
            if (found := flaw(sample, self.vocab_size)) is not None:
                raise ValueError(f"{path}: sample {sample.sample_id} cannot be trained: {found}")
            if self.index_topk is not None and sample.routed_experts is not None:
                sizes = sample.num_tokens, self.index_topk, sample.routed_experts.shape[1]
                if (found := indexer_topk.flaw(sample.indexer_topk, *sizes)) is not None:
                    raise ValueError(f"{path}: sample {sample.sample_id} {found}")
        return groups


class InjectedRollouts(ForwardedSource):
    """A source whose rollouts are replaced by dumped ones that must be like them.

    The servers go on generating, so a wrong weight in them shows: with the same settings they draw the
    recorded answers again, but for rounding.
    """

    def __init__(
        self,
        source: Any,
        checkpoint: CheckpointSection,
        *,
        needs_routes: bool,
        temperature: float,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert checkpoint.ci_inject_rollout_data_path is not None
        super().__init__(source)
        self._directory = checkpoint.ci_inject_rollout_data_path
        self._start = checkpoint.ci_inject_rollout_data_start_rollout_id
        self._least = checkpoint.ci_inject_rollout_data_min_match_ratio
        self._needs_routes = needs_routes
        self._check = _OneTemperature(temperature, note)
        self._match: float | None = None

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The dumped groups of one rollout, once the source has generated its own.

        Raises ValueError naming the file where prompts or the temperature differ, answers differ too
        much, or routes are needed and missing; what was generated is put back then.
        """
        generated = self._inner.next_batch(rollout_id, on_wait)
        if rollout_id < self._start:
            return generated
        try:
            return self._recorded(rollout_id, generated)
        except Exception:
            self._inner.put_back()
            raise

    def _recorded(self, rollout_id: int, generated: list[list[Scored]]) -> list[list[Scored]]:
        path = rollout_path(self._directory, rollout_id)
        recorded = load_rollout(self._directory, rollout_id, self._check)
        if self._needs_routes:
            _check_routes(path, recorded)
        ours, theirs = (
            [s for group in groups for s, _ in group] for groups in (generated, recorded)
        )
        if len(ours) != len(theirs):
            raise ValueError(f"{path}: holds {len(theirs)} samples, generated were {len(ours)}")
        matches = []
        for sample, other in zip(ours, theirs):
            prompts = (s.token_ids[: s.prompt_len] for s in (sample, other))
            if not np.array_equal(*prompts):
                raise ValueError(
                    f"{path}: sample {other.sample_id} has another prompt than the one that was"
                    f" generated, {sample.prompt.prompt_id}: expected the recording of this run"
                )
            matches.append(_match(sample, other))
        self._match = float(np.mean(matches))
        if self._match < self._least:
            raise ValueError(
                f"{path}: {self._match:.1%} of the tokens of its answers were generated again, expected"
                f" at least {self._least:.1%} (--ci-inject-rollout-data-min-match-ratio): the servers"
                " hold other weights than the recording's did"
            )
        return recorded

    def stats(self) -> dict[str, Any]:
        """The source's counts, and the match of the last rollout."""
        return self._inner.stats() | {"inject_match": self._match}


def _match(one: RolloutSample, other: RolloutSample) -> float:
    """The share of places in the longer of two responses at which both have the same token."""
    a, b = (s.token_ids[s.prompt_len :] for s in (one, other))
    short, longer = sorted((len(a), len(b)))
    return 1.0 if longer == 0 else float((a[:short] == b[:short]).sum()) / longer


@dataclass(eq=False)
class Conversations(RolloutSource):
    """A RolloutSource of conversations (--loss-type sft): each is a group of one sample.

    It holds no state: a rollout's number decides its conversations, so a resumed run goes on where it
    stopped.  order: of the conversations; num_groups: those of a rollout.
    """

    conversations: Sequence[RolloutSample]
    order: PromptOrder | MixedOrder
    num_groups: int

    def next_batch(self, rollout_id: int, on_wait: OnWait | None = None) -> list[list[Scored]]:
        """The conversations of one rollout, without a reward (0)."""
        if on_wait is not None:
            on_wait(self.stats())
        start = rollout_id * self.num_groups
        return [
            [(replace(self.conversations[self.order.index(n)], sample_id=n, group_id=n), 0.0)]
            for n in range(start, start + self.num_groups)
        ]
