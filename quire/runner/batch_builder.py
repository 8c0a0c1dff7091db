"""From a StepPlan and the slot tables to the arrays executors read: ForwardBatch, SampleBatch.

Both depend on the sampled positions of a plan (SampledRows). Most steps have the rows of the step
before, one position further: KeptRows and KeptSampleBatch keep then what was made of them, because
between two steps a model's weights have driven all else out of the caches, so that each array made
anew costs microseconds. Vector operations only: a step of many rows costs no Python loop but over
those that carry penalties, bias, banned ids or rare parameters. Letters: N rows of the plan, T
token rows, R sampled positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS, Bools, StepPlan
from quire.program.batch import NO_SLOTS, CacheRows, ForwardBatch
from quire.runner.grammar_rows import NO_MASK, Masks
from quire.runner.slot_tables import SlotTables
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import (
    WHOLE,
    LogitBias,
    NoiseKeys,
    Penalties,
    RaggedIds,
    TokenHistory,
    TokenMasks,
    Truncation,
    ragged,
)

Int32s = NDArray[np.int32]
Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The R sampled positions of a plan, in the order of its rows.

    rows: their rows in the plan. offsets: the position of the sampled token less the first position
    of its row. tenancy and changes: of the slots and of the tables, when the plan was applied.
    slot_range: the slots, if they follow each other. is_decode: each row of the plan computes one
    position and samples it. needs_host: a row needs logits or a state on the host.
    """

    rows: Index  # [R]
    slots: Index  # [R]
    offsets: Int32s  # [R]
    tenancy: NDArray[np.int64]  # [R]
    changes: int
    slot_range: slice | None
    is_decode: bool
    has_grammar: bool
    has_penalty: bool
    needs_host: bool

    def __len__(self) -> int:
        """Return R."""
        return len(self.slots)

    def positions(self, plan: StepPlan) -> Int32s:
        """Return the positions of the sampled tokens [R]."""
        if self.is_decode:
            return plan.starts + self.offsets
        return plan.starts[self.rows] + self.offsets

    def token_rows(self, seq_starts: Int32s) -> Int32s:
        """Return the token rows to sample [R], given the first token row of each row [N + 1]."""
        return seq_starts[self.rows] + self.offsets - np.int32(1)

    def firsts(self) -> Index:
        """Return for each sampled position the first one of its row [R]."""
        return np.searchsorted(self.rows, self.rows)

    def stays(self, tables: SlotTables) -> Bools | None:
        """Return which slots still have the request of the plan [R]; None: all."""
        if tables.changes == self.changes:
            return None
        stays: Bools = tables.tenancy[self.slots] == self.tenancy
        return stays


def sampled_rows(plan: StepPlan, tables: SlotTables) -> SampledRows:
    """Return the sampled positions of a plan that was applied to `tables`."""
    counts, sample_counts = plan.counts, plan.sample_counts
    num_rows = len(plan.slots)
    rows = np.repeat(np.arange(num_rows), sample_counts)
    slots = plan.slots[rows].astype(np.intp)
    # Of its row's sampled positions, which one each is.
    places = np.arange(len(rows)) - (np.cumsum(sample_counts) - sample_counts)[rows]
    offsets = (counts - sample_counts + 1)[rows] + places
    return SampledRows(
        rows=rows,
        slots=slots,
        offsets=offsets.astype(np.int32),
        tenancy=tables.tenancy[slots],
        changes=tables.changes,
        slot_range=_as_range(slots),
        is_decode=bool((counts == 1).all() and (sample_counts == 1).all()),
        has_grammar=bool(tables.grammars.has[slots].any()),
        has_penalty=bool(tables.has_penalty[slots].any()),
        needs_host=bool(
            tables.has_listed[slots].any()
            or tables.rare.uses[slots].any()
            or tables.num_candidates[slots].any()
        ),
    )


def _as_range(slots: Index) -> slice | None:
    if not len(slots) or (np.diff(slots) != 1).any():
        return None
    return slice(int(slots[0]), int(slots[-1]) + 1)


