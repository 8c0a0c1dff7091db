"""The records that pass between layers: StepPlan goes down, StepResult up, RequestOutput out.

All are frozen, self-contained, and hold numbers and arrays of numbers only, so they can be
sent, recorded and replayed. This file knows no policy, no tensor library and no clock.
Letters: N rows of a plan (one row a scheduled request), M table deltas, C block copies,
E tokens of a result, K alternatives a token, L listed ids a token, S scored prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import BlockCopies
from quire.base.cache_usage import CacheUsage
from quire.base.kv_transfer import KVTransfer
from quire.base.rare_records import NO_RULES as NO_RULES
from quire.base.rare_records import CachePin, Speculation
from quire.base.rare_records import Candidates as Candidates
from quire.base.rare_records import PartLayers as PartLayers
from quire.base.rare_records import PromptScores as PromptScores
from quire.base.rare_records import TokenRules as TokenRules
from quire.base.sampling_params import SamplingParams

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

NO_INTS: Int32s = np.empty(0, np.int32)
NO_FLOATS: Float32s = np.empty(0, np.float32)
NO_BOOLS: Bools = np.empty(0, np.bool_)
for _empty in (NO_INTS, NO_FLOATS, NO_BOOLS):
    _empty.setflags(write=False)


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end-of-text token, a stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the caller went away or asked for it
    ERROR = "error"  # its row failed; RequestOutput.error says how


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One stream of tokens. A caller's n > 1 makes n requests with one group_id.

    `sampling` is resolved (it has a seed). `max_total_tokens` bounds prompt plus output and is
    already cut to the context length. `stop_ids` are the ids that end the request: end-of-text
    ids unless ignore_eos, and the caller's stop_token_ids. Where sampling.max_tokens is 0,
    max_total_tokens is the length of the prompt: it is scored and nothing is generated.

    What policies read, none of which can change an answer: `tenant` ("" for the
    default one), `priority` (lower is served earlier), `deadline_ms` (the whole answer),
    `ttft_slo_ms` (its first token) and `tpot_slo_ms` (each further one, on average); deadline and
    ttft count from arrival_ms, None where not requested. explain_cache: its outputs have a
    cache_use. cache_pins: prefixes to keep. report_progress: each chunk of its prompt but the last
    gives an output. output_ids: tokens of the answer that are known already, as after a preemption;
    outputs begin after them. transfer: KV blocks of its prompt go to another engine, or come
    from one. background: it is computed in what capacity others leave.
    """

    request_id: str
    group_id: str
    stream: int
    prompt_ids: Int32s
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    max_total_tokens: int
    arrival_ms: float
    cache_salt: str = ""
    rules: TokenRules = NO_RULES
    tenant: str = ""
    priority: int = 0
    deadline_ms: float | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    explain_cache: bool = False
    cache_pins: tuple[CachePin, ...] = ()
    report_progress: bool = False
    speculation: Speculation | None = None
    output_ids: Int32s = field(default_factory=lambda: NO_INTS)
    transfer: KVTransfer | None = None
    background: bool = False

    @property
    def known_ids(self) -> Int32s:
        """Return the tokens that are known at its arrival: the prompt, then `output_ids`."""
        if not len(self.output_ids):
            return np.ascontiguousarray(self.prompt_ids, np.int32)
        return np.concatenate((self.prompt_ids, self.output_ids), dtype=np.int32)


