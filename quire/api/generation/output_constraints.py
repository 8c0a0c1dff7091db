"""What a chat's answer is held to: calls that must come, their arguments, the form of its words.

Calls as quire/output_parsers/call_grammar.py writes them, and what response_format and
structured_outputs say; where the model reasons, its reasoning may come before either. Compiles
nothing. Always holds: a call that was asked for comes, or the request is refused by the name of
the field that asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.api.generation.content_constraints import content_beside_calls
from quire.api.generation.conversation import Conversation
from quire.api.generation.tools import Offer
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
from quire.output_parsers.registry import HARMONY, TOOL_CALL_FORMATS, ParserSelection
from quire.structured.closed import closed
from quire.structured.schema import for_llguidance
from quire.text.tokenizer import Tokenizer

# In what dialect calls that must come are written, where the model's own has values without JSON.
_SLASHES = re.compile(r"\\.|/|\n")
_INSTEAD = {"qwen3_coder": "hermes", "glm": "hermes", "pythonic": "json"}


def output_grammar(
    asked: Grammar | None,
    offer: Offer,
    reading: ParserSelection,
    conversation: Conversation,
    tokenizer: Tokenizer,
) -> tuple[Grammar | None, ParserSelection]:
    """The grammar of the answer, if there has to be one, and how the answer is read then.

    asked: of response_format or structured_outputs. Raises InvalidParameter.
    """
    ids = {mark: tokenizer.token_id(mark) for mark in reading.marks}
    special = {
        mark: id_ for mark, id_ in ids.items() if id_ is not None and id_ in tokenizer.special_ids
    }
    shown = conversation.shows_tools
    if shown and offer.is_bound:
        reading = _in_json(offer, reading)
        return _calls(asked, offer, reading, conversation, special)
    if asked is None:
        return None, reading
    if shown and reading.tools is not None:
        if call_syntax(reading.tools.name, conversation.template) is None:
            raise InvalidParameter(
                f"{asked.param} and tools are both given, and this model's calls "
                f"({reading.tools.name}) are not written in JSON, so that no grammar holds them; "
                "leave one out",
                param=asked.param,
            )
        return _calls(asked, offer, reading, conversation, special)
    return _behind_reasoning(asked, reading, conversation, special), reading


def _calls(
    asked: Grammar | None,
    offer: Offer,
    reading: ParserSelection,
    conversation: Conversation,
    special: Mapping[str, int],
) -> tuple[Grammar, ParserSelection]:
    """The grammar of calls, or of the answer that was asked for beside them, and its reading."""
    assert reading.tools is not None
    form = call_syntax(reading.tools.name, conversation.template)
    assert form is not None, "a dialect without a form was exchanged for one with"
    must = offer.mode == "required"
    words = None if must or asked is None else _words(asked, form, offer, reading)
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
    return grammar(text, param=offer.param if asked is None else asked.param), reading


def _words(asked: Grammar, form: CallSyntax, offer: Offer, reading: ParserSelection) -> AnswerRule:
    """What was asked for, beside calls. In channels nothing is both."""
    lark = _lark(asked)
    if reading.reasoning == HARMONY:
        return AnswerRule(lark)
    return content_beside_calls(asked, lark, form, offer.callable, options=_options(asked))


def _in_json(offer: Offer, reading: ParserSelection) -> ParserSelection:
    """How calls are read that a grammar holds: always by a dialect whose arguments are JSON."""
    if reading.tools is None:
        raise InvalidParameter(
            f"{offer.param} asks for what a grammar of calls would hold, and this server reads no "
            "calls (--tool-call-parser none); leave it out",
            param=offer.param,
        )
    if reading.tools.name not in _INSTEAD:
        return reading
    if offer.mode != "required":
        raise InvalidParameter(
            f"{offer.param} asks for what a grammar of calls would hold, and this model's calls "
            f"({reading.tools.name}) are not written in JSON; leave it out, or ask for a call "
            '(tool_choice: "required")',
            param=offer.param,
        )
    return replace(reading, tools=TOOL_CALL_FORMATS[_INSTEAD[reading.tools.name]])


def _arguments(offer: Offer, name: str) -> dict[str, Any]:
    """The schema of a function's arguments: its own where it is to be followed, else any object.

    Of a schema that is not strict, keywords that cannot be followed say nothing. Its objects are
    closed: a function called with arguments it does not name would fail.
    """
    strict = name in offer.strict
    own = offer.schemas[name] if strict or offer.mode == "required" else {}
    options = {"lenient": not strict, "coerce_one_of": not strict}
    rewritten = for_llguidance(closed({**own, "type": "object"}))
    assert isinstance(rewritten, dict), "an object's schema stays one"
    return {**rewritten, "x-guidance": {**_separators(None), **options}}


def _behind_reasoning(
    asked: Grammar, reading: ParserSelection, conversation: Conversation, special: Mapping[str, int]
) -> Grammar:
    """What was asked for, behind reasoning where there may be some."""
    marks = reading.reasoning
    if marks is None:
        return asked
    opened = marks == HARMONY or (
        isinstance(marks, ReasoningMarks) and is_open(conversation.text, marks)
    )
    if not opened and asked.kind in (GrammarKind.GRAMMAR, GrammarKind.STRUCTURAL_TAG):
        return asked  # the answer is as asked from its first token, without reasoning
    text = answer_grammar(_lark(asked), reading=reading, prompt=conversation.text, special=special)
    return grammar(text, param=asked.param)


def _lark(asked: Grammar) -> str:
    """What was asked for as the body of a rule."""
    match asked.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = for_llguidance(json.loads(asked.text))
            if isinstance(schema, bool):
                schema = {} if schema else {"not": {}}
            return f"%json {embedded({**schema, 'x-guidance': _options(asked)})}"
        case GrammarKind.REGEX:
            return f"/{_SLASHES.sub(_escaped, asked.text)}/"
        case GrammarKind.CHOICE:
            texts = dict.fromkeys(json.loads(asked.text))
            return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    raise InvalidParameter(
        f"{asked.param} is a {asked.kind.value}, which does not go with tools or with reasoning "
        "that the template opens: leave tools out, or switch reasoning off (reasoning_effort: "
        '"none")',
        param=asked.param,
    )


def _options(asked: Grammar) -> dict[str, Any]:
    """How the JSON that was asked for is written."""
    return {**_separators(asked.whitespace), "lenient": False, "coerce_one_of": False}


def _escaped(found: re.Match[str]) -> str:
    """A slash would end a regular expression in Lark, and so would the end of a line."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _separators(whitespace: str | None) -> dict[str, Any]:
    """White space within JSON, as quire/structured/source.py has it."""
    if whitespace is None:
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {**separators, "whitespace_flexible": False}
    return {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
