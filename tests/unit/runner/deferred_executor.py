"""DeferredExecutor: an asynchronous device, made of an executor that computes on the host.

Submitted work runs only on a wait, and then only as much as must have happened by then: code that
reads too early, or relies on an order that was not enforced, finds nothing. Its `log` records the
submissions and the waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.program.batch import ForwardBatch
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
UNREAD = 0xEE  # bytes that the device may be writing


class _Logits:
    """Logits of rows that will be computed; some of them are read at once."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.values: Any = None
        self._settle = settle

    def __getitem__(self, rows: Any) -> Any:
        self._settle()
        return self.values[rows]


class DeferredExecutor:
    """log: ("trunk", rows, late rows), ("head", rows), ("choose", rows) at submission, ("wait",
    token choices not waited for yet, including this one), ("settle",) if the host reads anything
    else.

    batches: as computed, with the ids of late rows filled in.
    """

    def __init__(self, executor: Any, num_slots: int = 16) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.batches: list[ForwardBatch] = []
        self.fail_next: dict[str, Exception] = {}  # by kind of submission
        self._executor = executor
        self._queue: deque[Callable[[], None]] = deque()
        self._done = self._said = 0
        self._last: Int32s = np.full(num_slots, -1, np.int32)
        self._filled: dict[int, tuple[ForwardBatch, ForwardBatch]] = {}
        self._lock = threading.RLock()  # blocks come from tiers in another thread
        self._unread = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        self._say(lambda: self._executor.copy_blocks(copy_from, copy_to))

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        self._say(lambda: self._executor.run_layers(batch, first, end))

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        late = int(np.count_nonzero(batch.late_slots >= 0))
        self.log.append(("trunk", len(batch.token_ids), late))
        self._fail("trunk")

        def run() -> None:
            filled = self._fill(batch)
            self.batches.append(filled)
            self._filled = {id(batch): (batch, filled)}
            self._executor.run_trunk(filled, head_rows=head_rows)

        self._say(run)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Any:
        self.log.append(("head", count))
        self._fail("head")
        logits = _Logits(self._settle)

        def run() -> None:
            known = self._filled.get(id(batch))
            # Rows of prompts are another batch; logits of late rows depend on nothing else.
            filled = batch if known is None else known[1]
            filled = replace(filled, late_slots=np.empty(0, np.int32)) if known is None else filled
            logits.values = self._executor.run_head(filled, first, count).copy()

        self._say(run)
        return logits

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> Any:
        self.log.append(("pool", count))
        self._settle()
        known = replace(batch, late_slots=np.empty(0, np.int32))
        return self._executor.run_pool(known, first, count)

    def sample(self, logits: _Logits, batch: SampleBatch) -> TokenChoice:
        self._settle()
        self._fail("sample")
        choice: TokenChoice = self._executor.sample(logits.values, batch)
        return choice

    def sample_later(
        self, logits: _Logits, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        self.log.append(("choose", len(slots)))
        self._fail("choose")
        assert batch.rare is None, "these are chosen on the host"
        assert batch.num_candidates is None, "these are chosen on the host"
        found: list[TokenChoice] = []

        def run() -> None:
            known = batch.completed(self._last)
            found.append(self._executor.sample(logits.values, known))
            self._last[slots] = found[0].token_ids

        place = self._say(run)
        self._unread += 1

        def wait() -> TokenChoice:
            self.log.append(("wait", self._unread))
            self._unread -= 1
            self._do_until(place)
            return found[0]

        return wait

    def mark(self) -> Callable[[], None]:
        self.log.append(("choose", 0))
        place = self._said
        self._unread += 1

        def wait() -> None:
            self.log.append(("wait", self._unread))
            self._unread -= 1
            self._do_until(place)

        return wait

    def score(self, logits: Any, batch: ScoreBatch) -> Scores:
        self._settle()
        values = logits.values if isinstance(logits, _Logits) else logits
        scores: Scores = self._executor.score(values, batch)
        return scores

    def begin_moving(self, num_blocks: int) -> None:
        pass

    def host_memory(self, num_bytes: int) -> Bytes:
        return np.full(num_bytes, UNREAD, np.uint8)

    def pin(self, memory: Bytes) -> None:
        pass

    def export_blocks(self, blocks: Int32s, outs: Sequence[Bytes]) -> Callable[[], None]:
        rows = [np.full(len(out), UNREAD, np.uint8) for out in outs]

        def gather() -> None:
            for block, row in zip(blocks.tolist(), rows, strict=True):
                self._executor.export_block(block, row)

        place = self._say(gather)
        for out in outs:
            out[:] = UNREAD  # the device may be writing

        def wait() -> None:
            self._do_until(place)
            for out, row in zip(outs, rows, strict=True):
                out[:] = row

        return wait

    def import_blocks(self, blocks: Int32s, raws: Sequence[Bytes]) -> None:
        """Import in parallel with submitted work."""
        with self._lock:
            for block, raw in zip(blocks.tolist(), raws, strict=True):
                self._executor.import_block(block, raw)

    def _fill(self, batch: ForwardBatch) -> ForwardBatch:
        if not len(batch.late_slots):
            return batch
        is_late = batch.late_slots >= 0
        ids = np.where(is_late, np.maximum(self._last[batch.late_slots], 0), batch.token_ids)
        return replace(batch, token_ids=ids, late_slots=np.empty(0, np.int32))

    def _fail(self, what: str) -> None:
        if (error := self.fail_next.pop(what, None)) is not None:
            raise error

    def _say(self, call: Callable[[], None]) -> int:
        with self._lock:
            self._queue.append(call)
            self._said += 1
            return self._said

    def _do_until(self, place: int) -> None:
        with self._lock:
            while self._done < place:
                self._done += 1
                self._queue.popleft()()

    def _settle(self) -> None:
        self.log.append(("settle",))
        self._do_until(self._said)
