"""The protocol between the benchmark and an engine: one JSON object per line in each direction.

    {"do": "load", "model": PATH, "threads": 2, "settings": {...}} -> {"ok": true, ...}
    {"do": "run", "requests": [{"prompt_ids": [...], "output_tokens": 32}, ...],
     "static_batch": 0}                                            -> {"ok": true, "answers": []}
    {"do": "own_tool", "workload": {...}}                          -> {"ok": true, ...}
    {"do": "quit"}                                                 -> the process ends

An answer has sent_s, first_s, last_s (seconds from the run's start) and token_ids; of engines that
speculate also how many tokens were drafted and accepted, and generation_s where the engine itself
says how long it took from the first token to the last. Unsupported calls are answered with
{"ok": false, "error": TEXT}. Standard library only: every peer runs this with its own environment's
Python. Standard output belongs to the protocol; output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Protocol

Asked = dict[str, Any]


class Unsupported(Exception):
    """The engine does not support the call; the text states why."""


class Driver(Protocol):
    """The interface that a peer's script implements."""

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Make the engine ready; return version, scheme and dtype of the KV cache."""

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        """Run all requests at once (static_batch: in groups of so many, one after the other).

        Greedy, without end-of-text; returns an answer each, in order.
        """

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the engine's own benchmark. Raise Unsupported if there is none."""

    def close(self) -> None:
        """Free everything."""


def serve(driver: Driver) -> None:
    """Answer lines of standard input until quit or its end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not break the protocol
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "quit":
                return
            try:
                reply = {"ok": True, **_answer(driver, asked)}
            except Unsupported as error:
                reply = {"ok": False, "error": str(error)}
            except Exception as error:  # noqa: BLE001 - a process edge: reported, not swallowed
                traceback.print_exc()
                reply = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    finally:
        driver.close()


def _answer(driver: Driver, asked: Asked) -> dict[str, Any]:
    match asked["do"]:
        case "load":
            return driver.load(asked["model"], asked["threads"], asked["settings"])
        case "run":
            return {"answers": driver.run(asked["requests"], asked.get("static_batch", 0))}
        case "own_tool":
            return driver.own_tool(asked["workload"])
    raise Unsupported(f"{asked['do']!r} is not part of the protocol")
