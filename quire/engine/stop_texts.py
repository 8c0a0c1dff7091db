"""StopTexts: the stop strings that end beams, read where beams are chosen.

Elsewhere stop strings are the reader's: the engine hears that a stream is over. Beams are compared
at each step, so the engine must know which of them end; it reads the tokenizer for it when the
first such request comes, in a thread, and requests wait meanwhile. Knows no scheduler. Always
holds: what it reads is the text that the reader of the answer sees (answer_detokenizer).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.base.errors import QuireError, WorkerError
from quire.base.records import Admission
from quire.text.detokenizer import answer_detokenizer
from quire.text.stop_watch import StopWatch
from quire.text.stops import StopStrings

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class StopTexts:
    """load: reads the tokenizer; called once. on_settled: called in a thread when it was."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        self.error: QuireError | None = None  # why there is none
        self._load = load
        self._tokenizer: Tokenizer | None = None
        self._loading = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the tokenizer was read, or cannot be."""
        return self._tokenizer is not None or self.error is not None

    @property
    def is_ready(self) -> bool:
        """Whether the tokenizer was read."""
        return self._tokenizer is not None

    def want(self) -> None:
        """Begin to read it, unless that has begun."""
        if self._thread is None and not self.is_settled:
            self._thread = threading.Thread(target=self._work, name="quire-text", daemon=True)
            self._thread.start()

    def watch(self, admission: Admission) -> StopWatch:
        """Return the watch of an answer at its beginning.

        Reads the tokenizer in the calling thread where it is not read yet. Raises QuireError where
        it cannot be read.
        """
        tokenizer = self.tokenizer()
        sampling = admission.sampling
        return StopWatch(
            answer_detokenizer(
                tokenizer,
                sampling,
                admission.token_ids[: admission.num_prompt_tokens],
                frozenset(admission.rules.shown_ids),
            ),
            StopStrings(sampling.stop),
            armed_from=sampling.min_tokens,
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises QuireError where it cannot be read."""
        with self._loading:
            if self._tokenizer is None and self.error is None:
                try:
                    self._tokenizer = self._load()
                except QuireError as error:
                    self.error = error
                except Exception as error:  # noqa: BLE001  of a library; fails only these requests
                    self.error = WorkerError(
                        f"the tokenizer cannot be read: {type(error).__name__}: {str(error)[:200]}"
                    )
            if self._tokenizer is None:
                assert self.error is not None, "what was tried is there or has failed"
                raise self.error
            return self._tokenizer

    def _work(self) -> None:
        with contextlib.suppress(QuireError):  # kept in `error`
            self.tokenizer()
        self.on_settled()