class KeptRows:
    """sampled_rows, made anew only where the rows or the tables changed."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._key: tuple[int, bytes, bytes, bytes] | None = None
        self._rows: SampledRows | None = None

    def of(self, plan: StepPlan) -> SampledRows:
        """See sampled_rows."""
        key = (
            self._tables.changes,
            plan.slots.tobytes(),
            plan.counts.tobytes(),
            plan.sample_counts.tobytes(),
        )
        if self._rows is None or key != self._key:
            self._key, self._rows = key, sampled_rows(plan, self._tables)
        return self._rows


def forward_batch(
    plan: StepPlan, tables: SlotTables, sampled: SampledRows, *, knows_tokens: bool = True
) -> ForwardBatch:
    """Return the token rows of `plan` [T], in the order of its rows. The plan has at least one row.

    knows_tokens: False if earlier steps are not finished. A token that one of them samples is not
    in the table yet; its row names the slot instead of an id.
    """
    if sampled.is_decode:
        batch = _decode_batch(plan, tables, sampled)
        return batch if knows_tokens else _with_late_slots(batch, plan.slots, tables)
    block_size = tables.block_size
    num_rows = len(plan.slots)
    seq_starts = np.zeros(num_rows + 1, np.int32)
    np.cumsum(plan.counts, out=seq_starts[1:])
    row_of = np.repeat(np.arange(num_rows), plan.counts)  # [T]
    offsets = plan.starts - seq_starts[:-1]
    positions = np.arange(seq_starts[-1], dtype=np.int32) + offsets[row_of]
    slots = plan.slots[row_of]
    columns = positions // block_size
    kv_slots = tables.blocks[slots, columns] * np.int32(block_size) + positions % block_size
    kv_slots[positions < plan.store_from[row_of]] = -1
    num_columns = int((plan.starts + plan.counts - 1).max()) // block_size + 1
    batch = ForwardBatch(
        token_ids=tables.tokens.tokens[slots, positions],
        positions=positions,
        rope_positions=positions,
        caches=(
            CacheRows(kv_slots=kv_slots, block_tables=tables.blocks[plan.slots, :num_columns]),
        ),
        seq_starts=seq_starts,
        sample_rows=sampled.token_rows(seq_starts),
    )
    return batch if knows_tokens else _with_late_slots(batch, slots, tables)


def _with_late_slots(batch: ForwardBatch, slots: Int32s, tables: SlotTables) -> ForwardBatch:
    """slots [T]: the slot of each row."""
    is_late = batch.positions >= tables.tokens.lengths[slots]
    if not is_late.any():
        return batch
    return replace(
        batch,
        token_ids=np.where(is_late, np.int32(0), batch.token_ids),
        late_slots=np.where(is_late, slots, np.int32(-1)),
    )


def _decode_batch(plan: StepPlan, tables: SlotTables, sampled: SampledRows) -> ForwardBatch:
    """Return the batch of a plan in which each row computes and samples one position.

    While one is made, a thread of the same process that streams the last step's tokens waits for
    the GIL. Nothing here releases it, so that the thread runs beside the model (TokenTable.at).
    """
    slots, positions = sampled.slots, plan.starts
    columns, within = np.divmod(positions, np.int32(tables.block_size))
    kv_slots = tables.block_at(slots, columns) * np.int32(tables.block_size) + within
    kv_slots[positions < plan.store_from] = -1
    num_columns = int(np.maximum.reduce(columns)) + 1
    if sampled.slot_range is not None:
        block_tables = tables.blocks[sampled.slot_range, :num_columns].copy()
    else:
        block_tables = tables.blocks[slots, :num_columns]
    seq_starts = _counted(len(slots) + 1)
    return ForwardBatch(
        token_ids=tables.tokens.at(slots, positions),
        positions=positions,
        rope_positions=positions,
        caches=(CacheRows(kv_slots=kv_slots, block_tables=block_tables),),
        seq_starts=seq_starts,
        sample_rows=seq_starts[:-1],
        late_slots=NO_SLOTS,
    )


@lru_cache(maxsize=1024)
def _counted(end: int) -> Int32s:
    """0, 1 and so on, before `end`."""
    numbers = np.arange(end, dtype=np.int32)
    numbers.setflags(write=False)
    return numbers


class KeptSampleBatch:
    """sample_batch, made anew only where rows or their parameters changed: else the last one
    stands, at other positions. Only plain rows are kept: what others carry changes with each token,
    or must not outlive its request."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._last: tuple[int, bytes, SampleBatch] | None = None

    def of(
        self, slots: Index, positions: Int32s, masks: Masks, *, is_late: bool = False
    ) -> SampleBatch:
        """See sample_batch."""
        tables, rows = self._tables, slots.tobytes()
        if self._last is not None and not len(masks.rows):
            changes, last_rows, batch = self._last
            if changes == tables.changes and last_rows == rows:
                return batch.at(positions)
        batch = sample_batch(slots, positions, tables, masks, is_late=is_late)
        is_plain = (
            batch.history is None
            and batch.logit_bias is None
            and batch.rare is None
            and batch.masks is None
            and batch.banned is None  # no row is before its min_tokens, nor will be
        )
        self._last = (tables.changes, rows, batch) if is_plain else None
        return batch


