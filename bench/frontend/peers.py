"""Run other engines' servers under the load of the front-end bench, with the built-in model.

llama-server and vLLM have no executor that computes nothing, so each serves the smallest trained
model there is, three million parameters, and its numbers include that model's compute; Quire serves
the same model here for comparison. A request's cost is that of one token. Always holds: all answers
are complete; an engine that is not installed, or has a server that fails, is recorded as a failure
and the others are measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.frontend.figures import medians, per
from bench.frontend.servers import Asked, drive
from bench.peers.child import PeerFailed
from bench.peers.convert import Unavailable
from bench.servers import Server
from bench.token_check import trained_checkpoint
from quire.bench.http_load import Target, served_model
from quire.config.machine import num_usable_cores

TOKENS = 64
ROUNDS = 2
PROMPT = "Once upon a time there was a little dog that liked to run by the sea."
CONTEXT = 256
# As many slots as streams in each, without prefix caching.
SETTINGS: dict[str, dict[str, Any]] = {
    "quire": {"dtype": "f32", "max_num_seqs": 256, "max_model_len": CONTEXT},
    "llama.cpp": {"-np": 256, "-c": 256 * CONTEXT, "--cache-ram": 0},
    "vllm": {"max_num_seqs": 256, "max_model_len": CONTEXT, "dtype": "float32"},
}


def measure_models(names: Sequence[str], *, streams: int, samples: int) -> dict[str, Any]:
    """Return each engine's figures, one server at a time."""
    results: dict[str, Any] = {"model": "box, 3 million parameters, f32", "tokens": TOKENS}
    checkpoint = trained_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            log = Path(folder) / f"{name}.log"
            threads = num_usable_cores()
            settings = SETTINGS[name]
            try:
                with Server(
                    name, checkpoint, "f32", threads=threads, log=log, settings=settings
                ) as server:
                    server.wait()
                    results[name] = _measured(server, log, streams, samples)
            except (PeerFailed, Unavailable, OSError) as error:
                results[name] = {"failed": str(error), "log": _end_of(log)}
            results[name]["settings"] = settings
            print(json.dumps({name: results[name]}), flush=True)
    return results


def _measured(server: Server, log: Path, streams: int, samples: int) -> dict[str, Any]:
    port = int(server.target.url.rpartition(":")[2])
    model = _model_of(server.target)

    def asked(max_tokens: int, rounds: int) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": max_tokens > 1,
        }
        came = drive(
            server.pid,
            Asked(port, "/v1/completions", body, streams, rounds),
            output=lambda: _end_of(log),
        )
        check_peer(came, answers=streams * rounds, tokens=max_tokens if max_tokens > 1 else 0)
        return came

    asked(TOKENS, 1)  # imports, first connections, memory
    streamed = [per(asked(TOKENS, 1), streams * TOKENS, "token") for _ in range(samples)]
    asked(1, 1)
    whole = [per(asked(1, ROUNDS), streams * ROUNDS, "request") for _ in range(samples)]
    return {"streamed": medians(streamed), "requests": medians(whole)}


def check_peer(came: dict[str, Any], *, answers: int, tokens: int) -> None:
    """Raise PeerFailed if answers are missing, or arrived in too few events.

    Fewer than nine events per ten tokens are too few (parts of a character share an event).
    """
    counts = {int(events): count for events, count in came["events"].items()}
    least = 0 if not tokens else round(0.9 * tokens)
    if came["answers"] != answers or not all(least <= events <= tokens for events in counts):
        raise PeerFailed(f"{answers} answers of {tokens} tokens wanted, came: {counts}")


def _model_of(target: Target) -> str:
    return asyncio.run(served_model(target)).name


def _end_of(log: Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - 800, 0))
        return file.read().decode(errors="replace")
