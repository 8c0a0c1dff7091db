"""Functions in a namespace: groups of functions, as agents send those of an MCP server.

To the model such a function has the name NAMESPACE__NAME, and its description begins with that of
the namespace. Calls and their outputs have both names apart. Knows no template. Always holds: the
functions of a namespace are executed by the client, as all functions are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

_JOINED = "__"
_KEYS = {"type", "name", "description", "tools"}
_FORM = '{"type": "namespace", "name": "...", "description": "...", "tools": [...]}'


def is_namespace(tool: Any) -> bool:
    """Return whether an entry of `tools` is a namespace."""
    return isinstance(tool, dict) and tool.get("type") == "namespace"


def full_name(item: Mapping[str, Any]) -> Any:
    """Return the name that the model sees of a call's function."""
    namespace = item.get("namespace")
    return item.get("name") if namespace is None else f"{namespace}{_JOINED}{item.get('name')}"


def check_namespace(place: str, tool: Mapping[str, Any]) -> None:
    """Check a namespace, but not its functions. Raises InvalidParameter."""
    strings = [tool.get("name"), tool.get("description") or ""]
    others = [key for key in tool.keys() - _KEYS if tool[key] is not None]
    if (
        not all(isinstance(one, str) for one in strings)
        or not strings[0]
        or not isinstance(tool.get("tools"), list)
        or others
    ):
        raise InvalidParameter(f"{place} is {show(tool)}; {_FORM} is allowed", param="tools")


def as_functions(namespace: Mapping[str, Any]) -> list[Any]:
    """Return the functions of a checked namespace as those of a request; others as they are."""
    return [_function(namespace, tool) for tool in namespace["tools"]]


def names_of(given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return namespace and name of each function of checked tools that is in one, by full name."""
    return {
        f"{tool['name']}{_JOINED}{inner['name']}": (tool["name"], inner["name"])
        for tool in given.get("tools", ())
        if is_namespace(tool)
        for inner in tool["tools"]
    }


def _function(namespace: Mapping[str, Any], tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    lines = [namespace.get("description"), tool.get("description")]
    if not all(isinstance(line, str | None) for line in lines):
        return tool
    described = {"description": "\n".join(line for line in lines if line)} if any(lines) else {}
    return {**tool, "name": f"{namespace['name']}{_JOINED}{tool['name']}", **described}