def sample_batch(
    slots: Index,
    positions: Int32s,
    tables: SlotTables,
    masks: Masks = NO_MASK,
    *,
    is_late: bool = False,
) -> SampleBatch:
    """Return the sampling parameters of `slots` [R], for tokens at `positions` [R].

    masks: grammar masks of these rows. is_late: earlier steps may be in flight, so that the last
    token of a row may be on the device only. Without is_late a token can be missing from the table
    only if its request failed or ended; the result of such a row is discarded.
    """
    num_logprobs = tables.num_logprobs[slots]
    num_candidates = tables.num_candidates[slots] if tables.num_beams else NO_INTS
    return SampleBatch(
        positions=positions,
        temperature=tables.temperature[slots],
        noise=NoiseKeys(seeds=tables.seeds[slots], streams=tables.streams[slots]),
        truncation=_truncation(slots, tables),
        penalties=_penalties(slots, tables),
        history=_history(slots, positions, tables, is_late=is_late),
        logit_bias=_logit_bias(slots, tables),
        banned=_banned(slots, positions, tables),
        masks=TokenMasks(rows=masks.rows, words=masks.words) if len(masks.rows) else None,
        rare=tables.rare.parameters(slots) if tables.rare.uses[slots].any() else None,
        num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None,
        num_candidates=num_candidates if num_candidates.any() else None,
    )


def num_unknown(slots: Index, positions: Int32s, tables: SlotTables) -> Int32s:
    """Return how many tokens before `positions` [R] are not in the table: steps that are not
    finished have chosen them, or will."""
    unknown: Int32s = positions - tables.tokens.lengths[slots]
    return unknown


def _truncation(slots: Index, tables: SlotTables) -> Truncation | None:
    if not tables.has_truncation[slots].any():
        return None
    return Truncation(
        top_k=tables.top_k[slots], top_p=tables.top_p[slots], min_p=tables.min_p[slots]
    )


def _penalties(slots: Index, tables: SlotTables) -> Penalties | None:
    if not tables.has_penalty[slots].any():
        return None
    last_n = tables.repeat_last_n[slots]
    return Penalties(
        repetition=tables.repetition_penalty[slots],
        presence=tables.presence_penalty[slots],
        frequency=tables.frequency_penalty[slots],
        last_n=last_n if (last_n != WHOLE).any() else None,
    )


def _history(
    slots: Index, positions: Int32s, tables: SlotTables, *, is_late: bool
) -> TokenHistory | None:
    """Return the histories of rows that read them, as far as they are known."""
    rows = (tables.has_penalty[slots] | tables.rare.has_history[slots]).nonzero()[0]
    if not len(rows):
        return None
    tokens, lengths = tables.tokens.tokens, tables.tokens.lengths
    read = [
        tokens[slot, : min(position, lengths[slot])]
        for slot, position in zip(slots[rows], positions[rows], strict=True)
    ]
    return TokenHistory(
        tokens=ragged(read, rows, len(slots)),
        num_prompt_tokens=tables.tokens.prompt_lengths[slots],
        late_slots=_late_slots(slots, positions, tables) if is_late else None,
    )


def _late_slots(slots: Index, positions: Int32s, tables: SlotTables) -> Int32s | None:
    """Return the slots of rows that read their history and lack its last token. A row that lacks
    more has failed: a step of such rows is chosen when the one before is finished."""
    lacks_one = tables.has_penalty[slots] & (num_unknown(slots, positions, tables) == 1)
    return np.where(lacks_one, slots, -1).astype(np.int32) if lacks_one.any() else None


def _logit_bias(slots: Index, tables: SlotTables) -> LogitBias | None:
    rows = tables.has_bias[slots].nonzero()[0]
    if not len(rows):
        return None
    biased = slots[rows]
    return LogitBias(
        tokens=ragged([tables.bias_ids[slot] for slot in biased], rows, len(slots)),
        values=np.concatenate([tables.bias_values[slot] for slot in biased]),
    )


def _banned(slots: Index, positions: Int32s, tables: SlotTables) -> RaggedIds | None:
    """Return the stop ids of rows before min_tokens."""
    rows = (positions < tables.stops_from[slots]).nonzero()[0]
    if not len(rows):
        return None
    return ragged([tables.stop_ids[slot] for slot in slots[rows]], rows, len(slots))
