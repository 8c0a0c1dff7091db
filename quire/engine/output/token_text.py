"""TokenText: a token with its log-probability, to be read; PromptLogprobs: those of a prompt.

Knows the tokenizer, no requests and no JSON. A long prompt's log-probabilities stay arrays of
numbers until they are read: texts are made one position at a time, on access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from quire.base.records import PromptScores, Request
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
    top: tuple[TokenText, ...] = ()
    listed: tuple[TokenText, ...] = ()
    start_chars: int = 0
    rank: int = 0


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
        pairs = zip(
            scores.top_ids[entry].tolist(), scores.top_logprobs[entry].tolist(), strict=True
        )
        top = tuple(
            self._token(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(pairs, start=1)
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
        top: tuple[TokenText, ...] = (),
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
