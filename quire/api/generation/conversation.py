"""Check the conversation of a request and render it with the model's chat template.

quire/text/messages.py checks messages; this file checks the fields beside them: a template by its
name or as text, documents, tools, reasoning_effort, variables. Tools and documents that the
template does not read are refused, or ignored with unknown_fields="warn". reasoning_effort and
variables are hints: those that the template does not read are ignored and listed in a response
header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.generation.chat_output import ChatOutputParser, Conversation
from quire.api.generation.fields import flag
from quire.api.generation.output_constraints import output_grammar
from quire.api.generation.request_context import RequestContext
from quire.api.generation.thinking_budget import AskedBudget, with_budget
from quire.api.generation.tools import ToolOffer
from quire.base.errors import InvalidParameter, RequestError, TokenizerError
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.output_parsers.selection import select_parsers
from quire.output_parsers.tools import Tools
from quire.text.chat_template import OWN_VARIABLES, ChatTemplate
from quire.text.messages import checked_messages

MAX_MESSAGES = 4096
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Names of the variable that switches reasoning off.
_SWITCHES = ("enable_thinking", "thinking")
MAX_TEMPLATE_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFields:
    """A conversation to render. messages: of the form that `checked_messages` returns; tools: of
    OpenAI's form, which templates read. effort: of EFFORTS; effort_name: of its field. variables:
    further ones of the template. `name` and `source` of a template: at most one is given."""

    messages: list[dict[str, Any]]
    effort: str | None = None
    effort_name: str = "reasoning_effort"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    source: str | None = None


async def rendered(request: RequestContext, fields: ConversationFields) -> Conversation:
    """Render a conversation. Raises RequestError naming the field, and TokenizerError.

    A template is untrusted code that may run for long on little input, so it runs in a thread.
    """
    template = request.engine.template
    if template is None and fields.source is None:
        raise RequestError(
            f"model {request.engine.card.name!r} has no chat template; use /v1/completions, put a "
            "chat_template.jinja into the model's directory, or start the server with "
            "--chat-template"
        )
    if template is None:
        template = ChatTemplate({}, variables=request.engine.tokenizer.special_tokens)
    run = request.run_in_thread if fields.source is None else request.run_slow
    conversation, ignored = await run(_render, template, fields, warns=request.warns)
    request.ignore(*ignored)
    return conversation


def conversation_fields(request: RequestContext, offer: ToolOffer | None) -> ConversationFields:
    """Return the conversation of a request with OpenAI's field names. Raises InvalidParameter.

    offer: the request's tools.
    """
    given = request.given
    trusted = request.config.trust_request_chat_template
    name, source = _template_of(given, request.engine.template, trusted=trusted)
    opens = flag(given, "add_generation_prompt") if "add_generation_prompt" in given else None
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InvalidParameter(
            f"chat_template_kwargs is {show(variables)}; an object is allowed",
            param="chat_template_kwargs",
        )
    return ConversationFields(
        messages=_messages(given.get("messages")),
        effort=_effort(given.get("reasoning_effort")),
        add_generation_prompt=opens,
        continue_final_message=flag(given, "continue_final_message"),
        tools=None if offer is None else offer.shown,
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
    if effort is not None and effort not in EFFORTS:
        raise InvalidParameter(
            f"reasoning_effort is {show(effort)}; {', '.join(EFFORTS)} are allowed",
            param="reasoning_effort",
        )
    return None if effort is None else str(effort)


def _template_of(
    given: Mapping[str, Any], template: ChatTemplate | None, *, trusted: bool
) -> tuple[str | None, str | None]:
    """Return the name of one of the model's templates, or the source that the request brings."""
    name = given.get("chat_template")
    if name is None:
        return None, None
    if not isinstance(name, str):
        raise InvalidParameter(
            f"chat_template is {show(name)}; the name of one of the model's templates is allowed",
            param="chat_template",
        )
    names = () if template is None else template.names
    if name in names or not any(mark in name for mark in ("{{", "{%", "{#")):
        return name, None
    if not trusted:
        raise InvalidParameter(
            "chat_template holds the text of a template, a program that this server does not run "
            "for its clients; name one of the model's templates "
            f"({', '.join(names) or 'it has none'}), or start the server with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    if len(name) > MAX_TEMPLATE_CHARS:
        raise InvalidParameter(
            f"chat_template has {len(name)} characters; at most {MAX_TEMPLATE_CHARS} are allowed "
            "in a request",
            param="chat_template",
        )
    return None, name


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
    template: ChatTemplate, fields: ConversationFields, *, warns: bool
) -> tuple[Conversation, tuple[str, ...]]:
    """Return the prompt and the names that are ignored. Runs in a thread."""
    if fields.source is None:
        return _render_with(template, fields, warns=warns)
    try:
        return _render_with(template.with_source(fields.source), fields, warns=warns)
    except TokenizerError as error:  # the request's own template
        raise InvalidParameter(str(error), param="chat_template") from error


