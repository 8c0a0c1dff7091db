"""Call: the arguments of `generate` as one record, so that a request can be sent again.

Knows no engine that exists. Always holds: a call asks for the same answer wherever it is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.output.text_delta import PLAIN_TEXT, TextDelta, TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of Engine.generate."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    request_id: str
    first_stream: int
    cache_salt: str
    terms: SchedulingParams
    text_rules: TextRules
    output_ids: Sequence[int]


class CallEngine(ABC):
    """An engine that sends its calls to other engines."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        first_stream: int = 0,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        text_rules: TextRules = PLAIN_TEXT,
        output_ids: Sequence[int] = (),
    ) -> AsyncGenerator[TextDelta, None]:
        """As EngineClient.generate; also PoisonRequest, where two engines die with the request."""
        return self.deltas(
            Call(
                prompt_ids=prompt_ids,
                sampling=sampling,
                request_id=request_id,
                first_stream=first_stream,
                cache_salt=cache_salt,
                terms=terms,
                text_rules=text_rules,
                output_ids=output_ids,
            )
        )

    @abstractmethod
    def deltas(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer to a call."""
