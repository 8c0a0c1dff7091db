"""What interactive requests lose beside a batch: their percentiles without one and with one.

    python -m bench.batches --rate 2 --seconds 60

One server with --batch-store; the same Poisson arrivals in turn alone and while a batch of endless
lines runs, several rounds of each. The goal is a p99 of time to first token and of time per output
token within 5 % of that alone. Writes bench/results/batches-SHAPE-PRECISION.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import SHAPES, random_checkpoint
from bench.compare import quire_state
from bench.peers.child import end_cleanly_on_sigterm
from bench.peers.convert import PRECISIONS
from bench.peers.places import REPOSITORY
from bench.servers import Server
from quire.bench.machine import machine_card
from quire.bench.serve import Load, measure_serving, resolve_model
from quire.bench.workloads import mixed_lengths
from quire.config.machine import num_usable_cores
from quire.models.registry import open_model
from quire.obs.timing import Goals

GOAL = 1.05
_MEASURES = ("ttft_s", "tpot_s")
_LINES = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=8, help="as --batch-lines")
    parser.add_argument("--policy", default="priority", help="as --scheduling-policy")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    checkpoint = random_checkpoint(args.shape)
    vocab_size = open_model(checkpoint).vocab_size
    settings = {"batch_lines": args.lines, "scheduling_policy": args.policy}
    result: dict[str, Any] = {
        "bench": "batches",
        "machine": machine_card(),
        "quire": quire_state(),
        "settings": {**settings, "rate": args.rate, "seconds": args.seconds},
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        stored = {**settings, "batch_store": Path(folder) / "batches.sqlite"}
        with Server(
            "quire", checkpoint, args.precision, threads=args.threads, log=log, settings=stored
        ) as server:
            server.wait()
            for number in range(args.rounds):
                result["rounds"].append(_round(server, args, vocab_size, number))
    result["ratios"] = _ratios(result["rounds"])
    out = REPOSITORY / "bench/results" / f"batches-{args.shape}-{args.precision}.json"
    out.write_text(json.dumps(result, indent=1) + os.linesep)
    for name, ratio in result["ratios"].items():
        print(f"{name} p99 beside a batch: {ratio:.3f} of that alone (goal: {GOAL})")


def _round(
    server: Server, args: argparse.Namespace, vocab_size: int, number: int
) -> dict[str, Any]:
    """Measure the same arrivals alone and beside a batch."""
    load = Load(
        rates=(args.rate,),
        seconds=args.seconds,
        lengths=mixed_lengths(64, (128, 512), (32, 128), seed=number),
        vocab_size=vocab_size,
        seed=number,
    )
    _asked(server.target.url, "POST", "/v1/cache/flush")
    alone = measure_serving(server.target, load, Goals())
    model = resolve_model(server.target).name
    batch = _started(server.target.url, model, vocab_size)
    _asked(server.target.url, "POST", "/v1/cache/flush")  # the same prompts once more
    try:
        beside = measure_serving(server.target, load, Goals())
    finally:
        state = _asked(server.target.url, "POST", f"/v1/batches/{batch}/cancel")
    [of_alone], [of_beside] = alone["rates"], beside["rates"]  # type: ignore[misc]
    return {
        "alone": of_alone,
        "beside": of_beside,
        "lines_completed": state["request_counts"]["completed"],
    }


def _ratios(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median over rounds of the p99 beside a batch, by the p99 alone."""
    return {
        name: float(
            np.median([one["beside"][name]["p99"] / one["alone"][name]["p99"] for one in rounds])
        )
        for name in _MEASURES
    }


def _started(url: str, model: str, vocab_size: int) -> str:
    """Begin a batch that does not end while requests are measured; return its id."""
    rng = np.random.default_rng(7)
    lines = []
    for number in range(_LINES):
        ids = rng.integers(300, vocab_size, 256).tolist()
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": 256,
            "ignore_eos": True,
            "seed": number,
        }
        entry = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(entry))
    form = (
        '--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--X\r\n'
        'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        + "\n".join(lines)
        + "\r\n--X--\r\n"
    )
    file = _asked(url, "POST", "/v1/files", form.encode(), "multipart/form-data; boundary=X")
    batch = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    created = _asked(url, "POST", "/v1/batches", json.dumps(batch).encode())
    return str(created["id"])


def _asked(
    url: str, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> Any:
    request = urllib.request.Request(
        url + path, data=body, method=method, headers={"content-type": kind}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())


if __name__ == "__main__":
    main()
