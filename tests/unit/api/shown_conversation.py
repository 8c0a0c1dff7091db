"""A chat template that shows everything of a conversation that may change a prompt, and a tool.

For tests that compare the prompt of an API with that of the same chat in OpenAI's form. Knows no
API but the form of its tools.
"""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
