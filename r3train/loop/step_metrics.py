"""Metrics of a step under the keys that people, plots and scripts read (see observe.metrics)."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from r3train.algo.corrections import group_metrics, is_group_sum
from r3train.algo.reward_stats import GroupStats
from r3train.config import RunConfig
from r3train.host_group import host_group
from r3train.observe.metrics import MetricsWriter
from r3train.types import RolloutSample, RowClass, TrainSample


logger = logging.getLogger(__name__)

_METRICS_OF_REWARDS = (
    "rollout/reward_",
    "rollout/zero_variance_groups",
    "rollout/taught_samples",
    "rollout/pass_at_",
)


def report_rollout(
    rollout_id: int,
    samples: Sequence[TrainSample],
    groups: GroupStats,
    config: RunConfig,
    writer: MetricsWriter,
    counts: Mapping[str, Any],
    counts_before: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a few of a rollout's samples, and return its metrics.

    counts: the source's now, and at the rollout before.
    """
    writer.write_samples(rollout_id, samples_to_report(samples))
    if text := shared_failure(counts.get("agent", {}), counts_before.get("agent", {})):
        logger.warning("step %d: %s", rollout_id, text)
    turns = config.rollout.environment is not None
    keys = config.algorithm.reward_keys
    metrics = rollout_metrics(rollout_id, groups, samples, turns=turns, reward_keys=keys)
    if config.algorithm.loss_type == "sft":  # conversations have no rewards
        metrics = {k: v for k, v in metrics.items() if not k.startswith(_METRICS_OF_REWARDS)}
    return metrics | source_metrics(counts, counts_before)


def rollout_metrics(
    rollout_id: int,
    groups: GroupStats,
    samples: Sequence[TrainSample],
    *,
    turns: bool = False,
    reward_keys: Sequence[str] = (),
) -> dict[str, Any]:
    """Rewards, lengths, staleness of one rollout.

    turns: True with --environment; reward_keys: the keys of the samples' reward parts.
    """
    parts = [
        s.sample.reward_parts
        for s in samples
        if s.sample.is_last_step is not False and s.sample.reward_parts is not None
    ]
    part_means = np.mean(parts, axis=0).tolist() if parts else []
    lengths = np.array([_model_tokens(s.sample) for s in samples])
    prompts = np.array([s.sample.prompt_len for s in samples])
    truncated = sum(s.sample.finish_reason == "length" for s in samples)
    # tokens of the prompt and of an environment have version -1: no weights generated them
    generated = [_versions(s) for s in samples]
    staleness = [rollout_id - int(versions[0]) for versions in generated if len(versions)]
    histogram = {
        f"rollout/staleness_{age}": staleness.count(age)
        for age in range(max(staleness, default=0) + 1)
    }
    seconds = np.array([s.sample.generation_s for s in samples])
    return {
        "rollout/reward_mean": groups.mean,
        "rollout/reward_std": groups.std,
        "rollout/reward_min": groups.min,
        "rollout/reward_max": groups.max,
        **{f"rollout/reward_mean_{key}": mean for key, mean in zip(reward_keys, part_means)},
        "rollout/zero_variance_groups": groups.num_zero_variance,
        "rollout/taught_samples": sum(bool(np.any(s.advantages)) for s in samples),
        "rollout/num_groups": groups.num_groups,
        "rollout/num_samples": len(samples),
        **{f"rollout/pass_at_{k}": share for k, share in groups.pass_at_k.items()},
        "rollout/response_len_mean": float(lengths.mean()),
        "rollout/response_len_median": float(np.median(lengths)),
        "rollout/response_len_max": int(lengths.max()),
        "rollout/prompt_len_mean": float(prompts.mean()),
        "rollout/prompt_len_max": int(prompts.max()),
        "rollout/repetition": float(np.mean([repetition(s.sample) for s in samples])),
        "rollout/tokens": int(lengths.sum()),
        "rollout/truncated": truncated,
        "rollout/truncated_share": truncated / len(samples),
        "rollout/aborted": sum(s.sample.finish_reason == "abort" for s in samples),
        "rollout/staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "rollout/staleness_max": max(staleness, default=0),
        "rollout/generation_s_mean": float(seconds.mean()),
        "rollout/generation_s_max": float(seconds.max()),
        "rollout/retracted_samples": sum(s.sample.num_retractions > 0 for s in samples),
        "rollout/spanning_samples": sum(len(versions) > 1 for versions in generated),
        **histogram,
        **row_metrics([s.sample for s in samples]),
        **(_turn_metrics([s.sample for s in samples]) if turns else {}),
    }


