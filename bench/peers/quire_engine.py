"""Quire behind the peers' protocol: AsyncLLM in this process, as `quire bench` drives it.

It has its own process like every peer, so that memory and processor time are counted alike.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from bench.peers.protocol import Asked, Unsupported, serve
from quire.bench.local import CompletedRequest, LocalEngine
from quire.bench.workloads import RequestSpec


class Quire:
    """See protocol.Driver."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engine: LocalEngine | None = None

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        self.close()
        self._runner = asyncio.Runner()
        self._engine = LocalEngine(model, {"num_threads": threads, **settings})
        self._runner.run(self._engine.__aenter__())
        self._runner.run(self._engine.settle())
        described = self._engine.description
        scheme = described["quantization"]
        return {
            "version": str(described["fingerprint"]),
            "scheme": str(described["dtype"] if scheme == "none" else scheme),
            "kv_dtype": str(described["kv_cache_dtype"]),
            "recipe": str(described["recipe"]),
            "vocab_size": self._engine.vocab_size,
            "pid": os.getpid(),
        }

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        if self._engine is None:
            raise Unsupported("nothing is loaded")
        specs = [
            RequestSpec(prompt_ids=tuple(one["prompt_ids"]), output_tokens=one["output_tokens"])
            for one in requests
        ]
        answered = self._runner.run(self._engine.run(specs, static_batch=static_batch))
        return [_answer_of(one) for one in answered]

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        raise Unsupported("Quire is measured by this benchmark")

    def close(self) -> None:
        if self._engine is not None:
            self._runner.run(self._engine.__aexit__())
            self._engine = None
        self._runner.close()


def _answer_of(answered: CompletedRequest) -> dict[str, Any]:
    times = answered.times
    return {
        "sent_s": times.sent_s,
        "first_s": times.first_s,
        "last_s": times.last_s,
        "token_ids": list(answered.token_ids),
        "drafted": answered.accepted_drafts + answered.rejected_drafts,
        "accepted": answered.accepted_drafts,
    }


if __name__ == "__main__":
    serve(Quire())
