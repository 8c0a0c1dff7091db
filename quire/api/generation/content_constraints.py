"""Exclude content that begins like a tool call from the grammar of constrained content.

    words = content_beside_calls(requested, written, form, names, options=...)

Llama writes a call as a JSON object, and constrained content may be one too. Text that begins like
a call is parsed as one (quire/output_parsers/calls_or_content.py), so content may not begin so.
Compiles nothing. Always holds: no text of the grammar could be both, or the request is refused with
the name of the field that constrains the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.show import show
from quire.output_parsers.call_grammar import AnswerRule, CallSyntax, embedded
from quire.structured.call_beginnings import may_begin

# A string as llguidance writes it, as a terminal.
_TEXT = r'/"([^"\\\x00-\x1f\x7f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/'


def content_beside_calls(
    requested: Grammar,
    written: str,
    form: CallSyntax,
    names: Sequence[str],
    *,
    options: Mapping[str, Any],
) -> AnswerRule:
    """Return the requested content without texts that begin like a call of one of these functions.

    written: the requested content as the body of a Lark rule. options: llguidance's options for its
    JSON. Raises InvalidParameter.
    """
    begins = form.begins(names)
    if requested.kind is GrammarKind.REGEX:
        calls = "|".join(map(_pattern, begins))
        return AnswerRule(f"NO_CALL\nNO_CALL: {written} & ~/({calls})(.|\\n)*/")
    if requested.kind is GrammarKind.CHOICE:
        for text in json.loads(requested.text):
            if text.startswith(begins):
                raise _refusal(requested, f"the choice has {show(text)}, which begins")
        return AnswerRule(written)
    key = form.bare_key
    if key is None or requested.whitespace == "":  # no JSON begins like a call
        return AnswerRule(written, is_json=True)
    schema, in_list = json.loads(requested.text), bool(form.first)
    if not may_begin(schema, names=names, key=key, in_list=in_list):
        return AnswerRule(written, is_json=True)
    if schema == {"type": "object"} and requested.whitespace is None:
        return AnswerRule(_other_objects(names, key, options), is_json=True)
    raise _refusal(requested, "the schema allows an answer that begins")


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _refusal(requested: Grammar, what: str) -> InvalidParameter:
    return InvalidParameter(
        f"{requested.param}: {what} as this model's calls of the request's tools do, so that the "
        "two cannot be distinguished; have it begin with a required property that calls do not "
        "have, rename the tools, or leave one of both out",
        param=requested.param,
    )


def _other_objects(names: Sequence[str], key: str, options: Mapping[str, Any]) -> str:
    """Return a Lark rule of all objects except those that begin {"name": NAME, KEY: ..."""

    def in_json(**schema: Any) -> str:
        return f"%json {embedded({**schema, 'x-guidance': dict(options)})}"

    name = f'{json.dumps(json.dumps("name"))} ": "'
    kinds = ["object", "array", "null", "number", "boolean"]
    rules = {
        "first": f'NO_NAME ": " value | {name} (NO_TOOL | no_text)',
        "second": 'NO_ARGUMENTS ": " value',
        "more": '(", " TEXT ": " value)*',
        "value": in_json(),
        "no_text": in_json(type=kinds),
        "TEXT": _TEXT,
        "TOOL": " | ".join(json.dumps(json.dumps(tool)) for tool in names),
        "NO_TOOL": "TEXT & ~TOOL",
        "NO_NAME": f"TEXT & ~{json.dumps(json.dumps('name'))}",
        "NO_ARGUMENTS": f"TEXT & ~{json.dumps(json.dumps(key))}",
    }
    body = f'"{{" (first more | {name} TOOL (", " second more)?)? "}}"'
    return "\n".join([body, *(f"{rule}: {text}" for rule, text in rules.items())])
