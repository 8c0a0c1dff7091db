"""GBNF as Lark: the result of llguidance's own conversion, for any order of rules."""

from __future__ import annotations

import random

import pytest

from quire.structured.gbnf import lark_of

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
