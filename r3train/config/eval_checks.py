"""Settings of the evaluation that contradict one another, or the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from r3train.config.evaluation_settings import EvalSection
from r3train.config.run import RunConfig


def eval_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a complaint for each setting that has no effect or cannot be kept, with the reason."""
    sets = config.eval_sets
    if not sets:
        yield from _without_sets(config.eval)
        return
    if not config.has_engines:
        yield "--eval-prompt-data cannot go with --replay-rollouts or --loss-type sft: no server could answer"
    names = [dataset.name for dataset in sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"evaluation sets: two have the name {name}"
    for dataset in sets:
        if dataset.top_k == 0:
            yield (
                f"evaluation set {dataset.name}: top_k 0 is not a number of tokens: set 1 or more, or"
                " -1 for no limit"
            )
        greedy = dataset.temperature == 0 or dataset.top_k == 1
        if greedy and dataset.n_samples_per_eval_prompt > 1:
            yield (
                f"evaluation set {dataset.name}: n_samples_per_eval_prompt"
                f" {dataset.n_samples_per_eval_prompt} with greedy decoding: all answers to a prompt"
                " would be equal"
            )
        context = config.rollout.rollout_max_context_len
        if context is not None and dataset.max_response_len >= context:
            yield (
                f"evaluation set {dataset.name}: max_response_len {dataset.max_response_len} leaves no"
                f" room for a prompt in rollout_max_context_len {context}"
            )
    most, places = config.rollout.max_concurrency, config.eval.eval_max_concurrency
    if places is not None and places > most:
        yield f"eval_max_concurrency {places} exceeds the {most} requests in flight at once"


def _without_sets(section: EvalSection) -> Iterator[str]:
    for name in section.changed():
        flag = "--" + name.replace("_", "-")
        yield f"{flag} needs --eval-prompt-data: there is no evaluation set"
