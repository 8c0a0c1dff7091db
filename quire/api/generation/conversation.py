"""What a request says of its conversation, checked and rendered by the model's template.

quire/text/messages.py checks messages; here is what goes with them: a template by its name or as
text, documents, tools, reasoning_effort, variables. Tools and documents that the template does not
read are refused, or left out with unknown_fields="warn". reasoning_effort and variables are hints:
those that the template does not read are left out and listed in a response header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext
from quire.api.generation.tools import Offer, offer_of
from quire.base.errors import InvalidParameter, RequestError, TokenizerError
from quire.base.show import show
from quire.text.chat_template import OWN_VARIABLES, ChatTemplate
from quire.text.messages import checked_messages, with_argument_objects

MAX_MESSAGES = 4096
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What templates call the variable that switches reasoning off.
_SWITCHES = ("enable_thinking", "thinking")
MAX_TEMPLATE_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A conversation as it was asked for. `name` and `source` of a template: at most one."""

    messages: list[dict[str, Any]]
    effort: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: Mapping[str, Any]
    name: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """text: the prompt. template: the text of what rendered it. shows_tools: they are in it."""

    text: str
    template: str
    shows_tools: bool


async def rendered(request: RequestContext, offer: Offer | None = None) -> Conversation:
    """A request's messages. Raises RequestError naming the field, and TokenizerError.

    offer: of the request, where that has been read already.

    A template is a stranger's program: however little it is given, it may take its time, so it
    runs in a thread.
    """
    template, given = request.engine.template, request.given
    asked = _asked(
        given,
        template,
        offer or offer_of(given),
        trusted=request.config.trust_request_chat_template,
    )
    if template is None and asked.source is None:
        raise RequestError(
            f"model {request.engine.card.name!r} has no chat template; use /v1/completions, put a "
            "chat_template.jinja into the model's folder, or start the server with --chat-template"
        )
    if template is None:
        template = ChatTemplate({}, variables=request.engine.tokenizer.special_tokens)
    run = request.beside if asked.source is None else request.at_length
    conversation, ignored = await run(_render, template, asked, warns=request.warns)
    request.ignore(*ignored)
    return conversation


def _asked(
    given: Mapping[str, Any], template: ChatTemplate | None, offer: Offer, *, trusted: bool
) -> _Asked:
    name, source = _template_of(given, template, trusted=trusted)
    opens = flag(given, "add_generation_prompt") if "add_generation_prompt" in given else None
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InvalidParameter(
            f"chat_template_kwargs is {show(variables)}; an object is allowed",
            param="chat_template_kwargs",
        )
    return _Asked(
        messages=_messages(given.get("messages")),
        effort=_effort(given.get("reasoning_effort")),
        add_generation_prompt=opens,
        continue_final_message=flag(given, "continue_final_message"),
        tools=offer.shown,
        documents=_objects(given, "documents") or None,
        variables=variables,
        name=name,
        source=source,
    )


def _messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise InvalidParameter(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    return checked_messages(messages)


def _effort(effort: Any) -> str | None:
    if not isinstance(effort, str | None):
        raise InvalidParameter(
            f"reasoning_effort is {show(effort)}; a string is allowed: {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    return effort


def _template_of(
    given: Mapping[str, Any], template: ChatTemplate | None, *, trusted: bool
) -> tuple[str | None, str | None]:
    """The name of one of the model's templates, or the text of the caller's own."""
    asked = given.get("chat_template")
    if asked is None:
        return None, None
    if not isinstance(asked, str):
        raise InvalidParameter(
            f"chat_template is {show(asked)}; the name of one of the model's templates is allowed",
            param="chat_template",
        )
    names = () if template is None else template.names
    if asked in names or not any(mark in asked for mark in ("{{", "{%", "{#")):
        return asked, None
    if not trusted:
        raise InvalidParameter(
            "chat_template holds the text of a template, a program that this server does not run "
            "for its callers; name one of the model's templates "
            f"({', '.join(names) or 'it has none'}), or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    if len(asked) > MAX_TEMPLATE_CHARS:
        raise InvalidParameter(
            f"chat_template has {len(asked)} characters; at most {MAX_TEMPLATE_CHARS} are allowed "
            "in a request",
            param="chat_template",
        )
    return None, asked


def _objects(given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = given.get(name, [])
    if not isinstance(value, list):
        raise InvalidParameter(f"{name} is {show(value)}; a list of objects is allowed", param=name)
    for at, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise InvalidParameter(
                f"{name}[{at}] is {show(entry)}; an object is allowed", param=name
            )
    return value


def _render(
    template: ChatTemplate, asked: _Asked, *, warns: bool
) -> tuple[Conversation, tuple[str, ...]]:
    """The prompt, and names of variables that were left out. In a thread."""
    if asked.source is None:
        return _render_with(template, asked, warns=warns)
    try:
        return _render_with(template.with_source(asked.source), asked, warns=warns)
    except TokenizerError as error:  # it is the caller's own
        raise InvalidParameter(str(error), param="chat_template") from error


def _render_with(
    template: ChatTemplate, asked: _Asked, *, warns: bool
) -> tuple[Conversation, tuple[str, ...]]:
    variables, ignored = dict(asked.variables), []
    for name in asked.variables:
        if name in OWN_VARIABLES and not warns:
            continue  # refused below
        if name in OWN_VARIABLES or not template.reads(
            name, tools=asked.tools, chat_template=asked.name
        ):
            ignored.append(f"chat_template_kwargs.{name}")
            del variables[name]
    template.check_variables(variables, tools=asked.tools, chat_template=asked.name)
    listed = {"tools": asked.tools, "documents": asked.documents}
    for name in [name for name in listed if listed[name] is not None]:
        try:
            template.check_reads(name, tools=asked.tools, chat_template=asked.name)
        except InvalidParameter:
            if not warns:
                raise
            ignored.append(name)
            listed[name] = None
    tools = listed["tools"]
    of_effort = _of_effort(template, asked)
    if asked.effort is not None and of_effort is None:
        ignored.append("reasoning_effort")
    variables |= of_effort or {}
    text = template.render(
        with_argument_objects(template, asked.messages, tools=tools, chat_template=asked.name),
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        tools=tools,
        documents=listed["documents"],
        chat_template=asked.name,
        **variables,
    )
    source = template.source(tools=tools, chat_template=asked.name)
    conversation = Conversation(text=text, template=source, shows_tools=tools is not None)
    return conversation, tuple(ignored)


def _of_effort(template: ChatTemplate, asked: _Asked) -> dict[str, Any] | None:
    """Return the template's variables for reasoning_effort; None where it cannot be followed.

    A template that reads no degrees but a switch has it switched off by "none" and on by any other
    degree. Variables of chat_template_kwargs precede reasoning_effort.
    """
    if asked.effort not in EFFORTS:
        return None

    def reads(name: str) -> bool:
        return template.reads(name, tools=asked.tools, chat_template=asked.name)

    if any(name in asked.variables and reads(name) for name in ("reasoning_effort", *_SWITCHES)):
        return None
    if reads("reasoning_effort"):
        return {"reasoning_effort": asked.effort}
    switch = next((name for name in _SWITCHES if reads(name)), None)
    return None if switch is None else {switch: asked.effort != "none"}
