"""A scheduler, a drafter and its proposers under a fake clock, in which everything has a price.

Steps, passes of what drafts, tokens that it catches up with, and the host's work for drafts take
milliseconds by their numbers, so that what a control costs is computed and not timed. Answers are
given, and a draft is right with a probability of its request. Always holds: the same case has the
same drafts whatever the control chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.rare_records import Speculation
from quire.base.records import NO_INTS, Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from quire.speculative.control import Control
from quire.speculative.draft_heads import HeadRows
from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.ngram import NgramProposer
from quire.speculative.passes import ComputingProposer, DraftLimits
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import Drafts, LookupProposer, Proposer
from quire.speculative.self_draft import SelfProposer

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
BLOCK, MAX_DRAFTS = 16, 8
FIRST_TOKEN, VOCAB_SIZE = 10, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Milliseconds. pass_ms, pass_row_ms, prompt_ms: of a pass of what drafts, of a request in it,
    and of each further token. once_ms, row_ms: of the host, for a step and a row with drafts.
    ask_ms: of the host, for choosing numbers of drafts. curve: positions and milliseconds of steps
    that compute so many, in place of step_ms and token_ms; between and beyond them a line.
    after_ms: what the first, second, ... step without drafts after one with drafts takes longer.
    noise: deviation of the logarithm of a step's time; one in 40 takes half as long again."""

    step_ms: float = 1.0
    token_ms: float = 0.05
    once_ms: float = 0.1
    row_ms: float = 0.01
    ask_ms: float = 0.1
    pass_ms: float = 0.0
    pass_row_ms: float = 0.0
    prompt_ms: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    after_ms: tuple[float, ...] = ()
    noise: float = 0.0

    def positions_ms(self, num_positions: int) -> float:
        """Return what computing so many positions in a step takes."""
        if not self.curve:
            return self.step_ms + self.token_ms * num_positions
        places, times = zip(*self.curve, strict=True)
        ms = float(np.interp(num_positions, places, times))
        slope = (times[-1] - times[-2]) / (places[-1] - places[-2])
        return ms + slope * max(num_positions - places[-1], 0.0)


