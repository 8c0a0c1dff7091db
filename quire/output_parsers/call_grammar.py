"""Build grammars, in llguidance's Lark, that constrain an answer to tool calls.

    text = calls_grammar(syntax, arguments={"add": schema}, must=True, several=False, ...)

Each format writes a call as its own marks, the name, and the arguments as JSON that follows a
schema. Reasoning may precede the calls if the model reasons; free text may precede them only if
calls are optional. Marks that are special tokens are written as token ids, since text does not
match them. This module compiles nothing. Invariant: whatever a grammar allows, the parser of its
format reads as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.output_parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from quire.output_parsers.mistral import ARGUMENTS, CALLS
from quire.output_parsers.reasoning import ReasoningMarks, is_open
from quire.output_parsers.registry import HARMONY
from quire.output_parsers.sections import DEEPSEEK, KIMI
from quire.output_parsers.selection import ParserSelection
from quire.output_parsers.xml_tags import BLOCK, BLOCK_ENDS

_NAME = "NAME"
# An answer in words differs from bare JSON in its first character.
_WORDS = r"/[^{\[`\s](.|\n)*/"
_BARE = re.compile(r'\[?\{"name": "NAME", "(\w+)": ')
# The beginning of a call, split into the lexemes llguidance uses for JSON. A literal that spanned
# several of them would exclude other JSON with the same beginning.
_PARTS = re.compile(r'"[^"]*"|: |, |[\[{]')


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Describe how a format writes calls.

    begin: text before the arguments of a call, with NAME in place of its name. trigger: the mark
    that starts calls within free text; "" if calls are possible only at the beginning of an answer.
    alone: an answer holds at most one call.
    """

    first: str = ""
    begin: str
    end: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""
    alone: bool = False

    def begins(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the possible beginnings of an answer that calls one of these functions."""
        return tuple(self.first + self.begin.replace(_NAME, name) for name in names)

    @property
    def bare_key(self) -> str | None:
        """Return the key of the arguments if calls are JSON without a mark, else None."""
        found = _BARE.fullmatch(self.first + self.begin)
        return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """Constrain an answer without calls: a Lark rule body, optionally followed by more rules.

    is_json: the rule allows only JSON as llguidance writes it.
    """

    text: str
    is_json: bool = False


_OBJECT = '{"name": "NAME", "arguments": '
CALL_SYNTAXES: Mapping[str, CallSyntax] = {
    "hermes": CallSyntax(
        begin=f"{BLOCK}\n{_OBJECT}", end=f"}}\n{BLOCK_ENDS}", between="\n", trigger=BLOCK
    ),
    "llama3_json": CallSyntax(begin='{"name": "NAME", "parameters": ', end="}", between="; "),
    "json": CallSyntax(first="[", begin=_OBJECT, end="}", between=", ", last="]"),
    "mistral": CallSyntax(begin=f"{CALLS}NAME{ARGUMENTS}", trigger=CALLS),
    "deepseek": CallSyntax(
        first=DEEPSEEK.begins,
        begin=f"{DEEPSEEK.call_begins}NAME{DEEPSEEK.separator}",
        end=DEEPSEEK.call_ends,
        last=DEEPSEEK.ends,
        trigger=DEEPSEEK.begins,
    ),
    "kimi": CallSyntax(
        first=KIMI.begins,
        begin=f"{KIMI.call_begins}functions.NAME:0{KIMI.separator}",
        end=KIMI.call_ends,
        last=KIMI.ends,
        trigger=KIMI.begins,
    ),
    "granite": CallSyntax(
        first="<|tool_call|>[",
        begin=_OBJECT,
        end="}",
        between=", ",
        last="]",
        trigger="<|tool_call|>",
    ),
    "phi": CallSyntax(
        first="functools[", begin=_OBJECT, end="}", between=", ", last="]", trigger="functools"
    ),
    HARMONY: CallSyntax(
        begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", alone=True
    ),
}


def call_syntax(dialect: str, template: str) -> CallSyntax | None:
    """Return the syntax of a format as the template writes it; None if its values are not JSON."""
    form = CALL_SYNTAXES.get(dialect)
    if dialect == "mistral" and form is not None and ARGUMENTS not in template:
        return CallSyntax(
            first=f"{CALLS} [", begin=_OBJECT, end="}", between=", ", last="]", trigger=CALLS
        )
    if dialect == "deepseek" and form is not None and "```json" in template:
        return replace(
            form,
            begin=f"{DEEPSEEK.call_begins}function{DEEPSEEK.separator}NAME\n```json\n",
            end=f"\n```{DEEPSEEK.call_ends}",
            between="\n",
        )
    return form


def calls_grammar(
    form: CallSyntax,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    must: bool,
    several: bool,
    reading: ParserSelection,
    prompt: str,
    special: Mapping[str, int],
    answer: AnswerRule | None = None,
) -> str:
    """Return the grammar of an answer with tool calls. `arguments` must not be empty.

    arguments: maps each function's name to its schema, as llguidance takes it. must: a call is
    required; otherwise text is allowed, and calls after it. several: more than one call is allowed.
    prompt: its end decides whether reasoning is open or closed. special: marks that are single
    tokens, with their ids. answer: constraint on an answer without calls; then no text may precede
    calls.
    """
    apart = answer is not None and answer.is_json and form.bare_key is not None
    writer = _Writer(special, calls_in_parts=apart)
    start = _beginning(writer, reading, prompt)
    names = list(arguments)
    for at, name in enumerate(names):
        writer.rule(f"arguments_{at}", f"%json {embedded(arguments[name])}")
    more = ""
    if several and not form.alone:
        writer.rule("call", _one_of(writer, form, names, form.begin))
        more = f"({writer.text(form.between)} call)*" if form.between else "call*"
    # The trigger gets a rule of its own if text may precede it.
    first, begin = form.first, form.begin
    if form.trigger and not must and not answer:
        first = first.removeprefix(form.trigger)
        begin = begin if form.first else begin.removeprefix(form.trigger)
    called = f"{writer.text(first)} {_one_of(writer, form, names, begin)} {more} "
    called += writer.text(form.last)
    if must:
        return writer.grammar(f"{start} {called}")
    if answer:
        writer.rule("words", answer.text)
        final = writer.text(f"{CHANNEL}final{MESSAGE}") if reading.reasoning == HARMONY else ""
        return writer.grammar(f"{start} ({called} | {final} words)")
    if not form.trigger:
        if reading.reasoning == HARMONY:
            writer.rule("any_text", r"/(.|\n)*/")
            writer.rule("words", f"{writer.text(f'{CHANNEL}final{MESSAGE}')} any_text")
        else:
            writer.rule("words", _WORDS)
        return writer.grammar(f"{start} ({called} | words)?")
    writer.rule("words", r"/(.|\n)*/")
    if form.trigger in special:
        return writer.grammar(f"{start} words ({writer.text(form.trigger)} {called})?")
    writer.rule("until_call[lazy]", rf"/(.|\n)*{_pattern(form.trigger)}/")
    return writer.grammar(f"{start} (until_call {called} | words)")


def answer_grammar(
    answer: str, *, reading: ParserSelection, prompt: str, special: Mapping[str, int]
) -> str:
    """Return the Lark grammar of an answer without calls, with optional reasoning before it."""
    writer = _Writer(special)
    start = _beginning(writer, reading, prompt)
    if reading.reasoning == HARMONY:
        start = f"{start} {writer.text(f'{CHANNEL}final{MESSAGE}')}"
    writer.rule("words", answer)
    return writer.grammar(f"{start} words")


def _beginning(writer: _Writer, reading: ParserSelection, prompt: str) -> str:
    """Return the rule of the reasoning before the answer, which the prompt may have opened."""
    if reading.reasoning == HARMONY:
        opens, closes = f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"
        writer.rule("thought", f"{writer.text(opens)} {_up_to(writer, closes)}")
        return "thought?"
    if not isinstance(reading.reasoning, ReasoningMarks):
        return ""
    marks = reading.reasoning
    if prompt.rstrip().endswith(marks.closes):
        return ""
    writer.rule("space", r"/\n{0,2}/")
    thought = f"{_up_to(writer, marks.closes)} space"
    if is_open(prompt, marks):
        return thought
    writer.rule("thought", f"{writer.text(marks.opens)} {thought}")
    return "thought?"


def _up_to(writer: _Writer, closes: str) -> str:
    """Return a rule that matches any text through a mark."""
    opening = next((mark for mark in writer.special if closes.startswith(mark)), None)
    if opening is not None:
        writer.rule("thinking", r"/(.|\n)*/")
        return f"thinking {writer.text(closes)}"
    writer.rule("thinking[lazy]", rf"/(.|\n)*{_pattern(closes)}/")
    return "thinking"


def _one_of(writer: _Writer, form: CallSyntax, names: list[str], begin: str) -> str:
    """Return the alternatives of one call, one for each function."""
    calls = [
        f"{writer.call(begin.replace(_NAME, name))} arguments_{at} {writer.text(form.end)}"
        for at, name in enumerate(names)
    ]
    return f"({' | '.join(calls)})"


class _Writer:
    """Collect rules, and write texts with special tokens as ids."""

    def __init__(self, special: Mapping[str, int], *, calls_in_parts: bool = False) -> None:
        self.special = special
        self._rules: list[str] = []
        self._calls_in_parts = calls_in_parts
        marks = sorted(map(re.escape, special), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(marks)})" if marks else r"((?!))")

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def call(self, begin: str) -> str:
        """Return the literals of a call's beginning."""
        if self._calls_in_parts:
            return " ".join(map(json.dumps, _PARTS.findall(begin)))
        return self.text(begin)

    def text(self, text: str) -> str:
        parts = [part for part in self._marks.split(text) if part]
        return " ".join(
            f"<[{self.special[part]}]>"
            if part in self.special
            else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])


def embedded(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON that cannot be mistaken for a GBNF rule."""
    return json.dumps(schema, ensure_ascii=False).replace("::=", ":\\u003a=")


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
