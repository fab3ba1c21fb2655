"""Every number space of the records that flow, in one place.

| number | of | made of |
|---|---|---|
| sample id | a rollout's sample | group id times samples per prompt, plus its place: below 2^39 |
| sample id | a text that measures a server's rounding | ``NOISE_SAMPLES`` + n |
| sample id | an answer that is part of a canary | ``CANARIES`` + n |
| sample id | an evaluation's sample | ``evaluation_sample`` |
| group id | a rollout's prompt | counts from 0 over the run |
| group id | an evaluation's prompt | ``evaluation_group``: -2 and below |
| group id | a text of no group | ``NO_GROUP`` |
| token uid | a token of a rollout's sample | ``token_uids``: sample id above 24 bits of position |
| prompt id | a line of a file | ``prompt_id``: FILE:N, the N-th line, from 1 |
| route handle | a row that a store keeps | ``HANDLE_ROW_BITS`` of row below the key |

A sample's id gives the seed that it is sampled with, so no two kinds of samples share one.

>>> token_uids(3, 2).tolist() == [3 << 24, (3 << 24) + 1]
True
>>> [part.tolist() for part in split_uids(token_uids(3, 2))]
[[3, 3], [0, 1]]
"""

from __future__ import annotations

import zlib

import numpy as np

PADDING_UID = -1
NO_GROUP = -1
NOISE_SAMPLES = 1 << 40
CANARIES = 1 << 41
HANDLE_ROW_BITS = 24

_EVALUATIONS = 1 << 62
_LAST_EVALUATION_GROUP = -2
_POSITION_BITS = 24


def is_of_rollout(sample_id: int) -> bool:
    """Say whether a sample id is one of a rollout's."""
    return 0 <= sample_id < NOISE_SAMPLES


def evaluation_sample(set_name: str, number: int) -> int:
    """Id of the ``number``-th sample of an evaluation set, the same in every evaluation."""
    return (_EVALUATIONS | (zlib.crc32(set_name.encode()) >> 2) << 32) + number


def evaluation_group(prompt: int) -> int:
    """Group id of an evaluation set's prompt, counted from 0."""
    return _LAST_EVALUATION_GROUP - prompt


def prompt_id(file: str, index: int) -> str:
    """Id of the prompt in a file's line or row ``index``, which counts from 0."""
    return f"{file}:{index + 1}"


def token_uids(sample_id: int, num_tokens: int) -> np.ndarray:
    """int64[num_tokens] names of a sample's tokens: the sample id above 24 bits of position.

    Raises ValueError where a position or the sample id does not fit.
    """
    if not 0 <= sample_id < 1 << (63 - _POSITION_BITS) or num_tokens > 1 << _POSITION_BITS:
        raise ValueError(
            f"sample {sample_id} with {num_tokens} tokens cannot be named: ids stay below 2^39, "
            "tokens below 2^24"
        )
    return (sample_id << _POSITION_BITS) + np.arange(num_tokens, dtype=np.int64)


def split_uids(uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sample ids and the positions of ``token_uids``, int64[n] each; not of padding."""
    return uids >> _POSITION_BITS, uids & ((1 << _POSITION_BITS) - 1)
