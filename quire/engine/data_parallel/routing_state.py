"""RoutingState: what the choice of an engine reads, of one process or of several.

Open tokens and requests of each engine, and which engine has which beginnings of prompts.
LocalRouting is that of the only process before its engines; shared_routing.py has that of several.
Knows no engine. Always holds: what one process adds is read by the next choice of any.
"""

from __future__ import annotations

from typing import Protocol

from quire.routing.prefix_history import History, PrefixHistory, block_names

# Of prompts that are remembered for each engine; a block has 64 token ids.
HISTORY_BLOCKS = 1 << 16


class RoutingState(Protocol):
    """Engines are named by their numbers."""

    history: History

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """Return the names of the full blocks of a prompt, as `history` has them."""

    def add(self, number: int, *, tokens: int, requests: int = 0) -> None:
        """Add to what an engine has open."""

    def open_tokens(self, number: int) -> int:
        """Return how many tokens an engine has to compute."""

    def open_requests(self, number: int) -> int:
        """Return how many requests an engine has."""


class LocalRouting:
    """A RoutingState in this process."""

    def __init__(self) -> None:
        self.history: History = PrefixHistory(HISTORY_BLOCKS)
        self._tokens: dict[int, int] = {}
        self._requests: dict[int, int] = {}

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """See RoutingState."""
        return block_names(scope, prompt)

    def add(self, number: int, *, tokens: int, requests: int = 0) -> None:
        """See RoutingState."""
        self._tokens[number] = self.open_tokens(number) + tokens
        self._requests[number] = self.open_requests(number) + requests

    def open_tokens(self, number: int) -> int:
        """See RoutingState."""
        return self._tokens.get(number, 0)

    def open_requests(self, number: int) -> int:
        """See RoutingState."""
        return self._requests.get(number, 0)
