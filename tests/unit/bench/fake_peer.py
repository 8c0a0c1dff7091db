"""A peer without an engine: answers the protocol with tokens derived from the prompt.

Its settings select faults: "slow" sleeps, "dies" ends the process, "short" leaves a token out,
"noisy" prints on the protocol's output; "takes_s" is the duration it reports.
"""

from __future__ import annotations

import os
import time
from typing import Any

from bench.peers.protocol import Asked, Unsupported, serve


class FakePeer:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        self._settings = settings
        if settings.get("noisy"):
            print("a library says hello", flush=True)
            os.write(1, b"and its C++ too\n")
        return {"version": model, "kv_dtype": "f32", "threads": threads}

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._settings.get("slow"):
            time.sleep(30)
        if self._settings.get("dies"):
            os._exit(3)
        if self._settings.get("raises"):
            raise ValueError("nothing adds up")
        return [
            {
                "sent_s": 0.0,
                "first_s": 0.1,
                "last_s": self._settings.get("takes_s", 0.2),
                "token_ids": [sum(one["prompt_ids"]) % 97]
                * (one["output_tokens"] - bool(self._settings.get("short"))),
            }
            for one in requests
        ]

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        raise Unsupported("it has none")

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(FakePeer())