def row_metrics(samples: Sequence[RolloutSample]) -> dict[str, int]:
    """Route rows of a rollout by class; {} without routes, or where a sample's classes are not known."""
    classes = [s.row_classes for s in samples if s.row_classes is not None]
    if not classes or len(classes) < len(samples):
        return {}
    counts = np.bincount(np.concatenate(classes), minlength=len(RowClass)).tolist()
    return {f"rows/{row_class.label}": counts[row_class] for row_class in RowClass}


def _model_tokens(sample: RolloutSample) -> int:
    """Tokens of the response that are the model's own: not those of an environment.

    Those that the model generated have a weight version, trained or masked; a conversation that nothing
    generated (--loss-type sft) counts whole.
    """
    generated = sample.weight_versions[sample.prompt_len :] >= 0
    return int(generated.sum()) if generated.any() else sample.response_len


def _turn_metrics(samples: Sequence[RolloutSample]) -> dict[str, Any]:
    """Turns of each episode, and the tokens of its environment; of one sample a turn, the last tells."""
    episodes = [s for s in samples if s.is_last_step is not False]
    generated = [s.weight_versions >= 0 for s in episodes]
    # a turn begins with each token of the model after one that is not
    turns = np.array([int(o[0]) + int((o[1:] & ~o[:-1]).sum()) for o in generated])
    # after the first token of the model
    observed = [int((~o[o.argmax() :]).sum()) if o.any() else 0 for o in generated]
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": int(turns.max()),
        "rollout/observation_len_mean": float(np.mean(observed)),
    }


def repetition(sample: RolloutSample) -> float:
    """The share of the response's runs of 4 tokens that stood in it before; 0 below 4 tokens."""
    tokens = sample.token_ids[sample.prompt_len :].astype(np.uint64)
    if len(tokens) < 4:
        return 0.0
    # one number a run: products wrap around mod 2^64, and two runs hardly ever meet
    factors = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
    runs = (np.lib.stride_tricks.sliding_window_view(tokens + np.uint64(1), 4) * factors).sum(1)
    return 1 - len(np.unique(runs)) / len(runs)


def _versions(s: TrainSample) -> np.ndarray:
    """The weight versions that generated the response, trained or masked; of several it spans an update.

    int32, ascending and distinct; empty for an answer without a token.  Earlier turns, which are the prompt of
    a sample of one turn, do not count: they are samples of their own.
    """
    versions = s.sample.weight_versions[s.sample.prompt_len :]
    return np.unique(versions[versions >= 0])


