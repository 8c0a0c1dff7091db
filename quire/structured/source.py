"""Convert a Grammar to llguidance's languages, and its complaints to instructive errors.

Only GBNF and structural tags are compiled here, to Lark. Knows no tokens but the names of special
ones. Invariant: a schema's reference is resolved within the schema, never fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.show import show
from quire.structured.gbnf import lark_of
from quire.structured.schema import each_schema, for_llguidance, path_of
from quire.structured.unique_plan import NotTrackable, planned

MAX_GBNF_CHARS = 65_536
_MAX_MESSAGE_CHARS = 400
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])", re.DOTALL)
_TOO_WIDE = re.compile(r"Current row has (\d+) items; max is (\d+)")
_IN_SCHEMA = re.compile(
    r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?\Z", re.DOTALL
)
_PLAN = "x-quire-unique-items"
_TYPE = re.compile(r"Invalid type: (.*)")
_FORMAT = re.compile(r"Unknown format: (.*)")


def llguidance_grammar(grammar: Grammar, special_names: frozenset[str]) -> str:
    """Return the grammar in the form LLMatcher takes. special_names: tokens that have no text.

    Raises InvalidParameter for a grammar that is malformed.
    """
    from llguidance import LLMatcher

    text: str
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = for_llguidance(json.loads(grammar.text))
            if schema is False:
                raise rejection(grammar, "Unsatisfiable schema: schema is false")
            schema = _with_plan(grammar, {} if schema is True else schema)
            text = LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(grammar))
        case GrammarKind.REGEX:
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


def rejection(grammar: Grammar, complaint: str) -> InvalidParameter:
    """Return the error for a complaint of llguidance."""
    message = complaint.split("<state>")[0].split("<backtrace>")[0].strip()
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return InvalidParameter(
            f"{grammar.param}: {_of_schema(json.loads(grammar.text), message)}", param=grammar.param
        )
    if (embedded := _embedded_schema(grammar, message)) is not None:
        schema, message = embedded
        return InvalidParameter(
            f"{grammar.param}: {_of_schema(schema, message)}", param=grammar.param
        )
    what = {
        GrammarKind.REGEX: "the regular expression",
        GrammarKind.CHOICE: "the choice",
        GrammarKind.GRAMMAR: "the grammar",
        GrammarKind.STRUCTURAL_TAG: "the structural tag",
    }[grammar.kind]
    return InvalidParameter(
        f"{grammar.param}: {what} cannot be used: {_cut(message)}", param=grammar.param
    )


def _embedded_schema(grammar: Grammar, message: str) -> tuple[Any, str] | None:
    """Return the schema within a Lark grammar that a complaint is about, and the complaint itself.

    The listing of the grammar is removed from the complaint. None if it is about something else.
    """
    found = _IN_SCHEMA.match(message)
    lines = grammar.text.split("\n")
    if grammar.kind is not GrammarKind.GRAMMAR or found is None or int(found[1]) > len(lines):
        return None
    _, _, schema = lines[int(found[1]) - 1].partition("%json ")
    try:
        return json.JSONDecoder().raw_decode(schema)[0], found[2].strip()
    except ValueError:
        return None


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


def _of_schema(schema: Any, message: str) -> str:
    if (found := _UNIMPLEMENTED.search(message)) is not None:
        keys: list[str] = json.loads(found[1])
        places = [path_of(schema, key) for key in keys]
        named = ", ".join(
            f"{key} (at {place})" if place else key for key, place in zip(keys, places, strict=True)
        )
        return (
            f"the schema has keywords that are not supported: {named}; rewrite it without them "
            "(docs/structured-output.md lists what is)"
        )
    if (found := _FORMAT.search(message)) is not None:
        place = path_of(schema, "format", found[1].strip())
        return (
            f"the schema has the format {show(found[1].strip())}"
            f"{f' (at {place})' if place else ''}, which is not supported; leave it out, or write "
            "it as a pattern"
        )
    if "oneOf constraints are not supported" in message:
        return (
            f"the schema has a oneOf (at {_unresolved_path(schema, 'oneOf')}), and its "
            "alternatives are not known to exclude each other; give each object a required "
            "property with a const of its own, or write anyOf"
        )
    if _TOO_WIDE.search(message) is not None:
        return (
            "the schema has too many alternatives at one place, such as an object with more than "
            "about 1,600 optional properties; make them required, which fixes their order, or "
            "distribute them among several objects"
        )
    if (found := _TYPE.search(message)) is not None:
        place = path_of(schema, "type", found[1].strip())
        return (
            f"the schema has the type {show(found[1].strip())}{f' (at {place})' if place else ''}; "
            "array, boolean, integer, null, number, object and string are allowed"
        )
    return f"the schema cannot be used: {_cut(message)}"


def _unresolved_path(schema: Any, keyword: str) -> str:
    """Return the path of a keyword that rewriting has left unchanged."""
    rewritten = {path for path, at in each_schema(for_llguidance(schema)) if keyword in at}
    paths = [path for path, at in each_schema(schema) if keyword in at]
    path = next((path for path in paths if path in rewritten), paths[0] if paths else "#")
    return f"{path}/{keyword}"


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."


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
