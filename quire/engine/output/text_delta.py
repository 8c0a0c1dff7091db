"""TextDelta: what happened to one stream since its last delta; TextRules: what its text must have.

Records only: output_stream.py makes them of tokens. Knows no transport and no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.base.cache_usage import CacheUsage
from quire.base.rare_records import PooledSums
from quire.base.records import FinishReason, RequestTimes
from quire.engine.output.token_text import TokenText


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What a caller asks of the text of answers, beside sampling.

    shown_ids: special tokens kept in the text whatever skip_special_tokens is, since a parser
    reads them. counts_chars: deltas have the number of characters of each token. held_tokens: of a
    request with output_ids, as in its last TextDelta.
    """

    shown_ids: frozenset[int] = frozenset()
    counts_chars: bool = False
    held_tokens: int = 0


PLAIN_TEXT = TextRules()


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens computed so far, cached ones included, and milliseconds since scheduling."""

    processed: int
    time_ms: float


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to stream `index` of a request since its last delta.

    token_ids were completed by this delta; logprobs are parallel to them, or empty if not asked
    for. num_output_tokens counts all delivered so far, this delta's included. The last delta has
    a finish_reason; stop_reason is the stop string or the caller's stop token id, if one ended it.
    prompt_logprobs, parallel to the prompt's tokens, are delivered once a request, where they were
    asked for: by one of its streams, in its first delta, before any other stream has one.
    num_unseen_tokens: of sequences that best_of computed and dropped. score: of a beam.
    token_chars: how many characters of the text each token completed, parallel to token_ids, where
    it was asked for. accepted_drafts, rejected_drafts: proposed tokens so far, as in RequestOutput,
    without accepted ones behind the end, and with those of dropped sequences. prompt_progress: in a
    delta of nothing else. held_tokens: tokens that are known and not delivered yet; part of their
    text may be. known: in the first delta of a stream with output_ids, what these had delivered
    already. A Struct, not a dataclass: there is one a token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_prompt_tokens: int
    cached_tokens: int
    num_output_tokens: int
    times: RequestTimes | None
    seed: int | None
    error: str | None
    prompt_logprobs: Sequence[TokenText | None] = ()
    cache_use: CacheUsage | None = None
    num_unseen_tokens: int = 0
    score: float | None = None
    pooled: PooledSums | None = None  # of a prompt that is pooled, in its only delta
    token_chars: tuple[int, ...] = ()
    prompt_progress: PromptProgress | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    held_tokens: int = 0
    known: TextDelta | None = None