def source_metrics(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of the source since the last step's batch, from its counts then and now.

    ``rollout_s`` is the time, in seconds since then, with a request in flight.  The two shares of
    the wall time are those in which training waited for a batch and generation had nothing in
    flight.  A source without these counts (dumped rollouts) gives no metrics.
    """
    if "wall_s" not in now:
        return {}

    def since(key: str) -> float:
        return now[key] - before.get(key, 0)

    wall_s = max(since("wall_s"), 1e-9)
    earlier = before.get("outcomes", {})
    fates = {key: count - earlier.get(key, 0) for key, count in now["outcomes"].items()}
    fates = {f"rollout/groups_{key}": count for key, count in fates.items() if key != "trained"}
    match = now.get("inject_match")
    return {
        **({} if match is None else {"rollout/inject_match": match}),
        "perf/rollout_s": since("wall_s") - since("idle_s"),
        "perf/train_wait_share": since("waiting_s") / wall_s,
        "perf/rollout_idle_share": since("idle_s") / wall_s,
        "perf/rollout_loop_held_s": now["longest_hold_s"],
        "rollout/buffered_groups": now["buffered_groups"],
        "rollout/resumed": since("resumed_episodes"),
        "rollout/computed_again": since("recheck_tokens"),
        "rollout/retracted": since("retracted_answers"),
        **draft_metrics(since),
        **fates,
        **agent_metrics(now.get("agent", {}), before.get("agent", {})),
    }


def draft_metrics(since: Callable[[str], float]) -> dict[str, float]:
    """Return the share of right drafts and the tokens per verification; nothing where none were made.

    since: a count's growth, by its name.
    """
    if not (verifications := since("draft_verifications")):
        return {}
    accepted = since("drafts_accepted")
    return {
        "rollout/spec_accept_rate": accepted / max(since("drafts_proposed"), 1),
        "rollout/spec_accept_length": 1 + accepted / verifications,
    }


_SUMS = (
    "failures truncated_calls truncated_context refused unread_calls undelivered cut_tokens"
    " special_in_text retries_joined".split()
)


def agent_metrics(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, Any]:
    """Metrics of the sessions that ended since the last step, from the sums over all sessions then and now."""
    sums = now.keys() - {"session_s_max", "causes"}
    since = {key: now[key] - before.get(key, 0) for key in sums}
    sessions = since.get("sessions", 0)
    if not sessions:
        return {}
    named = {f"agent/{key}": since[key] for key in sums if key.startswith(("ignored_", "refused_"))}
    return {
        "agent/sessions": sessions,
        **{
            f"agent/{key}_mean": since.get(key, 0) / sessions
            for key in ("calls", "chains", "roots", "forks", "tool_calls")
        },
        **{f"agent/{key}": since.get(key, 0) for key in _SUMS},
        "agent/cut_by_client": since.get("cut_by_client", 0) / max(since.get("calls", 0), 1),
        "agent/template_differs": since.get("template_differs", 0) / max(since.get("chains", 0), 1),
        "agent/reprompted_share": since["prompt_again"] / max(since["tokens"], 1),
        "agent/session_s_mean": since["seconds"] / sessions,
        "agent/session_s_max": now["session_s_max"],
        "agent/harness_s_share": 1 - since["called_s"] / max(since["seconds"], 1e-9),
        **named,
    }


def shared_failure(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The commonest cause, in words, where all sessions that ended since the last step failed; "" where one did not."""
    sessions, failures = (now.get(k, 0) - before.get(k, 0) for k in ("sessions", "failures"))
    if not sessions or failures < sessions:
        return ""
    causes = Counter(now["causes"]) - Counter(before.get("causes", {}))
    cause, count = causes.most_common(1)[0]
    return f"all {sessions} sessions of agents failed, {count} of them so: {cause}"


def samples_to_report(samples: Sequence[TrainSample]) -> list[dict[str, Any]]:
    """The lowest reward, the slowest to generate and the highest reward, with their text.

    Those of agents have the conversations of their sessions, a sample each.
    """
    sessions: dict[int | None, list[Sequence[str]]] = {}
    for s in samples:
        if s.sample.conversation:
            sessions.setdefault(s.sample.trajectory_id, []).append(s.sample.conversation)
    picked = {
        "worst": min(samples, key=lambda s: s.reward),
        "slowest": max(samples, key=lambda s: (s.sample.generation_s, s.sample.response_len)),
        "best": max(samples, key=lambda s: s.reward),
    }
    return [
        {
            "kind": kind,
            "sample_id": s.sample.sample_id,
            "prompt_id": s.sample.prompt.prompt_id,
            "reward": s.reward,
            "response_len": s.sample.response_len,
            "generation_s": round(s.sample.generation_s, 4),
            "finish_reason": s.sample.finish_reason,
            "prompt": s.sample.prompt.text[-_TEXT:],
            "label": _short(s.sample.prompt.label),
            "metadata": _short(s.sample.prompt.metadata),
            "text": s.sample.text[:_TEXT],
            **_conversations(sessions.get(s.sample.trajectory_id, ())),
        }
        for kind, s in picked.items()
    ]


def _conversations(found: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The last conversations of a session; a session of many has the number of those before."""
    left = max(len(found) - _MOST_CONVERSATIONS, 0)
    return {"conversations": found[left:], "left_out": left} if found else {}


_MOST_CONVERSATIONS = 4
# characters of a text: enough to see what went wrong, and megabytes a run at most
_TEXT = 2000


def _short(value: Any) -> Any:
    """A value as JSON has it; of one that is long, the beginning of its text."""
    text = json.dumps(value, default=str)
    return json.loads(text) if len(text) <= _TEXT else f"{text[:_TEXT]}..."


# nats: a token is e times as likely to the one as to the other, on average
_ABSURD_GAP = 1.0
# the trainer's names -> ours, where they differ
_NAMES = {
    "clipped": "clip_share",
    "log_prob_gap_abs": "log_prob_gap_mean",
    "log_prob_gap_far": "log_prob_gap_far_share",
    "rs_rejected": "rs_rejected_share",
    "opsm_dropped": "opsm_dropped_share",
}
# how the numbers of optimizer steps are joined, those that have no mean
_JOINED_BY = {
    "lr": itemgetter(-1),
    # an upper bound of the p99.9 over all tokens of the rollout
    "log_prob_gap_p999": max,
    **dict.fromkeys(("num_loss_tokens", "skipped_steps", "low_ess_steps"), sum),
}


def train_metrics(
    reports: Sequence[dict[str, float]], maxima: Collection[str] = ()
) -> dict[str, Any]:
    """Join the numbers of a rollout's optimizer steps: means, except for maxima, sums and means by age and class.

    maxima: names of the loss's maxima.
    """
    out: dict[str, Any] = {}
    groups = {name: sum(r[name] for r in reports) for name in reports[0] if is_group_sum(name)}
    for name in (name for name in reports[0] if name not in groups):
        values = [r[name] for r in reports]
        join = max if name in maxima else _JOINED_BY.get(name, _mean)
        out[f"train/{_NAMES.get(name, name)}"] = join(values)
    return out | {f"train/{name}": value for name, value in group_metrics(groups).items()}


def gap_warning(rollout_id: int, metrics: Mapping[str, Any]) -> str | None:
    """Warn of log-probs of servers that are not those of the actor's model; None where they may be.

    Rounding makes a mean gap of 0.05 at most, a rollout of staleness 4 at a high learning rate 0.2.
    """
    gap = metrics.get("train/log_prob_gap_mean", 0.0)
    if gap < _ABSURD_GAP:
        return None
    return (
        f"step {rollout_id}: train/log_prob_gap_mean is {gap:.3g}, expected below {_ABSURD_GAP:g}: the"
        " servers' log-probs are not those of the model that is trained. Do they hold its weights, and"
        " sample at --rollout-temperature?"
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


class PhaseClock:
    """Times one step: ``with clock.phase("train"): ...`` adds to that phase's seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a phase; a phase may come several times in a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return ``perf/<phase>_s`` of every phase, ``perf/step_s`` and ``perf/tokens_per_s``.

        tokens: of the rollout.
        """
        step_s = self.step_s()
        phases = {f"perf/{name}_s": seconds for name, seconds in self.seconds.items()}
        return {**phases, "perf/step_s": step_s, "perf/tokens_per_s": tokens / step_s}


_GB = 1e9


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return ``perf/gpu_memory_peak_gb`` and ``perf/host_memory_gb``, in GB of 10^9 bytes; a collective.

    The first, with CUDA only, is torch's peak since the last call on the rank with the largest; the
    second what the fullest of the ranks' machines has in use, whoever uses it.
    """
    machine = psutil.virtual_memory()
    used = torch.tensor([0.0, float(machine.total - machine.available)], dtype=torch.float64)
    if device.type == "cuda":
        used[0] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=host_group())
    gpu, host = (used / _GB).tolist()
    gpu_metrics = {"perf/gpu_memory_peak_gb": gpu} if device.type == "cuda" else {}
    return gpu_metrics | {"perf/host_memory_gb": host}
