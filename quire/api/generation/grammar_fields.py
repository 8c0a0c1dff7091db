"""Convert response_format and structured_outputs to a grammar.

OpenAI's field and vLLM's, which may not both be given. Checks their form only: the grammar compiler
reports an unusable grammar before the first token. A schema of response_format is followed whether
`strict` is true, false or left out, and its objects are closed (quire/structured/closed.py); it may
be beside the type, as clients of llama.cpp and others send it. One of structured_outputs is used
unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar_of, json_object, json_schema, structural_tag
from quire.base.show import show
from quire.structured.closed import closed
from quire.structured.schema_form import TYPES, has_keywords

_FORMAT = "response_format"
FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_FORM = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def grammar_asked_for(given: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of a request's fields; None if the answer is unconstrained.

    Raises InvalidParameter naming the field.
    """
    requested, options = given.get(_FORMAT), given.get("structured_outputs")
    of_format = None if requested is None else _of_response_format(requested)
    if options is None:
        return of_format
    if of_format is not None:
        raise InvalidParameter(
            f"{_FORMAT} and structured_outputs both constrain the answer; give one",
            param="structured_outputs",
        )
    return grammar_of(options)


def _of_response_format(requested: Any) -> Grammar | None:
    kind = requested.get("type") if isinstance(requested, dict) else None
    if kind not in FORMAT_TYPES:
        raise InvalidParameter(
            f"{_FORMAT} is {show(requested)}; an object with a type is allowed, one of "
            f"{', '.join(FORMAT_TYPES)}{_instead(requested, kind)}",
            param=_FORMAT,
        )
    if kind == "structural_tag":
        return structural_tag(requested, param=_FORMAT)
    if kind != "text" and "schema" in requested and "json_schema" not in requested:
        named = {name: value for name, value in requested.items() if name != "type"}
        return _of_json_schema({"json_schema": named})
    extra = requested.keys() - {"type", *(("json_schema",) if kind == "json_schema" else ())}
    if extra & {"schema", "name", "strict"} and kind != "text":
        raise InvalidParameter(
            f"{_FORMAT} of type {kind} has {show(min(extra))} beside its type; a schema is given "
            f"as {_SCHEMA_FORM}",
            param=_FORMAT,
        )
    if extra:
        raise InvalidParameter(
            f"{_FORMAT} of type {kind} has {show(min(extra))}, which it does not take; leave it "
            "out",
            param=_FORMAT,
        )
    if kind == "text":
        return None
    return json_object(param=_FORMAT) if kind == "json_object" else _of_json_schema(requested)


def _of_json_schema(requested: Mapping[str, Any]) -> Grammar:
    named = requested.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(named, dict) or schema is None:
        found = "missing" if named is None else show(named)
        raise InvalidParameter(
            f"{_FORMAT}.json_schema is {found}; an object with a schema is needed: {_SCHEMA_FORM}",
            param=_FORMAT,
        )
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(
            f"{_FORMAT}.json_schema.schema is {show(schema)}; an object is allowed, not its text",
            param=_FORMAT,
        )
    if schema and isinstance(schema, dict) and not has_keywords(schema):
        raise InvalidParameter(
            f"{_FORMAT}.json_schema.schema has {show(next(iter(schema)))} and no keyword of JSON "
            'Schema, so it allows any value; write it as {"type": "object", "properties": {...}}, '
            "or as {} if any value is meant",
            param=_FORMAT,
        )
    for name, value in named.items():
        if name not in _SCHEMA_FIELDS:
            raise InvalidParameter(
                f"{_FORMAT}.json_schema has {show(name)}; name, description, schema and strict "
                "are allowed",
                param=_FORMAT,
            )
        if name == "strict" and not isinstance(value, bool | None):
            raise InvalidParameter(
                f"{_FORMAT}.json_schema.strict is {show(value)}; true or false is allowed",
                param=_FORMAT,
            )
        if name in ("name", "description") and not isinstance(value, str | None):
            raise InvalidParameter(
                f"{_FORMAT}.json_schema.{name} is {show(value)}; a text is allowed",
                param=_FORMAT,
            )
    return json_schema(closed(schema), param=_FORMAT)


def _instead(requested: Any, kind: Any) -> str:
    """Return advice for a schema or a regular expression that is given as the format itself."""
    if kind in ("regex", "grammar", "choice"):
        return f'; write it as structured_outputs: {{"{kind}": ...}}'
    if isinstance(requested, dict) and (kind in TYPES or "properties" in requested):
        return f"; a schema is given as {_SCHEMA_FORM}"
    return ""
