"""Grammars of tool calls: the text, in llguidance's Lark, that an answer which has to call may be.

    text = calls_grammar(form, arguments={"add": schema}, must=True, several=False, ...)

Each dialect writes a call as its own marks, the name, and the arguments as JSON; a schema says
which. Reasoning may come first, where the model reasons; free text only where no call must come.
Marks that are special tokens are named by their ids, since no text matches them. Knows no model;
compiles nothing. Always holds: what a grammar allows, its dialect's parser reads as calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.output_parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from quire.output_parsers.mistral import ARGUMENTS, CALLS
from quire.output_parsers.reasoning import Marks, is_open
from quire.output_parsers.registry import HARMONY, Reading
from quire.output_parsers.sections import DEEPSEEK, KIMI
from quire.output_parsers.xml_tags import BLOCK, BLOCK_ENDS

_NAME = "NAME"
# Bare JSON is told from an answer in words by how it begins.
_WORDS = r"/[^{\[`\s](.|\n)*/"
_BARE = re.compile(r'\[?\{"name": "NAME", "(\w+)": ')
# A call's beginning in the parts llguidance reads JSON by: one that ran over several of them would
# leave no way on for JSON that begins alike.
_PARTS = re.compile(r'"[^"]*"|: |, |[\[{]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How calls are written. begin: of one call, NAME stands for its name; its arguments follow.

    trigger: the mark with which calls begin within free text; "" where only an answer's beginning
    can be a call. alone: several calls cannot stand in one answer.
    """

    first: str = ""
    begin: str
    end: str = ""
    between: str = ""
    last: str = ""
    trigger: str = ""
    alone: bool = False

    def begins(self, names: Iterable[str]) -> tuple[str, ...]:
        """How an answer begins that is a call of one of these functions."""
        return tuple(self.first + self.begin.replace(_NAME, name) for name in names)

    @property
    def bare_key(self) -> str | None:
        """What the arguments are called, where calls are JSON without a mark; else None."""
        found = _BARE.fullmatch(self.first + self.begin)
        return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class Words:
    """What an answer in words has to be: a rule's body in Lark; more rules may stand behind it.

    is_json: it is JSON, as llguidance writes that.
    """

    text: str
    is_json: bool = False


_OBJECT = '{"name": "NAME", "arguments": '
FORMS: Mapping[str, Form] = {
    "hermes": Form(
        begin=f"{BLOCK}\n{_OBJECT}", end=f"}}\n{BLOCK_ENDS}", between="\n", trigger=BLOCK
    ),
    "llama3_json": Form(begin='{"name": "NAME", "parameters": ', end="}", between="; "),
    "json": Form(first="[", begin=_OBJECT, end="}", between=", ", last="]"),
    "mistral": Form(begin=f"{CALLS}NAME{ARGUMENTS}", trigger=CALLS),
    "deepseek": Form(
        first=DEEPSEEK.begins,
        begin=f"{DEEPSEEK.call_begins}NAME{DEEPSEEK.separator}",
        end=DEEPSEEK.call_ends,
        last=DEEPSEEK.ends,
        trigger=DEEPSEEK.begins,
    ),
    "kimi": Form(
        first=KIMI.begins,
        begin=f"{KIMI.call_begins}functions.NAME:0{KIMI.separator}",
        end=KIMI.call_ends,
        last=KIMI.ends,
        trigger=KIMI.begins,
    ),
    "granite": Form(
        first="<|tool_call|>[",
        begin=_OBJECT,
        end="}",
        between=", ",
        last="]",
        trigger="<|tool_call|>",
    ),
    "phi": Form(
        first="functools[", begin=_OBJECT, end="}", between=", ", last="]", trigger="functools"
    ),
    HARMONY: Form(
        begin=f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", alone=True
    ),
}


def form_of(dialect: str, template: str) -> Form | None:
    """The form of a dialect, as a template writes it; None where values are not JSON."""
    form = FORMS.get(dialect)
    if dialect == "mistral" and form is not None and ARGUMENTS not in template:
        return Form(
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
    form: Form,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    must: bool,
    several: bool,
    reading: Reading,
    prompt: str,
    special: Mapping[str, int],
    answer: Words | None = None,
) -> str:
    """The grammar. arguments: a schema, as llguidance takes it, for each function's name.

    must: a call has to come; else words may, and calls behind them. several: more than one may.
    prompt: its end tells whether reasoning is open or over. special: marks that are tokens of
    their own, with their ids. answer: what an answer in words has to be; then none come before
    calls. At least one function is needed.
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
    # The trigger is written apart where words may come before it.
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
    answer: str, *, reading: Reading, prompt: str, special: Mapping[str, int]
) -> str:
    """The grammar of an answer, in Lark, that reasoning may come before."""
    writer = _Writer(special)
    start = _beginning(writer, reading, prompt)
    if reading.reasoning == HARMONY:
        start = f"{start} {writer.text(f'{CHANNEL}final{MESSAGE}')}"
    writer.rule("words", answer)
    return writer.grammar(f"{start} words")


def _beginning(writer: _Writer, reading: Reading, prompt: str) -> str:
    """What may come before all else: reasoning, open already or not."""
    if reading.reasoning == HARMONY:
        opens, closes = f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"
        writer.rule("thought", f"{writer.text(opens)} {_up_to(writer, closes)}")
        return "thought?"
    if not isinstance(reading.reasoning, Marks):
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
    """Any text and then a mark."""
    opening = next((mark for mark in writer.special if closes.startswith(mark)), None)
    if opening is not None:
        writer.rule("thinking", r"/(.|\n)*/")
        return f"thinking {writer.text(closes)}"
    writer.rule("thinking[lazy]", rf"/(.|\n)*{_pattern(closes)}/")
    return "thinking"


def _one_of(writer: _Writer, form: Form, names: list[str], begin: str) -> str:
    """A call of any of the functions."""
    calls = [
        f"{writer.call(begin.replace(_NAME, name))} arguments_{at} {writer.text(form.end)}"
        for at, name in enumerate(names)
    ]
    return f"({' | '.join(calls)})"


class _Writer:
    """Rules, and texts in which special tokens stand by their ids."""

    def __init__(self, special: Mapping[str, int], *, calls_in_parts: bool = False) -> None:
        self.special = special
        self._rules: list[str] = []
        self._calls_in_parts = calls_in_parts
        marks = sorted(map(re.escape, special), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(marks)})" if marks else r"((?!))")

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def call(self, begin: str) -> str:
        """How a call begins."""
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
    """A schema as JSON that no reader takes for a GBNF rule."""
    return json.dumps(schema, ensure_ascii=False).replace("::=", ":\\u003a=")


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
