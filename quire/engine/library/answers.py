"""What LLM's calls return, and how it is gathered from what streams say.

Knows no engine: deltas are taken as they come. Always holds: an answer is made once all of its
streams have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage
from quire.base.errors import StepRowError
from quire.base.records import FinishReason, Request
from quire.base.sampling_params import SamplingParams
from quire.engine.output.answer_parser import AnswerReading
from quire.engine.output.best_of import Ranking
from quire.engine.output.embedding import vector_of
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.output.token_text import TokenText
from quire.models.pooling_files import PoolingSpec
from quire.output_parsers.parsed_answer import ParsedAnswer as Reply
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished stream. logprobs are parallel to token_ids, empty if not asked for.
    With SamplingParams.logprob_token_ids each of them has `listed`.

    stop_reason: the stop string or the caller's stop token id, if one ended it. cache_use: where
    cached_tokens were found, and why no more, if
    SchedulingParams.return_cached_tokens_details requested it. error:
    why, where finish_reason is "error". score: of a beam, by which the completions of an answer are
    ordered. message: of LLM.chat, what the text says: `reasoning`, `content`, and `calls` of tools,
    each with its `name` and `arguments` (the text of a JSON object, where the model wrote one).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int | None
    cached_tokens: int
    cache_use: CacheUsage | None = None
    error: str | None = None
    score: float | None = None
    message: Reply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one prompt: `outputs` has SamplingParams.n completions, by index.

    prompt_logprobs: parallel to prompt_ids, None first; empty unless SamplingParams asks for
    prompt_logprobs. They are made when they are read. The properties are those of the first
    completion.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: Sequence[TokenText | None] = ()

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """prompt_ids by its name in vLLM."""
        return self.prompt_ids

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenText, ...]:
        """Log-probabilities of the first completion."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The vector of a prompt [dimensions]; None where it failed, and error says why.

    prompt: None where ids were given. cached_tokens: of the prompt, found in the prefix cache.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    embedding: NDArray[np.float32] | None
    cached_tokens: int
    error: str | None = None


class GenerateCall:
    """One prompt on its way: its streams and what they have output so far."""

    def __init__(
        self,
        prompt: str | None,
        requests: tuple[Request, ...],
        sampling: SamplingParams,
        reading: AnswerReading | None,
    ) -> None:
        self.requests = requests
        self._prompt = prompt
        self._reading = reading
        self._ranking = Ranking(sampling, 0) if sampling.is_ranked else None
        self._deltas: tuple[list[TextDelta], ...] = tuple([] for _ in range(sampling.n))
        self._num_open = len(requests)
        self._prompt_logprobs: Sequence[TokenText | None] = ()
        self._last: TextDelta | None = None

    @property
    def is_done(self) -> bool:
        """Whether all streams have ended."""
        return self._num_open == 0

    def text_rules(self, tokenizer: Tokenizer) -> TextRules:
        """Return what has to be seen of its answers."""
        return PLAIN_TEXT if self._reading is None else self._reading.text_rules(tokenizer)

    def take(self, delta: TextDelta) -> None:
        """Keep what a stream has output."""
        for one in (delta,) if self._ranking is None else self._ranking.take(delta):
            self._deltas[one.index].append(one)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._last = delta

    def embedding(self, pooling: PoolingSpec, dimensions: int | None) -> Embedding:
        """Return the vector of a prompt that was pooled, once no stream is open."""
        last = self._last
        assert last is not None, "a finished stream has a last delta"
        vector = None
        if last.pooled is not None:
            vector = vector_of(last.pooled, pooling, dimensions=dimensions)
        return Embedding(
            prompt=self._prompt,
            prompt_ids=tuple(self.requests[0].prompt_ids.tolist()),
            embedding=vector,
            cached_tokens=last.cached_tokens,
            error=None if vector is not None else last.error or str(last.finish_reason),
        )

    def answer(self) -> Answer:
        """Return all of it, once no stream is open."""
        return Answer(
            prompt=self._prompt,
            prompt_ids=tuple(self.requests[0].prompt_ids.tolist()),
            outputs=tuple(_completion(deltas, self._reading) for deltas in self._deltas),
            prompt_logprobs=self._prompt_logprobs,
        )


def check_any_succeeded(answers: Sequence[Answer]) -> None:
    """Raise StepRowError if every completion failed before its first token.

    Otherwise failures are in Completion.error: what the others have is not lost.
    """
    outputs = [one for answer in answers for one in answer.outputs]
    if not outputs or any(one.error is None or one.token_ids for one in outputs):
        return
    several = f"all {len(answers)} prompts failed; the first: " if len(answers) > 1 else ""
    raise StepRowError(f"{several}{outputs[0].error}")


def _completion(deltas: Sequence[TextDelta], reading: AnswerReading | None) -> Completion:
    last = deltas[-1]
    assert last.finish_reason is not None, "a finished stream says why"
    text = "".join(delta.text for delta in deltas)
    return Completion(
        index=last.index,
        text=text,
        token_ids=tuple(id_ for delta in deltas for id_ in delta.token_ids),
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        seed=last.seed,
        cached_tokens=last.cached_tokens,
        cache_use=last.cache_use,
        error=last.error,
        score=last.score,
        message=None if reading is None else reading.message(text),
    )
