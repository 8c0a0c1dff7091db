"""Randomly composed templates: each renders, or raises a template error, and nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.chat_template import ChatTemplate
from quire.text.template_work import Limits
from tests.drawn import examples

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "吾輩は"},
    {"role": "user", "content": [{"type": "text", "text": "猫である"}], "x": {"y": [1, None]}},
]
SMALL = Limits(num_rounds=20_000, made_bytes=1 << 24, text_chars=100_000)
PIECES = (
    "{{ ", " }}", "{% ", " %}", "{%- ", " -%}", "{# ", " #}", "for x in ", "endfor", "if ",
    "endif", "else", "set ", "set y", "endset", "macro m(a)", "endmacro", "m(", "call m(1)",
    "endcall", "messages", "messages[0]", ".content", ".role", "['x']", "[1:]", "[::0]", " | ",
    "tojson", "join", "map(", "'upper'", "list", "sort", "default(", "(", ")", "[", "]", "{", "}",
    ":", ",", " + ", " * ", " ** ", " % ", " // ", " ~ ", " == ", " < ", " in ", " is ", "defined",
    "loop", "loop.index", "loop(", "self", "caller()", "varargs", "namespace(", "ns.x", "=", "1",
    "0", "99999999999", "1e999", "'%s'", "'{}'", ".format(", ".join(", ".split(", ".items()",
    "range(", "raise_exception(", "strftime_now(", "break", "continue", "generation",
    "endgeneration", "block b", "endblock", "self.b()", "filter upper", "endfilter", "not ",
    " or ", "none", "text", "\n", "é🦙", "__class__", "include 'x'", "autoescape true",
    "endautoescape", "raw", "endraw", "with a=1", "endwith", "recursive", "cycler(", "joiner(",
    ".next()", "dict(", "|attr(", "groupby(", "unique", "sum(", "batch(", "slice(", "round(",
    "indent(", "truncate(", "int(", "float", "items", "dictsort", "select(", "'eq'", "ns", "-1",
    ".get(", ".pop(", "'\\x00'", "'%d'", "center(", "first", "last", "reverse", "string", "e",
)  # fmt: skip


def _tried(source: str) -> str:
    template = ChatTemplate({"default": source}, variables={"bos_token": "<s>"}, limits=SMALL)
    try:
        return "rendered: " + template.render(TALK)
    except (TokenizerError, InvalidParameter) as error:
        return str(error)


@settings(max_examples=examples(300), deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_a_random_template_renders_or_raises_a_template_error(pieces: list[str]) -> None:
    said = _tried("".join(pieces))
    assert said.startswith(("rendered: ", "chat template 'default'", "the model's chat template"))


@settings(max_examples=examples(300), deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_a_random_expression_renders_or_raises_a_template_error(pieces: list[str]) -> None:
    inner = "".join(pieces)
    said = _tried(
        "{% set ns = namespace(x=[1]) %}{% for x in messages %}{{ " + inner + " }}{% endfor %}"
    )
    assert said.startswith(("rendered: ", "chat template 'default'", "the model's chat template"))
