"""Convert a Grammar to llguidance's languages.

Only GBNF and structural tags are compiled here, to Lark. Knows no tokens but the names of special
ones. Invariant: a schema's reference is resolved within the schema, never fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.show import show
from quire.structured.gbnf import lark_of
from quire.structured.rejection import rejection
from quire.structured.schema import each_schema, for_llguidance
from quire.structured.schema_form import check_form
from quire.structured.unique_plan import NotTrackable, planned

MAX_GBNF_CHARS = 65_536
_PLAN = "x-quire-unique-items"


def llguidance_grammar(grammar: Grammar, special_names: frozenset[str]) -> str:
    """Return the grammar in the form LLMatcher takes. special_names: tokens that have no text.

    Raises InvalidParameter for a grammar that is malformed.
    """
    from llguidance import LLMatcher

    text: str
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            check_form(schema, grammar.param)
            schema = for_llguidance(schema)
            if schema is False:
                raise rejection(grammar, "Unsatisfiable schema: schema is false")
            schema = _with_plan(grammar, {} if schema is True else schema)
            text = LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(grammar))
        case GrammarKind.REGEX:
            if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
                raise rejection(grammar, "the backslash at its end escapes nothing")
            text = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            text = LLMatcher.grammar_from_lark(_one_of(json.loads(grammar.text)))
        case GrammarKind.GRAMMAR:
            text = LLMatcher.grammar_from_lark(_lark(grammar))
        case GrammarKind.STRUCTURAL_TAG:
            text = _structural_tag(grammar, special_names)
    return text


def unique_plan(grammar: Grammar, source: str) -> dict[str, Any] | None:
    """Return the plan to enforce uniqueItems (unique_plan.py). source: llguidance's form."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA or _PLAN not in source:
        return None
    plan: dict[str, Any] | None = json.loads(source)["grammars"][0]["json_schema"].get(_PLAN)
    return plan


def _with_plan(grammar: Grammar, schema: Any) -> Any:
    """Replace uniqueItems by the plan to enforce it, under a keyword that llguidance ignores."""
    if not isinstance(schema, dict):
        return schema
    schema = {name: value for name, value in schema.items() if name != _PLAN}  # a client's own
    try:
        stripped, plan = planned(schema)
    except NotTrackable as error:
        paths = [path for path, at in each_schema(schema) if at is error.at]
        path = f"{paths[0] if paths else '#'}{'/uniqueItems' if 'uniqueItems' in error.at else ''}"
        raise InvalidParameter(
            f"{grammar.param}: the schema has uniqueItems (at {path}), which cannot be enforced "
            f"there: {error}; rewrite the schema without it",
            param=grammar.param,
        ) from None
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return schema  # malformed: llguidance explains it
    return stripped if plan is None else {**stripped, _PLAN: plan}


def _json_options(grammar: Grammar) -> Any:
    """Return the options for white space, without approximations.

    By default one space follows commas and colons and there is no other white space: an answer
    cannot continue with endless white space, and fewer tokens are ambiguous.
    """
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if grammar.whitespace is None:
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {**options, **separators, "whitespace_flexible": False}
    if not grammar.whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": grammar.whitespace}


def _literal(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)


def _one_of(texts: list[str]) -> str:
    return "start: " + " | ".join(map(_literal, dict.fromkeys(texts)))


def _lark(grammar: Grammar) -> str:
    if "::=" not in grammar.text:
        return grammar.text
    if len(grammar.text) > MAX_GBNF_CHARS:
        raise InvalidParameter(
            f"{grammar.param}: the GBNF grammar has {len(grammar.text)} characters; at most "
            f"{MAX_GBNF_CHARS} are allowed: write it as Lark",
            param=grammar.param,
        )
    try:
        return lark_of(grammar.text)
    except (Exception, RecursionError) as error:  # noqa: BLE001  third-party parser
        raise rejection(grammar, f"it is not valid GBNF: {str(error)[:200]}") from None


def _structural_tag(grammar: Grammar, special_names: frozenset[str]) -> str:
    from llguidance import StructTag

    tags = [
        StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
        for trigger, begin, schema, end in _structures(grammar)
    ]
    # A trigger that is a special token is a single token, not its characters.
    kinds = {tag.trigger in special_names for tag in tags}
    if len(kinds) > 1:
        raise InvalidParameter(
            f"{grammar.param}: some triggers are special tokens of the model and some are text; "
            "make all of them one or the other",
            param=grammar.param,
        )
    return StructTag.to_grammar(tags, assume_special=kinds == {True})


def _structures(grammar: Grammar) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield each structure's trigger, begin, schema and end."""
    tag, param = json.loads(grammar.text), grammar.param
    unknown = tag.keys() - {"type", "structures", "triggers"}
    if tag.get("type", "structural_tag") != "structural_tag" or unknown:
        extra = ", ".join(sorted(unknown)) or show(tag.get("type"))
        raise InvalidParameter(
            f"{param}: structural_tag has {extra}; allowed are structures and triggers (the form "
            "with format is not supported)",
            param=param,
        )
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not _texts(triggers) or not isinstance(structures, list) or not structures:
        raise InvalidParameter(
            f"{param}: structural_tag needs structures, a list of objects, and triggers, a list "
            "of strings; neither may be empty",
            param=param,
        )
    for place, structure in enumerate(structures):
        known = {"begin", "schema", "end"}
        if not isinstance(structure, dict) or structure.keys() - known or "begin" not in structure:
            raise InvalidParameter(
                f"{param}: structures[{place}] is {show(structure)}; an object with begin, schema "
                "and end is allowed",
                param=param,
            )
        begin, end = structure["begin"], structure.get("end", "")
        schema = structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise InvalidParameter(
                f"{param}: structures[{place}] needs strings as begin and end, and an object "
                "as schema",
                param=param,
            )
        check_form(schema, f"{param}: structures[{place}].schema", param=param)
        starts = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not starts:
            raise InvalidParameter(
                f"{param}: structures[{place}] begins with {show(begin)}, which begins with none "
                f"of the triggers {show(triggers)}",
                param=param,
            )
        yield max(starts, key=len), begin, for_llguidance(schema), end


def _texts(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(text, str) and text for text in value)
