"""GBNF, llama.cpp's way to write grammars, as Lark: by llguidance's own parser, in linear time.

llguidance finds out which rules are terminals by going through all of them until nothing changes.
Rules that stand in front of those they name make that as many rounds as there are rules, so they
are put behind them first: then one round finds all, and another that there is no more. Knows no
JSON and no tokens. Always holds: the Lark is that of llguidance's own conversion, in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lark_of(text: str) -> str:
    """The grammar in Lark. Raises whatever llguidance's parser raises for what is no GBNF."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    parsed = GrammarParser().parse(text)
    rules = {name: parsed[name] for name in _named_first(parsed)}
    resolve(rules)
    return "\n".join(["%llguidance {}", *map(str, rules.values()), ""])


def _named_first(rules: dict[str, Any]) -> list[str]:
    """The rules' names, each behind those it names, but where they name each other in a circle."""
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
    """The rules that a rule names."""
    from llguidance.gbnf_to_lark import RuleRefNode

    waiting = [rule]
    while waiting:
        node = waiting.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        waiting += node.children()
