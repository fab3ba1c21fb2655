"""Cost of an old-log-prob pass and of a train step by the share of rows with loss, over those with all rows.

Actors with the same weights take turns in one process, so that whatever else the machine does falls on all alike:
one whose rows all go through the output layer by Megatron's own end of a model, one with the rows of loss alone, and
that one again, which shows what equal work differs by.  Each ratio is of neighbours.

    python -m benchmarks.loss_rows [--rounds 7] [--tokens 1024] [--vocabularies 512 32768]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.measure import flags, in_turns, own_clock, ratios, spreads, write_result
from benchmarks.replay_overhead import MODEL, make_actor, one_rank  # first: it prepares the device
from benchmarks.samples import sample_of_routes
from benchmarks.tiny_jobs import describe, tiny_model

import torch

from r3train.layout.microbatch import build_microbatch, slice_microbatch, Streams
from r3train.trainer.megatron import forward_step
from r3train.trainer.megatron.actor import MegatronActor
from r3train.types import RankSlice, RankTopology

NUM_SAMPLES = 4


def main() -> None:
    arguments = flags(__doc__, rounds=7, tokens=1024, vocabularies=[512, 32768], prompts=[1, 4, 16])
    found = {}
    for vocab_size in arguments.vocabularies:
        model = replace(MODEL, vocab_size=vocab_size)
        with tiny_model(model) as tiny, one_rank() as place:
            actor = make_actor(tiny / "model", place)
            for prompt in arguments.prompts:
                slices = [make_slice(arguments.tokens, prompt, vocab_size, place)]
                seconds = in_turns(
                    arms(actor, slices), arguments.rounds, warm_up=2, clock=own_clock()
                )
                found[f"vocabulary {vocab_size}, {prompt}:1"] = summary(seconds)
    write_result(
        arguments.output,
        dict(
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, 1 thread",
            model=describe(MODEL),
            tokens=arguments.tokens,
            rounds=arguments.rounds,
            by_vocabulary_and_prompt_to_answer=found,
        ),
    )


def make_slice(num_tokens: int, prompt: int, vocab_size: int, place: RankTopology) -> RankSlice:
    """A microbatch of samples whose prompts are ``prompt`` times as long as their answers."""
    length = num_tokens // NUM_SAMPLES
    samples = [
        sample_of_routes(
            i,
            np.zeros((length - 1, MODEL.num_layers, MODEL.topk), np.uint8),
            prompt_len=length - length // (prompt + 1),
            vocab_size=vocab_size,
        )
        for i in range(NUM_SAMPLES)
    ]
    return slice_microbatch(build_microbatch(0, samples, Streams(), cp_size=1, tp_size=1), place)


def arms(actor: MegatronActor, slices: list[RankSlice]) -> dict[str, Callable[[], Any]]:
    """Both passes with all rows, with the rows of loss, and with these again."""

    def old() -> None:
        actor.compute_log_probs(slices, None, loss_rows_only=True)

    def train() -> None:
        actor.train_step(slices, None, None)

    def with_all_rows(one_pass: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with ExitStack() as stack:
                every = patch.object(forward_step, "loss_rows", lambda s: np.arange(s.num_rows))
                stack.enter_context(every)
                stack.enter_context(patch.object(forward_step, "logits_of_rows", None))
                one_pass()

        return run

    return {
        f"{name}, {rows}": change(one_pass)
        for name, one_pass in (("old pass", old), ("train step", train))
        for rows, change in (
            ("all rows", with_all_rows),
            ("loss rows", lambda same: same),
            ("again", lambda same: same),
        )
    }


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of each arm, and both passes over those with all rows."""
    found: dict[str, Any] = {"seconds": spreads(seconds)}
    for name in ("old pass", "train step"):
        every, few, again = (
            seconds[f"{name}, {rows}"] for rows in ("all rows", "loss rows", "again")
        )
        found[f"{name}, loss rows over all"] = ratios(few, every)
        found[f"{name}, again over loss rows"] = ratios(again, few)
    return found


if __name__ == "__main__":
    main()
