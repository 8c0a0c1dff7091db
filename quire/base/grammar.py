"""Grammar: what text an answer may be, as a caller writes it; and the check of its outer form.

A record of two texts, so that it crosses to the engine as it is; compiling it is the business of
quire.structured. Knows no grammar's syntax. Always holds: a Grammar's text is within MAX_CHARS and
valid Unicode, and JSON where its kind is written in JSON; two with one digest allow the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.base.thinking_budget import ThinkingBudget, thinking_budget_of

MAX_CHARS = 262_144
MAX_DEPTH = 64  # levels of objects and lists in a schema
MAX_CHOICES = 4_096
MAX_WHITESPACE_CHARS = 256
FIELD = "structured_outputs"
# Digests that are kept: each is read several times a request.
_KEPT_DIGESTS = 64


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts
    GRAMMAR = "grammar"  # Lark as llguidance reads it, or GBNF
    STRUCTURAL_TAG = "structural_tag"  # JSON, as vLLM and SGLang have it
    ANY = "any"  # any tokens, for a budget of reasoning alone; without a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer may be. param: the request's field it came from, which errors name.

    whitespace: a regular expression of what may stand between the parts of JSON; None: a space
    behind each comma and colon, nothing else ("" allows none at all). thinking: a limit of the
    reasoning before the text.
    """

    kind: GrammarKind
    text: str
    param: str = FIELD
    whitespace: str | None = None
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise InvalidParameter(
                f"{self.param} has {len(self.text)} characters; at most {MAX_CHARS} are allowed",
                param=self.param,
            )
        for text in (self.text, self.whitespace or ""):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidParameter(
                    f"{self.param} holds a lone surrogate, half of a character, which no text can "
                    "hold; send whole characters",
                    param=self.param,
                ) from None

    @property
    def digest(self) -> bytes:
        """Equal for equal languages, whatever field they came from."""
        return _digest(self)


@lru_cache(maxsize=_KEPT_DIGESTS)
def _digest(grammar: Grammar) -> bytes:
    whitespace = grammar.whitespace
    parts = (grammar.kind.value, grammar.text, "" if whitespace is None else whitespace)
    content = json.dumps((*parts, whitespace is None))
    if (budget := grammar.thinking) is not None:
        content += json.dumps((budget.form, budget.param))  # errors name the field
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def json_schema(
    schema: Mapping[str, Any] | bool | str, *, param: str = FIELD, whitespace: str | None = None
) -> Grammar:
    """JSON that a schema allows; a text is the schema written down."""
    if isinstance(schema, str):
        schema = _parsed(schema, f"{param}.json", param)
    if not isinstance(schema, bool | Mapping):
        raise InvalidParameter(
            f"{param}: the schema is {show(schema)}; an object is allowed", param=param
        )
    _check_depth(schema, param)
    return Grammar(
        kind=GrammarKind.JSON_SCHEMA,
        text=_written(schema, param),
        param=param,
        whitespace=whitespace,
    )


def json_object(*, param: str = FIELD, whitespace: str | None = None) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param=param, whitespace=whitespace)


def regex(pattern: str, *, param: str = FIELD) -> Grammar:
    """Return text that a regular expression matches as a whole (Rust's syntax: no look-around)."""
    return Grammar(kind=GrammarKind.REGEX, text=_text(pattern, "regex", param), param=param)


