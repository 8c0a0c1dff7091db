"""BatchWorker: runs the lines of batches in what capacity other requests leave.

A line starts only while the lines and the open requests of others are together fewer than
--batch-lines. Batches of one key run one after the other, those of different keys line by line in
turn. Knows no HTTP. Always holds: a batch that has not ended is continued after a restart; lines
with a result never run again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from sqlite3 import Connection
from typing import TYPE_CHECKING, TypeVar

from quire.api.batches.expiry import SWEEP_S, drop_stale
from quire.api.batches.input_lines import InputCheck, decode_line
from quire.api.batches.line_form import CANCELLED, EXPIRED, BatchEndpoint
from quire.api.batches.line_runner import NotNow, run_line
from quire.api.batches.message_batches import keep_counts
from quire.api.batches.stored_batches import (
    ENDED,
    MAX_ATTEMPTS,
    Line,
    StoredBatch,
    begin_attempt,
    begin_lines,
    end_batch,
    find_batch,
    forget_lines,
    move_to,
    next_lines,
    save_result,
    unfinished,
)
from quire.api.batches.stored_files import read_span
from quire.base.errors import QuireError

if TYPE_CHECKING:
    from quire.api.batches.journal import BatchJournal
    from quire.api.server_state import ServerState

T = TypeVar("T")

# Interval of checks for room while a line waits for it.
_POLL_S = 0.05
# A line that the server could not run now is tried again after this.
_AGAIN_S = 1.0
# After a failure of the journal, as with a full disk, a batch waits this long.
_AFTER_FAULT_S = 10.0
_LINES_READ = 64
# How a line without an answer failed; see message_batches.py.
_KINDS = {CANCELLED: 2, EXPIRED: 3}


class BatchWorker:
    """Runs batches until the server stops. endpoints: of the lines, by path."""

    def __init__(
        self,
        server_state: ServerState,
        journal: BatchJournal,
        endpoints: Mapping[str, BatchEndpoint],
    ) -> None:
        self._server_state, self._journal, self._endpoints = server_state, journal, endpoints
        self._num_running = 0
        self._turn = asyncio.Lock()
        self._key_turns: dict[bytes, asyncio.Lock] = {}
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._main = asyncio.ensure_future(self._resume())
        self._sweep = asyncio.ensure_future(self._drop_stale())
        server_state.lifecycle.stopping.add_done_callback(lambda _: self._stop())

    def begin(self, batch: StoredBatch) -> None:
        """Run a batch, which the journal has."""
        if self._server_state.lifecycle.stopping.done() or batch.id in self._batches:
            return  # the next start continues it
        task = asyncio.ensure_future(self._run(batch))
        self._batches[batch.id] = task
        task.add_done_callback(lambda _: self._ended(batch))

    def cancel(self, id_: str) -> None:
        """End the lines of a batch that is `cancelling`."""
        task = self._batches.get(id_)
        if task is not None and id_ not in self._cancelled:
            self._cancelled.add(id_)
            task.cancel()

    def _ended(self, batch: StoredBatch) -> None:
        """Forget a task. One that a cancel ended, wherever it was, leaves the batch to end."""
        task = self._batches.pop(batch.id)
        if batch.id in self._cancelled:
            self._cancelled.discard(batch.id)
            if task.cancelled():
                self.begin(batch)

    async def _resume(self) -> None:
        while self._server_state.loaded_engine is None:
            await asyncio.sleep(_POLL_S)
        for batch in await self._journal.run(unfinished):
            self.begin(batch)

    async def _drop_stale(self) -> None:
        """Remove expired files, and what failed uploads left, from time to time."""
        while True:
            try:
                await self._in_journal(drop_stale, self._journal.open_uploads)
            except QuireError as error:  # as with a full disk
                self._server_state.log.error("stale files not removed", error=str(error))
            await asyncio.sleep(SWEEP_S)

    def _stop(self) -> None:
        """End what runs and close the journal; a server that drains waits for it."""
        tasks = [self._main, self._sweep, *self._batches.values()]
        for task in tasks:
            task.cancel()
        held = ExitStack()
        held.enter_context(self._server_state.track_request(counts=True))

        async def close() -> None:
            with held:
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*self._ends, return_exceptions=True)
                self._journal.close()

        self._closing = asyncio.ensure_future(close())

    async def _run(self, batch: StoredBatch) -> None:
        """Run a batch to its end. A journal that cannot be written now is tried again."""
        while True:
            try:
                # As it is now: a batch that was validated must not be validated again.
                batch = await self._in_journal(find_batch, batch.key, batch.id)
                if batch.status in ENDED:
                    return
                end = await self._end_of(batch)
                # Not to be cancelled: the batch must not stay between its states.
                finish = asyncio.ensure_future(self._finish(batch, end))
                self._ends.add(finish)
                finish.add_done_callback(self._ends.discard)
                await asyncio.shield(finish)
                return
            except Exception as error:  # noqa: BLE001  as with a full disk
                self._server_state.log.error("batch interrupted", batch=batch.id, error=repr(error))
                await asyncio.sleep(_AFTER_FAULT_S)

    async def _end_of(self, batch: StoredBatch) -> str:
        """Run the lines of a batch; return the status that it ends with."""
        if batch.status == "cancelling":
            return "cancelled"
        try:
            async with asyncio.timeout(batch.expires_s - time.time()):
                await self._run_lines(batch)
        except TimeoutError:
            return "expired"
        return "completed"

    async def _finish(self, batch: StoredBatch, end: str) -> None:
        form = self._endpoints[batch.endpoint].form
        if end == "expired":
            await self._leave_unanswered(batch, EXPIRED, "this line did not run within 24 hours")
        elif not form.has_files:
            await self._leave_unanswered(batch, CANCELLED, "the batch was cancelled")

        def end_rows(database: Connection) -> None:
            end_batch(database, batch.id, end, has_files=form.has_files)
            if not form.has_files:
                keep_counts(database, batch.id)

        await self._journal.run(end_rows)
        self._server_state.log.event("batch ended", batch=batch.id, status=end)

    async def _run_lines(self, batch: StoredBatch) -> None:
        if batch.status == "validating" and not await self._validate(batch):
            return
        turn = self._key_turns.setdefault(batch.key, asyncio.Lock())
        async with turn, asyncio.TaskGroup() as lines:
            first = 0
            while found := await self._in_journal(next_lines, batch.id, first, _LINES_READ):
                for line in found:
                    await self._take_room()
                    task = lines.create_task(self._run_line(batch, line))
                    task.add_done_callback(lambda _: self._leave_room())
                first = found[-1].number + 1
        await self._in_journal(move_to, batch.id, "finalizing")

    async def _validate(self, batch: StoredBatch) -> bool:
        """Read the input of a batch; return whether its lines may run."""
        check = InputCheck(batch, self._server_state.config.max_body_bytes)
        await check.read(self._journal)
        if not check.faults:
            return await self._in_journal(begin_lines, batch.id, check.num_lines) is not None

        def fail(database: Connection) -> None:
            forget_lines(database, batch.id)
            move_to(database, batch.id, "failed", check.faults)

        await self._journal.run(fail)
        return False

    async def _take_room(self) -> None:
        """Wait until a line may start."""
        async with self._turn:
            while not self._has_room():
                await asyncio.sleep(_POLL_S)
            self._num_running += 1

    def _has_room(self) -> bool:
        lifecycle, limit = self._server_state.lifecycle, self._server_state.config.batch_lines
        # Lines are open requests too, but not from their first moment to their last.
        others = max(0, self._server_state.requests.num_open - self._num_running)
        return self._num_running + others < limit and not (lifecycle.paused or lifecycle.draining)

    def _leave_room(self) -> None:
        self._num_running -= 1

    async def _run_line(self, batch: StoredBatch, line: Line) -> None:
        if line.attempts >= MAX_ATTEMPTS:
            message = f"the server ended {line.attempts} times while this line ran"
            await self._save_error(batch, line, "server_ended", message)
            return
        await self._in_journal(begin_attempt, batch.id, line.number)
        raw = await self._in_journal(read_span, batch.input, line.start, line.size)
        body, endpoint = bytes(decode_line(raw).body), self._endpoints[batch.endpoint]
        while True:
            caller = self._server_state.keys.owner(batch.key)
            if caller is None:
                message = "the API key of this batch is no longer one of this server's keys"
                await self._save_error(batch, line, "invalid_api_key", message)
                return
            try:
                answer = await run_line(self._server_state, endpoint, caller, body)
                break
            except NotNow:
                await asyncio.sleep(_AGAIN_S)
        result, failed = endpoint.form.answered(line.custom_id, *answer), int(answer[0] != 200)
        usage = None if failed or not endpoint.usage_of else endpoint.usage_of(answer[2])
        await self._in_journal(save_result, batch.id, line.number, result, failed, usage)

    async def _save_error(self, batch: StoredBatch, line: Line, code: str, message: str) -> None:
        form = self._endpoints[batch.endpoint].form
        result, failed = form.unanswered(line.custom_id, code, message), _KINDS.get(code, 1)
        if form.has_files:
            failed = 1
        await self._in_journal(save_result, batch.id, line.number, result, failed)

    async def _leave_unanswered(self, batch: StoredBatch, code: str, message: str) -> None:
        """Write an error for each line without a result."""
        first = 0
        while lines := await self._in_journal(next_lines, batch.id, first, _LINES_READ):
            for line in lines:
                await self._save_error(batch, line, code, message)
            first = lines[-1].number + 1

    async def _in_journal(self, work: Callable[..., T], *args: object) -> T:
        return await self._journal.run(lambda database: work(database, *args))
