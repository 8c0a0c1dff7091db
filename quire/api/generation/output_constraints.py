"""Build the grammar of a chat's answer from tool calls, response_format and structured_outputs.

quire/output_parsers/call_grammar.py writes the grammar of calls; reasoning may precede the
constrained part. Compiles nothing. Always holds: a required call is enforced, or the request is
refused with the name of the field that requires it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.api.generation.chat_output import Conversation
from quire.api.generation.content_constraints import content_beside_calls
from quire.api.generation.tools import ToolOffer
from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind, grammar
from quire.output_parsers.call_grammar import (
    AnswerRule,
    CallSyntax,
    answer_grammar,
    call_syntax,
    calls_grammar,
    embedded,
)
from quire.output_parsers.calls_or_content import calls_or_content
from quire.output_parsers.reasoning import ReasoningMarks, is_open
from quire.output_parsers.registry import HARMONY, TOOL_CALL_FORMATS
from quire.output_parsers.selection import ParserSelection
from quire.structured.closed import closed
from quire.structured.schema import for_llguidance
from quire.text.tokenizer import Tokenizer

# The dialect of enforced calls, if the model's own dialect has values that are not JSON.
_SLASHES = re.compile(r"\\.|/|\n")
_INSTEAD = {"qwen3_coder": "hermes", "glm": "hermes", "pythonic": "json"}


def output_grammar(
    requested: Grammar | None,
    offer: ToolOffer | None,
    reading: ParserSelection,
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> tuple[Grammar | None, ParserSelection]:
    """Return the grammar of the answer, None if it is unconstrained, and the reading it needs.

    requested: of response_format or structured_outputs. Raises InvalidParameter.
    """
    ids = {mark: tokenizer.token_id(mark) for mark in reading.marks}
    special = {
        mark: id_ for mark, id_ in ids.items() if id_ is not None and id_ in tokenizer.special_ids
    }
    if not conversation.shows_tools:
        offer = None
    if offer is not None and offer.is_bound:
        reading = _in_json(offer, reading)
        return _calls(requested, offer, reading, conversation, special)
    if requested is None:
        return None, reading
    if offer is not None and reading.tools is not None:
        if call_syntax(reading.tools.name, conversation.template) is None:
            raise InvalidParameter(
                f"{requested.param} and tools are both given, and this model's calls "
                f"({reading.tools.name}) are not written in JSON, so no grammar enforces them; "
                "leave one out",
                param=requested.param,
            )
        return _calls(requested, offer, reading, conversation, special)
    return _behind_reasoning(requested, reading, conversation, special), reading


def _calls(
    requested: Grammar | None,
    offer: ToolOffer,
    reading: ParserSelection,
    conversation: Conversation,
    special: Mapping[str, int],
) -> tuple[Grammar, ParserSelection]:
    """Return the grammar of calls, or of calls and requested content, and its reading."""
    assert reading.tools is not None
    form = call_syntax(reading.tools.name, conversation.template)
    assert form is not None, "a dialect without a form was replaced by one with a form"
    must = offer.mode == "required"
    words = None if must or requested is None else _words(requested, form, offer, reading)
    if words is not None and reading.reasoning != HARMONY:
        begins = form.begins(offer.callable)
        reading = replace(reading, tools=calls_or_content(reading.tools, begins))
    text = calls_grammar(
        form,
        {name: _arguments(offer, name) for name in offer.callable},
        must=must,
        several=offer.parallel,
        reading=reading,
        prompt=conversation.text,
        special=special,
        answer=words,
    )
    return grammar(text, param=offer.param if requested is None else requested.param), reading


def _words(
    requested: Grammar, form: CallSyntax, offer: ToolOffer, reading: ParserSelection
) -> AnswerRule:
    """Return the requested content as an alternative to calls. Harmony's channels separate them."""
    lark = _lark(requested)
    if reading.reasoning == HARMONY:
        return AnswerRule(lark)
    return content_beside_calls(requested, lark, form, offer.callable, options=_options(requested))


def _in_json(offer: ToolOffer, reading: ParserSelection) -> ParserSelection:
    """Return the reading of enforced calls: a dialect with JSON arguments."""
    if reading.tools is None:
        raise InvalidParameter(
            f"{offer.param} needs a grammar of calls, and this server parses no calls "
            "(--tool-call-parser none); leave it out",
            param=offer.param,
        )
    if reading.tools.name not in _INSTEAD:
        return reading
    if offer.mode != "required":
        raise InvalidParameter(
            f"{offer.param} needs a grammar of calls, and this model's calls "
            f"({reading.tools.name}) are not written in JSON; leave it out, or ask for a call "
            '(tool_choice: "required")',
            param=offer.param,
        )
    return replace(reading, tools=TOOL_CALL_FORMATS[_INSTEAD[reading.tools.name]])


def _arguments(offer: ToolOffer, name: str) -> dict[str, Any]:
    """Return the schema of a function's arguments: its own if it is enforced, else any object.

    Unsupported keywords of a schema that is not strict are ignored. Objects are closed: a function
    called with arguments that it does not name would fail.
    """
    strict = name in offer.strict
    own = offer.schemas[name] if strict or offer.mode == "required" else {}
    options = {"lenient": not strict, "coerce_one_of": not strict}
    rewritten = for_llguidance(closed({**own, "type": "object"}))
    assert isinstance(rewritten, dict), "an object's schema stays one"
    return {**rewritten, "x-guidance": {**_separators(None), **options}}


def _behind_reasoning(
    requested: Grammar,
    reading: ParserSelection,
    conversation: Conversation,
    special: Mapping[str, int],
) -> Grammar:
    """Return the requested grammar, preceded by reasoning if the model may reason."""
    marks = reading.reasoning
    if marks is None:
        return requested
    opened = marks == HARMONY or (
        isinstance(marks, ReasoningMarks) and is_open(conversation.text, marks)
    )
    if not opened and requested.kind in (GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG):
        return requested  # the grammar holds from the first token, without reasoning
    text = answer_grammar(
        _lark(requested), reading=reading, prompt=conversation.text, special=special
    )
    return grammar(text, param=requested.param)


def _lark(requested: Grammar) -> str:
    """Return the requested grammar as the body of a Lark rule."""
    match requested.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = for_llguidance(json.loads(requested.text))
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return f"%json {embedded({**schema, 'x-guidance': _options(requested)})}"
        case GrammarKind.REGEX:
            return f"/{_SLASHES.sub(_escaped, requested.text)}/"
        case GrammarKind.CHOICE:
            texts = dict.fromkeys(json.loads(requested.text))
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    raise InvalidParameter(
        f"{requested.param} is a {requested.kind.value}, which does not go with tools or with "
        "reasoning that the template opens: leave tools out, or switch reasoning off "
        '(reasoning_effort: "none")',
        param=requested.param,
    )


def _options(requested: Grammar) -> dict[str, Any]:
    """Return llguidance's options for the requested JSON."""
    return {**_separators(requested.whitespace), "lenient": False, "coerce_one_of": False}


def _escaped(found: re.Match[str]) -> str:
    """Escape slashes and line ends, which would end a regular expression in Lark."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _separators(whitespace: str | None) -> dict[str, Any]:
    """Return the options of white space within JSON, as in quire/structured/source.py."""
    if whitespace is None:
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {**separators, "whitespace_flexible": False}
    return {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