def _render_with(
    template: ChatTemplate, fields: ConversationFields, *, warns: bool
) -> tuple[Conversation, tuple[str, ...]]:
    variables, ignored = dict(fields.variables), []
    for name in fields.variables:
        if name in OWN_VARIABLES and not warns:
            continue  # refused below
        if name in OWN_VARIABLES or not template.reads(
            name, tools=fields.tools, chat_template=fields.name
        ):
            ignored.append(f"chat_template_kwargs.{name}")
            del variables[name]
    template.check_variables(variables, tools=fields.tools, chat_template=fields.name)
    listed = {"tools": fields.tools, "documents": fields.documents}
    for name in [name for name in listed if listed[name] is not None]:
        try:
            template.check_reads(name, tools=fields.tools, chat_template=fields.name)
        except InvalidParameter:
            if not warns:
                raise
            ignored.append(name)
            listed[name] = None
    tools = listed["tools"]
    effort_variables = _effort_variables(template, fields)
    if fields.effort is not None and effort_variables is None:
        ignored.append(fields.effort_name)
    variables |= effort_variables or {}
    text = template.render(
        template.with_argument_objects(fields.messages, tools=tools, chat_template=fields.name),
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        tools=tools,
        documents=listed["documents"],
        chat_template=fields.name,
        **variables,
    )
    source = template.source(tools=tools, chat_template=fields.name)
    conversation = Conversation(text=text, template=source, shows_tools=tools is not None)
    return conversation, tuple(ignored)


def _effort_variables(template: ChatTemplate, fields: ConversationFields) -> dict[str, Any] | None:
    """Return the template's variables for reasoning_effort; None if the template has none.

    A template with a switch instead of degrees has it switched off by "none" and on by any other
    degree. Variables of chat_template_kwargs take precedence over reasoning_effort.
    """
    if fields.effort not in EFFORTS:
        return None

    def reads(name: str) -> bool:
        return template.reads(name, tools=fields.tools, chat_template=fields.name)

    if any(name in fields.variables and reads(name) for name in ("reasoning_effort", *_SWITCHES)):
        return None
    if reads("reasoning_effort"):
        return {"reasoning_effort": fields.effort}
    switch = next((name for name in _SWITCHES if reads(name)), None)
    return None if switch is None else {switch: fields.effort != "none"}


def parsing_of(
    request: RequestContext,
    offer: ToolOffer | None,
    conversation: Conversation,
    sampling: SamplingParams,
    *,
    includes_reasoning: bool,
    call_prefix: str = "call_",
    budget: AskedBudget | None = None,
) -> tuple[SamplingParams, ChatOutputParser | None]:
    """Return the parameters with the answer's grammar, and the parser of answers if they may have
    reasoning or calls. call_prefix: of the ids of calls. budget: most tokens of reasoning."""
    reading = select_parsers(
        conversation.template,
        tool_parser=request.config.tool_call_parser,
        reasoning_parser=request.config.reasoning_parser,
    )
    grammar = sampling.structured_outputs
    if grammar is not None or offer is not None:
        grammar, reading = output_grammar(
            grammar, offer, reading, conversation, request.engine.tokenizer
        )
        sampling = replace(sampling, structured_outputs=grammar)
    if budget is not None:
        sampling = with_budget(request, sampling, reading, conversation.text, budget)
    tools = None
    if offer is not None and conversation.shows_tools and reading.tools is not None:
        tools = Tools(offer.schemas)
    if tools is None and reading.reasoning is None:
        return sampling, None
    parser = ChatOutputParser(
        reading,
        tools,
        prompt=conversation.text,
        request_id=request.answer_id,
        includes_reasoning=includes_reasoning,
        call_prefix=call_prefix,
    )
    return sampling, parser
