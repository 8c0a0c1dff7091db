"""SchedulerLimits: the numbers the scheduler must keep to.

A record without knowledge, but for what limits of queues mean for streams that continue; the engine
fills it from flags and from what the cache can hold. Always holds: each number lies within its
limits, so it is not checked again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from quire.base.errors import InvalidParameter
from quire.base.records import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of one scheduler; 0 stands for no limit where it is a default.

    max_num_seqs: requests that run at once. max_num_batched_tokens: token rows of one step.
    max_model_len: prompt and output of one request, in tokens. plans_in_flight: how many plans may
    be out at once. max_queued_requests: how many may wait, beside those that can start at once,
    before new ones are rejected; max_queued_tokens: the same for their known tokens.
    step_budget_ms: predicted milliseconds of one step. queue_timeout_ms: how long a request may
    wait for its first step. tpot_target_ms: predicted milliseconds of a step that generates tokens,
    kept by bounding the prompts in it; 0 for what requests ask. long_prompt_tokens: from how many
    known tokens on a request counts as long. max_long_prompts, max_short_prompts: how many long
    ones, and others, may run at once. part_layers: into how many groups of layers a prompt chunk
    may be cut, to be computed one per step; layered_part_tokens: the most tokens of such a chunk.
    timeline_steps: steps kept for timelines; 0 keeps no timelines.
    micro_batches: plans over which the requests that generate are divided, which stages of a
    pipeline compute at once; 0: a plan may have all of them. pin_share: of the KV
    cache, that a tenant's marked prefixes may pin; 0 pins none.

    Raises InvalidParameter, which names the field.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    plans_in_flight: int = 1
    max_queued_requests: int = 1024
    max_queued_tokens: int = 0
    step_budget_ms: float = 0.0
    queue_timeout_ms: float = 0.0
    tpot_target_ms: float = 0.0
    long_prompt_tokens: int = 0
    max_long_prompts: int = 0
    max_short_prompts: int = 0
    part_layers: int = 0
    layered_part_tokens: int = 0
    timeline_steps: int = 0
    micro_batches: int = 0
    pin_share: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default in (0, 0.0) else 1  # 0: no such limit
            if not value >= least:
                raise InvalidParameter(
                    f"{field.name} is {value}; it must be at least {least}", param=field.name
                )


def queue_factor(request: Request) -> int:
    """Return how many times the room of a queue `request` may use: a stream that continues was
    admitted elsewhere, so as many again may wait."""
    return 2 if len(request.output_ids) else 1
