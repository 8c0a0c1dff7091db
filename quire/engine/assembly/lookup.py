"""Prompt lookup of an engine (--speculate ngram): what it keeps of requests and of earlier answers.

Nothing is loaded. An engine without a proposer of its own has prompt lookup as well, for requests
that ask for drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds, mib
from quire.engine.assembly.sized_proposer import LoadedModel, SizedProposer
from quire.speculative.history import HistoryProposer, history_bytes
from quire.speculative.ngram import INDEX_TOKEN_BYTES, NgramProposer
from quire.speculative.proposer import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLookup(SizedProposer):
    """For `num_slots` requests. history_tokens: of earlier answers, by tenant; 0: none are kept."""

    num_slots: int
    history_tokens: int
    needs: DraftNeeds

    def notes(self, max_model_len: int) -> list[str]:
        """See SizedProposer. The index grows with the texts, so that the sum does not have it."""
        most = self.num_slots * max_model_len * INDEX_TOKEN_BYTES
        return [
            f"prompt lookup: {INDEX_TOKEN_BYTES} bytes of host memory per token of a running "
            f"request, at most {mib(most)}, which the sum leaves out"
        ]

    def load(self, model: LoadedModel) -> Proposer:
        """See SizedProposer."""
        if self.history_tokens:
            return HistoryProposer(self.num_slots, self.history_tokens)
        return NgramProposer(self.num_slots)


def sized_lookup(config: EngineConfig) -> SizedLookup:
    """Return the prompt lookup that the settings ask for."""
    num_tokens = config.speculation.speculate_history_tokens
    return SizedLookup(
        num_slots=config.scheduler.max_num_seqs,
        history_tokens=num_tokens,
        needs=DraftNeeds(
            name="prompt lookup",
            host_bytes=history_bytes(num_tokens),
            host_what="history of answers",
            advice="lower --speculate-history-tokens" if num_tokens else "",
        ),
    )
