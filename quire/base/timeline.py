"""Timeline records: what happened to a request in the scheduler, and in the steps beside it.

Numbers and reasons only, in milliseconds of the engine's clock. Always holds: a record names no
other request, and nothing of another request but counts and times of steps it shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

# Ended requests with a history, per engine and per API process.
MAX_HISTORIES = 8192
# Steps in one report, the last ones of the request.
MAX_REPORTED_STEPS = 4096


class WaitReason(StrEnum):
    """Why a request waited."""

    STEP = "step_in_progress"  # the next step to begin admitted it
    SLOT = "no_slot"  # as many requests as may run did
    BLOCKS = "no_blocks"  # too few KV blocks were free for its tokens
    BUDGET = "step_budget"  # the tokens of the step were given to others
    ORDER = "policy_order"  # it was behind a request that could not begin
    TENANT_LIMIT = "tenant_limit"  # as many requests of its tenant ran as may
    TENANT_CEILING = "tenant_ceiling"  # its tenant had as many KV blocks as it may
    GRAMMAR = "grammar"  # its grammar was being compiled
    KV_LOAD = "kv_load"  # KV blocks were being loaded from a tier
    LENGTH = "length_limit"  # as many prompts of its kind ran as may
    GROUP = "group"  # another stream of its request computed their prompt
    PREFIX = "pending_prefix"  # another request was computing the same prefix
    BACKGROUND = "background"  # it is in the background, and others ran


class EventKind(StrEnum):
    """What happened to a request."""

    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    PAUSED = "paused"  # its client read too slowly
    RESUMED = "resumed"
    LOAD_BEGUN = "load_begun"
    LOAD_ENDED = "load_ended"


class HistoryEvent(NamedTuple):
    """One event. ADMITTED: `step` is the first with a row, in `slot`; positions from `start` are
    computed, and `known` tokens are known. PREEMPTED: `detail` is the reason, `known` is 1 where
    its blocks go to a tier. LOAD_*: `known` blocks."""

    ms: float
    kind: EventKind
    step: int = 0
    slot: int = -1
    start: int = 0
    known: int = 0
    detail: str = ""


class Wait(NamedTuple):
    """A time span in the queue, and its reason."""

    from_ms: float
    to_ms: float
    reason: WaitReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """The steps of a request, each with its own row and the sums of the others.

    own_tokens: 0 where the request had no row. own_samples: tokens that its row yielded.
    prefill_tokens: of other requests' rows of several tokens; prefill_share: the predicted part of
    the step's time that these took.
    """

    steps: Int64s
    began_ms: Float64s
    ended_ms: Float64s
    rows: Int32s
    tokens: Int32s
    own_tokens: Int32s
    own_samples: Int32s
    prefill_tokens: Int32s
    prefill_share: Float64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimelineReport:
    """One stream of a request. Times are NaN until they happened; finish_reason is "" while it
    runs.

    overtaken_by: requests that arrived later and were admitted before its first admission.
    cache_use: judged at admission if the request asked for it, else when the report is made
    (is_judged_now). is_salted: only prompts of one scope of cached prefixes were looked at.
    is_cut: steps of it are kept no more. mask_waits: (end, milliseconds) that steps waited for
    grammar masks.
    """

    request_id: str
    stream: int
    now_ms: float
    arrival_ms: float
    first_token_ms: float
    ended_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    cache_use: CacheUsage
    is_judged_now: bool
    is_salted: bool
    waits: tuple[Wait, ...]
    overtaken_by: int
    events: tuple[HistoryEvent, ...]
    dropped_events: int
    rows: StepRows
    is_cut: bool
    mask_waits: tuple[tuple[float, float], ...]
