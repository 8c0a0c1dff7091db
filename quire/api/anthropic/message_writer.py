"""Write an answer as a message of Anthropic's API, whole or as events.

answer_blocks.py writes the content. A stream is message_start, the events of the blocks,
message_delta with the stop reason and the usage, and the message_stop of its framing. What only
Anthropic's servers have (containers, tools of their own, regions) is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.api.anthropic.answer_blocks import BlockEvents, joined_blocks
from quire.api.anthropic.cache_breakpoints import LIFETIMES_MS
from quire.api.generation.answer_json import drafts_json, finite
from quire.api.generation.chat_output import ChatOutputParser
from quire.api.generation.choice_streams import Choice, PromptState
from quire.api.generation.generate import Envelope
from quire.api.generation.usage import Usage
from quire.base.records import FinishReason
from quire.engine.output.output_stream import TextDelta
from quire.output_parsers.parsed_answer import AnswerPiece

_TTLS = {lifetime_ms: ttl for ttl, lifetime_ms in LIFETIMES_MS.items()}

# Tiers of an answer's usage.
STANDARD, BATCH = "standard", "batch"


class MessageWriter:
    """Write one answer.

    parser: None if the answer has neither reasoning nor calls. fills_context: max_tokens was more
    than the context has room for, so that the length of the answer is the context's.
    hides_thinking: as of BlockEvents. tier: that of the usage.
    """

    def __init__(
        self,
        envelope: Envelope,
        parser: ChatOutputParser | None,
        *,
        fills_context: bool,
        hides_thinking: bool = False,
        tier: str = STANDARD,
    ) -> None:
        self._tier = tier
        self._envelope = envelope
        self._parser = None if parser is None else parser.choice(0)
        self._at_length = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._blocks = BlockEvents(self._call_id, hides_thinking=hides_thinking)
        self._begun = False
        self._end = _ended(None)

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the message."""
        choice = choices[0][0]
        pieces = self._pieces(choice.text, choice.token_chars, ends=True)
        content = joined_blocks([*self._blocks.of_pieces(pieces), *self._blocks.close()])
        end = self._end_of(choice.finish_reason, choice.stop_reason)
        logprobs = [finite(one.logprob) for one in choice.logprobs]
        known = {"logprobs": logprobs} if logprobs else {}
        return {**self._message(content, end, self._usage(usage)), "seed": choice.seed, **known}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield message_start before the first text, and the events of the content."""
        if not self._begun:
            self._begun = True
            usage = Usage(
                prompt_tokens=delta.num_prompt_tokens,
                completion_tokens=delta.num_output_tokens,
                cached_tokens=delta.cached_tokens,
                cache_uses=() if delta.cache_use is None else (delta.cache_use,),
            )
            message = self._message([], self._end, self._usage(usage, ends=False))
            yield {"type": "message_start", "message": {**message, "seed": delta.seed}}
        ends = delta.finish_reason is not None
        yield from self._blocks.of_pieces(self._pieces(delta.text, delta.token_chars, ends=ends))
        if ends:
            yield from self._blocks.close()
            self._end = self._end_of(delta.finish_reason, delta.stop_reason)

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return the event of more text; None if the text is parsed or no block is open."""
        return None if self._parser is not None else self._blocks.of_text(text)

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Not used: the route has no field that asks for progress."""
        raise NotImplementedError

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return nothing: the route has no field that asks for continuous usage."""
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        """Return message_delta."""
        return {"type": "message_delta", "delta": self._end, "usage": self._usage(usage)}

    def _pieces(self, text: str, token_chars: Sequence[int], *, ends: bool) -> list[AnswerPiece]:
        if self._parser is not None:
            return self._parser.pieces(text, token_chars, ends=ends)
        return [AnswerPiece("content", text)] if text else []

    def _call_id(self, index: int) -> str:
        assert self._parser is not None, "only a parser finds calls"
        return self._parser.call_id(index)

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            **end,
            "diagnostics": None,
            "usage": usage,
        }

    def _usage(self, usage: Usage, *, ends: bool = True) -> dict[str, Any]:
        """Return the object of `usage`. ends: the answer has ended, so that its parts are known."""
        reasoning = 0 if self._parser is None else self._parser.reasoning_tokens
        details = {"thinking_tokens": reasoning, **drafts_json(usage)}
        return {
            **_counts(usage),
            "output_tokens_details": details if ends else None,
            "server_tool_use": None,
            "service_tier": self._tier,
            "inference_geo": None,
            "speed": "standard",
        }

    def _end_of(
        self, reason: FinishReason | None, stopped_by: str | int | None
    ) -> dict[str, str | None]:
        if reason is FinishReason.LENGTH:
            return _ended(self._at_length)
        if isinstance(stopped_by, str):
            return _ended("stop_sequence", stopped_by)
        calls = self._parser is not None and self._parser.has_complete_calls
        return _ended("tool_use" if calls else "end_turn")


def _ended(reason: str | None, sequence: str | None = None) -> dict[str, str | None]:
    """Return the keys of a message that say why it ended."""
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def _counts(usage: Usage) -> dict[str, Any]:
    """Return the counts of tokens.

    cache_creation has the tokens that were not cached and are pinned; input_tokens are the others
    that were not cached.
    """
    created = dict.fromkeys(LIFETIMES_MS, 0)
    for use in usage.cache_uses:
        for lifetime_ms, tokens in use.pinned_tokens:
            created[_TTLS[lifetime_ms]] += tokens
    total = sum(created.values())
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - total,
        "cache_creation_input_tokens": total,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": n for ttl, n in created.items()},
        "output_tokens": usage.completion_tokens,
    }
