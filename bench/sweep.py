"""Finds each engine's best settings for a workload, among those of bench/peers/settings.py.

    python -m bench.sweep --engines llama.cpp,openvino --workloads w1,w3 --minutes 30

Every candidate is loaded, warmed and run a few times; its best run counts, so that a noisy moment
does not decide. All that was tried is kept in bench/results/sweep-SHAPE-PRECISION.json (a second
call goes on), and the choice is written to bench/peers/settings.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import SHAPES, random_checkpoint
from bench.peers.child import SCRIPTS, Peer, PeerFailed, end_cleanly_on_sigterm
from bench.peers.convert import PRECISIONS, Unavailable, converted
from bench.peers.places import REPOSITORY
from bench.peers.settings import candidates, settings_for, write_choice
from bench.record import HEADLINES
from quire.bench.machine import machine_card
from quire.bench.workloads import WORKLOADS
from quire.config.machine import num_usable_cores
from quire.models.registry import open_model
from quire.obs.timing import RequestTimes, run_rates


def measured(
    engine: str, model: Path, workload: str, settings: dict[str, Any], args: argparse.Namespace
) -> list[float]:
    """The headline rate of each repetition. Raises PeerFailed."""
    vocab_size = open_model(random_checkpoint(args.shape)).vocab_size
    log = Path(tempfile.gettempdir()) / f"quire-sweep-{os.getpid()}.log"
    rng = np.random.default_rng()
    rates = []
    with Peer(engine, args.threads, log) as peer:
        peer.load(str(model), settings, limit_s=600)
        for repetition in range(args.repeats + 1):
            asks = WORKLOADS[workload].draw(vocab_size, rng)
            told = peer.ask(
                {
                    "do": "run",
                    "requests": [
                        {"prompt_ids": list(ask.prompt_ids), "output_tokens": ask.output_tokens}
                        for ask in asks
                    ],
                },
                limit_s=args.limit,
            )
            times = [
                RequestTimes(
                    sent_s=answer["sent_s"],
                    first_s=answer["first_s"],
                    last_s=answer["last_s"],
                    prompt_tokens=len(ask.prompt_ids),
                    output_tokens=len(answer["token_ids"]),
                )
                for ask, answer in zip(asks, told["answers"], strict=True)
            ]
            if repetition:  # the first one warms up
                rates.append(run_rates(times)[HEADLINES[workload]])
    return rates


class Sweep:
    """What was tried so far, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"bench": "sweep", "machine": machine_card(), "tried": []}
        )

    def rates_of(self, engine: str, workload: str, settings: dict[str, Any]) -> list[float] | None:
        """What a candidate came to; empty if it failed, None if it was not tried."""
        for entry in self.content["tried"]:
            if (entry["engine"], entry["workload"]) == (engine, workload) and entry[
                "settings"
            ] == settings:
                found: list[float] = entry["rates"]
                return found
        return None

    def add(self, **entry: Any) -> None:
        """Keep a candidate."""
        self.content["tried"].append(entry)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")

    def best(self, engine: str, workload: str) -> dict[str, Any] | None:
        """The candidate with the best run."""
        done = [
            entry
            for entry in self.content["tried"]
            if (entry["engine"], entry["workload"]) == (engine, workload) and entry["rates"]
        ]
        return max(done, key=lambda entry: max(entry["rates"]), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--engines", default=",".join(SCRIPTS))
    parser.add_argument("--workloads", default=",".join(HEADLINES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0, help="time budget (default 30)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a run may take")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    end_s = time.monotonic() + 60 * args.minutes
    name = f"sweep-{args.shape}-{args.precision}.json"
    sweep = Sweep(REPOSITORY / "bench" / "results" / name)
    checkpoint = random_checkpoint(args.shape)
    for workload in args.workloads.split(","):
        for engine in args.engines.split(","):
            committed = settings_for(engine, precision=args.precision, workload=workload)
            is_whole = True
            for candidate in candidates(engine, workload):
                settings = committed | candidate
                if sweep.rates_of(engine, workload, settings) is not None:
                    continue
                if time.monotonic() > end_s:
                    is_whole = False
                    break
                rates, why = [], ""
                try:
                    model = converted(engine, checkpoint, args.precision)
                    rates = measured(engine, model, workload, settings, args)
                except (PeerFailed, Unavailable) as error:
                    why = str(error)[:400]
                shown = ", ".join(f"{rate:.1f}" for rate in rates) or why
                print(f"{workload} {engine} {candidate}: {shown}", flush=True)
                sweep.add(engine=engine, workload=workload, settings=settings, rates=rates, why=why)
            best = sweep.best(engine, workload)
            if best is not None and is_whole:
                write_choice(
                    engine, precision=args.precision, workload=workload, chosen=best["settings"]
                )
                print(f"{workload} {engine}: chosen {best['settings']}", flush=True)


if __name__ == "__main__":
    main()
