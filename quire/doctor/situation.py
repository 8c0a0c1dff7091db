"""Situation: what the checks of a server know: the window, the engine's limits, and the goals.

Derived numbers have one definition here. Everything comes from two readings of /metrics and one
each of /health, /v1/models and /v1/engine; what could not be read is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.doctor.readings import Histogram, Window
from quire.obs.timing import Goals
from quire.scheduler.cost.step_cost import LinearCost

# Defaults of --goal-ttft-ms and --goal-tpot-ms.
DEFAULT_GOALS = Goals(ttft_s=0.2, tpot_s=0.05)
# Fewer choices that ended say nothing about percentiles, and fewer steps nothing about steps.
MIN_FINISHED, MIN_STEPS = 10, 20
# Mean requests per step, as a share of the slots, from which on the slots count as full.
FULL_SLOTS = 0.9
# Steps from which the engine's learned prices are used.
MIN_STEPS_TIMED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """The engine of a server as GET /v1/engine describes it.

    prices: what its steps were learned to cost; None before enough of them. block_bytes: of one KV
    block. oldest_wait_ms: since the arrival of the longest waiting request, 0 for none. steps of
    part_layers: see SchedulerLimits.
    """

    slots: int
    step_tokens: int
    max_model_len: int
    plans_in_flight: int
    tpot_target_ms: float
    long_prompt_tokens: int
    max_long_prompts: int
    max_short_prompts: int
    part_layers: int
    num_blocks: int
    block_size: int
    block_bytes: int
    oldest_wait_ms: float
    prices: LinearCost | None


def engine_view(found: Mapping[str, Any] | None) -> EngineView | None:
    """Return the view of a response of /v1/engine; None where it has other fields."""
    try:
        limits, blocks, prices = found["limits"], found["blocks"], found["step_prices"]  # type: ignore[index]
        names = ("fixed_ms", "token_ms", "position_ms", "score_ms", "read_ms")
        learned = LinearCost(**{name: max(float(prices[name]), 0.0) for name in names})
        waiting = found["waiting"]  # type: ignore[index]
        return EngineView(
            slots=int(limits["max_num_seqs"]),
            step_tokens=int(limits["max_num_batched_tokens"]),
            max_model_len=int(limits["max_model_len"]),
            plans_in_flight=int(limits["plans_in_flight"]),
            tpot_target_ms=float(limits["tpot_target_ms"]),
            long_prompt_tokens=int(limits["long_prompt_tokens"]),
            max_long_prompts=int(limits["max_long_prompts"]),
            max_short_prompts=int(limits["max_short_prompts"]),
            part_layers=int(limits["part_layers"]),
            num_blocks=int(blocks["total"]),
            block_size=int(blocks["size"]),
            block_bytes=int(blocks["bytes_each"]),
            oldest_wait_ms=max((float(one["age_ms"]) for one in waiting), default=0.0),
            prices=learned if int(prices["steps_timed"]) >= MIN_STEPS_TIMED else None,
        )
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A server in the time between two readings. health, model: JSON as the server sent it."""

    window: Window
    goals: Goals = DEFAULT_GOALS
    engine: EngineView | None = None
    health: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> float:
        """Return the number of choices that ended."""
        return self.window.count("quire_requests_total")

    @property
    def arrivals(self) -> float:
        """Return the number of requests that the engine accepted."""
        names = ("quire_running_requests", "quire_waiting_requests", "quire_held_requests")
        first, last = self.window.first, self.window.last
        return max(self.finished + sum(last.value(name) - first.value(name) for name in names), 0.0)

    @property
    def prompt_tokens(self) -> float:
        """Return the mean prompt length of choices that ended."""
        return self._mean("quire_prompt_tokens_total")

    @property
    def output_tokens(self) -> float:
        """Return the mean output length of choices that ended."""
        return self._mean("quire_generated_tokens_total")

    @property
    def queried_tokens(self) -> float:
        """Return the prompt tokens that were looked up in the prefix cache."""
        return self.window.count("quire_prefix_queried_tokens_total")

    @property
    def hit_share(self) -> float:
        """Return the share of prompt tokens found in the prefix cache."""
        hits = self.window.count("quire_prefix_hit_tokens_total")
        return min(hits / self.queried_tokens, 1.0) if self.queried_tokens else 0.0

    @property
    def steps(self) -> float:
        """Return the number of steps."""
        return self.window.count("quire_steps_total")

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which the device had a step."""
        busy_s = self.window.count("quire_device_busy_seconds_total")
        return min(busy_s / self.window.seconds, 1.0)

    @property
    def step_ms(self) -> float:
        """Return the mean time of a step."""
        busy_s = self.window.count("quire_device_busy_seconds_total")
        return 1e3 * busy_s / self.steps if self.steps else 0.0

    @property
    def rows(self) -> Histogram:
        """Return the requests per step."""
        return self.window.histogram("quire_batch_rows")

    @property
    def prefill_share(self) -> float:
        """Return the share of computed tokens that are beyond one per request and step."""
        rows, tokens = self.rows, self.window.histogram("quire_batch_tokens")
        return max(1.0 - rows.total / tokens.total, 0.0) if tokens.total else 0.0

    @property
    def ttft(self) -> Histogram:
        """Return the times to first token."""
        return self.window.histogram("quire_time_to_first_token_seconds")

    @property
    def queued(self) -> Histogram:
        """Return the times from arrival to the first step."""
        return self.window.histogram("quire_queue_seconds")

    @property
    def tpot(self) -> Histogram:
        """Return the times per output token."""
        return self.window.histogram("quire_time_per_output_token_seconds")

    @property
    def waiting(self) -> float:
        """Return how many requests waited at both readings."""
        return self.window.least("quire_waiting_requests")

    @property
    def pending(self) -> float:
        """Return how many requests ran or waited at both readings."""
        window = self.window
        return min(
            reading.value("quire_running_requests") + reading.value("quire_waiting_requests")
            for reading in (window.first, window.last)
        )

    @property
    def preemptions(self) -> float:
        """Return the number of preemptions."""
        return self.window.count("quire_preemptions_total")

    @property
    def preemption_share(self) -> float:
        """Return the preemptions per choice that ended."""
        return self.preemptions / max(self.finished, 1.0)

    @property
    def used_share(self) -> float:
        """Return the share of KV blocks of live requests, the higher of both readings."""
        return self._block_share("quire_kv_blocks_used")

    @property
    def committed_share(self) -> float:
        """Return the share of KV blocks that admission cannot give to a new request."""
        names = ("quire_kv_blocks_used", "quire_kv_blocks_reserved", "quire_watermark_blocks")
        return self._block_share(*names)

    @property
    def slots_are_full(self) -> bool:
        """Return whether running requests took all slots at a reading or in most steps."""
        if self.engine is None:
            return False
        if self.window.most("quire_running_requests") >= self.engine.slots:
            return True
        return self.rows.mean >= FULL_SLOTS * self.engine.slots

    @property
    def large_batch_share(self) -> float:
        """Return the share of steps with a batch in the bucket of the largest possible one."""
        rows = self.rows
        if self.engine is None or not rows.num:
            return 0.0
        slots = self.engine.slots
        full = [n for bound, n in zip(rows.bounds, rows.counts, strict=True) if bound >= slots]
        return sum(full) / rows.num

    @property
    def misses_goals(self) -> bool:
        """Return whether a 95th percentile misses its goal."""
        ttft_s, tpot_s = self.ttft.quantile(0.95), self.tpot.quantile(0.95)
        return ttft_s > self.goals.ttft_s or tpot_s > self.goals.tpot_s

    def _mean(self, name: str) -> float:
        return self.window.count(name) / self.finished if self.finished else 0.0

    def _block_share(self, *names: str) -> float:
        shares = [
            sum(map(reading.value, names)) / blocks
            for reading in (self.window.first, self.window.last)
            if (blocks := reading.value("quire_kv_blocks"))
        ]
        return max(shares, default=0.0)


def time_text(seconds: float) -> str:
    """Return a time in ms below a second, else in s."""
    if math.isnan(seconds):
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def times_text(times: Histogram) -> str:
    """Return the percentiles of a histogram of seconds."""
    shown = [f"p{share} {time_text(times.quantile(share / 100))}" for share in (50, 95, 99)]
    return f"{', '.join(shown)} of {times.num:.0f}"
