"""What a caller sees of one stream: token ids become text, stop strings end it, tokens are counted.

    RequestOutput (ids) -> Detokenizer -> StopStrings -> TextDelta (text)

All it yields depends on the stream's tokens alone, never on how they were cut into outputs. Text
once sent never changes. A token is delivered, and counted, with the last of its text; what is
held back carries its tokens along. Nothing after a stop string is shown or counted. Knows no
scheduler, no transport and no JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from quire.base.cache_usage import CacheUsage
from quire.base.rare_records import PooledSums
from quire.base.records import FinishReason, Request, RequestOutput, RequestTimes, TokenLogprobs
from quire.engine.output.stop_conditions import stops_of
from quire.engine.output.text_delta import PLAIN_TEXT as PLAIN_TEXT
from quire.engine.output.text_delta import PromptProgress as PromptProgress
from quire.engine.output.text_delta import TextDelta as TextDelta
from quire.engine.output.text_delta import TextRules as TextRules
from quire.engine.output.token_text import TokenText, generated_token, listed_texts, prompt_logprobs
from quire.text.byte_fallback import Span
from quire.text.detokenizer import answer_detokenizer
from quire.text.stops import StopStrings
from quire.text.tokenizer import Tokenizer


class OutputStream:
    """Turns the RequestOutputs of one Request into TextDeltas.

    finished: the last delta was given out. wants_abort: a stop string or a failure ended the
    stream before the engine knew; the stream's owner should abort the request. is_plain: deltas
    have only the text of tokens and there are no stop strings, as for nearly all streams.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: Request, rules: TextRules = PLAIN_TEXT
    ) -> None:
        sampling, prompt = request.sampling, request.prompt_ids
        self.finished = False
        self.wants_abort = False
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizer = answer_detokenizer(tokenizer, sampling, prompt, rules.shown_ids)
        self._tells_chars = rules.counts_chars
        self._counts_chars = rules.counts_chars or sampling.logprobs is not None
        self._stops: StopStrings | None = None
        if sampling.stop or sampling.stop_regex:
            self._stops = stops_of(sampling)
        self.is_plain = not (self._stops or self._counts_chars)
        self._num_prompt_tokens = len(prompt)
        self._held: deque[tuple[int, int]] = deque()  # held characters: how many, of which token
        self._num_held_chars = 0
        self._waiting_ids: list[int] = []
        self._waiting_logprobs: list[TokenLogprobs] = []
        self._num_delivered = 0
        self._chars_of: dict[int, int] = {}  # characters by the token that completed them
        self._num_chars = 0  # of the delivered tokens
        self._cached_tokens = 0
        self._cache_use: CacheUsage | None = None
        self._drafts = 0, 0, 0, 0  # accepted, rejected; accepted ones and tokens before the last
        self._times: RequestTimes | None = None
        self._prompt_logprobs: Sequence[TokenText | None] = ()  # not delivered yet
        self._score: float | None = None
        self._pooled: PooledSums | None = None
        listed = sampling.logprobs is not None
        self._listed = listed_texts(tokenizer, sampling) if listed else ()

    def push(self, output: RequestOutput, step_ms: float = 0.0) -> TextDelta | None:
        """Take an output; None while there is nothing to show and the stream goes on.

        step_ms: when the step it came from ended, on the engine's clock. Only events carry times,
        so the stream keeps the time of its last token itself: it may end before the engine knows.
        """
        if self.finished:
            return None
        self._note(output, step_ms)
        if output.prompt_progress is not None:
            return self._progress_delta(output.prompt_progress, step_ms)
        shown_ids = output.token_ids if output.stop_id is None else output.token_ids[:-1]
        spans = self._detokenizer.spans(shown_ids)
        if output.finish_reason is not None:
            spans += self._detokenizer.flush_spans()
        if self._counts_chars:
            for part, token in spans:
                self._chars_of[token] = self._chars_of.get(token, 0) + len(part)
        stops = self._stops
        if stops is None:
            text = "".join([part for part, _ in spans])
        else:
            text, last_token = self._cut(stops, spans)
            if stops.matched is not None:
                self.wants_abort = output.finish_reason is None
                return self._last(text, last_token + 1, FinishReason.STOP, stops.matched)
        if output.finish_reason is not None:
            num_tokens = self._num_delivered + len(self._waiting_ids)
            asked = output.stop_id in self._request.sampling.stop_token_ids
            stop_reason = output.stop_id if asked else None
            text += "" if stops is None else stops.flush()
            return self._last(text, num_tokens, output.finish_reason, stop_reason, output.error)
        if not text and not self._prompt_logprobs:
            return None
        return self._delta(text, self._num_complete_tokens() if text else self._num_delivered)

    def push_token(self, token_id: int, step_ms: float) -> TextDelta | None:
        """As `push` of an output that has this one token and nothing else; of plain streams."""
        if self.finished:
            return None
        self._waiting_ids.append(token_id)
        self._keep_time(step_ms)
        spans = self._detokenizer.spans((token_id,))
        if not spans and not self._prompt_logprobs:
            return None
        text = spans[0][0] if len(spans) == 1 else "".join(part for part, _ in spans)
        return self._delta(text, self._num_complete_tokens() if text else self._num_delivered)

    def fail(self, error: Exception, *, engine_knows: bool) -> TextDelta:
        """End the stream because its tokens could not be made text."""
        self.wants_abort = not engine_knows
        return self.end_with(f"the tokens cannot be decoded: {type(error).__name__}: {error}")

    def end_with(self, why: str) -> TextDelta:
        """End the stream with an error; what was output stands."""
        self._waiting_logprobs.clear()
        return self._last("", self._num_delivered, FinishReason.ERROR, None, why)

    def _progress_delta(self, processed: int, step_ms: float) -> TextDelta:
        since_ms = step_ms if self._times is None else self._times.first_scheduled_ms
        progress = PromptProgress(processed=processed, time_ms=max(step_ms - since_ms, 0.0))
        return msgspec.structs.replace(
            self._delta("", self._num_delivered), prompt_progress=progress
        )

    def _note(self, output: RequestOutput, step_ms: float) -> None:
        self._waiting_ids += output.token_ids
        if self._request.sampling.logprobs is not None:
            self._waiting_logprobs += output.logprobs
        if output.scores is not None:
            self._pooled = output.scores.pooled
            self._prompt_logprobs = prompt_logprobs(self._tokenizer, self._request, output.scores)
        self._score = output.score
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._cache_use = output.cache_use or self._cache_use
        if output.accepted_drafts or output.rejected_drafts:  # an output without times has none
            before = self._num_delivered + len(self._waiting_ids) - len(output.token_ids)
            self._drafts = output.accepted_drafts, output.rejected_drafts, self._drafts[0], before
        self._times = output.times or self._times
        if output.token_ids:
            self._keep_time(step_ms)

    def _keep_time(self, step_ms: float) -> None:
        times = self._times
        if times is not None and step_ms > times.last_token_ms:
            self._times = RequestTimes(
                arrival_ms=times.arrival_ms,
                first_scheduled_ms=times.first_scheduled_ms,
                first_token_ms=times.first_token_ms,
                last_token_ms=step_ms,
            )

    def _cut(self, stops: StopStrings, spans: list[Span]) -> tuple[str, int]:
        """Return the text that is certain, and the token that completed a stop string or -1."""
        certain = []
        for text, token in spans:
            certain.append(stops.push(text, armed=token >= self._request.sampling.min_tokens))
            if stops.matched is not None:
                return "".join(certain), token
            self._hold(len(text), token, stops.num_held_chars)
        return "".join(certain), -1

    def _hold(self, num_chars: int, token: int, num_held_chars: int) -> None:
        """Add characters of a token to those held, then release all but `num_held_chars`."""
        held = self._held
        if not (held or num_held_chars):
            return
        held.append((num_chars, token))
        num_free = self._num_held_chars + num_chars - num_held_chars
        self._num_held_chars = num_held_chars
        while num_free > 0:
            count, of_token = held.popleft()
            if count > num_free:
                held.appendleft((count - num_free, of_token))
            num_free -= count

    def _num_complete_tokens(self) -> int:
        return self._held[0][1] if self._held else self._detokenizer.num_settled_tokens

    def _last(
        self,
        text: str,
        num_tokens: int,
        reason: FinishReason,
        stop_reason: str | int | None,
        error: str | None = None,
    ) -> TextDelta:
        self.finished = True
        num, rejected, before, at = self._drafts  # none behind the last token is of the answer
        self._drafts = min(num, before + max(num_tokens - at, 0)), rejected, before, at
        return self._delta(text, num_tokens, reason=reason, stop_reason=stop_reason, error=error)

    def _delta(
        self,
        text: str,
        num_tokens: int,
        *,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> TextDelta:
        """Return a delta that brings the stream's delivered tokens to `num_tokens`."""
        num_new = num_tokens - self._num_delivered
        token_ids = tuple(self._waiting_ids[:num_new])
        del self._waiting_ids[:num_new]
        chars: tuple[int, ...] = ()
        logprobs: tuple[TokenText, ...] = ()
        if self._counts_chars:
            places = range(self._num_delivered, num_tokens)
            chars = tuple(self._chars_of.pop(place, 0) for place in places)
            logprobs = tuple(
                self._token_text(token, num_chars)
                for token, num_chars in zip(self._waiting_logprobs[:num_new], chars, strict=False)
            )
            del self._waiting_logprobs[:num_new]
        self._num_delivered = num_tokens
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        return TextDelta(
            index=self._request.stream,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._cached_tokens,
            cache_use=self._cache_use,
            num_output_tokens=num_tokens,
            times=self._times,
            seed=self._request.sampling.seed,
            error=error,
            prompt_logprobs=prompt_logprobs,
            score=self._score,
            pooled=self._pooled,
            token_chars=chars if self._tells_chars else (),
            accepted_drafts=self._drafts[0],
            rejected_drafts=self._drafts[1],
            held_tokens=len(self._waiting_ids),
        )

    def _token_text(self, token: TokenLogprobs, num_chars: int) -> TokenText:
        start_chars = self._num_chars
        self._num_chars += num_chars
        return generated_token(self._tokenizer, token, self._listed, start_chars)
