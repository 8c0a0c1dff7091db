"""Drive a scheduler with the fake worker and check invariants after each operation.

QUIRE_DRAWN_CASES=500 draws more cases of each property (`make exact` does). The default is small
because cases of fixed seeds, which find every planted fault, run beside the drawn ones.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from quire.base.errors import OverloadedError
from quire.base.records import FinishReason, Request, RequestOutput, StepPlan, StepResult
from quire.base.timeline import TimelineReport
from quire.cache.manager import CacheManager
from quire.cache.tier_map import TierMap
from quire.scheduler.cost.transfer_cost import RestoreMode
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.policy.policy import Policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step_budget import CostModel
from quire.scheduler.tenants.tenant_usage import TenantLimits
from tests.unit.scheduler.fake_drafts import FakeDrafts, FakeKVDrafts
from tests.unit.scheduler.fake_tier import FakeTier
from tests.unit.scheduler.fake_worker import (
    FakeWorker,
    alone,
    alone_beam,
    alone_scores,
    ends_by_text,
)

NUM_DRAWN = int(os.environ.get("QUIRE_DRAWN_CASES", "15"))
ENDED = FinishReason.ABORT  # before it was complete, for whatever reason


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of one case."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    plans_in_flight: int = 1
    micro_batches: int = 0
    prefix_caching: bool = True
    step_budget_ms: float = 0.0
    queue_timeout_ms: float = 0.0
    max_queued_tokens: int = 0
    tpot_target_ms: float = 0.0
    long_prompt_tokens: int = 0
    max_long_prompts: int = 0
    max_short_prompts: int = 0
    part_layers: int = 0
    layered_part_tokens: int = 512
    run_late: bool = False  # the worker computes only when its result is collected
    policy: Callable[[], Policy] = FirstCome
    tier_places: int = 0  # places of a tier that is used whenever possible
    tenants: tuple[TenantLimits, ...] = ()
    window: int = 0  # visible positions of a token; 0: all
    timeline_steps: int = 4096
    pin_share: float = 0.0
    max_drafts: int = 0  # of a request in a step
    drafts_in_cache: bool = False  # drafts are computed in the requests' blocks


class Harness:
    """One scheduler, one worker; `step` does what the engine's loop does."""

    def __init__(self, setup: Setup, *, cost: CostModel | None = None) -> None:
        self.setup = setup
        self.cache = CacheManager(
            setup.num_blocks,
            setup.block_size,
            prefix_caching=setup.prefix_caching,
            tier=TierMap(setup.tier_places, max_saving=3) if setup.tier_places else None,
            window=setup.window,
        )
        limits = SchedulerLimits(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            plans_in_flight=setup.plans_in_flight,
            step_budget_ms=setup.step_budget_ms,
            queue_timeout_ms=setup.queue_timeout_ms,
            max_queued_tokens=setup.max_queued_tokens,
            tpot_target_ms=setup.tpot_target_ms,
            long_prompt_tokens=setup.long_prompt_tokens,
            max_long_prompts=setup.max_long_prompts,
            max_short_prompts=setup.max_short_prompts,
            part_layers=setup.part_layers,
            layered_part_tokens=setup.layered_part_tokens,
            timeline_steps=setup.timeline_steps,
            micro_batches=setup.micro_batches,
            pin_share=setup.pin_share,
        )
        self.drafts: FakeDrafts | None = None
        if setup.max_drafts:
            drafts = FakeKVDrafts if setup.drafts_in_cache else FakeDrafts
            self.drafts = drafts(setup.max_drafts, self.alone)
        self.scheduler = Scheduler(
            limits,
            self.cache,
            setup.policy(),
            cost=cost,
            tenants=setup.tenants,
            restore_mode=RestoreMode.MOVE,
            draft_source=self.drafts,
        )
        self.tier = FakeTier(setup.block_size)
        self.worker = FakeWorker(
            setup.max_num_seqs,
            setup.max_model_len,
            setup.num_blocks,
            setup.block_size,
            tier=self.tier,
            window=setup.window,
        )
        if isinstance(self.drafts, FakeKVDrafts):
            self.drafts.content = self.worker.content
            self.drafts.block_size = setup.block_size
        self.out: deque[tuple[StepPlan, StepResult | None, Sequence[int]]] = deque()
        self.named: deque[dict[int, set[str]]] = deque()  # block: owners, per plan in flight
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self.refusals: dict[str, OverloadedError] = {}  # errors of expired requests
        self.plans: list[StepPlan] = []
        # By step, and request between two preemptions: drafts.
        self.rows_of: dict[int, dict[tuple[str, int], int]] = {}
        self.max_in_flight = 0
        self.now_ms = 0.0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.check()

    def abort(self, name: str) -> None:
        """Abort a request, live or not."""
        output = self.scheduler.abort(name)
        assert (output is None) == (name in self.ends or name not in self.requests)
        if output is not None:
            assert output.finish_reason is FinishReason.ABORT
            self.take(output)
        self.check()

    def schedule(self, fail_rows: Sequence[int] = ()) -> bool:
        """Make one plan and submit it to the worker; False if there was none."""
        self.now_ms += 1.0
        for names, error in self.scheduler.expire(self.now_ms):
            for name in names:
                self.refusals[name] = error
                self.take(RequestOutput(request_id=name, token_ids=(), finish_reason=ENDED))
        plan = self.scheduler.schedule(self.now_ms)
        if plan is None:
            self.check()
            return False
        self.check_plan(plan)
        self.plans.append(plan)
        num_rows = len(plan.slots) + (plan.layers is not None)
        fails = [row for row in fail_rows if row < num_rows]
        result = None if self.setup.run_late else self.worker.run(plan, fails)
        self.out.append((plan, result, fails))
        self.max_in_flight = max(self.max_in_flight, len(self.out))
        self.check()
        return True

    def update(self) -> bool:
        """Collect the oldest plan; False if none is in flight."""
        if not self.out:
            return False
        self.now_ms += 1.0
        plan, result, fails = self.out.popleft()
        self.named.popleft()
        if result is None:
            result = self.worker.run(plan, fails)
        outputs = self.scheduler.update(plan, result, self.now_ms)
        assert len(outputs) == len({output.request_id for output in outputs})
        for output in outputs:
            self.take(output)
        self.check()
        return True

    def step(self) -> bool:
        """Run one turn of the engine's loop; False if there was nothing to do."""
        moved = False
        while len(self.out) < self.setup.plans_in_flight and self.schedule():
            moved = True
        return self.update() or moved

    def arrive(self, random: Random, *, most: int = 1000) -> bool:
        """End copies between tiers; False if none did."""
        self.now_ms += 1.0
        copies = self.tier.end(random, self.worker.content, most=most)
        if copies is not None:
            self.scheduler.copies_ended(copies, self.now_ms)
            self.check()
        return copies is not None

    def timelines(self, prefixes: Sequence[str]) -> list[TimelineReport]:
        """Return the reports of requests with ids that begin with one of `prefixes`."""
        query = self.scheduler.query_timelines(prefixes)
        return list(iter(lambda: query.next_report(self.now_ms), None))

    def drain(self, max_steps: int = 5_000) -> None:
        """Run until nothing is left; fail if there is no progress."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            num_refusals = len(self.refusals)
            moved = self.step() or len(self.refusals) > num_refusals
            gets_on = moved or self.arrive(Random(0)) or not self.scheduler.has_work
            assert gets_on, "there is work, but neither plans nor arrivals"
        raise AssertionError(f"still work after {max_steps} steps")

    def take(self, output: RequestOutput) -> None:
        """Record the output of a request."""
        assert output.request_id not in self.ends, "an output after the last one"
        if output.scores is not None:
            assert output.request_id not in self.scores, "scores are emitted once"
            assert not self.tokens[output.request_id], "scores come with the first token"
            width = self.requests[output.request_id].sampling.prompt_logprobs
            assert output.scores.top_ids.shape[1] in (0, width)
            self.scores[output.request_id] = output.scores.ranks.tolist()
        self.tokens[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.ends[output.request_id] = output

    def limit(self, request: Request) -> int:
        """Return the largest number of tokens a request can have here."""
        size = self.setup.block_size
        pool_tokens = self.setup.num_blocks * size
        max_tokens = min(pool_tokens, self.scheduler._tenants.max_tokens(request))
        limit = min(request.max_total_tokens, self.setup.max_model_len, max_tokens)
        if not request.sampling.use_beam_search:
            return limit
        width, shared = request.sampling.num_sequences, len(request.prompt_ids) // size
        return min(limit, (shared + (max_tokens // size - shared - width + 1) // width) * size)

    def alone(self, request: Request) -> list[int]:
        """Return the tokens of `request` when nothing else runs."""
        limit = self.limit(request)
        return alone_beam(request, limit) or alone(request, limit)

    def check(self) -> None:
        """Check the invariants that hold at every moment."""
        assert self.scheduler.check_integrity() == []
        self.scheduler._batch.totals()  # cached from now on: the next check verifies it
        assert self.worker.wrong == [], self.worker.wrong
        assert self.tier.wrong == [], self.tier.wrong

    def check_plan(self, plan: StepPlan) -> None:
        """Check the invariants of each plan, together with those in flight."""
        setup = self.setup
        assert plan.num_tokens <= setup.max_num_batched_tokens
        assert len(plan.slots) <= setup.max_num_seqs
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert (
            len(plan.slots) > 0
            or plan.layers is not None
            or self.scheduler._beams._groups
            or plan.tier_copies is not None
        )
        self._check_layers(plan)
        assert (plan.counts > 0).all()
        self._check_drafts(plan)
        assert (plan.store_from >= plan.starts).all()
        owners_of = self._owners_of_blocks()
        for block in self._written_blocks(plan):
            owners = owners_of.get(block, set())
            assert len(owners) == 1, "a shared block is written to"
            assert not self.cache.pool.findable[block], "a registered block is written to"
            for named in self.named:
                assert owners <= named.get(block, owners), "a block named in flight is reused"
        named = self._named_blocks(plan)
        self.named.append({block: owners_of.get(block, set()) for block in named})

    def _check_drafts(self, plan: StepPlan) -> None:
        rows = self.rows_of[plan.step] = {
            (sequence.request.request_id, sequence.preemption.count): int(num)
            for sequence, num in zip(
                map(self.scheduler._batch.sequence, plan.slots.tolist()),
                plan.draft_counts if plan.draft_ids.size else np.zeros(len(plan.slots)),
                strict=True,
            )
        }
        for other, *_ in self.out:
            for name, num in self.rows_of[other.step].items():
                assert not num or name not in rows, "a row after drafts in flight"
        if not plan.draft_ids.size:
            return
        assert plan.draft_counts.sum() == len(plan.draft_ids)
        has_drafts = plan.draft_counts > 0
        assert (plan.counts[has_drafts] == plan.draft_counts[has_drafts] + 1).all()
        assert (plan.sample_counts[has_drafts] == plan.counts[has_drafts]).all()
        assert plan.draft_counts.max() <= self.setup.max_drafts

    def _check_layers(self, plan: StepPlan) -> None:
        layers = plan.layers
        if layers is None:
            return
        assert layers.slot not in plan.slots, "a layered chunk together with a row of its request"
        assert 0 <= layers.first_layer < layers.end_layer <= self.setup.part_layers
        assert 0 < layers.count <= self.setup.layered_part_tokens
        assert layers.store_from >= layers.start

    def _written_blocks(self, plan: StepPlan) -> set[int]:
        size, written = self.setup.block_size, set(plan.copy_to.tolist())
        ends = plan.starts + plan.counts
        for slot, first, end in zip(plan.slots, plan.store_from, ends, strict=True):
            row = self.cache.tables.blocks[slot]
            written.update(row[first // size : -(-end // size)].tolist())
        if (part := plan.layers) is not None:
            row, end = self.cache.tables.blocks[part.slot], part.start + part.count
            written.update(row[part.store_from // size : -(-end // size)].tolist())
        return written

    def _named_blocks(self, plan: StepPlan) -> set[int]:
        """Return the blocks that a row sees or writes."""
        window, size = self.setup.window, self.setup.block_size
        rows = []
        starts = list(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
        if plan.layers is not None:
            starts.append((plan.layers.slot, plan.layers.start))
        for slot, start in starts:
            seen_from = max(start - window + 1, 0) // size if window else 0
            rows.append(self.cache.tables.blocks[slot, seen_from : self.cache.tables.counts[slot]])
            assert (rows[-1] >= 0).all(), "a row sees a freed block"
        return set(np.concatenate([plan.copy_from, plan.copy_to, *rows]).tolist())

    def _owners_of_blocks(self) -> dict[int, set[str]]:
        """Return the requests that have each block in their tables."""
        found: dict[int, set[str]] = {}
        for slot, row in enumerate(self.cache.tables.blocks.tolist()):
            blocks = [block for block in row if block >= 0]
            if blocks:
                name = self.scheduler._batch.sequence(slot).request.request_id
                for block in blocks:
                    found.setdefault(block, set()).add(name)
        return found

    def check_scores(self) -> None:
        """Check that scores match those alone, once per group unless all of its streams failed."""
        for name, scores in self.scores.items():
            assert scores == alone_scores(self.requests[name]), name
        groups: dict[str, list[str]] = {}
        for name, request in self.requests.items():
            if request.sampling.prompt_logprobs is not None:
                groups.setdefault(request.group_id, []).append(name)
        for names in groups.values():
            reasons = {self.ends[name].finish_reason for name in names}
            num_told = sum(name in self.scores for name in names)
            assert num_told == 1 or (
                num_told == 0 and reasons <= {FinishReason.ABORT, FinishReason.ERROR}
            )
        assert all(request in self.requests for request in self.scores)

    def check_end(self) -> None:
        """Check the end: right tokens, right reasons, no leaks."""
        assert self.ends.keys() == self.requests.keys()
        for name, request in self.requests.items():
            expected = self.alone(request)
            reason = self.ends[name].finish_reason
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.tokens[name] == expected[: len(self.tokens[name])]
                continue
            assert self.tokens[name] == expected, name
            by_token = bool(expected) and expected[-1] in request.stop_ids
            stopped = by_token or ends_by_text(request, expected)
            assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert self.ends[name].stop_id == (expected[-1] if by_token else None)
        self.check_scores()
        assert self.cache.num_free == self.setup.num_blocks
        assert self.scheduler.stats().running == self.scheduler.stats().waiting == 0
        assert not np.any(self.cache.pool.references)
