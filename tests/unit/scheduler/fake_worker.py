"""A worker without a model: it executes plans and remembers the content of every pool slot.

The "keys and values" of a token are a digest of the request's tokens up to it. A row reads the
digests of all positions before it through its block table, so that a stale, wrong, unwritten or
overwritten block is found at once. The next token is a function of that digest, the seed and the
stream: `alone` computes the same without blocks, plans or other requests. A prompt's score at a
position is a function of the digest there and the next token: `alone_scores`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from quire.base.rare_records import CachePin, Speculation
from quire.base.records import (
    Admission,
    Candidates,
    PartLayers,
    PromptScores,
    Request,
    RowError,
    StepPlan,
    StepResult,
)
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from tests.unit.scheduler.beam.beam_oracle import Wishes, beams
from tests.unit.scheduler.fake_tier import FakeTier

Top = tuple[list[int], list[float], list[bool]]
"""Of a beam: tokens, their log-probabilities, and whether the answer is over with them."""

VOCAB = 11
UNWRITTEN = 0
GARBAGE = 1
HALF_DONE = 2  # a position of which some layers have been computed
_MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 18)  # every step computes the digests of the same histories
def mix(digest: int, number: int) -> int:
    """Return the digest extended by one token, never UNWRITTEN or GARBAGE in practice."""
    digest = (digest * 6364136223846793005 + number + 1442695040888963407) & _MASK
    digest ^= digest >> 29
    return (digest * 0xBF58476D1CE4E5B9) & _MASK


def next_token(digest: int, sampling: SamplingParams, stream: int) -> int:
    """Return the token after the history that `digest` stands for."""
    return (mix(mix(digest, sampling.seed or 0), stream) >> 33) % VOCAB


def alone(request: Request, limit: int) -> list[int]:
    """Return the output of `request` when nothing else runs and nothing is shared or moved."""
    digest = 7
    for token_id in request.prompt_ids.tolist():
        digest = mix(digest, token_id)
    output: list[int] = []
    while len(request.prompt_ids) + len(output) < limit:
        output.append(next_token(digest, request.sampling, request.stream))
        if output[-1] in request.stop_ids:
            break
        digest = mix(digest, output[-1])
    return output


def beam_logprobs(digest: int) -> list[float]:
    """Return fake log-probabilities of all tokens after a history; all differ."""
    return [
        float(np.float32(-0.01 - (mix(digest, 1000 + token) >> 44) / 2**18))
        for token in range(VOCAB)
    ]


def ends_beam(digest: int, token_id: int, sampling: SamplingParams) -> bool:
    """Return whether the text after a history and this token ends with a stop string."""
    return bool(sampling.stop) and mix(digest, 500 + token_id) % 6 == 0


def ends_by_text(request: Request, output: Sequence[int]) -> bool:
    """Return whether the last of these tokens completed a stop string of a beam."""
    if not request.sampling.use_beam_search or not output:
        return False
    digest = 7
    for token_id in (*request.prompt_ids.tolist(), *output[:-1]):
        digest = mix(digest, token_id)
    return ends_beam(digest, output[-1], request.sampling)


def alone_beam(request: Request, limit: int) -> list[int] | None:
    """Return the sequence of a stream of a beam search; None for other requests."""
    sampling, digest = request.sampling, 7
    if not sampling.use_beam_search:
        return None
    for token_id in request.prompt_ids.tolist():
        digest = mix(digest, token_id)

    def digest_after(tokens: tuple[int, ...]) -> int:
        after = digest
        for token_id in tokens:
            after = mix(after, token_id)
        return after

    def logprobs_after(tokens: tuple[int, ...]) -> list[float]:
        return beam_logprobs(digest_after(tokens))

    wishes = Wishes(
        width=sampling.num_sequences,
        max_new=limit - len(request.prompt_ids),
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        stop_ids=request.stop_ids,
        ends=lambda tokens: ends_beam(digest_after(tokens[:-1]), tokens[-1], sampling),
    )
    return list(beams(logprobs_after, wishes)[request.stream][1])


def score(digest: int, token_id: int) -> int:
    """Return the fake score of the prompt token after a history."""
    return mix(digest, token_id) >> 34


def alone_scores(request: Request) -> list[int]:
    """Return the scores of all prompt tokens except the first."""
    digest, scores = 7, []
    for token_id, following in pairwise(request.prompt_ids.tolist()):
        digest = mix(digest, token_id)
        scores.append(score(digest, following))
    return scores


@dataclass
class FakeWorker:
    """Apply plans in order; `wrong` collects what a real worker would have computed wrongly."""

    num_slots: int
    max_tokens: int
    num_blocks: int
    block_size: int
    copies_blocks: ClassVar[bool] = True  # False is an injected fault
    wrong: list[str] = field(default_factory=list)
    tier: FakeTier | None = None
    window: int = 0  # visible positions of a token; 0: all

    def __post_init__(self) -> None:
        columns = -(-self.max_tokens // self.block_size)
        self.tokens = TokenTable(self.num_slots, self.max_tokens)
        self.tables = np.full((self.num_slots, columns), -1, np.int64)
        self.admitted: dict[int, Admission] = {}
        self.content: list[int] = [UNWRITTEN] * (self.num_blocks * self.block_size)
        self.failed: set[int] = set()  # slots of requests with a failed row
        self.part: PartLayers | None = None  # the layers computed last
        self.next_step = 1

    def run(self, plan: StepPlan, fail_rows: Collection[int] = ()) -> StepResult:
        """Return the result of `plan`; rows in `fail_rows` fail after writing garbage."""
        assert plan.step == self.next_step, "plans must come in order without gaps"
        self.next_step += 1
        self._apply(plan)
        token_counts, token_ids, errors = [], [], []
        tops: list[Top] = []
        scores: list[list[int]] = []
        for row, slot in enumerate(plan.slots.tolist()):
            start, count = int(plan.starts[row]), int(plan.counts[row])
            error = self._compute(plan, row, slot, start, count, failing=row in fail_rows)
            scores.append(self._scores(slot, start, count) if error is None else [])
            drafts = self._take_back_drafts(plan, row, slot, start + count)
            if error is None and plan.samples[row]:
                run = self._sample(slot, start + count - len(drafts), drafts)
                token_ids += [token_id for token_id, _ in run]
                tops += [top for _, top in run]
                token_counts.append(len(run))
                continue
            token_counts.append(0)
            if error is not None:
                errors.append(RowError(row=row, message=error))
        if plan.layers is not None:
            row = len(plan.slots)
            error = self._compute_layers(plan.step, plan.layers, failing=row in fail_rows)
            if error is not None:
                errors.append(RowError(row=row, message=error))
        return StepResult(
            step=plan.step,
            token_counts=np.array(token_counts, np.int32),
            token_ids=np.array(token_ids, np.int32),
            **_beam_candidates(tops),
            score_counts=np.array([len(of_row) for of_row in scores], np.int32),
            scores=_as_record([one for of_row in scores for one in of_row]),
            errors=tuple(errors),
        )

    def _take_back_drafts(self, plan: StepPlan, row: int, slot: int, end: int) -> list[int]:
        """Remove the row's drafts, which end before `end`, from the known tokens; return them."""
        if not plan.draft_ids.size or not plan.draft_counts[row] or slot not in self.admitted:
            return []
        first = end - int(plan.draft_counts[row])
        drafts: list[int] = self.tokens.tokens[slot, first:end].tolist()
        self.tokens.lengths[slot] = first
        return drafts

    def _sample(self, slot: int, position: int, drafts: list[int]) -> list[tuple[int, Top]]:
        """Sample the token at `position`, and those after it while they agree with the drafts."""
        admission, run = self.admitted[slot], []
        for draft in (*drafts, None):
            digest = self._read(slot, position - 1, computed_now=True)
            token_id = next_token(digest, admission.sampling, admission.stream)
            self._append(slot, position, token_id)
            run.append((token_id, _top(digest, admission)))
            position += 1
            if token_id != draft:
                break
        return run

    def _scores(self, slot: int, start: int, count: int) -> list[int]:
        """Return requested scores of the prompt tokens after the row's positions."""
        admission = self.admitted[slot]
        if admission.scores_from is None:
            return []
        end = min(start + count, admission.num_prompt_tokens - 1)
        tokens = self.tokens.tokens[slot]
        return [
            score(self._read(slot, position), int(tokens[position + 1]))
            for position in range(max(start, admission.scores_from), end)
        ]

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.retired.tolist():
            self.admitted.pop(slot, None)
            self.tables[slot] = -1
            self.tokens.lengths[slot] = 0
        for admission in plan.admissions:
            if admission.slot in self.admitted:
                self.wrong.append(f"slot {admission.slot} admitted twice")
            self.admitted[admission.slot] = admission
            self.failed.discard(admission.slot)
            self.tokens.admit(admission.slot, admission.token_ids, admission.num_prompt_tokens)
        self.tokens.branch(plan.branch_from, plan.branch_to)
        for slot, token_id in zip(plan.known_slots.tolist(), plan.known_ids.tolist(), strict=True):
            self.tokens.tokens[slot, self.tokens.lengths[slot] - 1] = token_id
        self.tables[plan.table_slots, plan.table_columns] = plan.table_blocks
        self._put_drafts(plan)
        if plan.tier_copies is not None:
            assert self.tier is not None, "copies to a missing tier"
            self.tier.begin(plan.tier_copies, self.content)
        if not self.copies_blocks:
            return
        for source, target in zip(plan.copy_from.tolist(), plan.copy_to.tolist(), strict=True):
            size = self.block_size
            part = self.content[source * size : (source + 1) * size]
            self.content[target * size : (target + 1) * size] = part

    def _put_drafts(self, plan: StepPlan) -> None:
        end = 0
        for row, num in enumerate(plan.draft_counts.tolist()):
            slot, last = int(plan.slots[row]), int(plan.starts[row] + plan.counts[row])
            if num and int(self.tokens.lengths[slot]) != last - num:
                self.wrong.append(f"step {plan.step} slot {slot}: drafts behind unknown tokens")
            self.tokens.tokens[slot, last - num : last] = plan.draft_ids[end : end + num]
            self.tokens.lengths[slot] += num
            end += num

    def _compute(
        self, plan: StepPlan, row: int, slot: int, start: int, count: int, *, failing: bool
    ) -> str | None:
        """Store digests of the row's positions; return an error message if the row fails."""
        if slot not in self.admitted:
            self.wrong.append(f"step {plan.step}: slot {slot} computes but is not admitted")
            return "no request"
        if slot in self.failed:
            return "an earlier row of this request failed"
        if start + count > int(self.tokens.lengths[slot]):
            self.wrong.append(f"step {plan.step} slot {slot}: a token is not known")
            return "a token is missing"
        store_from = int(plan.store_from[row])
        digest = 7
        seen_from = max(start - self.window + 1, 0) if self.window else 0
        known_until = max(start, store_from)
        blocks, size, content = self.tables[slot].tolist(), self.block_size, self.content
        tokens = self.tokens.tokens[slot, : start + count].tolist()
        for position, token_id in enumerate(tokens):
            digest = mix(digest, token_id)
            if position < seen_from:
                continue
            block = blocks[position // size]
            assert block >= 0, f"slot {slot} has no block for position {position}"
            place = block * size + position % size
            if position < known_until:
                held = content[place]
                if held != digest:
                    self.wrong.append(
                        f"step {plan.step} slot {slot}: position {position} read {held:x}, "
                        f"should be {digest:x}"
                    )
                    return "read a wrong block"
                continue
            content[place] = GARBAGE if failing else digest
        if failing:
            self.failed.add(slot)
            return "the row failed as planned"
        return None

    def _compute_layers(self, step: int, layers: PartLayers, *, failing: bool) -> str | None:
        """Leave positions half done until the last layer; return an error message if the
        chunk fails.
        """
        slot, end = layers.slot, layers.start + layers.count
        where, last, self.part = f"step {step} slot {slot}", self.part, layers
        if slot not in self.admitted or end >= int(self.tokens.lengths[slot]):
            self.wrong.append(f"{where}: a part that has no request, or would have to sample")
            return "no request"
        if slot in self.failed:
            return "an earlier row of this request failed"
        if layers.first_layer > 0 and (
            last is None
            or last.end_layer != layers.first_layer
            or last.slot != slot
            or (last.start, last.count) != (layers.start, layers.count)
        ):
            self.wrong.append(f"{where}: {layers} does not follow {last}")
        digest, held = 7, HALF_DONE if layers.first_layer else None
        seen_from = max(layers.start - self.window + 1, 0) if self.window else 0
        for position, token_id in enumerate(self.tokens.tokens[slot, :end].tolist()):
            digest = mix(digest, token_id)
            if position < seen_from:
                continue
            if position < layers.store_from:
                if self._read(slot, position) != digest:
                    self.wrong.append(f"{where}: position {position} is not what it should be")
                continue
            if held is not None and self._read(slot, position) != held:
                self.wrong.append(f"{where}: position {position} was written between layers")
            done = GARBAGE if failing else digest if layers.is_last else HALF_DONE
            self._write(slot, position, done)
        if failing:
            self.failed.add(slot)
            return "the part failed as planned"
        return None

    def _place(self, slot: int, position: int) -> int:
        block = int(self.tables[slot, position // self.block_size])
        assert block >= 0, f"slot {slot} has no block for position {position}"
        return block * self.block_size + position % self.block_size

    def _read(self, slot: int, position: int, *, computed_now: bool = False) -> int:
        return self.content[self._place(slot, position)]

    def _write(self, slot: int, position: int, digest: int) -> None:
        self.content[self._place(slot, position)] = digest

    def _append(self, slot: int, position: int, token_id: int) -> None:
        if int(self.tokens.lengths[slot]) != position:
            self.wrong.append(f"slot {slot} samples position {position} out of turn")
        length = int(self.tokens.lengths[slot])
        self.tokens.tokens[slot, length] = token_id
        self.tokens.lengths[slot] = length + 1


def _top(digest: int, admission: Admission) -> Top:
    logprobs = beam_logprobs(digest)
    best = sorted(range(VOCAB), key=lambda token: -logprobs[token])[: admission.num_candidates]
    ends = [ends_beam(digest, token, admission.sampling) for token in best]
    return best, [logprobs[token] for token in best], ends


def _beam_candidates(tops: list[Top]) -> dict[str, Any]:
    """Return fields of a StepResult; the search decides by the model's own log-probabilities."""
    width = max((len(ids) for ids, _, _ in tops), default=0)
    if not width:
        return {}
    ids = np.full((len(tops), width), -1, np.int32)
    logprobs = np.full((len(tops), width), np.nan, np.float32)
    ends = np.zeros((len(tops), width), np.bool_)
    for row, (best, theirs, over) in enumerate(tops):
        ids[row, : len(best)], logprobs[row, : len(best)] = best, theirs
        ends[row, : len(best)] = over
    candidates = Candidates(ids=ids, scores=logprobs, logprobs=logprobs, ends=ends)
    of_tokens = logprobs[:, 0]  # NaN: of no beam
    return {
        "candidates": candidates,
        "logprobs": of_tokens,
        "top_ids": ids,
        "top_logprobs": logprobs,
    }


def _as_record(ranks: list[int]) -> PromptScores | None:
    """Return scores in the worker's format; the values are in the ranks."""
    if not ranks:
        return None
    nothing = np.zeros((len(ranks), 2), np.float32)
    return PromptScores(
        logprobs=nothing[:, 0],
        ranks=np.array(ranks, np.int32),
        top_ids=nothing.astype(np.int32),
        top_logprobs=nothing,
    )


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    seed: int = 0,
    group: str | None = None,
    stream: int = 0,
    stop_ids: tuple[int, ...] = (),
    salt: str = "",
    arrival_ms: float = 0.0,
    prompt_logprobs: int | None = None,
    tenant: str = "",
    priority: int = 0,
    deadline_ms: float | None = None,
    ttft_slo_ms: float | None = None,
    tpot_slo_ms: float | None = None,
    explain_cache: bool = False,
    max_drafts: int = 0,
    cache_pins: tuple[CachePin, ...] = (),
    **sampling: Any,
) -> Request:
    """Return a request as the engine would build it."""
    return Request(
        request_id=name,
        group_id=group or name,
        stream=stream,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(
            seed=seed,
            max_tokens=0 if max_tokens == 0 and prompt_logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            **sampling,
        ),
        stop_ids=stop_ids,
        max_total_tokens=len(prompt) + max_tokens,
        arrival_ms=arrival_ms,
        cache_salt=salt,
        tenant=tenant,
        priority=priority,
        deadline_ms=deadline_ms,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        explain_cache=explain_cache,
        cache_pins=cache_pins,
        speculation=Speculation(max_drafts=max_drafts) if max_drafts else None,
    )
