"""ContinuedStream: the output of a request that begins with known tokens of its answer.

The known tokens are replayed into the same detokenizer and stop strings that made their text the
first time, so the stream goes on where the original was, held text included. What the known tokens
had delivered comes once, as `known` of the first delta, for readers with a state of their own; it
has no log-probabilities.
Always holds: all other text, ids and log-probabilities are of what follows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from msgspec import structs

from quire.base.records import FinishReason, Request, RequestOutput, TokenLogprobs
from quire.engine.output.output_stream import OutputStream
from quire.engine.output.text_delta import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.output.token_text import TokenText
from quire.text.tokenizer import Tokenizer

# In place of the log-probabilities of known tokens, which nothing reads.
_UNKNOWN = TokenLogprobs(token_id=0, logprob=math.nan)
_UNKNOWN_TEXT = TokenText(token_id=0, text="", raw=b"", logprob=math.nan)


class ContinuedStream(OutputStream):
    """As OutputStream. rules.held_tokens: so many tokens after output_ids were known, and part of
    their text delivered, when the original ended; they are computed again."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, rules: TextRules = PLAIN_TEXT
    ) -> None:
        super().__init__(tokenizer, request, rules)
        self._becomes_plain, self.is_plain = self.is_plain, False
        self._num_given = len(request.output_ids)
        self._num_held_tokens = rules.held_tokens
        self._known: TextDelta | None = None
        self._final: TextDelta | None = None  # the known tokens are a whole answer
        if self._num_given:
            self._replay(request)

    def push(self, output: RequestOutput, step_ms: float = 0.0) -> TextDelta | None:
        """Take an output of tokens after the known ones."""
        if self._final is not None:
            return self._end(self._final)
        if output.prompt_progress is not None or not self._num_held_tokens or not output.token_ids:
            delta = self._with_known(super().push(output, step_ms))
            self.is_plain = self._becomes_plain and self._is_past_known
            return delta
        count = min(self._num_held_tokens, len(output.token_ids))
        is_whole = count == len(output.token_ids)
        if is_whole and output.finish_reason is not None:
            return self._with_known(super().push(output, step_ms))
        self._num_held_tokens -= count
        held = replace(
            output,
            token_ids=output.token_ids[:count],
            logprobs=output.logprobs[:count],
            finish_reason=None,
            stop_id=None,
        )
        self._keep(super().push(held, step_ms))
        if self._final is not None:
            return self._end(self._final)
        if is_whole:
            return None
        rest = replace(output, token_ids=output.token_ids[count:], logprobs=output.logprobs[count:])
        return self._with_known(super().push(rest, step_ms))

    @property
    def _is_past_known(self) -> bool:
        """Whether all of the known tokens is delivered, so that the stream is as any other."""
        is_computed = not self._num_held_tokens and self._final is None
        return is_computed and self._known is None and self._num_delivered >= self._num_given

    def _replay(self, request: Request) -> None:
        """Make the text of the known tokens. Their log-probabilities are not known."""
        token_ids = tuple(request.output_ids.tolist())
        has_logprobs = request.sampling.logprobs is not None
        logprobs = (_UNKNOWN,) * len(token_ids) if has_logprobs else ()
        self._keep(super().push(RequestOutput(request.request_id, token_ids, logprobs)))

    def _keep(self, delta: TextDelta | None) -> None:
        """Add what known tokens had delivered; a stop string in it ends the stream."""
        if delta is None:
            return
        if delta.finish_reason is not None:
            self._final, self.finished = delta, False
        delta = structs.replace(delta, finish_reason=None, stop_reason=None, logprobs=())
        known = self._known
        if known is not None:
            delta = structs.replace(
                delta,
                text=known.text + delta.text,
                token_ids=known.token_ids + delta.token_ids,
                token_chars=known.token_chars + delta.token_chars,
            )
        self._known = delta

    def _with_known(self, delta: TextDelta | None) -> TextDelta | None:
        if delta is None or delta.prompt_progress is not None or self._known is None:
            return delta
        known, self._known = self._known, None
        return structs.replace(delta, known=known)

    def _token_text(self, token: TokenLogprobs, num_chars: int) -> TokenText:
        """As of OutputStream; a known token only counts its characters."""
        if token is not _UNKNOWN:
            return super()._token_text(token, num_chars)
        self._num_chars += num_chars
        return _UNKNOWN_TEXT

    def _end(self, delta: TextDelta) -> TextDelta | None:
        """Return the last delta of an answer that was whole already."""
        if self.finished:
            return None
        self.finished = self.wants_abort = True
        last = structs.replace(delta, text="", token_ids=(), logprobs=(), token_chars=())
        return self._with_known(last)

    def _delta(
        self,
        text: str,
        num_tokens: int,
        *,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> TextDelta:
        """As of OutputStream, without what belongs to tokens of output_ids."""
        num_before = self._num_delivered
        delta = super()._delta(
            text, num_tokens, reason=reason, stop_reason=stop_reason, error=error
        )
        if num_before >= self._num_given:
            return delta
        cut = self._num_given - num_before
        return structs.replace(
            delta,
            token_ids=delta.token_ids[cut:],
            logprobs=delta.logprobs[cut:],
            held_tokens=delta.held_tokens - max(self._num_given - num_tokens, 0),
        )
