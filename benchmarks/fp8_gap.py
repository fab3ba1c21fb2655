"""The gap between servers and actor with servers of fp8 and of bfloat16, with the servers' experts replayed and without.

    python -m benchmarks.fp8_gap [--steps 3] [--prompts 8] [--response 16]

Four jobs of one random model, which differ in these two settings alone.  No weights are stale, and the learning rate is
small, so that all of the gap is rounding and, without replay, experts that the actor chooses otherwise.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.measure import flags, write_result
from benchmarks.tiny_jobs import R3, describe, job_flags, run, step_metrics, tiny_model, torchrun
from r3train.verify.tiny import TinyOptions

MODEL = TinyOptions(
    num_layers=8,
    hidden_size=256,
    head_dim=64,
    num_experts=32,
    topk=4,
    moe_intermediate_size=128,
    initializer_range=0.05,
    dtype="bfloat16",
)
FIGURES = {
    "k3": "train/log_prob_gap_k3",
    "mean": "train/log_prob_gap_mean",
    "ess": "train/ess",
    "rows_with_the_same_experts": "r3/agreement",
    "rows_without_a_common_expert": "r3/agreement_mismatch",
}


def main() -> None:
    arguments = flags(__doc__, steps=3, prompts=8, response=16)
    settings = [
        *f"--num-rollout {arguments.steps} --rollout-batch-size {arguments.prompts}".split(),
        *f"--rollout-max-response-len {arguments.response} --rollout-ignore-eos".split(),
        *"--bf16 --max-weight-staleness 0 --lr 1e-5 --lr-warmup-iters 0 --reuse-log-probs off".split(),
    ]
    found = {}
    with tiny_model(MODEL) as tiny, tempfile.TemporaryDirectory() as directory:
        for weights in ("same", "fp8"):
            for replay, words in (("replayed", R3), ("not replayed", ())):
                run_dir = Path(directory) / f"{weights}_{len(words)}"
                job = (*settings, "--rollout-weights", weights, *words)
                run(torchrun(2, *job_flags(tiny, run_dir, *job)))
                steps = step_metrics(run_dir)
                found[f"{weights}, {replay}"] = {
                    figure: mean(step[metric] for step in steps)
                    for figure, metric in FIGURES.items()
                    if metric in steps[0]
                }
    write_result(arguments.output, {"model": describe(MODEL), "settings": settings, **found})


if __name__ == "__main__":
    main()
