"""Convert `tools` and `tool_choice` of the Responses API to the tools of a conversation.

Functions have their name and schema beside their type; those of a namespace (namespaces.py) are
functions with longer names. Tools that OpenAI's servers execute, and those without a schema, are
refused by type. generation/tools.py checks the schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.api.generation.foreign_fields import same_json
from quire.api.generation.tools import TOOL_FIELDS, ToolOffer, offer_of
from quire.api.openai.responses.namespaces import (
    as_functions,
    check_namespace,
    full_name,
    is_namespace,
)
from quire.base.errors import InvalidParameter
from quire.base.show import show

_FORM = '{"type": "function", "name": "...", "parameters": {"type": "object", ...}}'
_KEYS = ("name", "description", "parameters", "strict")
# Further keys, with the value that asks for nothing.
_NEUTRAL = {"defer_loading": False, "async": False, "allowed_callers": ["direct"]}
_CHOICES = ("none", "auto", "required")
_OBJECTS = ("function", "allowed_tools")


def tool_offer(given: Mapping[str, Any]) -> ToolOffer | None:
    """Return the tools of a request; None if it has no such field. Raises InvalidParameter."""
    if TOOL_FIELDS.isdisjoint(given):
        return None
    listed = given.get("tools", [])
    if not isinstance(listed, list):
        raise _fault(f"tools is {show(listed)}; a list of objects {_FORM} is allowed")
    tools = [tool for at, entry in enumerate(listed) for tool in _tools(f"tools[{at}]", entry)]
    fields = {**given, "tools": tools, "tool_choice": _choice(given.get("tool_choice", "auto"))}
    try:
        return offer_of(fields)
    except InvalidParameter as error:  # paths of the form that was converted to
        raise InvalidParameter(str(error).replace(".function", ""), param=error.param) from error


def tools_of(given: Mapping[str, Any], offer: ToolOffer | None) -> dict[str, Any]:
    """Return the fields of tools as a response repeats them; they have been checked."""
    shown = iter(() if offer is None else offer.tools)
    return {
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "tool_choice": _shown_choice(given.get("tool_choice", "auto")),
        "tools": [_shown_entry(entry, shown) for entry in given.get("tools", ())],
    }


def _shown_entry(sent: Mapping[str, Any], tools: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return an entry of `tools`, made of as many of the offered ones as it has."""
    if not is_namespace(sent):
        return {**_shown(next(tools)["function"]), **_neutral(sent)}
    inner = []
    for tool in sent["tools"]:
        own = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
        offered = next(tools)["function"]
        rest = {key: value for key, value in offered.items() if key != "description"}
        inner.append({**_shown({**rest, **own}), **_neutral(tool)})
    return {"type": "namespace", "description": None, **sent, "tools": inner}


def _shown(function: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"description": None, "parameters": None, "strict": False}
    return {"type": "function", **empty, **function}


def _neutral(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a tool that ask for nothing, if they were sent."""
    return {key: tool[key] for key in _NEUTRAL if tool.get(key) is not None}


def _shown_choice(choice: Any) -> Any:
    """Return a choice with names beside types, where it was sent in the form of chats."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "function":
        within = {key: choice[key] for key in ("namespace",) if choice.get(key) is not None}
        return {"type": "function", **within, "name": choice.get("function", choice)["name"]}
    allowed = choice.get("allowed_tools", choice)
    return {
        "type": "allowed_tools",
        "mode": allowed.get("mode", "auto"),
        "tools": [_shown_choice({**tool, "type": "function"}) for tool in allowed["tools"]],
    }


def _fault(message: str, param: str = "tools") -> InvalidParameter:
    return InvalidParameter(message, param=param)


def _tools(place: str, entry: Any) -> list[dict[str, Any]]:
    """Return the functions of an entry of `tools`: one, or those of a namespace."""
    if not is_namespace(entry):
        return [_tool(place, entry)]
    check_namespace(place, entry)
    functions = as_functions(entry)
    return [_tool(f"{place}.tools[{at}]", tool) for at, tool in enumerate(functions)]


def _tool(place: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _fault(f"{place} is {show(tool)}; an object {_FORM} is allowed")
    kind = tool.get("type")
    if kind != "function":
        raise _fault(
            f'{place}.type is {show(kind)}; "function" is allowed: this server executes no tools, '
            f"and the model knows no tool without a schema. Declare it as {_FORM}, execute its "
            "calls yourself and send a function_call_output for each"
        )
    if "function" in tool:
        raise _fault(
            f"{place} has function, as chats write tools; here name and parameters are beside the "
            f"type: write it as {_FORM}"
        )
    for key, value in tool.items():
        if key in (*_KEYS, "type") or value is None:
            continue
        if key not in _NEUTRAL or not same_json(value, _NEUTRAL[key]):
            raise _fault(f"{place}.{key} is {show(value)}, which is not supported; leave it out")
    # In the order of OpenAI's clients: templates write tools as JSON.
    function = {key: tool[key] for key in _KEYS if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """Return the choice; offer_of reads the newer form of functions too."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [_by_full_name(tool) for tool in choice["tools"]]}
    if kind in _OBJECTS or (isinstance(choice, str) and choice in _CHOICES):
        return _by_full_name(choice)
    raise _fault(
        f'tool_choice is {show(choice)}; "none", "auto", "required", {{"type": "function", '
        '"name": ...} and {"type": "allowed_tools", "mode": ..., "tools": [...]} are allowed: this '
        "server executes no tools",
        "tool_choice",
    )


def _by_full_name(choice: Any) -> Any:
    """Return a choice of a function, which may have its namespace apart, as offer_of reads it."""
    if not isinstance(choice, dict) or choice.get("namespace") is None:
        return choice
    return {"type": "function", "name": full_name(choice)}
