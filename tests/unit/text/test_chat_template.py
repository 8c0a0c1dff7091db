"""ChatTemplate: how templates are found and rendered, the party at fault, what is bounded."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, SettingError, TokenizerError
from quire.text.chat_template import ChatTemplate
from quire.text.compiled_template import MAX_SOURCE_CHARS, CompiledTemplate
from quire.text.message_forms import takes_argument_objects, takes_argument_text
from quire.text.template_sandbox import TemplateSandbox
from quire.text.template_work import Limits
from tests.cases import each_case
from tests.unit.text.made_tokenizers import NAMED, byte_level_json, made, write_folder

# A selected template must read messages.
READS = "{% if messages %}{% endif %}"
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


def test_request_variables_override_the_models() -> None:
    template = _template("{{ bos_token }}{{ enable_thinking }}{{ tools }}", bos_token="<s>")
    assert template.render(PLAIN, enable_thinking=False) == "<s>FalseNone"
    assert template.render(PLAIN, bos_token="", enable_thinking=1, tools=[]) == "1[]"


def test_json_is_not_escaped_and_keeps_its_order() -> None:
    template = _template("{{ messages[0] | tojson }}|{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}")
    text = template.render([{"role": "user", "content": "<é>"}])
    assert text == '{"role": "user", "content": "<é>"}|{\n "b": 1,\n "a": "é"\n}'


def test_the_date_comes_from_the_given_clock() -> None:
    assert _template("{{ strftime_now('%d %b %Y') }}").render(PLAIN) == "31 Jan 2026"


def test_loop_controls_and_generation_blocks_are_supported() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{{ loop.last }}"
        "{% endfor %}{% generation %}said{% endgeneration %}"
    )
    assert _template(source).render(PLAIN) == "0False1False2Falsesaid"


def test_loop_variables_and_recursion_work_with_counting() -> None:
    source = (
        "{% for x in messages[0].tree recursive %}{{ loop.depth }}{{ loop.revindex }}"
        "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}"
    )
    assert _template(source).render([{"tree": [7, [8, [9]]]}]) == "127" + "11(228" + "21(319))"
    lazy = "{% for x in messages | map(attribute='role') %}{{ x }}{{ loop.last }}{% endfor %}"
    assert _template(lazy).render(SEVERAL) == "userFalseassistantFalseuserTrue"


@each_case(
    "source",
    [
        "{{ 'a' | random }}",
        "{{ 'a' | wordwrap(1, wrapstring='x' * 1000000) }}",
        "{% if %}",
        "{{ x",
        "{% for %}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{% from 'other' import x %}",
        "{% extends 'other' %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_a_template_that_does_not_compile_is_kept_with_its_line_and_raises(source: str) -> None:
    template = _template("a\nb\n" + source)
    assert "chat template 'default', line 3" in template.problems["default"]
    with pytest.raises(TokenizerError, match=r"'default', line 3: .*--chat-template"):
        template.render(PLAIN)
    with pytest.raises(TokenizerError, match="'default', line 3"):
        _template("fine").with_source("a\nb\n" + source)


def test_one_invalid_template_does_not_affect_the_others() -> None:
    template = ChatTemplate({"default": "fine", "rag": "{% if"}, variables={})
    assert template.render(PLAIN) == "fine"
    assert list(template.problems) == ["rag"]
    with pytest.raises(TokenizerError, match="'rag', line 1"):
        template.render(PLAIN, chat_template="rag")


def test_an_endlessly_nested_template_is_rejected() -> None:
    for source in (
        "{{ " + "(" * 50_000,
        "{{ " + "not " * 50_000 + "1 }}",
        "{% for i in x %}" * 50 + "{% endfor %}" * 50,
        "{% if x %}" * 2_000 + "{% endif %}" * 2_000,
        "{% if x %}" + "{% elif x %}" * 20_000 + "{% endif %}",
        "{{ " + "9" * 10_000 + " }}",
    ):
        assert "chat template 'default'" in _template(source).problems["default"]
    assert (
        f"at most {MAX_SOURCE_CHARS}" in _template(" " * (MAX_SOURCE_CHARS + 1)).problems["default"]
    )


def test_messages_rejected_by_a_template_are_a_client_error() -> None:
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


def test_deep_messages_do_not_crash_the_process() -> None:
    deep: Any = "end"
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(InvalidParameter, match="nested more than 80 levels"):
        _template("{{ messages | tojson }}").render([{"role": "user", "content": {"x": deep}}])


def test_content_parts_are_joined_for_templates_without_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = _template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(InvalidParameter, match="content part of type 'image_url'"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_content_parts_are_passed_to_templates_with_parts() -> None:
    template = _template(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "[one][two]"


def _folder(path: Path, chat_template: object) -> ChatTemplate | None:
    config = {**NAMED, "chat_template": chat_template}
    write_folder(path, byte_level_json(), config)
    return ChatTemplate.load(path, made(byte_level_json(), config))


def test_a_missing_template_is_none(tmp_path: Path) -> None:
    assert _folder(tmp_path, None) is None


def test_the_template_of_the_tokenizer_config_has_its_tokens(tmp_path: Path) -> None:
    template = _folder(tmp_path, "{{ bos_token }}x")
    assert template is not None
    assert template.render(PLAIN) == "<s>x"


def test_a_template_file_overrides_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    template = _folder(tmp_path, "config")
    assert template is not None
    assert template.render(PLAIN) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja\n")
    template = _folder(tmp_path, "config")
    assert template is not None
    assert template.render(PLAIN) == "jinja"


def test_named_templates_are_selected_by_default_tools_or_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "{{ documents[0].text }}"},
    ]
    template = _folder(tmp_path, named)
    assert template is not None
    assert template.render(PLAIN) == "plain"
    assert template.render(PLAIN, tools=TOOLS) == "tools"
    assert template.render(PLAIN, documents=[{"text": "d"}], chat_template="rag") == "d"
    with pytest.raises(InvalidParameter, match="named 'x'; it has default, rag, tool_use"):
        template.render(PLAIN, chat_template="x")


def test_a_single_named_template_is_the_default_and_several_need_one(tmp_path: Path) -> None:
    template = _folder(tmp_path, [{"name": "only", "template": "one"}])
    assert template is not None
    assert template.render(PLAIN) == "one"
    two = [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]
    template = _folder(tmp_path, two)
    assert template is not None
    assert template.render(PLAIN, chat_template="b") == "y"
    with pytest.raises(InvalidParameter, match="no chat template named 'default'; it has a, b"):
        template.render(PLAIN)


@pytest.mark.parametrize("wrong", [3, ["text"], [{"name": "default"}], {"template": "x"}])
def test_a_template_field_of_another_form_is_rejected(tmp_path: Path, wrong: object) -> None:
    template = _folder(tmp_path, wrong)
    assert template is not None
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template holds"):
        template.render(PLAIN)


def test_a_file_or_a_name_replaces_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "rag" + READS}]
    write_folder(tmp_path, byte_level_json(), {**NAMED, "chat_template": named})
    tokenizer = made(byte_level_json(), NAMED)
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}own" + READS)
    for chosen, text in ((str(file), "<s>own"), ("rag", "rag"), (None, "plain")):
        template = ChatTemplate.load(tmp_path, tokenizer, chosen=chosen)
        assert template is not None
        assert template.render(PLAIN) == text
        assert template.render(PLAIN, chat_template="rag") == "rag"
    with pytest.raises(SettingError, match=r"neither a file nor the name .*it has: default, rag"):
        ChatTemplate.load(tmp_path, tokenizer, chosen="nowhere")
    file.write_text("a\n{% if")
    with pytest.raises(SettingError, match="line 2"):
        ChatTemplate.load(tmp_path, tokenizer, chosen=str(file))
    file.write_text("a text of another kind")
    with pytest.raises(SettingError, match=r"own.jinja' never reads messages.*give a Jinja"):
        ChatTemplate.load(tmp_path, tokenizer, chosen=str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(SettingError, match="not valid UTF-8"):
        ChatTemplate.load(tmp_path, tokenizer, chosen=str(file))


def test_a_template_beside_a_broken_config_can_be_selected(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level_json(), {**NAMED, "chat_template": 3})
    file = tmp_path / "own.jinja"
    file.write_text("own" + READS)
    template = ChatTemplate.load(tmp_path, made(byte_level_json(), NAMED), chosen=str(file))
    assert template is not None
    assert template.render(PLAIN) == "own"


def test_unread_variables_are_detected() -> None:
    template = ChatTemplate(
        {
            "default": "{% set today = today or 'now' %}{{ mood }}{{ messages }}{{ bos_token }}",
            "other": "{{ weather }}",
        },
        variables=NAMED,
    )
    template.check_variables(["mood", "today", "bos_token"])
    template.check_variables(["weather"], chat_template="other")
    with pytest.raises(InvalidParameter, match=r"did you mean 'mood'\? it has: bos_token, mood"):
        template.check_variables(["modo"])
    for own in ("messages", "raise_exception", "namespace", "loop", "caller"):
        with pytest.raises(InvalidParameter) as caught:
            template.check_variables([own])
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "none"),
        ("{% if day is not defined %}{% set day = 1 %}{% endif %}{{ day }}", "day"),
        ("{% if messages %}{% set kind = 1 %}{% endif %}{{ kind }}{{ mood }}", "mood"),
        ("{% set name = 1 %}{{ name }}", "none"),
        ("{% macro say(what) %}{{ what }}{{ tone }}{% endmacro %}{{ say(1) }}", "tone"),
    ],
)
def test_only_variables_that_can_change_the_text_count(source: str, told: str) -> None:
    template = _template(source)
    for name in ("loop", "m", "name", "say", "what"):
        with pytest.raises(InvalidParameter, match=f"it has: {told}$"):
            template.check_variables([name])
    for name in {"day", "mood", "tone"} & {told}:
        template.check_variables([name])


def test_unused_tools_and_documents_are_detected() -> None:
    template = ChatTemplate(
        {"default": "{{ messages }}{{ documents }}", "tool_use": "{{ tools }}"}, variables={}
    )
    template.check_reads("documents")
    template.check_reads("tools", tools=[{}])
    for name, chosen in (("tools", "default"), ("documents", "tool_use")):
        with pytest.raises(InvalidParameter, match=f"does not use {name}") as caught:
            template.check_reads(name, tools=[{}], chat_template=chosen)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("written", "takes", "takes_text"),
    [
        ("{{ c.function.arguments | tojson }}", True, True),
        ("{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}", True, False),
        ("{% for k in c.function.arguments %}{{ k }}{% endfor %}", True, True),
        ("{{ c.function.arguments.keys() | list | tojson }}", True, False),
        ("{{ c.function.arguments }}", False, True),
        ("{{ 'a' + c.function.arguments }}", False, True),
        ("{{ c.function.name }}", False, False),
        ("{{ raise_exception('no tools') }}", False, False),
    ],
)
def test_whether_arguments_should_be_objects_is_detected_by_trying(
    written: str, takes: bool, takes_text: bool
) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + written + "{% endfor %}"
        "{% endfor %}"
    )
    template = CompiledTemplate(
        TemplateSandbox(_noon), "default", source, limits=Limits(), clock_s=time.monotonic
    )
    assert takes_argument_objects(template, {}) is takes
    assert takes_argument_text(template, {}) is takes_text
