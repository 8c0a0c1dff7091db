"""How a prompt of /api/generate is made to fit the context: the middle of its ids is left out.

As in Ollama, `num_keep` ids at the beginning stay, one more if the first begins each text, and as
many of the last as there is room for; but here the answer has room too. Knows no text. Always
holds: a prompt that fits is not changed; what is left out is listed in a response header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.generation.generate import GenerationRequest
from quire.api.generation.request_context import RequestContext
from quire.api.generation.truncation import answer_room, without_middle
from quire.api.ollama.request import num_keep
from quire.base.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptCut:
    """num_first: ids to keep at the beginning, below 0 as many as possible; begin_id: of each text,
    None where there is none."""

    context: RequestContext
    max_model_len: int
    room_tokens: int
    num_first: int
    begin_id: int | None

    @classmethod
    def of(cls, request: GenerationRequest, sampling: SamplingParams) -> PromptCut:
        """Return what a request asks for."""
        max_model_len = request.engine.card.max_model_len
        return cls(
            context=request.context,
            max_model_len=max_model_len,
            room_tokens=answer_room(sampling.max_tokens, max_model_len),
            num_first=num_keep(request.given),
            begin_id=request.engine.tokenizer.bos_id,
        )

    def ids(self, token_ids: Sequence[int], param: str) -> Sequence[int]:
        """Return ids that fit the context with an answer. param: the field that they came in."""
        if len(token_ids) < self.max_model_len:
            return token_ids
        first = self.num_first
        if first >= 0 and token_ids[0] == self.begin_id:
            first += 1
        most = max(self.max_model_len - self.room_tokens, 1)
        kept, left_out = without_middle(token_ids, most=most, first=first)
        self.context.ignore(f"{param}[{left_out.start}:{left_out.stop}]")
        return kept
