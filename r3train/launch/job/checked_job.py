"""A job whose settings and data were checked, and what follows from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3train.config import RunConfig
from r3train.families.checks.settings_checks import context_len
from r3train.config.evaluation_settings import EvalDataset
from r3train.families.hf_facts import HfModelFacts
from r3train.data.file_fingerprint import FileFingerprint, facts_fingerprint
from r3train.data.curriculum import DifficultyOrder, PASS_RATES_FILE
from r3train.data.order import MixedOrder, PromptOrder
from r3train.data.prompts import shown
from r3train.data.tokenizer import stop_token
from r3train.launch.job.finding import Finding
from r3train.rewards.scoring import Scorer
from r3train.types import Prompt, RolloutSample


@dataclass(frozen=True)
class EvalData:
    """An evaluation set that was checked: its settings, its prompts and its reward."""

    dataset: EvalDataset
    prompts: list[Prompt]
    reward: Scorer
    prompt_file: FileFingerprint


@dataclass(frozen=True)
class Job:
    """A checked configuration, with the files that its checks have read.

    Data and tokenizer are read once per node: its other ranks have no prompts, tokenizer, prompt_file,
    evaluation sets and conversations.
    """

    config: RunConfig
    hf: HfModelFacts
    prompts: list[Prompt]  # file after file
    tokenizer: Any
    reward: Scorer
    prompt_file: FileFingerprint | None
    warnings: tuple[Finding, ...] = ()
    eval_data: tuple[EvalData, ...] = ()
    sizes: tuple[int, ...] = ()  # prompts of each file
    # of --loss-type sft; ``prompts`` holds their beginnings
    conversations: tuple[RolloutSample, ...] = ()
    first_reward: str | None = None  # of the first prompt, in words; on the rank that tried it
    agent_facts: tuple[str, ...] = ()  # what the rehearsal of an agent's session showed

    @property
    def first_prompt(self) -> list[str]:
        """Lines that show the first prompt as the model gets it, and what the reward says to it."""
        lines = shown(self.prompts[0], self.tokenizer)
        return lines if self.first_reward is None else [*lines, self.first_reward]

    @property
    def other_prompts(self) -> list[str]:
        """Lines that show the longest prompt and one at random, where these are not the first."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        drawn = random.Random(self.config.rollout.rollout_seed).randrange(len(lengths))
        which = {lengths.index(max(lengths)): "longest"}
        which.setdefault(drawn, "random")
        further = [(self.prompts[index], name) for index, name in which.items() if index]
        return [line for prompt, name in further for line in shown(prompt, self.tokenizer, name)]

    @property
    def order(self) -> PromptOrder | MixedOrder:
        """The order of the prompts."""
        seed, data = self.config.rollout.rollout_seed, self.config.data
        weights = [file.weight for file in data.prompt_files]
        if None in weights:
            return PromptOrder(len(self.prompts), seed, data.rollout_shuffle)
        return MixedOrder(self.sizes, weights, seed, data.rollout_shuffle)

    def difficulty_order(self, directory: Path) -> DifficultyOrder:
        """The order of the prompts by the pass rates in a directory; raises ValueError for a damaged file."""
        rollout = self.config.rollout
        return DifficultyOrder(
            [prompt.prompt_id for prompt in self.prompts],
            rollout.rollout_seed,
            self.config.data.rollout_shuffle,
            draws_per_rollout=rollout.groups_per_rollout,
            max_staleness=rollout.max_weight_staleness,
            path=directory / PASS_RATES_FILE,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: the checkpoint's own, and those of the flags."""
        return stop_token_ids(self.config, self.hf, self.tokenizer)

    @property
    def tokenizer_stop_ids(self) -> tuple[int, ...]:
        """Tokens at which a server that was started with its tokenizer stops unasked; ours are not.

        Source: SGLang 0.5.23, ``Req._check_token_based_finish``.
        """
        added = self.tokenizer.get_added_vocab()
        ids = (self.tokenizer.eos_token_id, *map(added.get, _STOPS_OF_TOKENIZERS))
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Make the function of a response's tokens to its text: special tokens stay, but the one that ended it.

        A word at which --rollout-stop-token-ids stops is one of the text.
        """
        stops, decode = {*self.stop_token_ids, *self.tokenizer_stop_ids}, self.tokenizer.decode
        stops &= {*self.tokenizer.all_special_ids, *self.hf.eos_token_ids}

        def text_of(token_ids: Sequence[int]) -> str:
            ended = len(token_ids) > 0 and token_ids[-1] in stops
            return decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=False)

        return text_of

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt of the rollouts, or of each conversation where these are learned."""
        if self.conversations:
            return [sample.num_tokens for sample in self.conversations]
        return [len(prompt.token_ids) for prompt in self.prompts]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the rollouts, or conversation; with an agent all that leave room."""
        if self.config.agent.named is not None:
            response = self.config.rollout.rollout_max_response_len
            return context_len(self.config, self.hf) - response
        return max(self.lengths)

    def close(self) -> None:
        """End the helpers of all rewards."""
        self.reward.close()
        for data in self.eval_data:
            data.reward.close()


# SGLang 0.5.23, utils/hf_transformers/common.py
_STOPS_OF_TOKENIZERS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


def stop_token_ids(config: RunConfig, hf: HfModelFacts, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the checkpoint's own, and those of the flags."""
    rollout = config.rollout
    named = (stop_token(text, tokenizer) for text in rollout.rollout_stop)
    return tuple(dict.fromkeys((*hf.eos_token_ids, *rollout.rollout_stop_token_ids, *named)))


def eval_settings(job: Job, weights: Path | None = None) -> dict[str, str]:
    """Fingerprint, by name, all that the answers of an evaluation set depend on, apart from its version.

    weights: the checkpoint that training began with; None: hf_checkpoint.
    """
    rollout, data = job.config.rollout, job.config.data
    judge = {name: value for name, value in data if name.startswith("judge_")}
    shared = {
        "weights": str(weights or job.config.model.hf_checkpoint),
        "seed": rollout.rollout_seed,
        "stop": job.stop_token_ids,
        "context": rollout.rollout_max_context_len,
        "served": rollout.rollout_weights,
        "prompts": (rollout.rollout_max_prompt_len, data.apply_chat_template_kwargs, data.tool_key),
        "reward": (data.rm_type, data.custom_rm_path, data.reward_key, data.group_rm),
        "judge": {**judge, "rm_url": data.rm_url},
        "environment": rollout.environment,
        **({"agent": job.config.agent.model_dump(mode="json")} if job.config.agent.named else {}),
        "turns": (rollout.environment_max_turns, rollout.environment_max_turn_len),
    }
    if weight_of_key := job.config.algorithm.weight_of_key:
        shared["reward_keys"] = weight_of_key
    return {
        each.dataset.name: facts_fingerprint(
            {
                **shared,
                **each.dataset.model_dump(mode="json", exclude={"path"}),
                "sha256": each.prompt_file.sha256,
                "reward_code": each.reward.code,
            }
        )
        for each in job.eval_data
    }
