"""Convert `tools` and `tool_choice` of the Messages API to the tools of a conversation.

generation/tools.py checks the schemas. Tools of Anthropic's servers, and those with
a schema that only Anthropic's models know (bash, text editor, computer), are refused by type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.anthropic.history import check_cache_control
from quire.api.generation.tools import ToolOffer, offer_of
from quire.base.errors import InvalidParameter
from quire.base.show import show

_FORM = '{"name": "...", "description": "...", "input_schema": {"type": "object", ...}}'
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Keys beside those of _FORM. Of those with a value here, only this value is accepted.
_KEYS: Mapping[str, Any] = {
    "type": ...,
    "name": ...,
    "description": ...,
    "input_schema": ...,
    "strict": ...,
    "cache_control": ...,
    "eager_input_streaming": ...,  # arguments are always streamed as they are written
    "defer_loading": False,
    "allowed_callers": ["direct"],
}


def tool_offer(given: Mapping[str, Any]) -> ToolOffer | None:
    """Return the tools of a request; None if it has neither field. Raises InvalidParameter."""
    if "tools" not in given and "tool_choice" not in given:
        return None
    listed = given.get("tools", [])
    if not isinstance(listed, list):
        raise _fault(f"tools is {show(listed)}; a list of objects {_FORM} is allowed")
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(listed)]
    choice, parallel = _choice(given.get("tool_choice", {"type": "auto"}))
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    try:
        return offer_of(fields)
    except InvalidParameter as error:  # paths of the form that was converted to
        said = str(error).replace(".function.parameters", ".input_schema")
        said = said.replace(".function", "").replace(".allowed_tools.tools[0]", "")
        raise InvalidParameter(said, param=error.param) from error


def _fault(message: str, param: str = "tools") -> InvalidParameter:
    return InvalidParameter(message, param=param)


def _tool(place: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _fault(f"{place} is {show(tool)}; an object {_FORM} is allowed")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise _fault(
            f'{place}.type is {show(kind)}; "custom" is allowed: this server has no tools of its '
            f"own, and the model knows no tool without a schema: write it as {_FORM}"
        )
    for key, value in tool.items():
        if value is None:
            continue
        if key not in _KEYS:
            raise _fault(f"{place} has {show(key)}, which is not supported; leave it out")
        if _KEYS[key] is not ... and value != _KEYS[key]:
            raise _fault(f"{place}.{key} is {show(value)}, which is not supported; leave it out")
    if not isinstance(tool.get("input_schema"), dict):
        found = "missing" if tool.get("input_schema") is None else show(tool["input_schema"])
        raise _fault(f"{place}.input_schema is {found}; a JSON schema is needed: {_FORM}")
    eager = tool.get("eager_input_streaming")
    if not isinstance(eager, bool | None):
        raise _fault(f"{place}.eager_input_streaming is {show(eager)}; true or false is allowed")
    check_cache_control(f"{place}.cache_control", tool.get("cache_control"))
    # In the order of OpenAI's clients: templates write tools as JSON.
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    known = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def _choice(choice: Any) -> tuple[Any, bool]:
    """Return the choice in OpenAI's form, and whether several calls are allowed."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    keys = {"type", *(("name",) if kind == "tool" else ())}
    keys |= set() if kind == "none" else {"disable_parallel_tool_use"}
    if kind not in (*_CHOICES, "tool") or any(
        value is not None and key not in keys for key, value in choice.items()
    ):
        raise _fault(
            f'tool_choice is {show(choice)}; {{"type": "auto"}}, "any", "none" and '
            '{"type": "tool", "name": ...} are allowed, with disable_parallel_tool_use',
            "tool_choice",
        )
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise _fault(
            f"tool_choice.disable_parallel_tool_use is {show(alone)}; true or false is allowed",
            "tool_choice",
        )
    if kind != "tool":
        return _CHOICES[kind], not alone
    named = {"type": "function", "function": {"name": choice.get("name")}}
    if alone:  # one call of this tool; else one or several
        return named, False
    return {"type": "allowed_tools", "mode": "required", "tools": [named]}, True
