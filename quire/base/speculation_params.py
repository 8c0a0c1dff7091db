"""SpeculationParams: what a request sets about draft tokens.

Plain numbers, checked where they are read from fields. They change the speed of an answer only.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """is_on: whether the server's proposer is asked; None: as the server is set.

    max_drafts: most draft tokens of a step; None: the server's. prediction_ids: the tokens of a
    text that the answer may repeat.
    """

    is_on: bool | None = None
    max_drafts: int | None = None
    prediction_ids: tuple[int, ...] = ()
