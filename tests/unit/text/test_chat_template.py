"""ChatTemplate: where templates are found, how they render, who is blamed, what is bounded."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text import template_sandbox
from quire.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from tests.data import outside
from tests.unit.text.made_tokenizers import NAMED, byte_level_json, made, write_folder

PLAIN = [{"role": "user", "content": "Hi <b> & 'x' 🦙\n"}]
SEVERAL = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "吾輩は猫である"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}},
                "required": ["city"],
            },
        },
    }
]
OWN = (
    "{{ bos_token }}\n{% for message in messages %}\n"
    "    {% if message.role not in ['user', 'assistant'] %}\n"
    "        {{ raise_exception('no role ' ~ message.role) }}\n    {% endif %}\n"
    "<{{ message.role }}>{{ message.content | trim }}{{ eos_token }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\n<assistant>\n{% endif %}\n"
)
PUBLISHED = (
    "HuggingFaceTB-SmolLM3-3B",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "openai-gpt-oss-120b",
)
NEEDS_TOOLS = "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"


def _noon() -> datetime:
    return datetime(2026, 1, 31, 12, 0)


def _template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, variables=variables, now=_noon)


def test_a_template_renders_blocks_without_their_lines() -> None:
    text = _template(OWN, **NAMED).render(SEVERAL)
    assert text == (
        "<s>\n<user>Hi</s>\n<assistant>Hello.</s>\n<user>吾輩は猫である</s>\n<assistant>\n"
    )
    assert (
        not _template(OWN, **NAMED)
        .render(PLAIN, add_generation_prompt=False)
        .endswith("<assistant>\n")
    )


def test_variables_of_the_caller_count_over_the_models() -> None:
    template = _template("{{ bos_token }}{{ enable_thinking }}{{ tools }}", bos_token="<s>")
    assert template.render(PLAIN, enable_thinking=False) == "<s>FalseNone"
    assert template.render(PLAIN, bos_token="", enable_thinking=1, tools=[]) == "1[]"


def test_json_is_not_escaped_and_keeps_its_order() -> None:
    template = _template("{{ messages[0] | tojson }}|{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}")
    text = template.render([{"role": "user", "content": "<é>"}])
    assert text == '{"role": "user", "content": "<é>"}|{\n "b": 1,\n "a": "é"\n}'


def test_today_comes_from_the_clock_it_was_given() -> None:
    assert _template("{{ strftime_now('%d %b %Y') }}").render(PLAIN) == "31 Jan 2026"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{{ loop.last }}"
        "{% endfor %}{% generation %}said{% endgeneration %}"
    )
    assert _template(source).render(PLAIN) == "0False1False2Falsesaid"


def test_loop_facts_and_recursion_survive_the_counting() -> None:
    source = (
        "{% for x in messages[0].tree recursive %}{{ loop.depth }}{{ loop.revindex }}"
        "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}"
    )
    assert _template(source).render([{"tree": [7, [8, [9]]]}]) == "127" + "11(228" + "21(319))"
    lazy = "{% for x in messages | map(attribute='role') %}{{ x }}{{ loop.last }}{% endfor %}"
    assert _template(lazy).render(SEVERAL) == "userFalseassistantFalseuserTrue"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' | random }}",
        "{{ ['a'] | batch(300000000, 'y') | list }}",
        "{{ 'ab' | slice(30000000) | list }}",
        "{{ 'a' | wordwrap(1, wrapstring='x' * 1000000) }}",
        "{% if %}",
        "{{ x",
        "{% for %}",
    ],
)
def test_a_template_that_does_not_compile_names_its_line(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"chat template 'default', line 3"):
        _template("a\nb\n" + source)


def test_a_template_nested_without_end_is_refused() -> None:
    with pytest.raises(TokenizerError, match="chat template 'default'"):
        _template("{{ " + "(" * 50_000)
    with pytest.raises(TokenizerError, match=f"at most {MAX_SOURCE_CHARS}"):
        _template(" " * (MAX_SOURCE_CHARS + 1))


def test_messages_a_template_refuses_are_the_callers_fault() -> None:
    with pytest.raises(InvalidParameter, match="refuses these messages: no role tool") as caught:
        _template(OWN, **NAMED).render([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("\n\n{{ messages[3].content }}", PLAIN),
        ("\n\n{{ messages[0].content + 1 }}", PLAIN),
        ("\n\n{{ messages[0].nosuch.thing }}", PLAIN),
        ("\n\n{% for x in messages[0].content %}{% endfor %}", [{"role": "user", "content": 3}]),
        ("\n\n{% for x in tools %}{% endfor %}", PLAIN),
    ],
)
def test_other_failures_name_the_line_of_the_template(
    source: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(InvalidParameter, match=r"'default', line 3, cannot render these messages"):
        _template(source).render(messages)


def test_deep_messages_do_not_break_the_process() -> None:
    deep: Any = "end"
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(InvalidParameter, match="RecursionError"):
        _template("{{ messages | tojson }}").render([{"role": "user", "content": {"x": deep}}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_what_the_sandbox_forbids_is_the_templates_fault(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"line 1, does what a template may not"):
        _template(source).render(PLAIN)
    with pytest.raises(TokenizerError, match="starts with '_'"):
        _template("{% set ns = namespace() %}{% set ns.__class__ = 1 %}")


_GROW = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(999999) %}{% for j in range(999999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) }}",
        _GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        _GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        _GROW + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        _GROW + "{% set ns.s = ns.s | replace('a', ns.s) %}{% endfor %}",
        _GROW + "{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        _GROW + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{{ 'a'.ljust(10 ** 11) }}",
        "{{ range(1000000) | join('x' * 2000) | length }}",
        "{{ (['x' * 1000000] * 1000) | join | length }}",
        "{{ ('a' * 4000) | replace('', 'b' * 30000) | length }}",
        "{{ 1.5 | round(3000000, 'ceil') }}",
        "{{ 'a b' | truncate(10 ** 9) }}",
        "{% for i in range(300) %}{% set x = range(1000000) | list %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(1000) %}"
        "{% set ns.l = ns.l + ['x' * 1000000] %}{% endfor %}",
        "{{ [['x' * 1000000] * 1000] }}",
        "{{ [['x' * 1000000] * 1000] | string | length }}",
        "{{ [['x' * 1000000] * 1000] | tojson | length }}",
        "{{ ('a' ~ [['x' * 1000000] * 1000]) | length }}",
        "{{ '%s' % [['x' * 1000000] * 1000] }}",
        "{{ '{}'.format([['x' * 1000000] * 1000]) }}",
        "{{ (['x' * 1000000] * 1000) | map('list') | list | length }}",
        "{{ (['x' * 1000000] * 1000) | map('upper') | list | length }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}"
        "{% endfor %}{{ ns.l }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{{ 'a' | indent(10 ** 11) }}",
        "{{ '%100000000000d' % 3 }}",
        "{{ '%*d' % (10 ** 11, 3) }}",
        "{{ '%100000000000d' | format(3) }}",
        "{{ '{:>10000000000}'.format('a') }}",
        "{% for i in range(900000) %}{{ '------------------------' }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(99) }}",
    ],
)
def test_work_and_size_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_WORK", 950_000 if "900000" in source else 20_000)
    with pytest.raises(InvalidParameter, match="does too much for these messages"):
        _template(source).render(PLAIN)


def test_ordinary_arithmetic_and_formats_are_not_disturbed() -> None:
    source = "{{ 2 ** 10 }} {{ '-' * 3 }} {{ '%5.2f' % 2.5 }} {{ '%s-%s' | format('a', 'b') }}"
    assert _template(source).render(PLAIN) == "1024 ---  2.50 a-b"


def test_content_in_parts_is_joined_for_templates_that_know_no_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = _template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not template.takes_parts
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(InvalidParameter, match="content part of type 'image_url'"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_content_in_parts_is_left_to_templates_that_take_it() -> None:
    template = _template(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert template.takes_parts
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "[one][two]"


def _folder(path: Path, chat_template: object) -> ChatTemplate | None:
    config = {**NAMED, "chat_template": chat_template}
    write_folder(path, byte_level_json(), config)
    return ChatTemplate.load(path, made(byte_level_json(), config))


def test_no_template_is_none(tmp_path: Path) -> None:
    assert _folder(tmp_path, None) is None


def test_the_template_of_the_tokenizer_config_sees_its_tokens(tmp_path: Path) -> None:
    template = _folder(tmp_path, "{{ bos_token }}x")
    assert template is not None
    assert template.render(PLAIN) == "<s>x"


def test_a_file_of_its_own_counts_over_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    template = _folder(tmp_path, "config")
    assert template is not None
    assert template.render(PLAIN) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja\n")
    template = _folder(tmp_path, "config")
    assert template is not None
    assert template.render(PLAIN) == "jinja"


def test_named_templates_are_chosen_by_default_tools_or_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "{{ documents[0].text }}"},
    ]
    template = _folder(tmp_path, named)
    assert template is not None
    assert template.render(PLAIN) == "plain"
    assert template.render(PLAIN, tools=TOOLS) == "tools"
    assert template.render(PLAIN, documents=[{"text": "d"}], template_name="rag") == "d"
    with pytest.raises(InvalidParameter, match="named 'x'; it has default, rag, tool_use"):
        template.render(PLAIN, template_name="x")


def test_a_single_named_template_is_the_default_and_several_need_one(tmp_path: Path) -> None:
    template = _folder(tmp_path, [{"name": "only", "template": "one"}])
    assert template is not None
    assert template.render(PLAIN) == "one"
    two = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    with pytest.raises(TokenizerError, match="none named 'default'"):
        _folder(tmp_path, two)


@pytest.mark.parametrize("wrong", [3, ["text"], [{"name": "default"}], {"template": "x"}])
def test_a_template_field_of_another_shape_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template holds"):
        _folder(tmp_path, wrong)


def _conversations(name: str) -> list[tuple[list[dict[str, str]], list[dict[str, Any]] | None]]:
    tools = TOOLS if name == NEEDS_TOOLS else None
    return [(PLAIN, tools), (SEVERAL, tools)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_render_plain_and_longer_conversations(name: str) -> None:
    template = ChatTemplate.load(outside(f"templates/{name}.jinja"), made(byte_level_json()))
    assert template is not None
    for messages, tools in _conversations(name):
        text = template.render(messages, tools=tools)
        for message in messages:
            assert message["content"].strip() in text
        assert text == template.render(messages, tools=tools)


@pytest.mark.parity
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_published_templates_render_as_transformers_does(
    name: str, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    file = outside(f"templates/{name}.jinja")
    template = ChatTemplate.load(file, made(byte_level_json()))
    assert template is not None
    system = {"role": "system", "content": "Be brief."}
    for messages in (PLAIN, SEVERAL, [system, *SEVERAL]):
        try:
            expected = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=file.read_text(encoding="utf-8"),
                add_generation_prompt=add_generation_prompt,
                **NAMED,
            )[0][0]
        except (TemplateError, TypeError):  # what it refuses, we refuse
            with pytest.raises(InvalidParameter):
                template.render(messages, tools=tools)
            continue
        rendered = template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        assert rendered == expected
