"""python -m bench.frontend: processor time of the HTTP front end per token and per request.

The real server runs on a null executor that returns each row's token at once (null_executor.py),
with 256 concurrent streams from a client in another process, one event per token. Two paces: `flat
out`, as fast as tokens pass through, and `paced`, a step every 40 ms, like a model that computes:
then no two tokens of a stream wait together, and each costs a wake-up and a write. The floor is an
empty app on the same HTTP server, which sends as many events of the same size at the same pace.
Refuses to report if a stream has an error, a wrong number of events, or a text that is not the
tokenizer's. With --peers, also the servers of other engines and Quire with the built-in model;
their numbers include its small compute (peers.py). Writes bench/results/frontend.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from bench.compare import quire_state
from bench.frontend.figures import medians, per
from bench.frontend.null_executor import token_at
from bench.frontend.peers import measure_models
from bench.frontend.servers import REPOSITORY, Child
from quire.bench.machine import machine_card
from quire.config.groups import ModelConfig
from quire.engine.client.tokenizer_side import load_tokenizer_side

STREAMS = 256
TOKENS = 384
STEP_MS = 40.0
GOAL_TOKEN_US, GOAL_REQUEST_US = 15.0, 400.0
PROMPT = "Once upon a time there was a little dog that liked to run by the sea."


def body(max_tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return a completion request of exactly `tokens` tokens."""
    return {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


def digest_wanted(max_tokens: int) -> str:
    """Return the digest of the answer's text, detokenized directly."""
    tokenizer = load_tokenizer_side(ModelConfig()).tokenizer
    prompt = tokenizer.encode(PROMPT)
    places = range(len(prompt), len(prompt) + max_tokens)
    whole = tokenizer.decode([*prompt, *map(token_at, places)], skip_special_tokens=True)
    text = whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]
    return hashlib.sha256(text.encode()).hexdigest()


def check(counts: dict[str, Any], *, answers: int, events: int, digest: str | None) -> None:
    """Exit if an answer is not the expected one."""
    if counts["answers"] != answers or counts["events"] != {str(events): answers}:
        raise SystemExit(f"{events} events in each of {answers} answers wanted, came: {counts}")
    if digest is not None and counts["digests"] != {digest: answers}:
        raise SystemExit(f"texts with digest {digest} wanted, came: {counts['digests']}")


def streamed(server: Child, tokens: int, wanted: str) -> dict[str, Any]:
    """Measure all streams at once."""
    counts = server.drive("/v1/completions", body(tokens, stream=True), streams=STREAMS, rounds=1)
    check(counts, answers=STREAMS, events=tokens, digest=wanted)
    return per(counts, STREAMS * tokens, "token")


def asked(server: Child, rounds: int, wanted: str) -> dict[str, Any]:
    """Measure requests of one token, on as many connections as there are streams."""
    counts = server.drive("/v1/completions", body(1, stream=False), streams=STREAMS, rounds=rounds)
    check(counts, answers=STREAMS * rounds, events=0, digest=wanted)
    return per(counts, STREAMS * rounds, "request")


def floored(server: Child, *, events: int, size: int, rounds: int) -> dict[str, Any]:
    """Measure the same on the floor server; events 0: requests."""
    path = f"/?events={events}&bytes={size}" if events else "/"
    counts = server.drive(path, {}, streams=STREAMS, rounds=rounds)
    check(counts, answers=STREAMS * rounds, events=events, digest=None)
    count = STREAMS * rounds * max(events, 1)
    return per(counts, count, "token" if events else "request")


def measure(samples: int, tokens: int, rounds: int, api_processes: int) -> dict[str, Any]:
    """Measure all parts; Quire and the floor in turn."""
    result: dict[str, Any] = {}
    of_many, of_one = digest_wanted(tokens), digest_wanted(1)
    serve = ("--port", "0", "--max-num-seqs", str(STREAMS), "--api-processes", str(api_processes))
    for part, step_ms in (("flat_out", 0.0), ("paced", STEP_MS)):
        with (
            Child("bench.frontend.null_server", str(step_ms), *serve) as quire,
            Child("bench.frontend.floor_server", str(step_ms)) as floor,
        ):
            streamed(quire, tokens, of_many)  # imports, first connections
            ours, lowest = [], []
            for _ in range(samples):
                ours.append(streamed(quire, tokens, of_many))
                size = ours[0]["bytes_per_token"]
                lowest.append(floored(floor, events=tokens, size=size, rounds=1))
            result[part] = {"step_ms": step_ms, "quire": medians(ours), "floor": medians(lowest)}
            print(json.dumps({part: result[part]}), flush=True)
            if part == "flat_out":
                asked(quire, rounds, of_one)
                ours = [asked(quire, rounds, of_one) for _ in range(samples)]
                lowest = [floored(floor, events=0, size=0, rounds=rounds) for _ in range(samples)]
                result["requests"] = {"quire": medians(ours), "floor": medians(lowest)}
                print(json.dumps({"requests": result["requests"]}), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument("--rounds", type=int, default=8, help="requests of each connection")
    parser.add_argument("--api-processes", type=int, default=1, help="of Quire")
    parser.add_argument("--peers", default="", help="others to measure: llama.cpp,vllm")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "bench/results/frontend.json")
    args = parser.parse_args()
    result = {
        "bench": "frontend",
        "machine": machine_card(),
        "quire": quire_state(),
        "streams": STREAMS,
        "api_processes": args.api_processes,
        "goal_token_us": GOAL_TOKEN_US,
        "goal_request_us": GOAL_REQUEST_US,
        **measure(args.samples, args.tokens, args.rounds, args.api_processes),
    }
    if args.peers:
        names = ("quire", *args.peers.split(","))
        result["with_a_model"] = measure_models(names, streams=STREAMS, samples=args.samples)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
