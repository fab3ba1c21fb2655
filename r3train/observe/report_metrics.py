"""Which metrics a report draws, under what names: tables alone.  The keys are those of metrics.py."""

from __future__ import annotations

# metric, title, note, logarithmic
CHARTS = (
    ("rollout/reward_mean", "Reward", "mean over the samples of a step", False),
    ("train/loss", "Loss", "", False),
    ("train/entropy", "Entropy", "nats a token, of the actor", False),
    ("rollout/response_len_mean", "Response length", "tokens", False),
    ("rollout/staleness_mean", "Staleness", "weight versions behind, mean", False),
    ("rollout/generation_s_max", "Slowest sample", "seconds of generation", False),
    ("perf/tokens_per_s", "Throughput", "generated tokens a second of wall time", False),
    ("train/grad_norm", "Gradient norm", "before clipping", False),
    ("train/log_prob_gap_mean", "Log-prob gap, mean", "|actor - engine|, nats", True),
    ("train/log_prob_gap_k3", "Log-prob gap, k3 KL", "estimate of KL(engine, actor)", True),
    ("train/log_prob_gap_far_share", "Extreme tokens", "share with |gap| above ln 2", False),
    (
        "train/log_prob_gap_p999",
        "Log-prob gap, p99.9",
        "nats; of a step's optimizer steps the largest p99.9",
        True,
    ),
    ("train/log_prob_gap_max", "Log-prob gap, largest", "nats", True),
)
# two metrics in one chart, the second dashed; title, note
PAIRS = (
    (
        "perf/train_wait_share",
        "perf/rollout_idle_share",
        "Waiting",
        "share of wall time; solid: training waits, dashed: generation idles",
    ),
    (
        "r3/agreement",
        "r3/agreement_chance_equal",
        "Routing agreement",
        "share of rows with the replayed experts; dashed: chance",
    ),
)
# name, metric, whether the last tenth of the steps counts instead of all
COMPARED = (
    ("reward, last tenth of the steps", "rollout/reward_mean", True),
    ("log-prob gap, mean", "train/log_prob_gap_mean", False),
    ("k3 KL, mean", "train/log_prob_gap_k3", False),
    ("share of tokens with |gap| above ln 2", "train/log_prob_gap_far_share", False),
    (
        "p99.9 of the gap (largest of a step's optimizer steps), mean over steps",
        "train/log_prob_gap_p999",
        False,
    ),
    ("largest gap, mean over steps", "train/log_prob_gap_max", False),
    ("tokens a second, mean", "perf/tokens_per_s", False),
    ("seconds a step, mean", "perf/step_s", False),
    ("seconds of rollout a step, mean", "perf/rollout_s", False),
)
STEP_S, ROLLOUT_S = "perf/step_s", "perf/rollout_s"
# parts of a step's wall time in the order of the loop: name, metric, the part that it lies within
TIMES = (
    ("waiting for rollout", "perf/rollout_wait_s", None),
    ("route exchange", "perf/route_exchange_s", "waiting for rollout"),
    ("log-probs", "perf/log_prob_s", "training"),
    ("training", "perf/train_s", None),
    ("weight sync", "perf/publish_s", None),
    ("saving", "perf/save_s", None),
)
PASSED = "r3/passed"
DRAWN = frozenset(
    [PASSED, STEP_S, ROLLOUT_S]
    + [key for key, *_ in CHARTS]
    + [key for pair in PAIRS for key in pair[:2]]
    + [key for _, key, _ in (*COMPARED, *TIMES)]
)
