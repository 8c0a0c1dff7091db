"""SlotTables: the worker's mirror of what runs, a row a slot: tokens, block tables, parameters.

Changed only by the retired slots, admissions and table deltas of plans, in order, and by the
tokens the worker samples. Knows no scheduler and no executor. Always holds: what a plan's rows
name is what the scheduler knew when it made the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_FLOATS, NO_INTS, Admission, StepPlan
from quire.base.token_table import TokenTable
from quire.runner.beam_stops import BeamStops, WatchSource
from quire.runner.grammar_rows import GrammarRows, MatcherSource
from quire.runner.rare_params import RareParamsTables
from quire.runner.verification import put_drafts
from quire.sampling.parts import WHOLE

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
# The least of a top_p: it keeps the likeliest token alone, as 0 means it.
SMALLEST_TOP_P = 1e-30
NEVER = np.iinfo(np.int32).max  # a position no request reaches
ALL_IDS = (-1,)  # as listed ids: the whole vocabulary


class SlotTables:
    """Arrays by slot. `blocks` is int32 [slots, columns]; the rest is [slots]. `rare` holds what
    few requests ask for, `grammars` what answers must follow, `ends` what ends those of beams."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        matchers: MatcherSource | None = None,
        watches: WatchSource | None = None,
        jump_ahead: bool = True,
    ) -> None:
        self.block_size = block_size
        self.changes = 0  # plans that retired, admitted or branched slots
        self.tenancy = np.zeros(num_slots, np.int64)  # grows whenever a slot is given or given back
        self.tokens = TokenTable(num_slots, max_model_len)
        self.rare = RareParamsTables(num_slots)
        self.grammars = GrammarRows(num_slots, self.tokens, matchers, jump_ahead=jump_ahead)
        self.ends = BeamStops(num_slots, self.tokens, self.grammars, watches)
        self.blocks: Int32s = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self._flat_blocks = self.blocks.reshape(-1)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.repetition_penalty = np.ones(num_slots, np.float32)
        self.presence_penalty = np.zeros(num_slots, np.float32)
        self.frequency_penalty = np.zeros(num_slots, np.float32)
        self.repeat_last_n = np.full(num_slots, WHOLE, np.int32)
        self.seeds = np.zeros(num_slots, np.int64)
        self.streams = np.zeros(num_slots, np.int32)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.num_candidates = np.zeros(num_slots, np.int32)  # of beams
        self.num_beams = 0  # slots with some
        # Prompt positions to score: from scores_from on, but the prompt's last only if pooled.
        self.scores_from = np.full(num_slots, NEVER, np.int32)
        self.pooled = np.zeros(num_slots, np.bool_)
        self.num_prompt_logprobs = np.zeros(num_slots, np.int32)
        self.num_scoring = 0  # slots with a scores_from: steps without any do not look
        # Rows beyond the plain case: parts of a SampleBatch are made only for these.
        self.has_truncation = np.zeros(num_slots, np.bool_)
        self.has_penalty = np.zeros(num_slots, np.bool_)
        self.has_bias = np.zeros(num_slots, np.bool_)
        # The first output position at which stop ids may be chosen; 0 where always.
        self.stops_from = np.zeros(num_slots, np.int32)
        self.bias_ids: list[Int32s] = [NO_INTS] * num_slots
        self.bias_values: list[NDArray[np.float32]] = [NO_FLOATS] * num_slots
        self.stop_ids: list[Int32s] = [NO_INTS] * num_slots
        self.has_listed = np.zeros(num_slots, np.bool_)
        self.num_listed = 0  # slots with such ids
        self.listed_ids: list[Int32s] = [NO_INTS] * num_slots  # logprob_token_ids

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan: slots given back, admissions, branches, table deltas, drafts."""
        self.changes += bool(len(plan.retired) or plan.admissions or len(plan.known_slots))
        for slot in plan.retired.tolist():
            self._retire(slot)
        for admission in plan.admissions:
            self._admit(admission)
        if len(plan.known_slots):
            self.tokens.branch(plan.branch_from, plan.branch_to)
            self.grammars.branch(plan.branch_from, plan.branch_to)
            self.ends.branch(plan.branch_from, plan.branch_to)
            self.tokens.tokens[plan.known_slots, self.tokens.lengths[plan.known_slots] - 1] = (
                plan.known_ids
            )
        if len(plan.table_slots):
            self.blocks[plan.table_slots, plan.table_columns] = plan.table_blocks
        if plan.draft_ids.size:
            put_drafts(plan, self.tokens)

    def append(self, slots: Index, positions: Int32s, token_ids: Int32s) -> None:
        """Put tokens at their absolute positions; those of one slot are one run, in order."""
        self.tokens.put(slots, positions, token_ids)

    def block_at(self, slots: Index, columns: Int32s) -> Int32s:
        """Return entries columns[i] of the block tables of slots[i]; see TokenTable.at."""
        blocks: Int32s = self._flat_blocks[slots * self.blocks.shape[1] + columns]
        return blocks

    def _retire(self, slot: int) -> None:
        """Keep nothing of a request that is over: what it asked for may be long or secret."""
        self.tenancy[slot] += 1
        if self.rare.uses[slot]:
            self.rare.retire(slot)
        if self.grammars.has[slot]:
            self.grammars.retire(slot)
        if self.ends.has[slot]:
            self.ends.retire(slot)
        self._search(slot, 0)
        length = self.tokens.lengths[slot]
        self.tokens.tokens[slot, :length] = 0
        self.tokens.lengths[slot] = self.tokens.prompt_lengths[slot] = 0
        self.blocks[slot, : -(-length // self.block_size)] = 0
        self.has_truncation[slot] = self.has_penalty[slot] = self.has_bias[slot] = False
        self.num_logprobs[slot] = -1
        self.stops_from[slot] = 0
        self.bias_ids[slot], self.bias_values[slot] = NO_INTS, NO_FLOATS
        self.stop_ids[slot] = NO_INTS
        self._score_from(slot, NEVER)
        self._list(slot, ())

    def _score_from(self, slot: int, position: int) -> None:
        self.num_scoring += int(position != NEVER) - int(self.scores_from[slot] != NEVER)
        self.scores_from[slot] = position

    def _search(self, slot: int, num_candidates: int) -> None:
        self.num_beams += int(num_candidates > 0) - int(self.num_candidates[slot] > 0)
        self.num_candidates[slot] = num_candidates

    def _list(self, slot: int, ids: Sequence[int]) -> None:
        self.num_listed += int(bool(ids)) - int(self.has_listed[slot])
        self.has_listed[slot] = bool(ids)
        self.listed_ids[slot] = np.array(ids, np.int32) if ids else NO_INTS

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        if sampling.seed is None:
            raise ValueError(f"request {admission.request_id} was planned without a seed")
        self.tenancy[slot] += 1
        self.tokens.admit(slot, admission.token_ids, admission.num_prompt_tokens)
        if sampling.has_rare_steps or admission.rules.banned_sequences:
            self.rare.admit(admission)
        if sampling.structured_outputs is not None:
            self.grammars.admit(admission)
        if admission.num_candidates:
            self.ends.admit(admission)
        self._search(slot, admission.num_candidates)
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = max(sampling.top_k, 0)
        self.top_p[slot] = max(sampling.top_p, SMALLEST_TOP_P)
        self.min_p[slot] = sampling.min_p
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        last_n = sampling.repeat_last_n
        self.repeat_last_n[slot] = WHOLE if last_n is None else last_n
        self.seeds[slot] = sampling.seed
        self.streams[slot] = admission.stream
        self.num_logprobs[slot] = -1 if sampling.logprobs is None else max(sampling.logprobs, 0)
        self._score_from(slot, NEVER if admission.scores_from is None else admission.scores_from)
        self.num_prompt_logprobs[slot] = sampling.prompt_logprobs or 0
        self.pooled[slot] = sampling.pooling is not None
        self._list(slot, ALL_IDS if sampling.logprobs == -1 else sampling.logprob_token_ids)
        filters = sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0
        self.has_truncation[slot] = any(filters)
        penalties = sampling.repetition_penalty - 1.0, sampling.presence_penalty
        self.has_penalty[slot] = last_n != 0 and any((*penalties, sampling.frequency_penalty))
        self.has_bias[slot] = bool(sampling.logit_bias)
        self.bias_ids[slot] = np.fromiter(sampling.logit_bias.keys(), np.int32)
        self.bias_values[slot] = np.fromiter(sampling.logit_bias.values(), np.float32)
        self.stop_ids[slot] = np.array(admission.stop_ids, np.int32)
        until = admission.num_prompt_tokens + sampling.min_tokens
        self.stops_from[slot] = until if sampling.min_tokens and admission.stop_ids else 0
