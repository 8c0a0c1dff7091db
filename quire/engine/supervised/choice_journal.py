"""ChoiceJournal: what was delivered of one choice, and the deltas of the engine that continues it.

The continuation is that of `output_ids`: the tokens that were delivered count as output, and of
those computed but held back (`held_tokens`) the next engine knows that part of their text went out.
Mirostat has a state that output ids do not carry; such a choice is computed anew, and what was
delivered is left out. Always holds: the deltas of all engines joined are those of one engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import structs

from quire.base.records import RequestTimes
from quire.engine.output.text_delta import TextDelta


class ChoiceJournal:
    """One choice. output_ids: its tokens that were known before the request and delivered since."""

    def __init__(self, output_ids: Sequence[int]) -> None:
        self.output_ids = array("q", output_ids)
        self.has_ended = False
        self.held_tokens = 0
        self.has_prompt_logprobs = False
        self._last: TextDelta | None = None
        self._before: TextDelta | None = None  # the last delta of the engines before this one
        self._num_chars = 0
        self._num_tokens = 0
        self._skip_chars = self._skip_tokens = 0

    def delivered(self, delta: TextDelta) -> None:
        """Note a delta that goes to the client now."""
        self.output_ids.extend(delta.token_ids)
        self.held_tokens = delta.held_tokens
        self.has_ended = delta.finish_reason is not None
        self.has_prompt_logprobs = self.has_prompt_logprobs or bool(delta.prompt_logprobs)
        self._num_chars += len(delta.text)
        self._num_tokens += len(delta.token_ids)
        self._last = delta

    def resume(self, *, is_anew: bool) -> None:
        """Another engine continues. is_anew: it computes the choice from its beginning."""
        self._before = self._last
        if is_anew:
            self._skip_chars, self._skip_tokens = self._num_chars, self._num_tokens

    def continued(self, delta: TextDelta) -> TextDelta | None:
        """Return a delta of the engine that continues, as one of the first engine; None where the
        client has all of it."""
        before = self._before
        if before is None:
            return delta
        text = delta.text[self._skip_chars :]
        self._skip_chars -= len(delta.text) - len(text)
        skipped = min(self._skip_tokens, len(delta.token_ids))
        self._skip_tokens -= skipped
        is_known = skipped or self._skip_chars or (self._skip_tokens and not text)
        if is_known and not (text or delta.token_ids[skipped:] or delta.finish_reason):
            return None
        return structs.replace(
            delta,
            text=text,
            token_ids=delta.token_ids[skipped:],
            logprobs=delta.logprobs[skipped:],
            token_chars=delta.token_chars[skipped:],
            known=None,
            cached_tokens=before.cached_tokens,
            cache_use=before.cache_use,
            times=_joined(before.times, delta.times),
            accepted_drafts=before.accepted_drafts + delta.accepted_drafts,
            rejected_drafts=before.rejected_drafts + delta.rejected_drafts,
        )


def _joined(first: RequestTimes | None, last: RequestTimes | None) -> RequestTimes | None:
    """Return the times of an answer that began at one engine and ended at another."""
    if first is None or last is None:
        return last or first
    return RequestTimes(
        arrival_ms=first.arrival_ms,
        first_scheduled_ms=first.first_scheduled_ms,
        first_token_ms=first.first_token_ms,
        last_token_ms=last.last_token_ms,
    )
