"""From a Grammar to llguidance's own words, and from its complaints to errors that teach.

Each kind of grammar is written in one of llguidance's languages; nothing is compiled here but
GBNF and structural tags into Lark. Knows no tokens but the names of special ones. Always holds: a
schema's reference is looked up in the schema alone, never fetched.
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

MAX_GBNF_CHARS = 65_536
_MAX_SAID_CHARS = 400
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])", re.DOTALL)
_TOO_WIDE = re.compile(r"Current row has (\d+) items; max is (\d+)")
_IN_SCHEMA = re.compile(
    r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?\Z", re.DOTALL
)
_FORMAT = re.compile(r"Unknown format: (.*)")


def llguidance_grammar(grammar: Grammar, special_names: frozenset[str]) -> str:
    """The grammar as LLMatcher takes it. special_names: of tokens that have no text.

    Raises InvalidParameter for what is wrong on its face.
    """
    from llguidance import LLMatcher

    text: str
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = for_llguidance(json.loads(grammar.text))
            if schema is False:
                raise refusal(grammar, "Unsatisfiable schema: schema is false")
            schema = {} if schema is True else schema
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


def refusal(grammar: Grammar, complaint: str) -> InvalidParameter:
    """The error for what llguidance said of a grammar."""
    said = complaint.split("<state>")[0].split("<backtrace>")[0].strip()
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return InvalidParameter(
            f"{grammar.param}: {_of_schema(json.loads(grammar.text), said)}", param=grammar.param
        )
    if (embedded := _embedded_schema(grammar, said)) is not None:
        schema, said = embedded
        return InvalidParameter(f"{grammar.param}: {_of_schema(schema, said)}", param=grammar.param)
    what = {
        GrammarKind.REGEX: "the regular expression",
        GrammarKind.CHOICE: "the choice",
        GrammarKind.GRAMMAR: "the grammar",
        GrammarKind.STRUCTURAL_TAG: "the structural tag",
    }[grammar.kind]
    return InvalidParameter(
        f"{grammar.param}: {what} cannot be used: {_cut(said)}", param=grammar.param
    )


def _embedded_schema(grammar: Grammar, said: str) -> tuple[Any, str] | None:
    """Return the schema in a Lark grammar that a complaint is about, and the complaint without
    the listing of the grammar behind it; None where it is about something else."""
    found = _IN_SCHEMA.match(said)
    lines = grammar.text.split("\n")
    if grammar.kind is not GrammarKind.GRAMMAR or found is None or int(found[1]) > len(lines):
        return None
    _, _, schema = lines[int(found[1]) - 1].partition("%json ")
    try:
        return json.JSONDecoder().raw_decode(schema)[0], found[2].strip()
    except ValueError:
        return None


def _json_options(grammar: Grammar) -> Any:
    """Whitespace, and no approximations. A space behind commas and colons, nothing else: so an
    answer cannot lose itself in white space, and its form leaves as little open as it can."""
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if grammar.whitespace is None:
        separators = {"item_separator": ", ", "key_separator": ": "}
        return {**options, **separators, "whitespace_flexible": False}
    if not grammar.whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": grammar.whitespace}


def _of_schema(schema: Any, said: str) -> str:
    if (found := _UNIMPLEMENTED.search(said)) is not None:
        keys: list[str] = json.loads(found[1])
        places = [path_of(schema, key) for key in keys]
        named = ", ".join(
            f"{key} (at {place})" if place else key for key, place in zip(keys, places, strict=True)
        )
        return (
            f"the schema has keywords that are not supported: {named}; rewrite it without them "
            "(docs/structured-output.md lists what is)"
        )
    if (found := _FORMAT.search(said)) is not None:
        place = path_of(schema, "format", found[1].strip())
        return (
            f"the schema has the format {show(found[1].strip())}"
            f"{f' (at {place})' if place else ''}, which is not supported; leave it out, or write "
            "it as a pattern"
        )
    if "oneOf constraints are not supported" in said:
        return (
            f"the schema has a oneOf (at {_unresolved_path(schema, 'oneOf')}) whose alternatives "
            "are not seen to exclude each other; give each object a required property with a "
            "const of its own, or write anyOf"
        )
    if _TOO_WIDE.search(said) is not None:
        return (
            "the schema leaves too much open at one place, as an object of more than some 1,600 "
            "properties does that may all be left out; make them required, in which case their "
            "order says what comes next, or part them among several objects"
        )
    return f"the schema cannot be used: {_cut(said)}"


def _unresolved_path(schema: Any, keyword: str) -> str:
    """Return where a keyword is that rewriting has left as it was."""
    rewritten = {path for path, at in each_schema(for_llguidance(schema)) if keyword in at}
    paths = [path for path, at in each_schema(schema) if keyword in at]
    path = next((path for path in paths if path in rewritten), paths[0] if paths else "#")
    return f"{path}/{keyword}"


def _cut(said: str) -> str:
    return said if len(said) <= _MAX_SAID_CHARS else said[:_MAX_SAID_CHARS] + "..."


def _literal(text: str) -> str:
    """A text as Lark writes it."""
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
    except (Exception, RecursionError) as error:  # noqa: BLE001  a parser of others' making
        raise refusal(grammar, f"it is no GBNF: {str(error)[:200]}") from None


def _structural_tag(grammar: Grammar, special_names: frozenset[str]) -> str:
    from llguidance import StructTag

    tags = [
        StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
        for trigger, begin, schema, end in _structures(grammar)
    ]
    # A trigger that is a special token is one token, not its letters.
    kinds = {tag.trigger in special_names for tag in tags}
    if len(kinds) > 1:
        raise InvalidParameter(
            f"{grammar.param}: some triggers are special tokens of the model and some are text; "
            "make all of them one or the other",
            param=grammar.param,
        )
    return StructTag.to_grammar(tags, assume_special=kinds == {True})


def _structures(grammar: Grammar) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Each structure's trigger, begin, schema and end."""
    tag, param = json.loads(grammar.text), grammar.param
    unknown = tag.keys() - {"type", "structures", "triggers"}
    if tag.get("type", "structural_tag") != "structural_tag" or unknown:
        extra = ", ".join(sorted(unknown)) or show(tag.get("type"))
        raise InvalidParameter(
            f"{param}: structural_tag has {extra}; allowed are structures and triggers (the form "
            "with format is not served)",
            param=param,
        )
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not _texts(triggers) or not isinstance(structures, list) or not structures:
        raise InvalidParameter(
            f"{param}: structural_tag needs structures, a list of objects, and triggers, a list "
            "of texts; neither may be empty",
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
                f"{param}: structures[{place}] needs texts as begin and end, and an object as "
                "schema",
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
