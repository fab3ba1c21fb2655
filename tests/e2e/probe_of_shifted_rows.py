"""``r3train doctor`` with one defect planted: behind a prefix-cache hit, rows are another token's.

The server, its answers and the actor are real; the defect is put where the answer is read.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from r3train.cli import main
from r3train.doctor import engine_probe

read_answer = engine_probe.read_answer
prompts_seen: set[bytes] = set()


def read_and_shift(answer, *, prompt, **arguments):
    """The answer as it is; of a prompt asked for before, the rows of the answer shifted by one."""
    sample = read_answer(answer, prompt=prompt, **arguments)
    asked_before = prompt.token_ids.tobytes() in prompts_seen
    prompts_seen.add(prompt.token_ids.tobytes())
    if not asked_before or arguments["max_new_tokens"] != engine_probe._ANSWER:
        return sample
    rows = sample.routed_experts.copy()
    rows[sample.prompt_len :] = np.roll(rows, 1, axis=0)[sample.prompt_len :]
    return dataclasses.replace(sample, routed_experts=rows)


if __name__ == "__main__":
    engine_probe.read_answer = read_and_shift
    main()
