"""The fields with which POST /tokenize returns the prompt of a request, for each route.

A server renders the conversation of each API as it renders a chat, so a conversation of plain texts
is written as one here. Knows no replica. Always holds: a request with anything else that decides
its prompt (tools, reasoning, stored responses, parts that are no text) has no such fields, and is
routed by what was sent where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Fields of chats and completions that decide a prompt, as /tokenize takes them.
TOKENIZE_FIELDS = (
    *("model", "prompt", "messages", "tools", "tool_choice", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    *("documents", "add_special_tokens"),
)
# Of those, what other routes have under the same name.
_SHARED = ("model", "chat_template_kwargs", "add_special_tokens")
_NOT_OF_MESSAGES = ("tools", "tool_choice", "thinking", "output_config")
_NOT_OF_RESPONSES = (
    *("tools", "tool_choice", "reasoning", "previous_response_id", "conversation", "truncation"),
    "prompt",
)
_NOT_OF_OLLAMA = ("tools", "think", "template", "context", "suffix", "images")
_TEXTS = ("text", "input_text", "output_text")

_Fields = dict[str, Any]
_Make = Callable[[Mapping[str, Any]], _Fields | None]


def tokenize_fields(path: str, fields: Mapping[str, Any]) -> _Fields | None:
    """Return the fields for a request; None where they cannot be known."""
    make = _MAKERS.get(path)
    return None if make is None else make(fields)


def is_tokenized(path: str) -> bool:
    """Return whether some prompts of a route can be looked up."""
    return path in _MAKERS


def _openai(fields: Mapping[str, Any]) -> _Fields | None:
    if not isinstance(fields.get("prompt", ""), str):
        return None
    return {name: fields[name] for name in TOKENIZE_FIELDS if name in fields}


def _completion(fields: Mapping[str, Any]) -> _Fields | None:
    if not isinstance(fields.get("prompt"), str):
        return None
    return {name: fields[name] for name in ("prompt", *_SHARED) if name in fields}


def _messages(fields: Mapping[str, Any]) -> _Fields | None:
    return _conversation(fields, _NOT_OF_MESSAGES, fields.get("system"), fields.get("messages"))


def _responses(fields: Mapping[str, Any]) -> _Fields | None:
    given = fields.get("input")
    chat = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return _conversation(fields, _NOT_OF_RESPONSES, fields.get("instructions"), chat)


def _ollama_chat(fields: Mapping[str, Any]) -> _Fields | None:
    return _conversation(fields, _NOT_OF_OLLAMA, None, fields.get("messages"))


def _ollama_generate(fields: Mapping[str, Any]) -> _Fields | None:
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        return None
    if fields.get("raw") is True:
        return _completion(fields) if not any(map(fields.get, _NOT_OF_OLLAMA)) else None
    chat = [{"role": "user", "content": prompt}]
    return _conversation(fields, _NOT_OF_OLLAMA, fields.get("system"), chat)


def _conversation(
    fields: Mapping[str, Any], without: tuple[str, ...], system: Any, messages: Any
) -> _Fields | None:
    """Return the chat of a conversation of texts that ends with one of the user."""
    if any(fields.get(name) not in (None, [], False) for name in without):
        return None
    if not isinstance(messages, list) or not messages:
        return None
    first = {"role": "system", "content": system}
    chat = [] if system in (None, "", []) else [_text_message(first)]
    chat += map(_text_message, messages)
    roles = [None if one is None else one["role"] for one in chat]
    # Messages of one role that follow each other are one turn in some APIs.
    if None in roles or roles[-1] != "user" or any(map(str.__eq__, roles, roles[1:])):  # type: ignore[arg-type]
        return None
    return {"messages": chat, **{name: fields[name] for name in _SHARED if name in fields}}


def _text_message(message: Any) -> _Fields | None:
    """Return a message of texts as a chat has it; None for another."""
    if not isinstance(message, dict) or message.get("type", "message") != "message":
        return None
    if any(value is not None for key, value in message.items() if key not in _KEYS):
        return None
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        return None
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        if not texts or None in texts:
            return None
        content = texts[0] if len(texts) == 1 else [{"type": "text", "text": one} for one in texts]
    return {"role": role, "content": content} if isinstance(content, str | list) else None


_KEYS = ("type", "role", "content", "id", "status")


def _text(part: Any) -> str | None:
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


_MAKERS: Mapping[str, _Make] = {
    "/v1/chat/completions": _openai,
    "/v1/completions": _openai,
    "/generate": _openai,
    "/completion": _completion,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "/api/chat": _ollama_chat,
    "/api/generate": _ollama_generate,
}
