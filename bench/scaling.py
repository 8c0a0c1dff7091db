"""Gains of a second thread and of continuous batching: 0.6B shape, in pairs of one run.

    python -m bench.scaling

Threads: a prompt of 2,048 (W2) by an engine with one thread and by one with all, both loaded, in
turn on the same tokens; tokens must be equal. Batching: 32 requests (W3) by one engine, with
continuous batching and in fixed groups of 16, with the share of time outside native code (Python).
Writes bench/results/scaling.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import parser_of_models
from bench.checkpoints import random_checkpoint
from bench.compare import RESULTS, quire_state
from bench.pairs import WrongAnswer
from bench.peers.child import Peer, end_cleanly_on_sigterm
from bench.peers.convert import quire_settings
from bench.record import MIN_PAIRS
from quire.bench.machine import machine_card
from quire.bench.throughput import MODES, measure_throughput
from quire.bench.workloads import WORKLOADS, RequestSpec
from quire.config.machine import num_usable_cores

LIMIT_S = 240.0


def threads_in_turn(engines: dict[int, Peer], vocab_size: int, pairs: int) -> dict[str, Any]:
    """Return prefill tokens/s by number of threads, and the ratio of last to first by pairs.

    Raises WrongAnswer if the thread counts give different answers.
    """
    rng = np.random.default_rng()
    rates: dict[int, list[float]] = {threads: [] for threads in engines}
    for number in range(-1, pairs):  # the first one warms up
        specs = WORKLOADS["w2"].draw(vocab_size, rng)
        answers = {}
        for threads in sorted(engines, reverse=number % 2 == 1):
            answers[threads], rate = _prefill(engines[threads], specs)
            if number >= 0:
                rates[threads].append(rate)
        if len({tuple(one) for one in answers.values()}) > 1:
            raise WrongAnswer(f"threads answer differently: {answers}")
    fewest, most = min(rates), max(rates)
    ratios = [many / one for many, one in zip(rates[most], rates[fewest], strict=True)]
    return {
        "prefill_tokens_per_s": {str(threads): found for threads, found in rates.items()},
        "ratio": statistics.median(ratios),
    }


def _prefill(engine: Peer, specs: list[RequestSpec]) -> tuple[list[int], float]:
    requests = [
        {"prompt_ids": list(spec.prompt_ids), "output_tokens": spec.output_tokens} for spec in specs
    ]
    [answer] = engine.ask({"do": "run", "requests": requests}, limit_s=LIMIT_S)["answers"]
    return answer["token_ids"], len(specs[0].prompt_ids) / (answer["first_s"] - answer["sent_s"])


def main() -> None:
    """Measure, write, print."""
    parser = parser_of_models(__doc__)
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    checkpoint = str(random_checkpoint(args.shape))
    log = Path(tempfile.gettempdir()) / "quire-scaling.log"
    all_threads = num_usable_cores()
    if all_threads < 2:
        sys.exit("one core: there is nothing to compare")
    settings = quire_settings(args.precision, "w2")
    with Peer("quire", 1, log) as one, Peer("quire", all_threads, log) as many:
        engines = {1: one, all_threads: many}
        for engine in engines.values():
            loaded = engine.load(checkpoint, settings, limit_s=LIMIT_S)
        threads = threads_in_turn(engines, int(loaded["vocab_size"]), args.pairs)
    batching = measure_throughput(
        checkpoint,
        quire_settings(args.precision, "w3"),
        workload=WORKLOADS["w3"],
        modes=MODES,
        repeats=args.pairs,
    )
    outcome = {
        "bench": "scaling",
        "machine": machine_card(),
        "quire": quire_state(),
        "shape": args.shape,
        "precision": args.precision,
        "threads": threads,
        "batching": {"median": batching["median"], "samples": batching["samples"]},
    }
    args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps({"threads": threads, "batching": batching["median"]}, indent=1))


if __name__ == "__main__":
    main()
