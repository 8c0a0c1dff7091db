"""The usage in the body of a line's answer, of the routes of OpenAI's API.

Chats, completions and embeddings count a prompt and a completion, responses an input and an output.
Always holds: a body without usage counts nothing.
"""

from __future__ import annotations

import msgspec

from quire.api.batches.line_form import LineUsage


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None


def usage_of(body: bytes) -> LineUsage:
    """Return the usage of an answer."""
    found = msgspec.json.decode(body, type=_Body)
    usage = found.usage or _Usage()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    wrote = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return LineUsage(
        model=found.model,
        input_tokens=usage.prompt_tokens + usage.input_tokens,
        cached_tokens=read.cached_tokens,
        output_tokens=usage.completion_tokens + usage.output_tokens,
        reasoning_tokens=wrote.reasoning_tokens,
    )