@dataclass(slots=True)  # made per event: frozen or by keywords it takes three times as long
class Admission:
    """A request takes a slot: the worker copies its tokens and parameters into its mirror.

    `token_ids` are all tokens known so far: the prompt, and after a preemption also what was
    generated. `num_prompt_tokens` never changes (penalties depend on it). scores_from: the
    worker scores the prompt tokens that come after positions scores_from and up (see
    StepResult.scores); None scores none. mirostat_mu: where a request that steers by mirostat
    stood when it left its slot (StepResult.mirostat_mus); None: it begins, at 2 mirostat_tau.
    num_candidates: how many continuations of a beam the worker returns (Candidates).
    """

    slot: int
    request_id: str
    stream: int
    token_ids: Int32s
    num_prompt_tokens: int
    stop_ids: tuple[int, ...]
    sampling: SamplingParams
    scores_from: int | None = None
    rules: TokenRules = NO_RULES
    mirostat_mu: float | None = None
    num_candidates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. Plans are applied by each worker strictly in order of `step`.

    The worker applies a plan in this order:

    1. Slots in `retired` are freed; `admissions` fill slots.
    2. Branches: slot branch_to[i] gets a copy of the tokens of slot branch_from[i]. Then the last
       token of known_slots[i] is overwritten with known_ids[i]: the sampled token is replaced by
       the one that the beam search chose.
    3. Table deltas: block table entry [table_slots[i], table_columns[i]] = table_blocks[i].
    4. `tier_copies` start. Blocks that leave the pool are read at once; blocks that enter it may
       arrive while this and later plans are computed.
    5. Pool blocks copy_from[i] are copied to copy_to[i].
    6. The rows are computed.

    Row i computes positions starts[i] .. starts[i]+counts[i]-1 of the request in slots[i]. Its
    token ids come from the worker's TokenTable; a plan has no other sampled tokens than known_ids.
    Keys and values are stored only from position store_from[i] on: a fully cached prompt recomputes
    its last token without writing the shared block. The last sample_counts[i] positions of the row
    are sampled (0: a chunk of a prompt before its end). Each yields the token after it. The worker
    appends them to its TokenTable as one run that begins at position
    starts[i]+counts[i]-sample_counts[i]+1.

    The last draft_counts[i] positions of row i have proposed tokens, in draft_ids; both arrays are
    empty where no row has. They are sampled, and so is the position before them; the run ends with
    the first sampled token that differs from its draft. No later plan has a row of such a request
    until the result is known.
    `layers`: some layers of one chunk of a prompt, computed beside the rows. Plans compute the
    layers of a chunk in order from 0; a chunk that later plans do not continue starts again at
    layer 0 or is dropped.

    A plan in flight may have rows of a request that has ended or failed since it was made: the
    worker computes these rows, and their results are discarded.
    """

    step: int
    retired: Int32s = field(default_factory=lambda: NO_INTS)  # slots given back
    admissions: tuple[Admission, ...] = ()
    table_slots: Int32s = field(default_factory=lambda: NO_INTS)  # [M]
    table_columns: Int32s = field(default_factory=lambda: NO_INTS)  # [M]
    table_blocks: Int32s = field(default_factory=lambda: NO_INTS)  # [M]
    copy_from: Int32s = field(default_factory=lambda: NO_INTS)  # [C] pool blocks
    copy_to: Int32s = field(default_factory=lambda: NO_INTS)  # [C] pool blocks
    tier_copies: BlockCopies | None = None
    branch_from: Int32s = field(default_factory=lambda: NO_INTS)  # [B] slots
    branch_to: Int32s = field(default_factory=lambda: NO_INTS)  # [B] slots
    known_slots: Int32s = field(default_factory=lambda: NO_INTS)  # [B'] slots
    known_ids: Int32s = field(default_factory=lambda: NO_INTS)  # [B'] token ids
    slots: Int32s = field(default_factory=lambda: NO_INTS)  # [N]
    starts: Int32s = field(default_factory=lambda: NO_INTS)  # [N]
    counts: Int32s = field(default_factory=lambda: NO_INTS)  # [N]
    store_from: Int32s = field(default_factory=lambda: NO_INTS)  # [N]
    sample_counts: Int32s = field(default_factory=lambda: NO_INTS)  # [N]
    draft_counts: Int32s = field(default_factory=lambda: NO_INTS)  # [N] or empty
    draft_ids: Int32s = field(default_factory=lambda: NO_INTS)  # [sum of draft_counts]
    layers: PartLayers | None = None

    @property
    def samples(self) -> Bools:
        """Return which rows yield a run of tokens [N]."""
        sampled: Bools = self.sample_counts > 0
        return sampled

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass: the sum of counts."""
        return int(self.counts.sum())

    def slot_of(self, row: int) -> int:
        """Return the slot of a row; row N is the part of `layers`."""
        if row == len(self.slots) and self.layers is not None:
            return self.layers.slot
        return int(self.slots[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Row `row` of a plan failed; the other rows stand. Row N: the part of its `layers`."""

    row: int
    message: str


# Prefixes of such messages where the cause may be what the request bans, or its grammar.
TOO_FEW_SEQUENCES = "beam search found "
NOTHING_LEFT = ("there is no token to choose", "the grammar", TOO_FEW_SEQUENCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A run of tokens per row: row i has the next token_counts[i] of the E entries.

    A row that samples and has no error has a run of at least one token; all other rows have none.
    A run consists of sampled tokens, then of tokens that the row's grammar forces after them.
    complete[i]: the answer of row i can only end after its run.

    `logprobs` [E] are of the chosen tokens, NaN where the request asked for none. `top_ids` and
    `top_logprobs` are [E, K], K the most alternatives any row asked for; unused entries are -1
    and NaN. All three are empty if no row asked for any. `listed_logprobs` [E, L] are of the ids in
    logprob_token_ids, in their order, L the most any row listed; NaN beyond a row's own.
    `mirostat_mus` [E] are the rows' mu after their
    tokens, 0 for rows without mirostat; empty where no row has it. The worker keeps mu from step
    to step and follows it by itself; it is returned so that a preempted request keeps it.

    `scores`: None unless a row scored its prompt; row i has score_counts[i] of its S entries. A
    row that computes position p of a prompt scores the token at p + 1. There are at most as many
    entries as token rows in the step, so they stay small, however long prompts are. `candidates`
    [E, C]: None where no row is a beam's; a beam's token says nothing.
    """

    step: int
    token_counts: Int32s  # [N]
    token_ids: Int32s  # [E]
    logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)  # [E] or empty
    top_ids: Int32s = field(default_factory=lambda: np.empty((0, 0), np.int32))  # [E, K]
    top_logprobs: Float32s = field(default_factory=lambda: np.empty((0, 0), np.float32))
    listed_logprobs: Float32s = field(default_factory=lambda: np.empty((0, 0), np.float32))
    mirostat_mus: Float32s = field(default_factory=lambda: NO_FLOATS)  # [E] or empty
    score_counts: Int32s = field(default_factory=lambda: NO_INTS)  # [N] or empty
    scores: PromptScores | None = None
    complete: Bools = field(default_factory=lambda: NO_BOOLS)  # [N] or empty
    candidates: Candidates | None = None
    errors: tuple[RowError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one generated token: the chosen one and the best alternatives.

    listed: of the ids in SamplingParams.logprob_token_ids, in their order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    listed: tuple[float, ...] = ()


@dataclass(slots=True)  # made per event: frozen or by keywords it takes three times as long
class RequestTimes:
    """When things happened to a request, in milliseconds of the engine's clock.

    first_scheduled_ms and first_token_ms are NaN until they happened.
    """

    arrival_ms: float
    first_scheduled_ms: float
    first_token_ms: float
    last_token_ms: float


@dataclass(slots=True)  # made per event: frozen or by keywords it takes three times as long
class RequestOutput:
    """What happened to a request since its last output. The last one carries finish_reason.

    stop_id: the token that ended it (it is part of token_ids), where one did.
    cached_tokens: prompt tokens found in the prefix cache at first admission; cache_use: where,
    and why no more, if the request asked (not set for a fork: its leader has it). scores: of
    all prompt tokens but the first, given once: with the first token, or with the end where nothing
    is generated, by one stream of a group, which computed the prompt for all. score: of a beam,
    given with all of its tokens at the end. prompt_progress: prompt tokens computed so far, in an
    output without tokens. accepted_drafts, rejected_drafts: how many of the tokens proposed so far
    were those of the answer, and how many were not.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    scores: PromptScores | None = None
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    cached_tokens: int = 0
    cache_use: CacheUsage | None = None
    num_preemptions: int = 0
    times: RequestTimes | None = None
    score: float | None = None
    prompt_progress: int | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All that one update yields: plain rows as arrays, everything else as RequestOutputs.

    Row i of the arrays: request_ids[i] got token_ids[i], exactly one token, and goes on. An
    event is the output of a request that got its first token or several, or that ended (its last
    token is in the event). A request is in the rows or in the events, never in both, so a steady
    step makes no object a request. `logprobs`, `top_ids`, `top_logprobs` and `listed_logprobs` are
    as in StepResult; NaN in `logprobs` means that row asked for none.

    Iterating yields one RequestOutput a request (events first), for readers that do not mind
    the objects: a sender may ship the record as it is and let the reader's process iterate.
    Times, cached_tokens and num_preemptions are given in events only.
    """

    step: int
    request_ids: list[str]  # [N]
    token_ids: Int32s  # [N]
    logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)  # [N] or empty
    top_ids: Int32s = field(default_factory=lambda: NO_INTS.reshape(0, 0))  # [N, K]
    top_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS.reshape(0, 0))
    listed_logprobs: Float32s = field(default_factory=lambda: NO_FLOATS.reshape(0, 0))
    events: tuple[RequestOutput, ...] = ()

    def __len__(self) -> int:
        """How many requests have something to say."""
        return len(self.request_ids) + len(self.events)

    def __iter__(self) -> Iterator[RequestOutput]:
        yield from self.events
        yield from map(self.row, range(len(self.request_ids)))

    def row(self, row: int) -> RequestOutput:
        """Row `row` of the arrays as an output."""
        top = self.top_ids, self.top_logprobs
        arrays = (self.token_ids, self.logprobs, *top, self.listed_logprobs)
        return RequestOutput(
            request_id=self.request_ids[row],
            token_ids=(int(self.token_ids[row]),),
            logprobs=token_logprobs(row, *arrays),
        )


def token_logprobs(
    row: int,
    token_ids: Int32s,
    logprobs: Float32s,
    top_ids: Int32s,
    top_logprobs: Float32s,
    listed_logprobs: Float32s,
) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of entry `row` of a StepResult's arrays; empty if not asked for."""
    if row >= len(logprobs) or np.isnan(logprobs[row]):
        return ()
    top: tuple[tuple[int, float], ...] = ()
    if row < len(top_ids):
        pairs = zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True)
        top = tuple((token_id, logprob) for token_id, logprob in pairs if token_id >= 0)
    listed: tuple[float, ...] = ()
    if row < len(listed_logprobs):  # NaN only behind the row's own: a listed one is a number
        of_row = listed_logprobs[row]
        listed = tuple(of_row[~np.isnan(of_row)].tolist())
    chosen = TokenLogprobs(
        token_id=int(token_ids[row]), logprob=float(logprobs[row]), top=top, listed=listed
    )
    return (chosen,)
