"""Write an answer in the form of llama.cpp's /completion, whole or as events.

The last object of a stream is the whole answer without its text, or those parts of it that
`response_fields` names. Counts are those of `usage`; `timings` are in each last object, since the
routes imply the field. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.api.generation.answer_json import finite, speeds_json
from quire.api.generation.choice_streams import Choice, PromptState
from quire.api.generation.generate import Envelope
from quire.api.generation.usage import Usage
from quire.api.llama_cpp.request import Returned
from quire.api.llama_cpp.settings import settings_json
from quire.base.records import FinishReason
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText

_ABSENT = object()


class AnswerWriter:
    """Write one answer. prompt: its text, which the last object has. room_tokens: what the context
    leaves to the answer. index: its number among the answers of a request."""

    def __init__(
        self,
        envelope: Envelope,
        prompt: str,
        sampling: SamplingParams,
        returned: Returned,
        *,
        room_tokens: int,
        index: int = 0,
    ) -> None:
        self._index = index
        self._model = envelope.model
        self._prompt = prompt
        self._sampling = sampling
        self._returned = returned
        self._room_tokens = room_tokens
        self._end: dict[str, Any] = {}
        self._has_new_line = False

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choice = choices[0][0]
        self._keep_end(choice.text, choice.finish_reason, choice.stop_reason)
        tokens = choice.token_ids if self._returned.returns_tokens else []
        answer = self._last(choice.text, tokens, usage) | self._probabilities(choice.logprobs)
        return self._asked_for(answer)

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the event of more text."""
        self._keep_end(delta.text, delta.finish_reason, delta.stop_reason)
        if delta.text or delta.token_ids:
            yield {
                "index": self._index,
                "content": delta.text,
                "tokens": delta.token_ids,
                "stop": False,
                "id_slot": self._returned.id_slot,
                "tokens_predicted": delta.num_output_tokens,
                "tokens_evaluated": delta.num_prompt_tokens,
                **self._probabilities(delta.logprobs),
            }

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: events have ids and counts."""

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Return the event of prompt progress."""
        return {
            "index": self._index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": self._returned.id_slot,
            "tokens_predicted": 0,
            "tokens_evaluated": progress.total,
            "prompt_progress": msgspec.to_builtins(progress),
        }

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return the timings that every event has, if requested."""
        return speeds_json(usage) if self._returned.timings_per_token else {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        """Return the last event."""
        return self._asked_for(self._last("", [], usage))

    def _keep_end(
        self, text: str, reason: FinishReason | None, stopped_by: str | int | None
    ) -> None:
        self._has_new_line |= "\n" in text
        kind, word = "none", ""
        if reason is FinishReason.LENGTH:
            kind = "limit"
        elif reason is not None:
            kind = "word" if isinstance(stopped_by, str) else "eos"
            word = stopped_by if isinstance(stopped_by, str) else ""
        self._end = {"stop_type": kind, "stopping_word": word}

    def _asked_for(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the parts that response_fields names by their paths, such as `timings/prompt_n`;
        names that the answer does not have are left out."""
        if not self._returned.response_fields:
            return answer
        found: dict[str, Any] = {}
        for path in self._returned.response_fields:
            value: Any = answer
            for key in path.split("/"):
                value = value.get(key, _ABSENT) if isinstance(value, dict) else _ABSENT
            if value is not _ABSENT:
                found[path] = value
        return found

    def _last(self, text: str, tokens: Sequence[int], usage: Usage) -> dict[str, Any]:
        return {
            "index": self._index,
            "content": text,
            "tokens": tokens,
            "id_slot": self._returned.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": settings_json(self._sampling, self._returned),
            "prompt": self._prompt,
            "has_new_line": self._has_new_line,
            "truncated": self._fills_context(usage),
            **self._end,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            **speeds_json(usage),
        }

    def _fills_context(self, usage: Usage) -> bool:
        """Return whether the answer ended because the context is full."""
        return (
            self._end.get("stop_type") == "limit" and usage.completion_tokens >= self._room_tokens
        )

    def _probabilities(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        if not self._returned.num_probs:
            return {}
        return {
            "completion_probabilities": [
                {**_token(one), "top_logprobs": [_token(other) for other in one.top]}
                for one in tokens
            ]
        }


def _token(token: TokenText) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "token": token.text,
        "bytes": list(token.raw),
        "logprob": finite(token.logprob),
    }
