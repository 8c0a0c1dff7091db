"""Claims: what this engine computes for others, noted in the store while it does.

A claim is made by a lookup (jobs.py), and belongs to a request from then on. A thread renews all
claims, because a step may take longer than a claim lives. Knows request ids and records; no block.
Always holds: a claim ends with its request, or soon after the engine's thread has stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from quire.engine.kv_store.job_threads import Workers
from quire.kv_store.level import SharedLevel
from quire.kv_store.shared_store import CLAIM_LEASE_S

RENEW_S = CLAIM_LEASE_S / 3
# An engine's thread that was not seen for so long hangs, and what it claimed is free again.
MAX_STEP_MS = 120_000.0


class Claims:
    """The claims of one engine in `shared`. workers: for calls of the store. now_ms: a clock.

    All but the renewal is called in the engine's thread.
    """

    def __init__(self, shared: SharedLevel, workers: Workers, now_ms: Callable[[], float]) -> None:
        self._shared, self._workers, self._now_ms = shared, workers, now_ms
        self.num_made = 0
        self._seen_ms = now_ms()
        self._of: dict[str, tuple[bytes, bytes]] = {}  # key and record, by request
        self._changed = threading.Condition()
        self._calling = threading.Lock()  # so that no claim is renewed after its release
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """How many claims there are."""
        return len(self._of)

    def add(self, request_id: str, key: bytes, record: bytes) -> None:
        """Take over a claim for a request; one that has a claim already needs no other."""
        if request_id in self._of:
            self.release(key, record)
            return
        self.num_made += 1
        with self._changed:
            self._of[request_id] = key, record
            self._seen_ms = self._now_ms()
            self._keep_renewing()

    def end(self, request_id: str) -> None:
        """End the claim of a request, if it has one."""
        with self._changed:
            claim = self._of.pop(request_id, None)
        if claim is not None:
            self.release(*claim)

    def release(self, key: bytes, record: bytes) -> None:
        """End a claim that belongs to no request."""
        self._workers.put(partial(self._release, key, record))

    def note_alive(self, now_ms: float) -> None:
        """Note that the engine's thread goes on."""
        self._seen_ms = now_ms

    def close(self) -> None:
        """End all claims, and the thread that renews them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for request_id in [*self._of]:
            self.end(request_id)

    def _keep_renewing(self) -> None:
        """Start the thread that renews claims, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="quire-kv-claims", daemon=True)
            self._thread.start()

    def _release(self, key: bytes, record: bytes) -> None:
        with self._calling:
            self._shared.release(key, record)

    def _renew(self) -> None:
        """Renew all claims from time to time, until there are none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, RENEW_S)
                if self._is_closed or not self._of:
                    self._thread = None
                    return
                request_ids = [*self._of]
            if self._now_ms() - self._seen_ms > MAX_STEP_MS:
                continue
            for request_id in request_ids:
                with self._calling:
                    claim = self._of.get(request_id)
                    if claim is not None:
                        self._shared.renew(*claim)
