"""Turn llguidance's complaints about a grammar into errors that say where and what to do.

Knows llguidance's messages, as patterns; one that none matches is passed on, cut short. Invariant:
an error names the request's field, never a line of a grammar that the client did not write.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, GrammarKind
from quire.base.show import show
from quire.structured.schema import each_schema, escaped, for_llguidance, path_of
from quire.structured.schema_form import malformed

_MAX_MESSAGE_CHARS = 400
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])", re.DOTALL)
_TOO_WIDE = re.compile(r"Current row has (\d+) items; max is (\d+)")
_IN_SCHEMA = re.compile(
    r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?\Z", re.DOTALL
)
_FORMAT = re.compile(r"Unknown format: (.*)")
_TOO_LARGE = re.compile(r"not JSON serializable: (-?\d{1,60})\Z")
_ENDLESS = "no text ever ends it, or nothing begins it"
_RESOURCE = re.compile(r"Resource '(.*?)' is not present")
_UNSATISFIABLE = re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL)
_CROSSED = re.compile(r"(\w+) \(\S+\) is greater than (\w+) \(")
# A regular expression as the parser shows it, the place marked below it, and the reason.
_PATTERN = re.compile(r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.*)")
_POSITION = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
_LISTING = re.compile(r"\n +\d+ \| .*\Z", re.DOTALL)
_REGEX_SYNTAX = "Rust's syntax is allowed, without look-around and backreferences"
_GRAMMAR_SYNTAX = (
    'Lark with a rule `start: "a" | "b"`, or GBNF with a rule `root ::= "a" | "b"`, is allowed, as '
    "docs/structured-output.md describes"
)


def rejection(grammar: Grammar, complaint: str) -> InvalidParameter:
    """Return the error for a complaint of llguidance."""
    message = complaint.split("<state>")[0].split("<backtrace>")[0].strip()
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        said = _of_schema(json.loads(grammar.text), message, whitespace=grammar.whitespace)
        return _error(grammar, said)
    if (embedded := _embedded_schema(grammar, message)) is not None:
        return _error(grammar, _of_schema(*embedded))
    if grammar.kind is GrammarKind.REGEX:
        return _error(grammar, _of_regex(grammar.text, message))
    if grammar.kind is GrammarKind.GRAMMAR:
        return _error(grammar, f"the grammar cannot be used: {_of_lark(message)}")
    what = "the choice" if grammar.kind is GrammarKind.CHOICE else "the structural tag"
    return _error(grammar, f"{what} cannot be used: {_cut(_line(message))}")


def _error(grammar: Grammar, said: str) -> InvalidParameter:
    return InvalidParameter(f"{grammar.param}: {said}", param=grammar.param)


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


def _of_schema(schema: Any, message: str, *, whitespace: str | None = None) -> str:
    # A schema that was rewritten may list no values where the client's own listed some.
    if "Unsatisfiable" not in message and (said := malformed(schema)) is not None:
        return said
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
    if (found := _RESOURCE.search(message)) is not None:
        return (
            f"the schema cannot be used: it refers to {show(found[1])} ($ref or $schema), which is "
            "not fetched; copy that schema under $defs and refer to it as #/$defs/NAME"
        )
    if (found := _PATTERN.search(message)) is not None:
        return _of_pattern(schema, found, whitespace)
    if (found := _UNSATISFIABLE.search(message)) is not None:
        return f"the schema cannot be used: no value fits it: {_contradiction(schema, found[1])}"
    if (found := _TOO_LARGE.search(message)) is not None:
        return f"the schema cannot be used: the number {show(int(found[1]))} is too large"
    if _ENDLESS in message:
        return f"the schema cannot be used: {_ENDLESS}; give what recurs an alternative that ends"
    return f"the schema cannot be used: {_cut(_line(message))}; rewrite that part of it"


def _contradiction(schema: Any, reason: str) -> str:
    """Return why a schema allows nothing, with the place of bounds that exclude each other."""
    found, place = _CROSSED.search(reason), ""
    if found is not None:
        places = [path for path, at in each_schema(schema) if {found[1], found[2]} <= at.keys()]
        place = f" (at {places[0]})" if places else ""
    return f"{_cut(reason)}{place}; loosen it"


def _of_pattern(schema: Any, found: re.Match[str], whitespace: str | None) -> str:
    """Return the message about a regular expression of a schema. found: by _PATTERN."""
    pattern, reason = found[1], found[3]
    for path, at in each_schema(schema):
        if at.get("pattern") == pattern:
            return _no_pattern(pattern, f" (at {path}/pattern)", reason)
        if pattern in at.get("patternProperties", ()):
            place = f"{path}/patternProperties/{escaped(pattern)}"
            return _no_pattern(pattern, f" (at {place})", reason)
    if pattern == whitespace:
        return f"whitespace_pattern is {show(pattern)}: {reason}; {_REGEX_SYNTAX}"
    return _no_pattern(pattern, "", reason)


def _no_pattern(pattern: str, place: str, reason: str) -> str:
    return (
        f"the schema has the pattern {show(pattern)}{place}, which cannot be used: {reason}; "
        f"{_REGEX_SYNTAX}"
    )


def _of_regex(text: str, message: str) -> str:
    found = _PATTERN.search(message)
    if found is not None:
        place = f" (at character {len(found[2])})" if found[1] == text else ""
        reason = f"{found[3]}{place}"
    else:
        reason = _cut(_line(_POSITION.sub("", message)).split(" (in regex): ")[-1])
    if "too many expressions" in message:
        reason = "it is too large; repeat less"
    return f"the regular expression {show(text)} cannot be used: {reason}; {_REGEX_SYNTAX}"


def _of_lark(message: str) -> str:
    position = _POSITION.match(message)
    if (found := _PATTERN.search(message)) is not None:
        return f"the regular expression {show(found[1])} in it: {found[3]}; {_REGEX_SYNTAX}"
    said = _line(message[position.end() :] if position else message)
    place = f"line {position[1]}, column {position[2]}: " if position else ""
    return f"{place}{_cut(said)}; {_GRAMMAR_SYNTAX}"


def _line(message: str) -> str:
    """Return a complaint on one line, without the listing of the grammar."""
    return " ".join(_LISTING.sub("", message).split())


def _unresolved_path(schema: Any, keyword: str) -> str:
    """Return the path of a keyword that rewriting has left unchanged."""
    rewritten = {path for path, at in each_schema(for_llguidance(schema)) if keyword in at}
    paths = [path for path, at in each_schema(schema) if keyword in at]
    path = next((path for path in paths if path in rewritten), paths[0] if paths else "#")
    return f"{path}/{keyword}"


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."
