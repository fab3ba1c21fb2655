"""The seam between generation and the engine: a request, its answer, and the ways to fail.

``engine.client`` implements ``RolloutBackend`` over SGLang, and tests have an engine without a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from r3train.types import Rechecked, RecheckPart, RolloutSample


class EngineError(RuntimeError):
    """An engine refused a call, answered something malformed, or could not be reached."""


class EngineUnreachable(EngineError):
    """No connection to an engine, a connection that broke, or no answer in time."""


class EngineDied(EngineUnreachable):
    """An engine process that this job owns has ended or hangs; the message may hold its log's tail."""


class AnswerLate(EngineUnreachable):
    """No answer within ``request_timeout_s``."""


class AnswerCutShort(EngineUnreachable):
    """An answer whose connection ended before it did."""


class ServerLeft(EngineUnreachable):
    """The server of a call has left the run."""


class AnswerRefused(EngineError):
    """An answer that was not read to its end: too long for its request, or compressed."""


# statuses of servers and gateways that are overloaded or restarted for a moment
BUSY = (429, 502, 503, 504)


class EngineBusy(EngineError):
    """A status that says to ask again later: 429, 502, 503 or 504.  retry_after_s: by its header, or 0."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GroupBroken(EngineError):
    """A server's part of a broadcast failed because another one of its group was lost, or its own connections."""


class BadAnswer(EngineError, ValueError):
    """An answer that contradicts itself or the request, ended early or never came."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings by which one response is sampled.

    ``max_context_len`` bounds prompt plus response.  ``seed`` is the run's seed: each sample draws
    with its own seed made from it (see ``sample_seed``).  ``ignore_eos`` also disables
    ``stop_token_ids`` in SGLang.  ``may_stop_at`` are tokens that are not sent, at which a server that was
    started with its tokenizer stops too.  ``mask_vocab`` is the size of the vocabulary: each answer must then say the
    tokens that sampling kept, and its log-probs are those among them.  None: answers do not say it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    may_stop_at: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_context_len: int | None = None
    seed: int = 42
    mask_vocab: int | None = None

    def response_budget(self, prompt_len: int, prompt_id: str) -> int:
        """Tokens that may follow a prompt, those of an environment included.

        Raises ValueError when the prompt alone fills the context.
        """
        if self.max_context_len is None:
            return self.max_new_tokens
        left = self.max_context_len - prompt_len
        if left < 1:
            raise ValueError(
                f"prompt {prompt_id!r} has {prompt_len} tokens: rollout_max_context_len "
                f"{self.max_context_len} leaves no room for a response"
            )
        return min(self.max_new_tokens, left)


_MASK64 = (1 << 64) - 1


def sample_seed(run_seed: int, sample_id: int) -> int:
    """A 31-bit seed of one sample: splitmix64 of (run seed, sample id).

    31 bits, because SGLang hashes the seed with 32-bit arithmetic on some devices.
    """
    x = (run_seed * 0x9E3779B97F4A7C15 + sample_id * 0xD1B54A32D192ED03 + 1) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (x ^ (x >> 31)) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Request:
    """One request for tokens: the tokens before them, and the way to draw them.

    A prompt of 3 tokens and 2 tokens generated earlier are sent as 5 tokens.  Under R3 rows 0..3
    are known then, and row 4 is not: ``rows_start`` is 4, and the answer brings row 4 and later
    ones.
    """

    sample_id: int
    group_id: int  # samples of one group go to one server, where their prompt is cached
    prompt_id: str  # error messages name the sample by it
    token_ids: np.ndarray  # int32[T], prompt and all tokens that followed
    max_new_tokens: int
    sampling: SamplingParams
    rows_start: int = 0  # route rows that are known already
    num_generated: int = 0  # tokens of token_ids that the model generated
    weight_version: int | None = None  # every new token must carry it; None: any version
    exact_version: bool = True  # False: weight_version is the oldest that a token may carry
    wants_routes: bool = True  # False: the answer brings no rows, under R3 too
    fresh_prefix: bool = False  # True: no prefix that another weight version has cached, ever

    @property
    def name(self) -> str:
        """Name of the sample in messages."""
        return f"{self.sample_id} (prompt {self.prompt_id!r})"


class Drafts(NamedTuple):
    """Counts of the drafts of an answer that was decoded speculatively; zeros of any other.

    Of a verification with 3 drafts of which 2 were right the answer has 3 tokens: (3, 2, 1).
    """

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """The checked answer to one request: O new tokens, and R route rows.

    Rows run from ``rows_start`` to the row before the last token's: a whole answer has
    R = T + O - 1 - rows_start.  An answer without a token has R = 0: nothing was computed.
    """

    token_ids: np.ndarray  # int32[O]
    log_probs: np.ndarray  # float32[O]
    weight_versions: np.ndarray  # int32[O]
    rows: np.ndarray | None  # uint8/uint16 [R, L, K]; None without R3
    rows_start: int
    finish_reason: str  # stop | length | abort
    # times that the server gave up the request's cache under KV pressure and computed it again: its
    # rows are then of other forwards than its log-probs
    num_retractions: int = 0
    server: int = 0  # index of the server that answered
    cached_tokens: int = 0  # tokens that the server took from its prefix cache, below T
    drafts: Drafts = Drafts()
    # the tokens that sampling kept, in ``SamplingParams.mask_vocab``; None if it is None
    mask_counts: np.ndarray | None = None  # int32[O], at least 1
    mask_ids: np.ndarray | None = None  # int32[mask_counts.sum()], token after token
    # the tokens that an indexer chose, as bits, from row ``indexer_start`` on: the first after ``rows_start`` and
    # after the rows of which all tokens are chosen; None unless they are replayed
    indexer_topk: np.ndarray | None = None  # uint64[R, L, W]
    indexer_start: int = 0


class Teacher(Protocol):
    """Scores finished samples with another model than the one that generated them."""

    async def __call__(self, sample: RolloutSample) -> RolloutSample:
        """Return the sample with the teacher's log-probs; raises an error that names both."""
        ...

    async def aclose(self) -> None: ...


class RolloutBackend(Protocol):
    """Generation, and the control calls that it needs around a weight update."""

    async def generate(self, request: Request) -> Segment:
        """Draw tokens.  Raises EngineError or ValueError naming the sample."""
        ...

    def servers(self) -> list[int]:
        """The servers that may generate now, by number."""
        ...

    async def recheck(
        self, request: Request, part: RecheckPart, server: int | None = None
    ) -> Rechecked:
        """Compute the request's text again, without the prefix cache and without a new token.

        None is the group's server.  Raises EngineError, or ValueError naming the sample.
        """
        ...

    async def score_twice(self, request: Request, server: int) -> tuple[Segment, Rechecked]:
        """Sample tokens on a server and score the same tokens there; the routes come here."""
        ...

    async def pause_generation(self, mode: str = "in_place") -> None: ...

    async def continue_generation(self) -> None: ...

    async def abort(self) -> None:
        """Abort all requests of this job."""
        ...

    async def aclose(self) -> None: ...