def choice(texts: Iterable[str], *, param: str = FIELD) -> Grammar:
    """Return one of some texts."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise InvalidParameter(
            f"{param}: choice is {show(texts)}; a list of strings is allowed", param=param
        )
    chosen = tuple(texts)
    if not 0 < len(chosen) <= MAX_CHOICES:
        raise InvalidParameter(
            f"{param}: choice has {len(chosen)} strings; 1 to {MAX_CHOICES} are allowed",
            param=param,
        )
    for text in chosen:
        if not isinstance(text, str) or not text:
            raise InvalidParameter(
                f"{param}: choice holds {show(text)}; strings of at least one character are "
                "allowed",
                param=param,
            )
    return Grammar(kind=GrammarKind.CHOICE, text=_written(list(chosen), param), param=param)


def grammar(text: str, *, param: str = FIELD) -> Grammar:
    """Return a context-free grammar: Lark as llguidance reads it (rules `start: ...`), or GBNF
    (`root ::= ...`). Lark takes JSON schemas as `%json {...}`."""
    return Grammar(kind=GrammarKind.GRAMMAR, text=_text(text, "grammar", param), param=param)


def structural_tag(tag: Mapping[str, Any] | str, *, param: str = FIELD) -> Grammar:
    """Free text with parts in it that follow schemas, from their triggers on."""
    if isinstance(tag, str):
        tag = _parsed(tag, f"{param}.structural_tag", param)
    if not isinstance(tag, Mapping):
        raise InvalidParameter(
            f"{param}: structural_tag is {show(tag)}; an object is allowed", param=param
        )
    _check_depth(tag, param)
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=_written(tag, param), param=param)


def grammar_of(value: Mapping[str, Any], *, param: str = FIELD) -> Grammar:
    """Return the grammar that an object of vLLM's form asks for: exactly one of json, json_object,
    regex, choice, grammar and structural_tag; beside json and json_object perhaps
    whitespace_pattern or disable_any_whitespace. thinking (thinking_budget_of) may be beside it, or
    alone. Raises InvalidParameter naming what else it has."""
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"{param} is {show(value)}; an object is allowed", param=param)
    given = {name: entry for name, entry in value.items() if entry is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    if isinstance(given.get("disable_fallback"), bool):
        del given["disable_fallback"]  # there is nothing to fall back to
    if (thinking := given.pop(_THINKING, None)) is not None:
        budget = thinking_budget_of(thinking, param=param)
        if not given:
            return Grammar(kind=GrammarKind.ANY, text="", param=param, thinking=budget)
        return replace(grammar_of(given, param=param), thinking=budget)
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    for name in given:
        if name not in _FORMS:
            why = _REFUSED.get(name, "")
            raise InvalidParameter(
                f"{param} has {show(name)}, which is not served{why}; allowed is one of "
                f"{', '.join(_FORMS)}, with {' or '.join(_OPTIONS)} beside json",
                param=param,
            )
    if len(given) != 1:
        raise InvalidParameter(
            f"{param} has {' and '.join(given) or 'nothing'}; exactly one of "
            f"{', '.join(_FORMS)} is allowed",
            param=param,
        )
    [(form, entry)] = given.items()
    if options and form not in ("json", "json_object"):
        raise InvalidParameter(
            f"{param} has {show(next(iter(options)))} beside {form}; it goes with json and "
            "json_object only: leave it out",
            param=param,
        )
    whitespace = _whitespace(options, param)
    if form == "json":
        return json_schema(entry, param=param, whitespace=whitespace)
    if form == "json_object":
        if entry is not True:
            raise InvalidParameter(
                f"{param}: json_object is {show(entry)}; true is allowed", param=param
            )
        return json_object(param=param, whitespace=whitespace)
    makers = {
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "structural_tag": structural_tag,
    }
    return makers[form](entry, param=param)


_FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
_THINKING = "thinking"
_REFUSED = {
    "disable_additional_properties": " (write additionalProperties: false into the schema)",
    "backend": " (there is one: llguidance)",
}


def _whitespace(options: Mapping[str, Any], param: str) -> str | None:
    compact, pattern = (
        options.get("disable_any_whitespace", False),
        options.get("whitespace_pattern"),
    )
    if not isinstance(compact, bool):
        raise InvalidParameter(
            f"{param}: disable_any_whitespace is {show(compact)}; true or false is allowed",
            param=param,
        )
    if compact and pattern is not None:
        raise InvalidParameter(
            f"{param} has both whitespace_pattern and disable_any_whitespace; give one", param=param
        )
    if compact:
        return ""
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_WHITESPACE_CHARS:
        raise InvalidParameter(
            f"{param}: whitespace_pattern is {show(pattern)}; a regular expression of 1 to "
            f"{MAX_WHITESPACE_CHARS} characters is allowed",
            param=param,
        )
    return pattern


def _text(value: Any, what: str, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(
            f"{param}: {what} is {show(value)}; a text of at least one character is allowed",
            param=param,
        )
    return value


def _parsed(text: str, path: str, param: str) -> Any:
    if len(text) > MAX_CHARS:
        raise InvalidParameter(
            f"{path} has {len(text)} characters; at most {MAX_CHARS} are allowed", param=param
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(
            f"{path} is a text that is not JSON ({str(error)[:100]}); send an object, or one "
            "written as JSON",
            param=param,
        ) from None


def _written(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidParameter(
            f"{param} holds what JSON cannot ({str(error)[:100]}); allowed are texts, numbers, "
            "true, false, null, lists and objects of them",
            param=param,
        ) from None


def _check_depth(value: Any, param: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [
            item
            for items in inner
            if not isinstance(items, bool)
            for item in items
            if isinstance(item, Mapping | list | tuple)
        ]
        if not level:
            return
    raise InvalidParameter(
        f"{param} is nested in more than {MAX_DEPTH} levels; flatten it, with $ref where parts "
        "repeat",
        param=param,
    )
