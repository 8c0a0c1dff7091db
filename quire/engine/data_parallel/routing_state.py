"""RoutingState: what the choice of an engine reads, of one process or of several.

What is open at each engine, and which engine has which beginnings of prompts.
LocalRouting is that of the only process before its engines; shared_routing.py has that of several.
Knows no engine. Always holds: what one process adds is read by the next choice of any.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.routing.prefix_history import History, PrefixHistory, block_names

# Of prompts that are remembered for each engine; a block has 64 token ids.
HISTORY_BLOCKS = 1 << 16


class OpenCounts(NamedTuple):
    """Of an engine or a request. tokens: of prompts without output yet, and of expected output.
    prompt_tokens: of these, the former; new_tokens: of these, what is not cached."""

    tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class RoutingState(Protocol):
    """Engines are named by their numbers."""

    history: History

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """Return the names of the full blocks of a prompt, as `history` has them."""

    def add(self, number: int, more: OpenCounts) -> None:
        """Add to what an engine has open; negative counts take away."""

    def counts(self, number: int) -> OpenCounts:
        """Return what an engine has open."""


class LocalRouting:
    """A RoutingState in this process."""

    def __init__(self) -> None:
        self.history: History = PrefixHistory(HISTORY_BLOCKS)
        self._counts: dict[int, OpenCounts] = {}

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """See RoutingState."""
        return block_names(scope, prompt)

    def add(self, number: int, more: OpenCounts) -> None:
        """See RoutingState."""
        self._counts[number] = OpenCounts(
            *(one + other for one, other in zip(self.counts(number), more, strict=True))
        )

    def counts(self, number: int) -> OpenCounts:
        """See RoutingState."""
        return self._counts.get(number, OpenCounts())
