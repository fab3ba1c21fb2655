"""Canaries: fixed texts that every server and the actor score after weight updates (the claim *served*).

At every start 8 texts are made and scored, with the weights that servers and actor begin with, alone, four and eight at
once: this measures the noise of sound scores.  The first few of them, of --r3-canaries tokens together, are the canaries; a
checkpoint keeps these, and the scores of the first start.

    after an update    rank 0: canaries are sent with the first requests of the new weights.  Every server scores each of
                       them and draws eight tokens after it; one is scored twice more, for the cache.  Nothing waits for this
    before training    all ranks: one pass of the actor with the servers' experts, and its own choice next to them
                       rank 0: the verdict, its evidence; all ranks end where it failed

The first two updates of a start are judged, those after a restart, and then as many as --r3-canary-share of the time pays for.
What a server holds is judged at every update, by its checksums (``server_checksums``).

Without --use-rollout-routing-replay there are no experts to compare: scores are log-probs alone, and the actor routes for itself.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load, save

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import context_len
from r3train.config.files import open_regular
from r3train.families.hf_facts import HfModelFacts
from r3train.engine.backend import EngineUnreachable
from r3train.families import FAMILIES
from r3train.host_group import host_group, rank_zero_alone
from r3train.ids import split_uids
from r3train.layout.microbatch import Streams
from r3train.loop.distribute import broadcast_json, distribute_slices
from r3train.loop.rank_zero import RankZero
from r3train.loop.prepare import build_microbatches, deal_samples
from r3train.proof.step_verdict import Served, StepTotals
from r3train.proof.served_verdict import (
    CanaryNoise,
    CanaryStart,
    compare_servers,
    Difference,
    difference,
    judge_served,
    MOST_MEAN,
    MOST_MEAN_OF_FP8,
    ServedRecord,
    ServerScores,
)
from r3train.proof.suspicion import bounded_mean, SUSPECT_FROM, Suspicions
from r3train.proof.writer import EvidenceWriter
from r3train.types import CanaryScores, Prompt, RankTopology, RolloutSample, Scores, TrainSample

if TYPE_CHECKING:
    from r3train.trainer.megatron.actor import MegatronActor

logger = logging.getLogger(__name__)

CANARY_FILE = "canaries.safetensors"  # of a checkpoint
_FORMAT = "r3train-canaries-1"
_NOISE_TEXTS = 8
_BATCHES = (1, 1, 4, 8)  # texts that a server scores at once, in each repetition at the start
# a mean that cannot be told from none, in nats
_LEAST_MEAN, _LEAST_MEAN_HALF = 1e-6, 1e-3
# so many times the noise of the checkpoint's machine is said
_OTHER_MACHINE = 4.0
_FEWEST, _LONGEST = 2, 512  # canaries, and tokens of one
_DRAWN = 8  # tokens that a server draws after each
# updates after a start or a restart that are judged whatever it costs
_FIRST_UPDATES = 2
# canaries by which EARLY and WARM try a server's cache: it is flushed as a whole
_HALVED = 1
_LIVE_EVERY = 8  # every 8th judgement also a pass without replay, for metrics only
_SPARE_TOKENS = 8  # of the context, for what servers keep back
# nats: |actor - server| of one token where an expert that is nearly chosen takes another's place, which replay prevents
_GAP_OF_OTHER_EXPERTS = 0.5
_PASS = "old_log_prob"


class NotServed(AssertionError):
    """A server does not compute what the actor computes.

    metrics: of ``version``, on rank 0; sampled: such servers have sampled since the update.
    """

    def __init__(self, text: str, version: int, metrics: dict[str, Any], *, sampled: bool = False):
        super().__init__(text)
        self.version, self.metrics, self.sampled = version, metrics, sampled


@dataclass(eq=False)
class Canaries:
    """The canaries of a run; all ranks call its methods together.

    rank_zero: None on other ranks; evidence: None without the R3 check, where metrics alone tell of the verdicts;
    resumed: the checkpoint that the run goes on from.
    """

    config: RunConfig
    hf: HfModelFacts
    actor: MegatronActor
    topologies: list[RankTopology]
    rank_zero: RankZero | None
    evidence: EvidenceWriter | None
    _: KW_ONLY
    resumed: Path | None = None

    ready: bool = field(default=False, init=False)  # the noise is measured: updates are judged

    def __post_init__(self) -> None:
        self._texts: list[np.ndarray] = []
        self._cached: list[int] = []  # cached tokens of each text's second scores, at the start
        self._noise: CanaryNoise | None = None
        self._usual_apart = 0.0  # of log-probs of two sound servers, experts included
        # gap_mean of the start that the checkpoint tells of
        self._noise_before: float | None = None
        self._suspicions = Suspicions(self.config.suspect_limit)
        self._first: dict[int, ServerScores] = {}  # at the start, by server
        self._last: dict[int, ServerScores] = {}
        self._live: dict[int, list[np.ndarray]] = (
            {}
        )  # log-probs of the actor without replay, by server
        self._records: dict[int, list[ServedRecord]] = {}  # by weight version
        self._name = f"r3train-canary-{secrets.token_hex(4)}"
        self._replays = self.config.replay.use_rollout_routing_replay
        # layers whose experts are compared
        self._moe_layers = self.hf.moe_layer_numbers if self._replays else ()
        # rank 0: canaries that were sent, and their scores once they have come
        self._sent: Callable[[], tuple[dict[int, list[CanaryScores]], float]] | None = None
        self._unjudged: dict[int, list[CanaryScores]] = {}
        self._judgements = 1  # with the start
        self._owed = _FIRST_UPDATES  # updates to be judged in any case
        self._seconds = self._judged_at = 0.0  # of the last judgement
        # rank 0: texts, and the scores of each server in each repetition at the start
        self._begun: tuple[list[np.ndarray], list[dict[int, list[CanaryScores]]]] | None = None
        path = self.resumed and self.resumed / CANARY_FILE
        if path is not None and self._replays and path.exists():
            self._read(path)

    # -- the start ---------------------------------------------------------------------------

    def ask_first(self, version: int) -> None:
        """Rank 0: make the texts, and have the servers score them, which hold the weights of this start.

        Raises EngineUnreachable where none has scored all.
        """
        if any(len(text) > self._longest for text in self._texts):
            self._texts, self._first = [], {}  # the settings leave them no room now
        texts = list(self._texts)
        more = max(_NOISE_TEXTS, self._count) - len(texts)
        if more > 0:
            texts += self.rank_zero.rollouts.canary_texts(more, self._longest)
        repetitions = []
        for i, at_once in enumerate(_BATCHES):
            scores, _ = self._ask(texts, version, at_once=at_once, repetition=i)()
            repetitions.append(scores)
        stayed = set(repetitions[0]).intersection(*repetitions)
        if not stayed:
            raise EngineUnreachable("no server has stayed while the first canaries were scored")
        repetitions = [{s: scores[s] for s in sorted(stayed)} for scores in repetitions]
        self._begun = texts, repetitions

    def begin(self, version: int) -> None:
        """Measure the noise of what ``ask_first`` has brought, while the actor holds the same weights; a collective."""
        if not self.config.rollout.colocate:  # else in the actor's first turn
            self._measure(version)

    def _measure(self, version: int) -> None:
        """Let the actor score the texts of the start; raises NotServed."""
        (texts, repetitions), failed = self._begun or ([], [{}]), ""
        server_scores, self._begun = repetitions[0], None
        actor_log_probs, router = self._actor_log_probs(texts, server_scores, version)
        repeated, _ = self._actor_log_probs(texts, server_scores, version)
        # those of an update, in its pack: another one rounds otherwise, which would look like a move of the actor's
        texts = self._texts or texts[: self._count]
        kept_scores = {s: scores[: len(texts)] for s, scores in server_scores.items()}
        kept_log_probs, kept_router = self._actor_log_probs(texts, kept_scores, version, live=True)
        if self.rank_zero is not None:
            self._noise = self._measured(version, repetitions, actor_log_probs, repeated, router)
            self._texts = texts
            unreplayed = self._live or kept_log_probs
            self._usual_apart = self._largest_apart(repetitions, kept_scores, unreplayed)
            self._cached = [
                r.warm.cached_tokens for r in next(iter(kept_scores.values()))[:_HALVED]
            ]
            failed = self._judge(version, kept_scores, kept_log_probs, kept_router)
            self._first = self._first or dict(self._last)
            self._note_coverage(version)
        self.ready, self._judged_at = True, time.monotonic()
        self._end_if(failed, version, {})

    def _measured(
        self,
        version: int,
        repetitions: list[dict[int, list[CanaryScores]]],
        actor_log_probs: dict[int, list[np.ndarray]],
        repeated: dict[int, list[np.ndarray]],
        router: dict[int, tuple[int, int]],
    ) -> CanaryNoise:
        """Rank 0: the noise of servers' scores and of passes of the actor, from those that were made several times."""
        family, server_scores = FAMILIES[self.hf.model_type], repetitions[0]
        server_gaps = [
            ServerScores(version, s, server_scores[s], actor_log_probs[s]).gaps()
            for s in server_scores
        ]
        gaps, drawn_gaps = (np.concatenate(parts) for parts in zip(*server_gaps))
        first = next(iter(server_scores))
        again = [
            self._apart(server_scores[s], other[s])
            for other in repetitions[1:]
            for s in server_scores
        ]
        servers = [self._apart(server_scores[first], server_scores[s]) for s in server_scores]
        actor_pairs = [
            pair
            for s in server_scores
            for pair in zip(actor_log_probs[s], repeated[s], strict=True)
        ]
        float32 = self.config.server_dtype == "float32" and not self.config.model.bf16
        gap_floor = family.log_prob_gap if family.served_in_less and float32 else 0.0
        if not self._replays:
            gap_floor = _GAP_OF_OTHER_EXPERTS
        return CanaryNoise(
            repeat=max(again, key=_size),
            servers=max(servers, key=_size),
            gap_mean=float(gaps.mean()),
            decoded_mean=float(drawn_gaps.mean()),
            gap_max=float(gaps.max()),
            gap_floor=gap_floor,
            least_mean=_LEAST_MEAN if float32 else _LEAST_MEAN_HALF,
            actor_repeat=max(float(np.abs(a - b).max()) for a, b in actor_pairs),
            rows=sum(rows for rows, _ in router.values()),
            rows_left=sum(left for _, left in router.values()),
        )

    def _apart(self, one: list[CanaryScores], other: list[CanaryScores]) -> Difference:
        """The difference of two scores of the same texts."""
        pairs = list(zip(one, other, strict=True))
        twice = [(a.early, b.early) for a, b in pairs[:_HALVED]]
        return difference(twice + [(a.whole, b.whole) for a, b in pairs], self._moe_layers)

    def _largest_apart(
        self,
        repetitions: list[dict[int, list[CanaryScores]]],
        kept_scores: dict[int, list[CanaryScores]],
        unreplayed: dict[int, list[np.ndarray]],
    ) -> float:
        """The largest mean of |log-prob differences| at the start: of servers' scores, and of the actor's without replay."""
        every = [_given(scores) for repetition in repetitions for scores in repetition.values()]
        pairs = [(every[0], other) for other in every[1:]]
        for server, log_probs in unreplayed.items():
            mine = [a[1 : len(text)] for text, a in zip(self._texts, log_probs)]
            pairs.append((_given(kept_scores[server]), np.concatenate(mine)))
        return max(self._noise.least_mean, *(float(np.abs(a - b).mean()) for a, b in pairs))

    @property
    def _longest(self) -> int:
        """Tokens of a canary: all are as long."""
        trainer, cp = self.config.trainer, self.config.parallel.context_parallel_size
        room = min(
            context_len(self.config, self.hf) - _SPARE_TOKENS, trainer.max_tokens_per_gpu * cp
        )
        return min(_LONGEST, self.config.canary_tokens // _FEWEST, room - _DRAWN)

    @property
    def _count(self) -> int:
        return max(_FEWEST, self.config.canary_tokens // self._longest)

    def _note_coverage(self, version: int) -> None:
        record, noise = self._records[version][0], self._noise
        coverage = record.coverage
        repeats = (
            "bit by bit" if noise.repeat.is_none else f"to {noise.repeat.log_prob_off:.2g} nats"
        )
        experts = (
            f"{coverage.experts_used / coverage.experts:.0%} of the (layer, expert) pairs and "
            if coverage.experts
            else ""
        )
        self.rank_zero.display.note(
            f"canaries: {len(self._texts)} texts, {sum(map(len, self._texts))} tokens; they use {experts}"
            f"{coverage.tokens_used / coverage.vocabulary:.0%} of the vocabulary; servers repeat themselves {repeats}, and are"
            f" {noise.gap_mean:.2g} nats from the actor on average"
        )
        if noise.gap_mean > (MOST_MEAN_OF_FP8 if self.config.serves_fp8 else MOST_MEAN):
            gap = FAMILIES[self.hf.model_type].log_prob_gap
            self.rank_zero.display.note(
                f"canaries: {noise.gap_mean:.2g} nats on average are seldom rounding (of {self.hf.model_type} at most {gap:g} in"
                " float32): compare the weights with --check-weight-update-equal",
                style="yellow",
            )
        before = self._noise_before
        if before is not None and noise.gap_mean > _OTHER_MACHINE * max(before, noise.least_mean):
            self.rank_zero.display.note(
                f"canaries: servers and actor are {noise.gap_mean:.2g} nats apart on average, and were {before:.2g} where the"
                " checkpoint was begun: another machine, or other weights",
                style="yellow",
            )

    # -- an update ---------------------------------------------------------------------------

    def send(self, version: int) -> None:
        """Rank 0: send every server the canaries, if this update is judged; ``wait`` has their scores."""
        self._sent, self._unjudged = None, {}
        if self.ready and self._is_due():
            self._sent = self._ask(self._texts, version)

    def score_joiner(self, server: int, twin: int, version: int) -> str:
        """Rank 0, any thread: say how far a server that joins is from ``twin``, which holds the same weights.

        Both score the canaries, again while that is suspect.  Raises ValueError once it is more than suspect (see
        ``suspicion``), and the servers' errors.
        """
        limit, seen, text = self.config.suspect_limit, Suspicions(), "unscored"
        for _ in range(math.ceil(limit) if self.ready else 0):
            keys = [f"{self._name}-{secrets.token_hex(4)}" for _ in self._texts]
            wait_for_scores = self.rank_zero.weights.score_canaries(
                self._texts, keys, version, halves=0, drawn=0, at_once=1, servers=[server, twin]
            )
            scores, _ = wait_for_scores()
            off = np.abs(_given(scores[server]) - _given(scores[twin]))
            mean, usual = bounded_mean(off, self._usual_apart), self._usual_apart
            found = seen.see("JOINS", server, mean, start=usual, least=self._noise.least_mean)
            text = (
                f"its canaries are {mean:.2g} nats from those of server {twin}, usual {usual:.2g}"
            )
            if found.sum >= limit:
                raise ValueError(text)
            if found.sum < SUSPECT_FROM:
                return text
            logger.warning("suspect: server %d, which joins: %s", server, text)
        return text

    def _is_due(self) -> bool:
        """True for the first updates, and where the last judgement was paid for by the time since."""
        share, since = self.config.canary_share, time.monotonic() - self._judged_at
        return self._owed > 0 or share == 1 or self._seconds <= share * since

    def wait(self) -> None:
        """Rank 0: wait for the scores of what was sent; raises the servers' errors."""
        if self._sent is not None:
            self._unjudged, self._seconds = self._sent()
            self._sent = None

    def judge(self, version: int) -> dict[str, Any]:
        """Have the actor, which holds ``version``, score what servers scored; returns metrics on rank 0.

        A collective, before the actor trains.  Nothing where servers were sent no canaries.  Raises NotServed on all ranks.
        """
        if not self.ready:
            self._measure(version)
        elif broadcast_json(bool(self._unjudged)):
            return self._settle(version)
        # judged at the start, if at all
        return served_metrics(self._records[version]) if version in self._records else {}

    def _settle(self, version: int) -> dict[str, Any]:
        began, failed, metrics = time.monotonic(), "", {}
        server_scores, self._unjudged = self._unjudged, {}
        live = self._judgements % _LIVE_EVERY == 0
        actor_log_probs, router = self._actor_log_probs(
            self._texts, server_scores, version, live=live
        )
        if self.rank_zero is not None:
            failed = self._judge(version, server_scores, actor_log_probs, router)
            metrics = served_metrics(self._records[version])
            metrics["perf/canary_answers_s"] = self._seconds
            self._judged_at = time.monotonic()
            self._seconds += self._judged_at - began
        self._judgements, self._owed = self._judgements + 1, self._owed - 1
        self._end_if(failed, version, metrics)
        return metrics

    def _ask(
        self, texts: Sequence[np.ndarray], version: int, *, at_once: int = 1, repetition: int = 0
    ) -> Callable[[], tuple[dict[int, list[CanaryScores]], float]]:
        """Rank 0: have every server score, ``at_once`` texts at a time.

        The result waits for the scores, and for the seconds that servers took.
        Each text has a key of its own, the same under all versions where an update must flush the cache, and others in
        each ``repetition`` of a version, so that nothing is cached.  Where an update flushes nothing, every call makes new keys,
        because a server that left may come back with its cache.
        """
        name = self._name + (f"-{repetition}" if repetition else "")
        if not self.config.rollout.fresh_prefixes:
            name += f"-{version}-{secrets.token_hex(4)}"
        keys = [f"{name}-{i}" for i in range(len(texts))]
        return self.rank_zero.weights.score_canaries(
            texts, keys, version, halves=_HALVED, drawn=_DRAWN, at_once=at_once
        )

    def _judge(
        self,
        version: int,
        server_scores: dict[int, list[CanaryScores]],
        actor_log_probs: dict[int, list[np.ndarray]],
        router: dict[int, tuple[int, int]],
    ) -> str:
        """Rank 0: the verdict on all servers, written as evidence; returns what failed."""
        now = {
            s: ServerScores(version, s, server_scores[s], actor_log_probs[s]) for s in server_scores
        }
        start = CanaryStart(
            self._texts,
            self._cached,
            self._noise,
            self._moe_layers,
            self.hf.num_experts,
            self.hf.vocab_size,
        )
        records = []
        for server, scores in now.items():
            last, first = self._last.get(server), self._first.get(server)
            first = first or next(iter(self._first.values()), None)
            earlier = [r for r in (last, first) if r is not None and r.version < version]
            if len(earlier) == 2 and earlier[0].version == earlier[1].version:
                del earlier[1]
            records.append(
                compare_servers(scores, earlier, start, router[server], self._suspicions)
            )
        present = self.rank_zero.weights.present()
        self._last = {s: scores for s, scores in self._last.items() if s in present} | now
        self._records.setdefault(version, []).extend(records)
        for old in [v for v in self._records if v < version - 1]:
            del self._records[old]
        if self.evidence is not None:
            self.evidence.write_served(records)
        verdict = judge_served(records)
        for text in verdict.suspects:
            logger.warning("suspect: %s", text)
        for text in verdict.failures[1:]:
            logger.error("%s", text)
        if verdict.inconclusive:
            logger.info(
                "weight version %d: the actor moved too little to tell whether servers did", version
            )
        return verdict.failures[0] if verdict.failures else ""

    def _end_if(self, failed: str, version: int, metrics: dict[str, Any]) -> None:
        """Raise NotServed on all ranks where rank 0 says what failed; a collective."""
        failed = broadcast_json(failed)
        if failed:
            raise NotServed(f"not served: {failed}", version, metrics, sampled=True)

    def restarted(self) -> None:
        """Note that servers were restarted: their next updates are judged."""
        self._owed = _FIRST_UPDATES

    @property
    def last_scores(self) -> list[tuple[ServerScores, list[np.ndarray] | None]]:
        """Rank 0: the last scores of every server that was there at the last judgement, and of the actor.

        With each come the log-probs of the actor's pass without replay, if there was one.
        """
        return [(scores, self._live.get(s)) for s, scores in self._last.items()]

    def served(self, version: int) -> Served | None:
        """Rank 0: the verdict on a weight version."""
        return judge_served(self._records.get(version, []))

    # -- the actor ---------------------------------------------------------------------------

    def _actor_log_probs(
        self,
        texts: Sequence[np.ndarray],
        server_scores: dict[int, list[CanaryScores]],
        version: int,
        *,
        live: bool = False,
    ) -> tuple[dict[int, list[np.ndarray]], dict[int, tuple[int, int]]]:
        """Score the texts and what was drawn after them with the experts that each server chose.

        Servers that chose alike share a pass's samples.  live: also without replay, for the budget of the gap.
        Returns on rank 0, by server, float32[T + n] of each text of T tokens and the n drawn ones (entry 0 is 0), and the
        rows of the actor with those whose own choice was another.
        """
        live &= self._replays
        sharing: dict[bytes, list[int]] = {}
        for server, scores in server_scores.items():
            chosen = b"".join(r.whole.rows.tobytes() + r.whole.sampled.tobytes() for r in scores)
            sharing.setdefault(chosen, []).append(server)
        groups = list(sharing.values())
        log_probs, router = {}, {}
        self._live.clear()
        for i in range(broadcast_json(len(groups))):
            scores = server_scores[groups[i][0]] if groups else []
            drawn = [np.concatenate([t, s.whole.sampled]) for t, s in zip(texts, scores)]
            rows = [s.whole.rows if self._replays else None for s in scores]
            found, unreplayed, counts = self._pass(drawn, rows, version, live)
            for server in groups[i] if groups else ():
                log_probs[server], router[server] = found, counts
                if live:
                    self._live[server] = unreplayed
        return log_probs, router

    def _pass(
        self,
        texts: Sequence[np.ndarray],
        rows: Sequence[np.ndarray | None],
        version: int,
        live: bool,
    ) -> tuple[list[np.ndarray], list[np.ndarray], tuple[int, int]]:
        """Score the texts with these experts, and with ``live`` also without replay, else as zeros."""
        mine, microbatches = self.actor.topology, None
        if self.rank_zero is not None:
            samples = [
                _sample(i, text, text_rows, version)
                for i, (text, text_rows) in enumerate(zip(texts, rows, strict=True))
            ]
            dealt = deal_samples(samples, mine, self.config.trainer.max_tokens_per_gpu)
            shape = self.hf.route_shape if self._replays else None
            microbatches = build_microbatches(dealt, mine, Streams(shape))
        lengths = broadcast_json([len(text) for text in texts])
        count = broadcast_json(microbatches and len(microbatches[0]))
        slices = distribute_slices(microbatches, self.topologies, count)
        self.actor.check_replay(True)
        replay_pass = _PASS if self._replays else None
        log_probs = self.actor.compute_log_probs(slices, replay_pass, 1.0, version)
        counts = StepTotals(self.hf.route_shape)
        for call in self.actor.collect_evidence(version):
            counts.add(call)
        self.actor.collect_drift()  # of this pass: no metric
        found = [log_probs]
        if live:
            found.append(self.actor.compute_log_probs(slices, None, 1.0, routing="native"))
        firsts = np.concatenate([[0], np.cumsum(lengths)])
        out = torch.zeros(2, int(firsts[-1]), dtype=torch.float32)
        if mine.tp_rank == 0:
            for s in slices:
                if s.microbatch_id not in log_probs:
                    continue
                real = np.flatnonzero(s.token_uids >= 0)
                text, position = split_uids(s.token_uids[real])
                inner = position < np.asarray(lengths)[text] - 1
                at = firsts[text[inner]] + position[inner] + 1
                for values, by_id in zip(out, found):
                    local_values = by_id[s.microbatch_id].float().cpu()
                    values[torch.from_numpy(at)] = local_values[torch.from_numpy(real[inner])]
        table = torch.from_numpy(counts.to_table([_PASS]))
        for part in (out, table):
            dist.all_reduce(part, group=host_group())
        cells = StepTotals.from_table(table.numpy(), [_PASS], self.hf.route_shape)
        totals = [cells.counters(cell) for cell in cells.cells]
        compared = sum(
            cell["rows_equal"] + cell["rows_overlap"] + cell["rows_mismatch"] for cell in totals
        )
        left = compared - sum(cell["rows_equal"] for cell in totals)
        replayed, unreplayed = (np.split(values, firsts[1:-1]) for values in out.numpy())
        return replayed, unreplayed, (compared, left)

    # -- in a checkpoint -----------------------------------------------------------------------

    def keep(self, directory: Path) -> None:
        """Rank 0: write texts, noise and first scores into a checkpoint; none where scores are log-probs alone."""
        if self._noise is None or not self._replays:
            return
        tensors = {f"text.{i}": text for i, text in enumerate(self._texts)}
        server = next(iter(self._first.values()))
        for i, (scores, actor_log_probs) in enumerate(zip(server.scores, server.actor)):
            for name in ("early", "warm", "whole") if scores.early is not None else ("whole",):
                part = getattr(scores, name)
                tensors[f"{name}.{i}.log_probs"] = part.log_probs
                tensors[f"{name}.{i}.rows"] = np.ascontiguousarray(part.rows)
            tensors[f"sampled.{i}"] = scores.whole.sampled
            tensors[f"actor.{i}"] = np.ascontiguousarray(actor_log_probs)
        facts = {
            "cached": self._cached,
            "version": server.version,
            "server": server.server,
            "noise": asdict(self._noise),
        }
        (directory / CANARY_FILE).write_bytes(
            save(tensors, {"format": _FORMAT, "facts": json.dumps(facts)})
        )

    def _read(self, path: Path) -> None:
        """Take over what a checkpoint holds; raises ValueError naming the file."""
        if self.rank_zero is None:
            return
        try:
            with open_regular(path) as file:
                content = file.read()
            tensors = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            if (got := header["__metadata__"]["format"]) != _FORMAT:
                raise ValueError(f"its format is {got!r}, expected {_FORMAT!r}")
            facts = json.loads(header["__metadata__"]["facts"])
            self._cached = msgspec.convert(facts["cached"], list[int])[:_HALVED]
            self._noise_before = msgspec.convert(facts["noise"]["gap_mean"], float)
            numbers = range(sum(name.startswith("text.") for name in tensors))
            self._texts = [tensors[f"text.{i}"] for i in numbers]

            def part_scores(name: str, i: int) -> Scores | None:
                if name != "whole" and i >= len(self._cached):
                    return None
                log_probs, rows = tensors[f"{name}.{i}.log_probs"], tensors[f"{name}.{i}.rows"]
                cached = self._cached[i] if name == "warm" else 0
                if name != "whole" or f"sampled.{i}" not in tensors:  # an older file
                    return Scores(log_probs, rows, cached)
                return Scores(log_probs, rows, cached, tensors[f"sampled.{i}"])

            scores = [
                CanaryScores(*(part_scores(n, i) for n in ("early", "warm", "whole")))
                for i in numbers
            ]
            actor_log_probs = [tensors[f"actor.{i}"] for i in numbers]
            self._first = {
                facts["server"]: ServerScores(
                    facts["version"], facts["server"], scores, actor_log_probs
                )
            }
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a whole file of canaries: {error}") from None


def _given(scores: Sequence[CanaryScores]) -> np.ndarray:
    """The log-probs of all given tokens but each text's first: float64[N]."""
    parts = [s.whole.log_probs[1 : len(s.whole.rows) + 1 - len(s.whole.sampled)] for s in scores]
    return np.concatenate(parts).astype(np.float64)


def _size(difference: Difference) -> tuple[int, float]:
    return difference.rows_differ, difference.log_prob_off


def served_metrics(records: Sequence[ServedRecord]) -> dict[str, Any]:
    """Return the metrics of a weight version's canaries."""
    verdict = judge_served(records)
    rows = sum(record.rows for record in records)
    return {
        "served/passed": not verdict.failures,
        "served/suspect": max(s.sum for record in records for s in record.statistics),
        "served/inconclusive": verdict.inconclusive,
        "served/gap_mean": max(record.gap_mean for record in records),
        "served/gap_max": max(record.gap_max for record in records),
        "served/router_left": sum(record.rows_left for record in records) / max(rows, 1),
    }


def _sample(
    number: int, token_ids: np.ndarray, rows: np.ndarray | None, version: int
) -> TrainSample:
    """A text with a server's rows, if it has any, as a sample whose rows are of the actor's weights."""
    length = len(token_ids)
    after_first = np.arange(length) > 0
    sample = RolloutSample(
        sample_id=number,
        group_id=number,
        prompt=Prompt("canary", number, "", token_ids[:1], None),
        token_ids=token_ids,
        prompt_len=1,
        loss_mask=after_first,
        rollout_log_probs=np.zeros(length, dtype=np.float32),
        routed_experts=rows,
        weight_versions=np.where(after_first, version, -1).astype(np.int32),
        finish_reason="length",
    )
    return TrainSample(sample, 0.0, np.zeros(length, dtype=np.float32))
