"""llguidance's limits for one grammar, which bound its time and memory.

For the grammars of answers (compiler.py) and of single items (item_values.py). Invariant: both
fail at the same limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# In llguidance's units: work to build a lexer and for one mask, states, symbols.
_INITIAL_FUEL = 1_000_000
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000
_LEXER_STATES = 50_000
_GRAMMAR_SYMBOLS = 500_000
# Items of a parser row: two for each choice, four for each property, and a margin.
_ROW_ITEMS = 6_500


def parser_limits() -> LLParserLimits:
    """Return the limits of each grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        max_items_in_row=_ROW_ITEMS,
        verbose_errors=False,
    )
