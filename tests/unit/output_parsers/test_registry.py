"""Selection of the format by the template: by marks alone, and for published templates."""

from __future__ import annotations

import pytest

from quire.output_parsers.reasoning import STYLES
from quire.output_parsers.registry import REASONING_PARSERS, TOOL_CALL_FORMATS, TOOL_PARSERS
from quire.output_parsers.selection import ParserSelection, select_parsers
from tests.cases import each_case
from tests.data import outside

BAR = "\uff5c"


def names(reading: ParserSelection) -> tuple[str, str]:
    tools = reading.tools.name if reading.tools is not None else "none"
    if reading.reasoning == "harmony":
        return tools, "harmony"
    style = next((name for name, marks in STYLES.items() if marks == reading.reasoning), "none")
    return tools, style


@each_case(
    ("template", "expected"),
    [
        ("{{ messages }}", ("json", "none")),
        ("<tool_call> {{ tools }}", ("hermes", "none")),
        ("<tool_call> <think> </think>", ("hermes", "think")),
        ("<tool_call> <function=a> <parameter=b>", ("qwen3_coder", "none")),
        ("<tool_call> <arg_key> <arg_value> </think>", ("glm", "think")),
        ("<|python_tag|>", ("llama3_json", "none")),
        ("<|start_header_id|>ipython", ("llama3_json", "none")),
        ("<|python_start|> <|python_tag|>", ("pythonic", "none")),
        ("[func_name1(params)]", ("pythonic", "none")),
        ("[TOOL_CALLS] [THINK] [/THINK]", ("mistral", "mistral")),
        (f"<{BAR}tool▁calls▁begin{BAR}> </think>", ("deepseek", "think")),
        ("<|tool_calls_section_begin|>", ("kimi", "none")),
        ("<|tool_call|>", ("granite", "none")),
        ("functools", ("phi", "none")),
        ("<|channel|> <|message|>", ("harmony", "harmony")),
        ("<seed:think> </seed:think>", ("json", "seed")),
        ("◁think▷◁/think▷", ("json", "kimi")),
    ],
)
def test_marks_in_a_template_select_the_format(template: str, expected: tuple[str, str]) -> None:
    assert names(select_parsers(template)) == expected
    assert names(select_parsers(template, tool_parser="none", reasoning_parser="none")) == (
        "none",
        "none",
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceTB-SmolLM3-3B", ("json", "think")),
        ("Mistral-Small-3.2-24B-Instruct-2506", ("mistral", "none")),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", ("hermes", "none")),
        ("Qwen-Qwen2.5-7B-Instruct", ("hermes", "none")),
        ("Qwen-Qwen3-0.6B", ("hermes", "think")),
        ("Qwen3-Coder", ("qwen3_coder", "none")),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", ("deepseek", "think")),
        ("deepseek-ai-DeepSeek-V3.1", ("deepseek", "think")),
        ("google-gemma-2-2b-it", ("json", "none")),
        ("meta-llama-Llama-3.1-8B-Instruct", ("llama3_json", "none")),
        ("meta-llama-Llama-3.2-3B-Instruct", ("llama3_json", "none")),
        ("microsoft-Phi-3.5-mini-instruct", ("json", "none")),
        ("openai-gpt-oss-120b", ("harmony", "harmony")),
    ],
)
def test_published_templates_select_their_models_format(
    name: str, expected: tuple[str, str]
) -> None:
    template = outside(f"templates/{name}.jinja").read_text(encoding="utf-8")
    assert names(select_parsers(template)) == expected


def test_every_name_can_be_requested() -> None:
    for name in TOOL_PARSERS:
        reading = select_parsers("", tool_parser=name)
        expected = "json" if name == "auto" else name
        assert names(reading)[0] == expected
    for name in REASONING_PARSERS:
        expected = "none" if name == "auto" else name
        assert names(select_parsers("", reasoning_parser=name))[1] == expected
    assert set(TOOL_CALL_FORMATS) == set(TOOL_PARSERS) - {"auto", "none"}
