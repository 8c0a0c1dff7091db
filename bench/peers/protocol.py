"""The one protocol between the benchmark and an engine: a JSON object a line, asked and answered.

    {"do": "load", "model": PATH, "threads": 2, "settings": {...}} -> {"ok": true, ...}
    {"do": "run", "requests": [{"prompt_ids": [...], "output_tokens": 32}, ...],
     "static_batch": 0}                                            -> {"ok": true, "answers": []}
    {"do": "own_tool", "workload": {...}}                          -> {"ok": true, ...}
    {"do": "quit"}                                                 -> the process ends

An answer has sent_s, first_s, last_s (seconds from the run's start) and token_ids. What an engine
cannot do is answered with {"ok": false, "error": TEXT}. Standard library only: every peer runs
this with its own environment's Python. Standard output belongs to the protocol; whatever a
library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Protocol

Asked = dict[str, Any]


class Unsupported(Exception):
    """The engine cannot do what was asked; the text says why."""


class Driver(Protocol):
    """What a peer's script implements."""

    def load(self, model: str, threads: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Make the engine ready; return version, scheme and dtype of the KV cache."""

    def run(self, requests: list[Asked], static_batch: int) -> list[dict[str, Any]]:
        """Hand all requests in at once (static_batch: in groups of so many, one after the other);
        greedy, without end-of-text; an answer each, in order."""

    def own_tool(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the engine's own benchmark. Raise Unsupported if there is none."""

    def close(self) -> None:
        """Free everything."""


def serve(driver: Driver) -> None:
    """Answer lines of standard input until quit or its end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not break the protocol
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "quit":
                return
            try:
                told = {"ok": True, **_answer(driver, asked)}
            except Unsupported as error:
                told = {"ok": False, "error": str(error)}
            except Exception as error:  # noqa: BLE001 - a process edge: reported, not swallowed
                traceback.print_exc()
                told = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            answers.write(json.dumps(told) + "\n")
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
