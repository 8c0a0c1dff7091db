"""Answers written in each format by plain string building, independent of the parsers.

    text = WRITERS["hermes"]("Let me see.", [("weather", {"city": "Oslo"})])

A writer takes the content before the calls and the calls, each a name and its arguments, and writes
them as the family's models do. `argue` formats the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.output_parsers.tools import Tools

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Writer = Callable[[str, Calls], str]

# Parameters of every type, so that formats without quotes have the type of each value.
_TYPED = {
    "properties": {
        "city": {"type": "string"},
        "text": {"type": "string"},
        "note": {"type": "string"},
        "number": {"type": "number"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"type": "object"},
        "nothing": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "integer"}]},
    }
}
TOOLS = Tools(
    {
        "weather": _TYPED,
        "look_up": _TYPED,
        "add": _TYPED,
        "now": {},
        "files.read-all_2": _TYPED,
    }
)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(content: str, calls: Calls) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def _qwen3_coder(content: str, calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        said = value if isinstance(value, str) else dumped(value)
        return f"<parameter={key}>\n{said}\n</parameter>\n"

    blocks = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(key, value) for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def _glm(content: str, calls: Calls, between: str = "\n") -> str:
    def argument(key: str, value: Any) -> str:
        said = value if isinstance(value, str) else dumped(value)
        return f"<arg_key>{key}</arg_key>{between}<arg_value>{said}</arg_value>{between}"

    blocks = [
        f"<tool_call>{name}{between}"
        + "".join(argument(key, value) for key, value in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    ]
    return between.join([content, *blocks] if content else blocks)


def _glm_close(content: str, calls: Calls) -> str:
    return _glm(content, calls, "")


def _bare_llama(content: str, calls: Calls) -> str:
    said = "; ".join(f'{{"name": "{n}", "parameters": {dumped(a)}}}' for n, a in calls)
    return content + ("<|python_tag|>" if content and calls else "") + said


def _bare_list(content: str, calls: Calls) -> str:
    """Write the generic form, which has no mark, so it allows no text before a call."""
    if not calls:
        return content
    return dumped([{"name": name, "arguments": arguments} for name, arguments in calls])


def _pythonic(content: str, calls: Calls) -> str:
    said = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    listed = f"[{', '.join(said)}]" if calls else ""
    mark = ("<|python_start|>", "<|python_end|>") if content and calls else ("", "")
    return content + mark[0] + listed + mark[1]


def _mistral(content: str, calls: Calls) -> str:
    return content + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(args)}" for name, args in calls)


def _mistral_listed(content: str, calls: Calls) -> str:
    listed = [{"name": name, "arguments": args, "id": "a1b2c3d4e"} for name, args in calls]
    return content + (f"[TOOL_CALLS] {dumped(listed)}" if calls else "")


_BAR = "\uff5c"


def _deepseek(content: str, calls: Calls) -> str:
    blocks = [
        f"<{_BAR}tool▁call▁begin{_BAR}>{name}<{_BAR}tool▁sep{_BAR}>{dumped(arguments)}"
        f"<{_BAR}tool▁call▁end{_BAR}>"
        for name, arguments in calls
    ]
    opens, closes = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
    return content + (opens + "".join(blocks) + closes if calls else "")


def _deepseek_fenced(content: str, calls: Calls) -> str:
    blocks = [
        f"<{_BAR}tool▁call▁begin{_BAR}>function<{_BAR}tool▁sep{_BAR}>{name}\n```json\n"
        f"{dumped(arguments)}\n```<{_BAR}tool▁call▁end{_BAR}>"
        for name, arguments in calls
    ]
    opens, closes = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
    return content + (opens + "\n".join(blocks) + closes if calls else "")


def _kimi(content: str, calls: Calls) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
        f"{dumped(arguments)}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    ]
    opens, closes = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return content + (opens + "".join(blocks) + closes if calls else "")


def _granite(content: str, calls: Calls) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return content + (f"<|tool_call|>{dumped(listed)}" if calls else "")


def _phi(content: str, calls: Calls) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return content + (f"functools{dumped(listed)}" if calls else "")


def _harmony(content: str, calls: Calls) -> str:
    said = [f"<|channel|>final<|message|>{content}"] if content or not calls else []
    if calls:
        said = [f"<|channel|>commentary<|message|>{content}"] if content else []
    said += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}"
        for name, arguments in calls
    ]
    last = "<|call|>" if calls else "<|return|>"
    return "<|end|><|start|>assistant".join(said) + last


WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", _hermes),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "glm": ("glm", _glm),
    "glm, close together": ("glm", _glm_close),
    "llama3_json": ("llama3_json", _bare_llama),
    "json": ("json", _bare_list),
    "pythonic": ("pythonic", _pythonic),
    "mistral": ("mistral", _mistral),
    "mistral, a list": ("mistral", _mistral_listed),
    "deepseek": ("deepseek", _deepseek),
    "deepseek, fenced": ("deepseek", _deepseek_fenced),
    "kimi": ("kimi", _kimi),
    "granite": ("granite", _granite),
    "phi": ("phi", _phi),
    "harmony": ("harmony", _harmony),
}
