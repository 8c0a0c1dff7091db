"""Check tools, tool_choice and parallel_tool_calls: the functions a request offers its model.

The template renders them (conversation.py), quire/output_parsers reads calls out of answers, and a
grammar enforces them if needed (output_constraints.py). Always holds: no field of tools is ignored
silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.api.generation.fields import flag
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.structured.schema_form import check_form, has_keywords

MAX_TOOLS = 256
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORM = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_OBJECT = '{"type": "object", "properties": {"name": {"type": "string"}}}'
# What other APIs call the schema of the arguments.
_OTHER_PARAMETERS = ("input_schema", "inputSchema", "json_schema", "schema", "arguments", "args")

Mode = Literal["none", "auto", "required"]
# A request without these fields offers no tools.
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools of a request; it may offer none.

    tools: as given. schemas: of the arguments, by name. mode: whether the model may or must make a
    call. callable: the names it may call. parallel: whether it may make several calls. strict: the
    names with arguments that must follow their schema.
    """

    tools: tuple[dict[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]]
    mode: Mode = "auto"
    callable: tuple[str, ...] = ()
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools that the template renders; None if the model may not make calls."""
        return list(self.tools) if self.tools and self.mode != "none" else None

    @property
    def is_bound(self) -> bool:
        """Whether a grammar is needed to enforce the fields."""
        if not self.tools or self.mode == "none":
            return False
        restricted = len(self.callable) < len(self.tools)
        return self.mode == "required" or not self.parallel or restricted or bool(self.strict)

    @property
    def param(self) -> str:
        """The name of the field that needs the grammar."""
        if self.mode == "required" or len(self.callable) < len(self.tools):
            return "tool_choice"
        return "tools" if self.parallel else "parallel_tool_calls"


def offer_of(given: Mapping[str, Any]) -> ToolOffer:
    """Return the tools of a request. Raises InvalidParameter naming the field."""
    tools = _tools(given)
    functions = [tool["function"] for tool in tools]
    names = [function["name"] for function in functions]
    mode, allowed, parallel = _choice(given.get("tool_choice", "auto"), names)
    return ToolOffer(
        tools=tuple(tools),
        schemas={function["name"]: _parameters(function) for function in functions},
        mode=mode,
        callable=tuple(allowed),
        parallel=flag(given, "parallel_tool_calls", default=True) and parallel,
        strict=frozenset(f["name"] for f in functions if f.get("strict") and f["name"] in allowed),
    )


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments; without one it takes none."""
    schema = function.get("parameters")
    return dict(_NO_PARAMETERS if schema is None else schema)


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise _fault(f"tools is {show(tools)}; a list of objects {_FORM} is allowed")
    if len(tools) > MAX_TOOLS:
        raise _fault(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        name = _checked(f"tools[{at}]", tool)
        if name in seen:
            raise _fault(f"tools has two functions named {show(name)}; give each its own name")
        seen.add(name)
    return tools


def _checked(place: str, tool: Any) -> str:
    """Check one tool; return the name of its function."""
    if not isinstance(tool, dict):
        raise _fault(f"{place} is {show(tool)}; an object {_FORM} is allowed")
    kind, function = tool.get("type"), tool.get("function")
    if function is None and "name" in tool and kind in (None, "function"):
        raise _fault(
            f"{place} has name and parameters of its own, as other APIs write tools; they belong "
            f"under function: write it as {_FORM}"
        )
    if kind is None:
        raise _fault(f'{place}.type is missing; "function" is allowed: write it as {_FORM}')
    if kind != "function":
        raise _fault(
            f'{place}.type is {show(kind)}; "function" is allowed: the model writes calls as JSON, '
            "and there are no tools of the server's own"
        )
    if not isinstance(function, dict):
        found = "missing" if function is None else show(function)
        raise _fault(f"{place}.function is {found}; write the tool as {_FORM}")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise _fault(
            f"{place}.function.name is {'missing' if name is None else show(name)}; 1 to 128 "
            "letters, digits, '_', '-' and '.' are allowed"
        )
    for key, kind, words in (
        ("description", str, "a text"),
        ("parameters", dict, f"a JSON schema of an object, such as {_OBJECT},"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise _fault(f"{place}.function.{key} is {show(value)}; {words} is allowed")
    _check_parameters(f"{place}.function", function)
    return name


def _check_parameters(place: str, function: Mapping[str, Any]) -> None:
    """Refuse a schema of arguments that is malformed, or that allows no object."""
    schema = function.get("parameters")
    if schema is None:
        other = next((name for name in _OTHER_PARAMETERS if function.get(name)), None)
        if other is not None:
            raise _fault(
                f"{place} has {other}, and no parameters; the schema of the arguments is given as "
                "parameters: rename it"
            )
        return
    place = f"{place}.parameters"
    if schema and not has_keywords(schema):
        name = next(iter(schema))
        raise _fault(
            f"{place} has {show(name)} and no keyword of JSON Schema; list the arguments under "
            f"properties: {_OBJECT}"
        )
    check_form(schema, place, param="tools")
    named = schema.get("type", "object")
    if named != "object" and "object" not in named:
        raise _fault(
            f"{place}: the schema has the type {show(named)} (at #/type); arguments are an object: "
            f"write {_OBJECT}"
        )


def _fault(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="tools")


def _choice(choice: Any, names: list[str]) -> tuple[Mode, list[str], bool]:
    """Return the mode, the names that may be called, and whether several calls are allowed."""
    if choice in ("none", "auto"):
        return choice, names, True
    if choice == "required":
        _check_offered(names)
        return "required", names, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_named(choice, "tool_choice", names)], False
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), names)
    raise InvalidParameter(
        f'tool_choice is {show(choice)}; "none", "auto", "required", '
        '{"type": "function", "function": {"name": ...}} and {"type": "allowed_tools", ...} '
        "are allowed",
        param="tool_choice",
    )


def _allowed(choice: Any, names: list[str]) -> tuple[Mode, list[str], bool]:
    mode = choice.get("mode", "auto") if isinstance(choice, dict) else None
    listed = choice.get("tools") if isinstance(choice, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidParameter(
            f"tool_choice.allowed_tools is {show(choice)}; an object with mode "
            '("auto" or "required") and a list of tools is allowed',
            param="tool_choice",
        )
    allowed = [
        _named(tool, f"tool_choice.allowed_tools.tools[{at}]", names)
        for at, tool in enumerate(listed)
    ]
    return mode, [name for name in names if name in allowed], True


def _named(tool: Any, place: str, names: list[str]) -> str:
    """Return the name in {"type", "function": {"name"}}, or in the newer {"type", "name"}."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    _check_offered(names)
    if not isinstance(name, str) or name not in names:
        raise InvalidParameter(
            f"{place} names {show(name)}, which is none of the request's tools "
            f"({show(', '.join(names))}); name one of them",
            param="tool_choice",
        )
    return name


def _check_offered(names: list[str]) -> None:
    if not names:
        raise InvalidParameter(
            "tool_choice asks for a call, and the request has no tools; give tools, or leave "
            "tool_choice out",
            param="tool_choice",
        )
