"""TokenText: a token with its log-probability, to be read; PromptLogprobs: those of a prompt.

Knows the tokenizer, no requests and no JSON. A long prompt's log-probabilities stay arrays of
numbers until they are read: texts are made one position at a time, on access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from quire.base.records import PromptScores, Request, TokenLogprobs
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token with its log-probability, as text and as bytes (which may be part of a character).

    top: the best alternatives, the likeliest first; listed: those of the ids the caller listed, in
    their order; the `top` and `listed` of these are empty. start_chars: how many characters of the
    stream's text (for a prompt's token: the prompt's) come before the token's own, 0 for
    alternatives. rank: 1 for the likeliest token; 0 for a generated one, which is not ranked.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: Sequence[TokenText] = ()
    listed: tuple[TokenText, ...] = ()
    start_chars: int = 0
    rank: int = 0


def listed_texts(
    tokenizer: Tokenizer, sampling: SamplingParams
) -> Sequence[tuple[int, str, bytes]] | None:
    """Return the ids that a request lists, with their texts; None where it asks for all."""
    if not sampling.logprob_token_ids:
        return None if sampling.logprobs == ALL_LOGPROBS else ()
    return tuple(
        (id_, tokenizer.token_text(id_), tokenizer.token_bytes(id_))
        for id_ in sampling.logprob_token_ids
    )


def generated_token(
    tokenizer: Tokenizer,
    token: TokenLogprobs,
    listed: Sequence[tuple[int, str, bytes]] | None,
    start_chars: int,
) -> TokenText:
    """Return a generated token. listed: ids with their texts; None: all, the likeliest first."""

    def text_of(token_id: int, logprob: float) -> TokenText:
        text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        return TokenText(token_id=token_id, text=text, raw=raw, logprob=logprob)

    return TokenText(
        start_chars=start_chars,
        token_id=token.token_id,
        text=tokenizer.token_text(token.token_id),
        raw=tokenizer.token_bytes(token.token_id),
        logprob=token.logprob,
        top=RankedTokens(tokenizer, np.array(token.listed, np.float32))
        if listed is None
        else tuple(text_of(token_id, logprob) for token_id, logprob in token.top),
        listed=tuple(
            TokenText(token_id=token_id, text=text, raw=raw, logprob=logprob)
            for (token_id, text, raw), logprob in zip(listed or (), token.listed, strict=True)
        )
        if listed is not None
        else (),
    )


class RankedTokens(Sequence[TokenText]):
    """All tokens of the vocabulary, the likeliest first, ties to the lower id.

    logprobs: by id. Each TokenText is made anew when it is read: all together are large.
    """

    def __init__(self, tokenizer: Tokenizer, logprobs: NDArray[np.float32]) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._order: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, at: int) -> TokenText: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenText]: ...
    def __getitem__(self, at: int | slice) -> TokenText | list[TokenText]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        if self._order is None:
            self._order = np.argsort(-self._logprobs, kind="stable")
        place = range(len(self))[at]
        token_id = int(self._order[place])
        return TokenText(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            raw=self._tokenizer.token_bytes(token_id),
            logprob=float(self._logprobs[token_id]),
            rank=place + 1,
        )


def prompt_logprobs(
    tokenizer: Tokenizer, request: Request, scores: PromptScores
) -> Sequence[TokenText | None]:
    """Return the log-probabilities of a request's prompt; none where it is pooled instead."""
    if scores.pooled is not None:
        return ()
    return PromptLogprobs(
        tokenizer,
        request.prompt_ids.tolist(),
        scores,
        skip_special_tokens=request.sampling.skip_special_tokens,
    )


class PromptLogprobs(Sequence[TokenText | None]):
    """Of each token of a prompt, given those before it: None first, which nothing precedes.

    As long as the prompt. Each TokenText is made anew when it is read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        scores: PromptScores,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt_ids
        self._scores = scores
        self._skips = skip_special_tokens
        self._starts: list[int] | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<log-probabilities of a prompt of {len(self)} tokens; made when they are read>"

    @overload
    def __getitem__(self, at: int) -> TokenText | None: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenText | None]: ...
    def __getitem__(self, at: int | slice) -> TokenText | list[TokenText | None] | None:
        """Position `at`; raises IndexError beyond the prompt."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(f"position {at} of a prompt of {len(self)} tokens")
        return self._scored(index) if index > 0 else None

    def _scored(self, index: int) -> TokenText:
        scores, entry = self._scores, index - 1
        ids, logprobs = scores.top_ids[entry], scores.top_logprobs[entry]
        top: Sequence[TokenText] = RankedTokens(self._tokenizer, logprobs)
        if len(ids) or not len(logprobs):
            top = tuple(
                self._token(token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(
                    zip(ids.tolist(), logprobs.tolist(), strict=True), start=1
                )
                if token_id >= 0
            )
        return self._token(
            int(self._ids[index]),
            float(scores.logprobs[entry]),
            int(scores.ranks[entry]),
            top,
            self._token_starts()[index],
        )

    def _token_starts(self) -> list[int]:
        """For each token, how many characters of the prompt's text come before its own."""
        if self._starts is None:
            stream = Detokenizer(self._tokenizer, self._skips)
            num_chars = [0] * len(self._ids)
            for text, token in stream.spans(map(int, self._ids)) + stream.flush_spans():
                num_chars[token] += len(text)
            self._starts = [0]
            for count in num_chars[:-1]:
                self._starts.append(self._starts[-1] + count)
        return self._starts

    def _token(
        self,
        token_id: int,
        logprob: float,
        rank: int,
        top: Sequence[TokenText] = (),
        start_chars: int = 0,
    ) -> TokenText:
        return TokenText(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            raw=self._tokenizer.token_bytes(token_id),
            logprob=logprob,
            top=top,
            start_chars=start_chars,
            rank=rank,
        )
