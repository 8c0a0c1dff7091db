"""Find each engine's best settings for a workload, among those of bench/peers/settings.py.

    python -m bench.sweep --engines llama.cpp,openvino --workloads w1,w3 --minutes 30

Every candidate is loaded, warmed up and run a few times; its best run counts, so that a noisy
moment does not decide. The committed settings are a candidate too, and stay unless another is 2 %
faster. All tries are recorded in bench/results/sweep-SHAPE-PRECISION.json (a second call
continues), and a new choice is written to bench/peers/settings.json.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import parser_of_models
from bench.checkpoints import random_checkpoint
from bench.peers.child import SCRIPTS, Peer, PeerFailed, end_cleanly_on_sigterm
from bench.peers.convert import QUIRE_SETTINGS, Unavailable, converted
from bench.peers.places import REPOSITORY
from bench.peers.settings import FILE, candidates, settings_for, write_choice
from bench.record import HEADLINES
from quire.bench.machine import machine_card
from quire.bench.workloads import WORKLOADS, RequestSpec
from quire.config.machine import num_usable_cores
from quire.models.registry import open_model
from quire.obs.timing import RequestTimes, run_rates

LOAD_LIMIT_S = 600.0
# Two runs of one setting differ by about as much: smaller gains do not replace committed settings.
WORTH_CHANGING = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sweep. minutes: no candidate is begun later; the same command continues later.

    repeats: runs that count, after one that does not. limit_s: time limit of a run.
    """

    checkpoint: Path
    precision: str
    engines: Sequence[str]
    workloads: Sequence[str]
    repeats: int
    minutes: float
    limit_s: float
    threads: int


def measured(
    plan: Plan, engine: str, model: Path, workload: str, settings: dict[str, Any]
) -> list[float]:
    """Return the headline rate of each repetition. Raises PeerFailed."""
    vocab_size = open_model(plan.checkpoint).vocab_size
    log = Path(tempfile.gettempdir()) / f"quire-sweep-{os.getpid()}.log"
    rng = np.random.default_rng()
    rates = []
    if engine == "quire":
        settings = {**settings, **QUIRE_SETTINGS[plan.precision]}
    with Peer(engine, plan.threads, log) as peer:
        peer.load(str(model), settings, limit_s=LOAD_LIMIT_S)
        for repetition in range(plan.repeats + 1):
            specs = WORKLOADS[workload].draw(vocab_size, rng)
            requests = [
                {"prompt_ids": list(spec.prompt_ids), "output_tokens": spec.output_tokens}
                for spec in specs
            ]
            reply = peer.ask({"do": "run", "requests": requests}, limit_s=plan.limit_s)
            if repetition:  # the first one warms up
                rates.append(_headline(workload, specs, reply["answers"]))
    return rates


def _headline(
    workload: str, specs: Sequence[RequestSpec], answers: Sequence[dict[str, Any]]
) -> float:
    """Return the headline rate. Raises PeerFailed for an answer of another length."""
    times = []
    for spec, answer in zip(specs, answers, strict=True):
        if len(answer["token_ids"]) != spec.output_tokens:
            raise PeerFailed(
                f"answered {len(answer['token_ids'])} tokens where {spec.output_tokens} were asked"
            )
        times.append(
            RequestTimes(
                sent_s=answer["sent_s"],
                first_s=answer["first_s"],
                last_s=answer["last_s"],
                prompt_tokens=len(spec.prompt_ids),
                output_tokens=spec.output_tokens,
            )
        )
    return run_rates(times)[HEADLINES[workload]]


class Sweep:
    """The tries so far, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"bench": "sweep", "machine": machine_card(), "tried": []}
        )

    def rates_of(self, engine: str, workload: str, settings: dict[str, Any]) -> list[float] | None:
        """Return a candidate's rates; empty if it failed, None if it was not tried."""
        for entry in self.content["tried"]:
            if (entry["engine"], entry["workload"]) == (engine, workload) and entry[
                "settings"
            ] == settings:
                found: list[float] = entry["rates"]
                return found
        return None

    def add(self, **entry: Any) -> None:
        """Record a candidate."""
        self.content["tried"].append(entry)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")

    def choice(
        self, engine: str, workload: str, committed: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the settings with the best run; the committed ones unless it is clearly better.

        None where no candidate ran.
        """
        done = [
            entry
            for entry in self.content["tried"]
            if (entry["engine"], entry["workload"]) == (engine, workload) and entry["rates"]
        ]
        if not done:
            return None
        best = max(done, key=lambda entry: max(entry["rates"]))
        kept = [max(entry["rates"]) for entry in done if entry["settings"] == committed]
        hardly_better = kept and max(best["rates"]) <= WORTH_CHANGING * max(kept)
        found: dict[str, Any] = committed if hardly_better else best["settings"]
        return found


def run(plan: Plan, sweep: Sweep, *, file: Path = FILE) -> None:
    """Try the remaining candidates; after a complete grid write the best into `file`."""
    end_s = time.monotonic() + 60 * plan.minutes
    for workload in plan.workloads:
        for engine in plan.engines:
            if not _try_grid(plan, sweep, engine, workload, end_s=end_s, file=file):
                print(f"{workload} {engine}: no time left; the same command goes on", flush=True)
                continue
            committed = settings_for(engine, precision=plan.precision, workload=workload, file=file)
            chosen = sweep.choice(engine, workload, committed)
            if chosen is None:
                continue
            if chosen != committed:
                write_choice(
                    engine, precision=plan.precision, workload=workload, chosen=chosen, file=file
                )
            print(f"{workload} {engine}: chosen {chosen}", flush=True)


def _try_grid(
    plan: Plan, sweep: Sweep, engine: str, workload: str, *, end_s: float, file: Path
) -> bool:
    """Try the candidates and the committed settings; return whether all were tried."""
    committed = settings_for(engine, precision=plan.precision, workload=workload, file=file)
    for candidate in ({}, *candidates(engine, workload)):
        settings = committed | candidate
        if sweep.rates_of(engine, workload, settings) is not None:
            continue
        if time.monotonic() > end_s:
            return False
        rates, why = [], ""
        try:
            model = converted(engine, plan.checkpoint, plan.precision)
            rates = measured(plan, engine, model, workload, settings)
        except (PeerFailed, Unavailable) as error:
            why = str(error)[:400]
        shown = ", ".join(f"{rate:.1f}" for rate in rates) or why
        print(f"{workload} {engine} {candidate or 'as committed'}: {shown}", flush=True)
        sweep.add(engine=engine, workload=workload, settings=settings, rates=rates, why=why)
    return True


def main() -> None:
    parser = parser_of_models(__doc__)
    parser.add_argument("--engines", default=",".join(SCRIPTS))
    parser.add_argument("--workloads", default=",".join(HEADLINES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=30.0, help="time budget (default 30)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a run may take")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    name = f"sweep-{args.shape}-{args.precision}.json"
    plan = Plan(
        checkpoint=random_checkpoint(args.shape),
        precision=args.precision,
        engines=args.engines.split(","),
        workloads=args.workloads.split(","),
        repeats=args.repeats,
        minutes=args.minutes,
        limit_s=args.limit,
        threads=args.threads,
    )
    run(plan, Sweep(REPOSITORY / "bench" / "results" / name))


if __name__ == "__main__":
    main()