PRICES: Mapping[str, Prices] = MappingProxyType(
    {
        "draft": Prices(pass_ms=0.3, pass_row_ms=0.03, prompt_ms=0.01),
        "self": Prices(pass_ms=0.32, pass_row_ms=0.02),
        "heads": Prices(pass_ms=0.12, pass_row_ms=0.015, prompt_ms=0.01),
        "lookup": Prices(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that are all there at the beginning; `batch` run at once. acceptance: mean of the
    probabilities of the requests that a draft is right, which differ by `deviation`. later: in the
    second half of an answer; None: the same. found: share of the positions at which a lookup finds
    something. text: draws a prompt with its answer, of so many tokens; for kind "ngram", which
    looks them up as they are. predicted: makes the text that a request predicts of its answer."""

    kind: str
    batch: int
    num_requests: int
    num_tokens: int
    acceptance: float
    deviation: float = 0.1
    later: float | None = None
    found: float = 1.0
    prompt_tokens: int = 60
    prices: Prices = field(default_factory=Prices)
    text: Callable[[np.random.Generator, int], Int32s] | None = None
    predicted: Callable[[np.random.Generator, Int32s], Int32s] | None = None


class Engine:
    """Runs loads one after the other. control: None: no speculation.

    now_ms: the fake clock. num_passes, num_pass_rows, num_caught_up: passes of what drafts, drafts
    that they sampled, and further tokens that they computed. num_drafts: verified.
    """

    def __init__(self, load: Load, control: Control | None) -> None:
        self.load, self.now_ms = load, 0.0
        self.num_passes = self.num_pass_rows = self.num_caught_up = self.num_drafts = 0
        self.num_asks = self.num_tokens = 0
        self._control = control
        self.answers: dict[str, Int32s] = {}
        self.right: dict[str, Bools] = {}
        self.found: dict[str, Bools] = {}
        self._slots: dict[int, str] = {}
        self._length = load.prompt_tokens + load.num_tokens + 1
        self._ring = HiddenStateRing(max(1024, 2 * load.batch), 1, load.batch)
        self._tenancy = self._ring.tenancy
        self._num_added = self._num_plain = 0  # the latter: steps since one with drafts
        self._noise = np.random.default_rng(1)
        source = None if control is None else self._drafter(control)
        columns = -(-self._length // BLOCK) + 1
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=load.batch, max_num_batched_tokens=2048, max_model_len=self._length
            ),
            CacheManager(load.batch * columns, BLOCK, prefix_caching=False),
            FirstCome(),
            draft_source=source,
        )

    def run(self, *, seed: int, **changes: Any) -> float:
        """Answer the requests of the load, with `changes`; return the milliseconds of a token while
        as many run as can: at the end, fewer do, and how many is a matter of chance."""
        load, began_ms = replace(self.load, **changes), self.now_ms
        rng = np.random.default_rng(seed)
        num_left, began, token_ms = load.num_requests, self.num_tokens, 0.0
        num_added = 0
        while num_left:
            fewer = load.batch if load.batch < self.load.batch else load.num_requests
            while (
                num_added < load.num_requests and num_added - load.num_requests + num_left < fewer
            ):
                self._add(load, rng)
                num_added += 1
            num_left -= self._turn()
            if num_left >= load.batch or not token_ms:
                token_ms = (self.now_ms - began_ms) / max(self.num_tokens - began, 1)
        return token_ms

    def spend(self, num_rows: int, num_tokens: int) -> None:
        """Take the time of a pass of what drafts."""
        prices = self.load.prices
        self.num_passes += 1
        self.num_pass_rows += num_rows
        self.num_caught_up += num_tokens - num_rows
        self.now_ms += prices.pass_ms + num_rows * prices.pass_row_ms
        self.now_ms += (num_tokens - num_rows) * prices.prompt_ms

    def guess(self, request_id: str, position: int) -> int:
        """Return the draft for a position of a request."""
        answer = self.answers[request_id]
        position = min(position, len(answer) - 1)
        return int(answer[position]) + (not self.right[request_id][position])

    def _add(self, load: Load, rng: np.random.Generator) -> None:
        self._num_added += 1
        name = f"r{self._num_added}"
        length = load.prompt_tokens + load.num_tokens
        if load.text is None:
            answer = rng.integers(FIRST_TOKEN, VOCAB_SIZE - 1, length).astype(np.int32)
        else:
            answer = load.text(rng, length)
        self.answers[name] = answer
        chance = np.clip(load.acceptance + load.deviation * rng.standard_normal(), 0.0, 1.0)
        chances = np.full(length, chance)
        if load.later is not None:
            chances[load.prompt_tokens + load.num_tokens // 2 :] = load.later
        self.right[name] = rng.random(length) < chances
        if load.found < 1.0:
            self.found[name] = rng.random(length) < load.found
        prediction = NO_INTS
        if load.predicted is not None:
            prediction = load.predicted(rng, answer[load.prompt_tokens :])
        self.scheduler.add(
            Request(
                request_id=name,
                group_id=name,
                stream=0,
                prompt_ids=self.answers[name][: load.prompt_tokens],
                sampling=SamplingParams(seed=1),
                stop_ids=(),
                max_total_tokens=length,
                arrival_ms=self.now_ms,
                speculation=Speculation(
                    max_drafts=MAX_DRAFTS, uses_proposer=True, prediction_ids=prediction
                ),
            )
        )

    def _turn(self) -> int:
        """Plan, compute and apply a step; return how many requests ended."""
        plan = self.scheduler.schedule(self.now_ms)
        assert plan is not None
        for admission in plan.admissions:
            self._slots[admission.slot] = admission.request_id
            self._tenancy[admission.slot] += 1
        counts, tokens = [], []
        drafted = plan.draft_counts if plan.draft_ids.size else np.zeros_like(plan.counts)
        drafts, at = plan.draft_ids.tolist(), 0
        rows = zip(
            *(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist()),
            *(plan.sample_counts.tolist(), drafted.tolist()),
            strict=True,
        )
        for slot, start, count, num_sampled, num_drafts in rows:
            answer, first = self.answers[self._slots[slot]], start + count - num_sampled + 1
            num = num_sampled
            for place in range(num_drafts):
                if drafts[at + place] != answer[first + place]:
                    num = place + 1
                    break
            at += num_drafts
            counts.append(num)
            tokens += answer[first : first + num].tolist()
        self.num_tokens += len(tokens)
        is_decode = bool((plan.counts == 1).all() and (plan.sample_counts == 1).all())
        if self.load.kind == "heads":
            if self._ring.keeps(plan.step, is_decode=is_decode):
                self._keep_hidden_states(plan)
            else:
                self._ring.note_gap(plan.step)
        self._spend_step(plan)
        result = StepResult(
            step=plan.step,
            token_counts=np.array(counts, np.int32),
            token_ids=np.array(tokens, np.int32),
        )
        outputs = self.scheduler.update(plan, result, self.now_ms)
        return sum(output.finish_reason is not None for output in outputs)

    def _spend_step(self, plan: StepPlan) -> None:
        prices = self.load.prices
        ms = prices.positions_ms(int(plan.counts.sum()))
        if plan.draft_ids.size:
            self.num_drafts += plan.draft_ids.size
            num_rows = int(np.count_nonzero(plan.draft_counts))
            ms += prices.once_ms + prices.row_ms * num_rows
            self._num_plain = -1
        self._num_plain += 1
        if 0 < self._num_plain <= len(prices.after_ms):
            ms += prices.after_ms[self._num_plain - 1]
        if prices.noise:
            ms *= float(np.exp(prices.noise * self._noise.standard_normal()))
            ms *= 1.5 if self._noise.random() < 1 / 40 else 1.0
        self.now_ms += ms

    def _keep_hidden_states(self, plan: StepPlan) -> None:
        slots = np.repeat(plan.slots, plan.counts).astype(np.intp)
        within = np.arange(len(slots)) - np.repeat(
            np.cumsum(plan.counts) - plan.counts, plan.counts
        )
        positions = (np.repeat(plan.starts, plan.counts) + within).astype(np.int32)
        self._ring.put(
            slots, self._tenancy[slots], positions, np.zeros((len(slots), 1), np.float32)
        )

    def _drafter(self, control: Control) -> Drafter:
        load, limits = self.load, control.limits

        def counted(*given: Any) -> Int32s:
            self.num_asks += 1
            self.now_ms += load.prices.ask_ms
            return limits(*given)

        control.limits = counted  # type: ignore[method-assign]
        return Drafter(
            self._proposer(),
            PredictionProposer(load.batch),
            control,
            num_slots=load.batch,
            max_drafts=MAX_DRAFTS,
            vocab_size=VOCAB_SIZE,
            report=self._failed,
        )

    def _proposer(self) -> Proposer:
        load = self.load
        if load.kind == "lookup":
            return Lookup(self)
        if load.kind == "ngram":
            return NgramProposer(load.batch)
        columns = -(-self._length // BLOCK) + 1
        limits = DraftLimits(
            num_slots=load.batch,
            num_blocks=load.batch * columns,
            block_size=BLOCK,
            max_model_len=self._length,
            max_tokens=max(256, 2 * load.batch),
        )
        now_ms: Callable[[], float] = lambda: self.now_ms  # noqa: E731
        proposer: ComputingProposer
        if load.kind == "heads":
            proposer = EagleProposer(Head(self), self._ring, limits, now_ms)
        else:
            kinds = {"draft": ModelProposer, "self": SelfProposer}
            proposer = kinds[load.kind](Model(self), limits, now_ms)
        for num in {1, load.batch}:  # as when an engine starts
            prices = load.prices
            proposer.pass_times.note(num, prices.pass_ms + num * prices.pass_row_ms)
        proposer.pass_times.note_tokens(32, 32 * load.prices.prompt_ms)
        return proposer

    def _failed(self, what: str, **fields: Any) -> None:
        raise AssertionError(f"{what}: {fields}")


class Model:
    """A draft model that knows the answers of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = TokenTable(engine.load.batch, engine._length)
        self._engine = engine
        self._names: dict[int, str] = {}

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        self.tokens.admit(slot, NO_INTS, num_prompt_tokens)
        self._names[slot] = request.request_id

    def retire(self, slot: int) -> None:
        del self._names[slot]

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        pass

    def compute(
        self, slots: NDArray[np.intp], starts: Int32s, counts: Int32s, samples: Bools
    ) -> Int32s:
        self._engine.spend(len(slots), int(counts.sum()))
        return self.sampled(slots, starts + counts, samples)

    def sampled(self, slots: NDArray[np.intp], positions: Int32s, samples: Bools) -> Int32s:
        """Return the drafts for positions[i] of slots[i]; -1 where none is sampled."""
        found = [
            self._engine.guess(self._names[slot], position) if is_sampled else -1
            for slot, position, is_sampled in zip(
                slots.tolist(), positions.tolist(), samples.tolist(), strict=True
            )
        ]
        return np.array(found, np.int32)

    def close(self) -> None:
        pass


class Head:
    """An EAGLE-3 head that knows the answers."""

    def __init__(self, engine: Engine) -> None:
        self._model, self._engine = Model(engine), engine
        self.tokens, self.admit, self.retire = (
            self._model.tokens,
            self._model.admit,
            self._model.retire,
        )
        self.set_blocks, self.close = self._model.set_blocks, self._model.close

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, NDArray[np.float32]]:
        num = len(rows.slots)
        self._engine.spend(num, len(rows.token_ids))
        sampled = self._model.sampled(rows.slots, rows.positions, np.ones(num, np.bool_))
        return sampled, np.zeros((num, 1), np.float32)


class Lookup(LookupProposer):
    """Finds the answers of an engine at no cost."""

    name = "lookup"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: dict[int, str] = {}

    def begin(self, slot: int, request: Request) -> None:
        self._names[slot] = request.request_id

    def end(self, slot: int) -> None:
        self._names.pop(slot, None)

    def may_find(self, tokens: TokenTable) -> bool:
        return any(self._finds(slot, int(tokens.lengths[slot])) for slot in self._names)

    def _finds(self, slot: int, length: int) -> bool:
        found = self._engine.found.get(self._names[slot])
        return found is None or bool(found[min(length, len(found) - 1)])

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        for row, (slot, length) in enumerate(
            zip(slots.tolist(), tokens.lengths[slots].tolist(), strict=True)
        ):
            drafts.counts[row] = limits[row] * self._finds(slot, length)
            for place in range(int(drafts.counts[row])):
                drafts.ids[row, place] = self._engine.guess(self._names[slot], length + place)
