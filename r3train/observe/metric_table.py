"""Every metric of a run: key, unit and meaning.  docs/metrics.md is written from this table.

A capital word in a key stands for a part that varies: ``rollout/pass_at_N`` is the row of
``rollout/pass_at_4``.  Metrics that a user's own loss returns have no row.

>>> row_of("rollout/pass_at_4").key
'rollout/pass_at_N'
>>> row_of("rollout/unheard_of") is None
True
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """One row; ``unit`` is "" for a number without one, such as a mean reward."""

    key: str
    unit: str
    meaning: str


METRICS: dict[str, tuple[Metric, ...]] = {
    "Rollout: rewards and samples": (
        Metric("rollout/reward_mean", "", "mean reward over the step's samples"),
        Metric("rollout/reward_std", "", "standard deviation of the rewards over the step's samples"),
        Metric("rollout/reward_min", "", "lowest reward of the step"),
        Metric("rollout/reward_max", "", "highest reward of the step"),
        Metric("rollout/reward_mean_KEY", "", "mean of one of --reward-keys"),
        Metric("rollout/pass_at_N", "share", "unbiased pass@N over the step's groups, where rewards lie within 0 and 1; a reward of 1 passes"),
        Metric("rollout/num_groups", "groups", "groups (prompts) of the step"),
        Metric("rollout/num_samples", "samples", "samples of the step"),
        Metric("rollout/zero_variance_groups", "groups", "groups whose rewards are all equal: they teach nothing"),
        Metric("rollout/taught_samples", "samples", "samples with an advantage other than 0"),
        Metric("rollout/response_len_mean", "tokens", "mean length of a response: tokens that the model generated"),
        Metric("rollout/response_len_median", "tokens", "median length of a response"),
        Metric("rollout/response_len_max", "tokens", "longest response"),
        Metric("rollout/prompt_len_mean", "tokens", "mean length of a prompt"),
        Metric("rollout/prompt_len_max", "tokens", "longest prompt"),
        Metric("rollout/tokens", "tokens", "all tokens that the model generated"),
        Metric("rollout/truncated", "samples", "responses cut at their longest length"),
        Metric("rollout/truncated_share", "share", "share of responses cut at their longest length"),
        Metric("rollout/aborted", "samples", "samples whose generation was aborted for good"),
        Metric("rollout/repetition", "share", "sequences of 4 tokens that occur earlier in the response; mean over samples"),
        Metric("rollout/turns_mean", "turns", "with --environment: mean turns per episode"),
        Metric("rollout/turns_max", "turns", "with --environment: most turns of an episode"),
        Metric("rollout/observation_len_mean", "tokens", "with --environment: tokens of the environment per episode"),
        Metric("rollout/generation_s_mean", "s", "seconds that a sample took to generate, mean"),
        Metric("rollout/generation_s_max", "s", "seconds that a sample took to generate, longest"),
        Metric("rollout/inject_match", "share", "with --ci-inject-rollout-data-path: recorded tokens that were generated again"),
    ),
    "Agents (--agent)": (
        Metric("agent/custody_passed", "", "verdict of the custody: tokens that were sampled and delivered are trained exactly once"),
        Metric("agent/sessions", "sessions", "sessions that ended since the last step, also those that are not trained"),
        Metric("agent/calls_mean", "calls", "answers of the model in a session, mean"),
        Metric("agent/chains_mean", "samples", "samples of a session, mean: 1 where every conversation only grows"),
        Metric("agent/roots_mean", "chains", "chains that began with a request of their own, mean per session"),
        Metric("agent/forks_mean", "chains", "chains that began behind an answer that another chain goes on from, mean per session"),
        Metric("agent/reprompted_share", "share", "tokens of the sessions that are the prompt of a chain after the first: what a rewritten history costs"),
        Metric("agent/template_differs", "share", "samples whose last request the chat template would write otherwise than they have it: thoughts that stay, arguments written another way"),
        Metric("agent/failures", "sessions", "sessions whose agent failed (--agent-on-failure)"),
        Metric("agent/undelivered", "calls", "answers that no agent took: they are not trained"),
        Metric("agent/cut_tokens", "tokens", "tokens that were sampled behind a stop text and thrown away"),
        Metric("agent/retries_joined", "requests", "retries of clients that joined a call in flight, or got its answer"),
        Metric("agent/ignored_FIELD", "calls", "answered requests with a field of sampling that has no effect, such as temperature"),
        Metric("agent/session_s_mean", "s", "wall time of a session, mean"),
        Metric("agent/session_s_max", "s", "longest session of the run so far"),
        Metric("agent/harness_s_share", "share", "share of the sessions' time without a call in flight"),
    ),
    "Rollout: asynchrony": (
        Metric("rollout/staleness_mean", "versions", "weight versions between a sample's first token and the step that trains it, mean"),
        Metric("rollout/staleness_max", "versions", "the largest staleness of a sample"),
        Metric("rollout/staleness_N", "samples", "samples of staleness N"),
        Metric("rollout/spanning_samples", "samples", "samples that several weight versions generated"),
        Metric("rollout/weight_version", "", "weight version that the servers were given after the step"),
        Metric("rollout/buffered_groups", "groups", "groups under way or waiting in the buffer"),
        Metric("rollout/groups_OUTCOME", "groups", "groups that were not trained since the last step, by what became of them"),
        Metric("rollout/resumed", "samples", "samples continued after an abort"),
        Metric("rollout/retracted", "answers", "answers that a server retracted and computed again"),
        Metric("rollout/retracted_samples", "samples", "samples of the step with a retracted answer"),
        Metric("rollout/spec_accept_rate", "share", "drafts of servers with --sglang-speculative-algorithm that were right"),
        Metric("rollout/spec_accept_length", "tokens", "tokens per verification of drafts, the one that follows them included"),
        Metric("rollout/computed_again", "tokens", "tokens that the recheck had the servers compute once more"),
    ),
    "Training": (
        Metric("train/loss", "", "the optimized loss, mean over loss tokens (and over the rollout's optimizer steps, as all of this section)"),
        Metric("train/pg_loss", "", "the policy's part of the loss"),
        Metric("train/grad_norm", "", "gradient norm before clipping"),
        Metric("train/lr", "", "learning rate of the last optimizer step"),
        Metric("train/entropy", "nats", "entropy of the policy per loss token"),
        Metric("train/kl", "nats", "KL from the reference, by --kl-loss-type"),
        Metric("train/kl_in_reward", "nats", "with --kl-coef: KL times kl_coef, subtracted per episode, mean"),
        Metric("train/ppo_kl", "nats", "mean of old minus new log-prob"),
        Metric("train/ratio", "", "mean importance ratio, new over old policy"),
        Metric("train/clip_share", "share", "loss tokens whose ratio was clipped"),
        Metric("train/num_loss_tokens", "tokens", "tokens in the loss, summed over optimizer steps"),
        Metric("train/update_successful", "share", "optimizer steps that changed the weights"),
        Metric("train/skipped_steps", "steps", "optimizer steps skipped for a loss or gradient that was not finite"),
        Metric("train/low_ess_steps", "steps", "optimizer steps skipped by --min-ess"),
        Metric("train/opd_reverse_kl", "nats", "with --use-opd: KL(actor || teacher) per token"),
        Metric("train/weight_probe_gap", "nats", "with --check-weight-update-equal: actor against servers on one text after the update, largest"),
    ),
    "Log-prob gap and corrections": (
        Metric("train/log_prob_gap_mean", "nats", "|actor - engine| per loss token, mean"),
        Metric("train/log_prob_gap_max", "nats", "largest |actor - engine| of a loss token"),
        Metric("train/log_prob_gap_p999", "nats", "99.9th percentile of |actor - engine|, upper bound of its bin"),
        Metric("train/log_prob_gap_k1", "nats", "estimate k1 of KL(engine || actor)"),
        Metric("train/log_prob_gap_k3", "nats", "estimate k3 of KL(engine || actor)"),
        Metric("train/log_prob_gap_far_share", "share", "loss tokens with |actor - engine| above ln 2"),
        Metric("train/ess", "share", "effective sample size of the importance ratios, as a share"),
        Metric("train/chi2_token", "", "mean squared importance ratio minus 1, of tokens"),
        Metric("train/chi2_seq", "", "mean squared importance ratio minus 1, of whole samples"),
        Metric("train/ppl_actor", "", "perplexity of the samples under the actor"),
        Metric("train/ppl_rollout", "", "perplexity of the samples under the engine"),
        Metric("train/ppl_ratio", "", "the first perplexity over the second"),
        Metric("train/tis_weight", "", "with --rollout-is: mean weight after its bounds"),
        Metric("train/tis_ratio", "", "with --rollout-is: mean importance ratio before its bounds"),
        Metric("train/tis_clipped_high", "share", "with --rollout-is: loss tokens above the upper bound"),
        Metric("train/tis_clipped_low", "share", "with --rollout-is: loss tokens below the lower bound"),
        Metric("train/rs_rejected_share", "share", "loss tokens that --rollout-rs left out"),
        Metric("train/opsm_dropped_share", "share", "loss tokens that --opsm-delta left out"),
        Metric("train/NAME_age_N", "", "the metric NAME over tokens whose weights were N rollouts old; loss_tokens_age_N counts them"),
        Metric("train/NAME_rows_CLASS", "", "the metric NAME over tokens that a row of this class predicted; of cached, over samples with rows from the cache; loss_tokens_rows_CLASS counts them"),
    ),
    "Budget of the log-prob gap (docs/gap.md)": (
        Metric("gap/PART_k1", "nats", "what PART adds to train/log_prob_gap_k1: server, kernels, routing, cache, staleness or rest"),
        Metric("gap/PART_k3", "nats", "what PART adds to train/log_prob_gap_k3, without rounding that another part has too"),
        Metric("gap/PART_mean", "nats", "mean size of the differences as they were read: all parts but staleness and rest"),
        Metric("gap/PART_p999", "nats", "their 99.9th percentile: server, kernels and cache"),
    ),
    "R3: replay and its proof": (
        Metric("r3/passed", "", "the step's verdict, true or false; absent when the check is off"),
        Metric("r3/unchecked", "", "true where --r3-check-interval leaves the step out; absent otherwise"),
        Metric("r3/num_calls", "calls", "router calls that were recorded"),
        Metric("r3/num_calls_expected", "calls", "router calls that the step must have"),
        Metric("r3/rows_replayed", "rows", "router rows whose experts were the rollout's"),
        Metric("r3/rows_filled", "rows", "rows of tokens that no server recorded, filled by the trainer's own choice"),
        Metric("r3/rows_left_out", "rows", "filled rows that a server did compute: must be 0"),
        Metric("r3/rows_padding", "rows", "rows of padding"),
        Metric("r3/rows_native", "rows", "rows that the router chose by itself: must be 0"),
        Metric("r3/duplicate_rows", "rows", "rows that name an expert twice: must be 0"),
        Metric("r3/map_deviation", "slots", "dispatched slots beyond those replayed: must be 0"),
        Metric("r3/rows_recompute_differ", "rows", "rows whose recomputed router scores differ from the forward pass's: must be 0"),
        Metric("r3/rows_dropped", "rows", "with --r3-keep-score-ratio: replayed rows with a dropped slot"),
        Metric("r3/slots_dropped", "slots", "with --r3-keep-score-ratio: dropped slots"),
        Metric("r3/dropped_off", "slots", "slots dropped or kept against --r3-keep-score-ratio: must be 0"),
        Metric("r3/rows_equal", "rows", "rows whose live experts are the replayed ones"),
        Metric("r3/rows_overlap", "rows", "rows whose live experts are some of the replayed ones"),
        Metric("r3/rows_mismatch", "rows", "rows whose live experts are none of the replayed ones"),
        Metric("r3/rows_current", "rows", "rows of the weights that the actor holds; with _equal and _mismatch as above"),
        Metric("r3/rows_current_equal", "rows", "of these, rows of equal experts"),
        Metric("r3/rows_current_mismatch", "rows", "of these, rows with no expert in common: what the threshold judges"),
        Metric("r3/control_WHAT", "rows", "control: equal rows if the routes were shifted by a token or a layer"),
        Metric("r3/agreement", "share", "rows of equal experts"),
        Metric("r3/agreement_KIND", "share", "rows that overlap or mismatch; of current, stale and kept tokens; by chance; of the controls"),
        Metric("r3/drift_NAME", "", "with --log-route-drift: mean over layers of left, gate_mass, load_entropy, dead_experts"),
        Metric("r3/drift_NAME_layer_N", "", "the same of layer N, counted from 1"),
        Metric("r3_audit/passed", "", "verdict of the recheck (--r3-audit-share): true, false, or null without evidence"),
        Metric("r3_audit/parts", "comparisons", "comparisons that the recheck made"),
        Metric("r3_audit/missed", "samples", "samples that the recheck missed"),
        Metric("served/passed", "", "verdict of the canaries after the step's weight update (--r3-canaries), over all servers"),
        Metric("served/inconclusive", "readings", "servers that said the same as under an earlier version while the actor hardly moved either"),
        Metric("served/gap_mean", "nats", "|actor - server| per token of the canaries, with the server's experts replayed: mean, of the farthest server"),
        Metric("served/gap_max", "nats", "the largest of them"),
        Metric("served/router_left", "share", "rows of the canaries of which the actor's own experts are not the server's"),
    ),
    "Rows of routes by class (docs/r3.md)": (
        Metric("rows/decoded", "rows", "rows that a server computed when it generated a token after the first"),
        Metric("rows/prefilled", "rows", "rows that a server computed with a prompt, or with an environment's tokens"),
        Metric("rows/prefilled_again", "rows", "rows of a prefill that went on after an update, and all rows of retracted answers"),
        Metric("rows/cached", "rows", "rows of a prefix that a server took from its cache, as they were stored there"),
        Metric("rows/filled", "rows", "rows that no server computed: the trainer fills them"),
    ),
    "Time, memory and bytes": (
        Metric("perf/step_s", "s", "wall time of the step"),
        Metric("perf/tokens_per_s", "tokens/s", "tokens of the rollout over the step's wall time"),
        Metric("perf/rollout_wait_s", "s", "training waited for the rollout"),
        Metric("perf/train_s", "s", "log-prob passes, optimizer steps and the proof"),
        Metric("perf/log_prob_s", "s", "log-prob passes, a part of perf/train_s"),
        Metric("perf/publish_s", "s", "sending the new weights to the servers"),
        Metric("perf/canaries_s", "s", "servers and actor scored the canaries, a part of perf/publish_s"),
        Metric("perf/save_s", "s", "writing a checkpoint"),
        Metric("perf/eval_wait_s", "s", "training waited for an evaluation's end"),
        Metric("perf/rollout_s", "s", "since the last step's batch, with a request in flight; next to the other phases"),
        Metric("perf/train_wait_share", "share", "of the wall time: training waited for a batch"),
        Metric("perf/rollout_idle_share", "share", "of the wall time: generation had nothing in flight"),
        Metric("perf/train_tokens_per_s_per_gpu", "tokens/s", "trained tokens over perf/train_s and ranks"),
        Metric("perf/train_tflops_per_gpu", "TFLOP/s", "model FLOPs of training over perf/train_s and ranks"),
        Metric("perf/mfu", "share", "the same over --peak-tflops"),
        Metric("perf/gpu_memory_peak_gb", "GB", "most memory that torch had allocated on a GPU in the step, of the fullest rank; absent without CUDA"),
        Metric("perf/host_memory_gb", "GB", "host memory in use at the step's end, of the fullest machine with a rank"),
        Metric("perf/published_bytes", "bytes", "bytes of the weight update"),
        Metric("perf/published_tensors", "tensors", "tensors of the weight update"),
        Metric("perf/route_wire_bytes_rank0", "bytes", "bytes of routes in the answers that rank 0 received"),
        Metric("perf/route_store_held_bytes_max", "bytes", "with --route-stores: routes that a store keeps, largest"),
        Metric("perf/route_store_wire_bytes_max", "bytes", "with --route-stores: bytes that a store received, largest"),
        Metric("perf/route_store_fetched_bytes_max", "bytes", "with --route-stores: bytes fetched from another store, largest"),
        Metric("perf/route_exchange_s", "s", "with --route-stores: time of the exchange, longest"),
    ),
    "Faults, since the start": (
        Metric("faults/bad_answers", "answers", "answers that were refused and asked for again"),
        Metric("faults/engine_restarts", "restarts", "servers that were started again"),
        Metric("faults/resubmitted_requests", "requests", "requests sent again after a server's end"),
        Metric("faults/resumed_tokens", "tokens", "tokens kept of answers that a server's end cut short"),
    ),
    "Evaluation (eval/metrics.jsonl)": (
        Metric("eval/NAME/mean", "", "mean reward of the set"),
        Metric("eval/NAME/standard_error", "", "its standard error, over prompts"),
        Metric("eval/NAME/pass_at_N", "share", "unbiased pass@N"),
        Metric("eval/NAME/truncated_share", "share", "answers cut at their longest length"),
        Metric("eval/NAME/response_len_mean", "tokens", "mean length of an answer"),
        Metric("eval/NAME/response_len_max", "tokens", "longest answer"),
        Metric("eval/NAME/num_prompts", "prompts", "prompts of the set"),
        Metric("eval/NAME/num_samples", "samples", "answers, all prompts together"),
    ),
}  # fmt: skip


def row_of(key: str) -> Metric | None:
    """Return the row of a metric's key; None where there is none."""
    return next((metric for metric, form in _forms() if form.fullmatch(key)), None)


@cache
def _forms() -> list[tuple[Metric, re.Pattern[str]]]:
    rows = [metric for section in METRICS.values() for metric in section]
    rows.sort(key=lambda metric: -len(re.sub("[A-Z]+", "", metric.key)))  # the most exact first
    # numbers are digits, so that pass_at_N is not taken for a name
    part = {"N": r"\d+"}
    return [
        (m, re.compile(re.sub("[A-Z]+", lambda word: part.get(word[0], r"[^/]+"), m.key)))
        for m in rows
    ]
