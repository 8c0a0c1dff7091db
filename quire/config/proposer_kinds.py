"""The kinds of proposers of draft tokens: the one table that says what each is.

Settings, help texts, refusals, assembly and tests derive their names and lists from it. Loads
nothing. Always holds: the rows of PROPOSERS are the names of ProposerName, and those that read
hidden states are the names of HeadName (tests/unit/config/test_proposer_kinds.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

HeadName = Literal["medusa", "eagle"]
ProposerName = Literal["ngram", "draft", "self", HeadName]


class DraftWeights(Enum):
    """Where the weights that compute drafts come from."""

    NONE = "none"  # drafts are looked up
    MODEL = "model"  # they are the model's own
    FILES = "files"  # --draft-model names them, or they come with the built-in model


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerKind:
    """proposes: what, in the help of --speculate. reads_hidden_states: of the model, so that
    its program is tapped and its runner keeps rows of them."""

    proposes: str
    weights: DraftWeights
    reads_hidden_states: bool = False

    @property
    def computes(self) -> bool:
        """Whether drafts are computed: their passes are timed and priced, and read weights in an
        order of their own, so that offloaded weights exclude them."""
        return self.weights is not DraftWeights.NONE

    @property
    def needs_files(self) -> bool:
        """Whether --draft-model gives its weights."""
        return self.weights is DraftWeights.FILES


PROPOSERS: Mapping[ProposerName, ProposerKind] = MappingProxyType(
    {
        "ngram": ProposerKind(
            proposes="tokens that followed the last ones earlier in the request",
            weights=DraftWeights.NONE,
        ),
        "draft": ProposerKind(
            proposes="tokens of --draft-model",
            weights=DraftWeights.FILES,
        ),
        "self": ProposerKind(
            proposes="tokens of the model's first layers",
            weights=DraftWeights.MODEL,
        ),
        "medusa": ProposerKind(
            proposes="tokens of Medusa heads trained for the model (--draft-model)",
            weights=DraftWeights.FILES,
            reads_hidden_states=True,
        ),
        "eagle": ProposerKind(
            proposes="tokens of an EAGLE-3 head trained for the model (--draft-model)",
            weights=DraftWeights.FILES,
            reads_hidden_states=True,
        ),
    }
)
LOOKUPS = tuple(name for name, kind in PROPOSERS.items() if not kind.computes)
COMPUTED = tuple(name for name, kind in PROPOSERS.items() if kind.computes)
HEADS = tuple(name for name, kind in PROPOSERS.items() if kind.reads_hidden_states)
WITH_FILES = tuple(name for name, kind in PROPOSERS.items() if kind.needs_files)


def any_of(names: Iterable[str]) -> str:
    """Return names as a sentence has them: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
