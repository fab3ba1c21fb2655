"""``r3train doctor`` with one defect planted: after a prefix-cache hit, rows are another token's.

The server, its answers and the actor are real; the defect is put where the answer is read.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from r3train.cli import main
from r3train.doctor import engine_probe

read_answer = engine_probe.read_answer
prompts_seen: set[bytes] = set()


def read_and_shift(answer, request, sent, *, routes):
    """The answer as it is; of a prompt asked for before, the rows of the answer shifted by one."""
    segment = read_answer(answer, request, sent, routes=routes)
    prompt = request.token_ids.tobytes()
    asked_before = prompt in prompts_seen
    prompts_seen.add(prompt)
    if not asked_before or request.max_new_tokens != engine_probe._ANSWER:
        return segment
    rows, prompt_len = segment.rows.copy(), len(request.token_ids)
    rows[prompt_len:] = np.roll(rows, 1, axis=0)[prompt_len:]
    return dataclasses.replace(segment, rows=rows)


if __name__ == "__main__":
    engine_probe.read_answer = read_and_shift
    main()
