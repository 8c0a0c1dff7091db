"""Convert GBNF, llama.cpp's grammar language, to Lark with llguidance's parser, in linear time.

llguidance determines which rules are terminals by iterating over all rules until nothing changes.
If rules precede the ones they refer to, that takes as many rounds as there are rules. So rules are
sorted after the ones they refer to first; then the second round finds no change. Invariant: the
Lark equals that of llguidance's own conversion, except for the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lark_of(text: str) -> str:
    """Convert a grammar to Lark. Raises what llguidance's parser raises for invalid GBNF."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    parsed = GrammarParser().parse(text)
    rules = {name: parsed[name] for name in _named_first(parsed)}
    resolve(rules)
    return "\n".join(["%llguidance {}", *map(str, rules.values()), ""])


def _named_first(rules: dict[str, Any]) -> list[str]:
    """Return the rules' names, each after those it refers to, except in cycles."""
    order: dict[str, None] = {}
    met: set[str] = set()
    for first in rules:
        waiting = [] if first in met else [(first, _names(rules[first]))]
        met.add(first)
        while waiting:
            rule, named = waiting[-1]
            found = next((name for name in named if name in rules and name not in met), None)
            if found is None:
                order[rule] = None
                waiting.pop()
            else:
                met.add(found)
                waiting.append((found, _names(rules[found])))
    return list(order)


def _names(rule: Any) -> Iterator[str]:
    """Yield the rules that a rule refers to."""
    from llguidance.gbnf_to_lark import RuleRefNode

    waiting = [rule]
    while waiting:
        node = waiting.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        waiting += node.children()
