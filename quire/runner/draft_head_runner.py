"""DraftHeadRunner: computes draft heads over hidden states of the target, by slot.

Each head is a program with an executor of its own; a pass runs one of them. Drafts are sampled with
the parameters of their request and the noise of the target. A head over a part of the vocabulary
samples as if all other tokens had no probability, so that the noise of each token is that of the
target. Knows no proposer and no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request, StepPlan
from quire.base.token_table import TokenTable
from quire.execute.executor import Executor, TappedExecutor
from quire.program.batch import CacheRows, ForwardBatch
from quire.runner.batch_builder import KeptSampleBatch
from quire.runner.draft_runner import draft_admission
from quire.runner.grammar_rows import NO_MASK
from quire.runner.slot_tables import SlotTables
from quire.speculative.draft_heads import HeadRows

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
# The output of a head that is fed back as features.
FED_BACK = "hidden"


class DraftHeadRunner:
    """A DraftHeadModel (quire/speculative/draft_heads.py) over `executors`, one per head, with
    their caches allocated.

    max_samples: rows of a slice of a head. vocabulary: the token ids of its logits, for a head over
    a part of the `vocab_size` tokens; None: all. fuse: makes what a head reads of the target's
    hidden states; None: it reads them as they are. feeds_back: a head returns its hidden states,
    which it reads in place of fused ones. has_cache: heads attend to rows before, in their caches.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        tables: SlotTables,
        *,
        max_samples: int,
        vocab_size: int,
        vocabulary: Int32s | None = None,
        fuse: Executor | None = None,
        feeds_back: bool = False,
        has_cache: bool = False,
    ) -> None:
        self._executors, self._tables = tuple(executors), tables
        self._sampling = KeptSampleBatch(tables)
        self._max_samples = max_samples
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
        self._fuse, self._feeds_back, self._has_cache = fuse, feeds_back, has_cache
        self._num_plans = 0

    @property
    def tokens(self) -> TokenTable:
        """Return the known tokens and drafts, by slot."""
        return self._tables.tokens

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        """Take over the sampling parameters of `request`."""
        self._apply(admissions=(draft_admission(slot, request, num_prompt_tokens),))

    def retire(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._apply(retired=np.array([slot], np.int32))

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        """Set entries of the block table of `slot`, from column `first` on."""
        self._tables.blocks[slot, first : first + len(blocks)] = blocks

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, Float32s]:
        """See DraftHeadModel."""
        executor, batch = self._executors[head], self._batch(rows)
        if self._fuse is not None and not rows.fed_back:
            self._fuse.run_trunk(batch)
            fused = self._output(self._fuse, len(rows.token_ids))
            batch = replace(batch, features=np.ascontiguousarray(fused))
        num_rows, most = len(rows.slots), self._max_samples
        executor.run_trunk(batch, head_rows=num_rows if num_rows <= most else 0)
        hidden = np.empty((num_rows, 0), np.float32)
        if self._feeds_back:
            hidden = self._output(executor, len(rows.token_ids))[batch.sample_rows]
        sampled = np.full(num_rows, -1, np.int32)
        for first in range(0, num_rows, most):
            part = slice(first, min(first + most, num_rows))
            slots = rows.slots[part]
            logits = executor.run_head(batch, first, len(slots))
            if self._vocabulary is not None:
                logits = self._spread(self._output(executor, len(slots), "logits"))
            choice = executor.sample(
                logits, self._sampling.of(slots, rows.positions[part], NO_MASK)
            )
            sampled[part] = choice.token_ids
        return sampled, hidden

    def close(self) -> None:
        """Close the executors."""
        self._tables.grammars.close()
        for executor in reversed(self._executors):
            executor.close()
        if self._fuse is not None:
            self._fuse.close()

    def _batch(self, rows: HeadRows) -> ForwardBatch:
        """Return the rows as executors read them, their positions counted in the head's cache."""
        num_rows, num_tokens = len(rows.slots), len(rows.token_ids)
        seq_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(rows.counts, out=seq_starts[1:])
        row_of = np.repeat(np.arange(num_rows), rows.counts)
        positions = np.arange(num_tokens, dtype=np.int32) + (rows.starts - seq_starts[:-1])[row_of]
        size = self._tables.block_size
        kv_slots = np.full(num_tokens, -1, np.int32)
        num_columns = 1
        if self._has_cache:
            columns = positions // size
            kv_slots = self._tables.blocks[rows.slots[row_of], columns] * np.int32(size)
            kv_slots += positions % size
            num_columns = int(columns.max()) + 1
        return ForwardBatch(
            token_ids=rows.token_ids,
            positions=positions,
            rope_positions=positions,
            caches=(
                CacheRows(
                    kv_slots=kv_slots, block_tables=self._tables.blocks[rows.slots, :num_columns]
                ),
            ),
            seq_starts=seq_starts,
            sample_rows=seq_starts[1:] - np.int32(1),
            features=np.ascontiguousarray(rows.hidden_states),
        )

    @staticmethod
    def _output(executor: Executor, num_rows: int, name: str = FED_BACK) -> Float32s:
        """Return rows on the host of what an executor computed, until its next run."""
        assert isinstance(executor, TappedExecutor), "heads run on such executors only"
        rows: Float32s = executor.output(name, num_rows)
        return rows

    def _spread(self, logits: Float32s) -> Float32s:
        """Return logits of all tokens, -inf for those that the head does not know."""
        spread = np.full((len(logits), self._vocab_size), -np.inf, np.float32)
        spread[:, self._vocabulary] = logits
        return spread

    def _apply(self, **parts: object) -> None:
        self._num_plans += 1
        self._tables.apply(StepPlan(step=self._num_plans, **parts))  # type: ignore[arg-type]
