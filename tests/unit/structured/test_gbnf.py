"""GBNF as Lark: the result of llguidance's own conversion, for any order of rules; rejections."""

from __future__ import annotations

import random

import pytest

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar, json_schema, regex, structural_tag
from quire.structured.compiler import GrammarCompiler
from quire.structured.gbnf import lark_of
from tests.cases import each_case

conversion = pytest.importorskip("llguidance.gbnf_to_lark")

CHAIN = [f'r{at} ::= "a" r{at + 1}' for at in range(400)]
GRAMMARS = {
    "one rule": 'root ::= "a" [0-9]+',
    "a chain": "\n".join(["root ::= r0", *CHAIN, 'r400 ::= "z"']),
    "a circle": 'root ::= a | "x"\na ::= "(" b ")"\nb ::= a | c\nc ::= [a-z]{2,4}',
    "itself": 'root ::= "a" root | ""',
    "names with capitals": 'root ::= fooBar my-rule\nfooBar ::= "a"\nmy-rule ::= fooBar "b"?',
    "comments": '# first\nroot ::= a # here\n# then\na ::= "x" | ("y" | . )*\n',
    "unused": 'root ::= "a"\nb ::= c\nc ::= "d"',
}

ODD_TAG = structural_tag(
    {"structures": [{"begin": "<a", "schema": {"type": "int"}}], "triggers": ["<"]}
)


def rules(lark: str) -> list[str]:
    lines = [line.strip() for line in lark.split("\n")]
    return sorted(line for line in lines if line)


@pytest.mark.parametrize("name", GRAMMARS)
def test_it_has_the_rules_of_llguidances_own_conversion(name: str) -> None:
    text = GRAMMARS[name]
    assert rules(lark_of(text)) == rules(conversion.gbnf_to_lark(text))
    lines = text.split("\n")
    random.Random(3).shuffle(lines)
    assert rules(lark_of("\n".join(lines))) == rules(conversion.gbnf_to_lark("\n".join(lines)))


@pytest.mark.parametrize("text", ['root ::= a"', "root ::= missing", 'a ::= "x"', "root = 1"])
def test_invalid_gbnf_is_rejected_as_by_llguidance(text: str) -> None:
    with pytest.raises(Exception, match=r"\w") as ours:
        lark_of(text)
    with pytest.raises(type(ours.value)):
        conversion.gbnf_to_lark(text)


def test_each_rule_is_visited_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    look = conversion.RuleRefNode.is_terminal

    def counted(node: object) -> bool:
        nonlocal looks
        looks += 1
        return bool(look(node))

    monkeypatch.setattr(conversion.RuleRefNode, "is_terminal", counted)
    lark_of(GRAMMARS["a chain"])
    assert looks <= 2 * 401


@each_case(
    ("unusable", "said"),
    [
        (regex("(a"), 'expression "(a" cannot be used: unclosed group (at character 0); Rust'),
        (regex("a(?!b)"), "is not supported (at character 1); Rust's syntax is allowed"),
        (regex("a\\"), "the backslash at its end escapes nothing; Rust's"),
        (regex("\\bfoo"), 'expression "\\\\bfoo" cannot be used: lookarounds not supported yet;'),
        (grammar("start: foo"), 'line 1, column 8: unknown name: "foo"; Lark with a rule `start:'),
        (grammar("root ::= a"), "not valid GBNF: Rule 'a' not found; Lark with a rule"),
        (grammar("start: /(/"), 'the regular expression "(" in it: unclosed group; Rust\'s syntax'),
        (json_schema({}, whitespace="("), 'whitespace_pattern is "(": unclosed group; Rust\'s'),
        (json_schema({"$ref": "#"}), "give what recurs an alternative that ends"),
        (ODD_TAG, 'structures[0].schema: the schema has the type "int" (at #/type); did you mean'),
    ],
)
def test_an_unusable_grammar_is_rejected_on_one_line_with_what_is_allowed(
    unusable: Grammar, said: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidParameter) as error:
        compiler.matcher(unusable)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
