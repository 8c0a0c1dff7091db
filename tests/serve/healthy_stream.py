"""A stream beside hostile requests: its tokens must be those of the same request run alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.serve.running_server import GIVE_UP_S, EventReader, RunningServer, text_of

COMPLETIONS = "/v1/completions"
MAX_TOKENS = 400
HEALTHY = {
    "prompt": "the sea and the stone",
    "seed": 4,
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "logprobs": 1,
}


class HealthyStream:
    """A stream read by a thread, so that it always proceeds; opened again when it has ended."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._alone = server.post(COMPLETIONS, HEALTHY)[1]["choices"][0]
        self._events: list[Any] = []
        self._num_tokens = 0
        self._has_ended = False
        self._changed = threading.Condition()
        self._connection = ExitStack()
        self._thread: threading.Thread | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Have a stream in progress, which must proceed, unchanged, afterwards."""
        self.start()
        yield
        self.check()

    def start(self) -> None:
        """Have a stream in progress: continue the open one unless it ends soon."""
        if self._thread is not None and self._num_tokens < MAX_TOKENS * 3 // 4:
            return
        self.finish()
        self._events, self._num_tokens, self._has_ended = [], 0, False
        reader = self._connection.enter_context(self._server.stream(COMPLETIONS, HEALTHY))
        self._thread = threading.Thread(target=self._read, args=(reader,))
        self._thread.start()
        self._wait_for_more_than(0)

    def check(self) -> None:
        """Wait until the stream proceeds after this call, and compare its tokens until then."""
        self._wait_for_more_than(len(self._events))
        self._compare()

    def finish(self) -> None:
        """Wait for the end of the stream, if one is open, and compare all tokens."""
        if self._thread is None:
            return
        self._thread.join(GIVE_UP_S)
        self._thread = None
        self._connection.close()
        assert self._events[-1] == "[DONE]"
        assert self._compare() == MAX_TOKENS

    def _read(self, reader: EventReader) -> None:
        try:
            for event in reader:
                with self._changed:
                    self._events.append(event)
                    if event != "[DONE]":
                        logprobs = event["choices"][0]["logprobs"]
                        self._num_tokens += len(logprobs["token_logprobs"])
                    self._changed.notify()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify()

    def _wait_for_more_than(self, num_events: int) -> None:
        def proceeds() -> bool:
            return len(self._events) > num_events or self._has_ended

        with self._changed:
            assert self._changed.wait_for(proceeds, GIVE_UP_S), "the stream does not proceed"

    def _compare(self) -> int:
        """Compare the tokens so far with the request run alone; return how many there are."""
        events = [event for event in list(self._events) if event != "[DONE]"]
        assert self._alone["text"].startswith(text_of(events))
        logprobs = [
            value for event in events for value in event["choices"][0]["logprobs"]["token_logprobs"]
        ]
        assert logprobs == self._alone["logprobs"]["token_logprobs"][: len(logprobs)]
        return len(logprobs)
