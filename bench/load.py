"""W5: the engines' servers under rising load over HTTP, at each rate in turn.

    python -m bench.load --rates 0.25,0.5,1,2 --seconds 60

All servers are up; at each rate each gets the same arrivals and lengths (with new tokens), one
after another in rotating order. A server is dropped when few of its requests meet the goals. Writes
bench/results/serving-SHAPE-PRECISION.json and a PNG after each rate.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.arguments import parser_of_models
from bench.checkpoints import random_checkpoint
from bench.compare import quire_state
from bench.peers.child import PeerFailed, end_cleanly_on_sigterm
from bench.peers.convert import Unavailable
from bench.peers.places import REPOSITORY
from bench.peers.settings import settings_for
from bench.servers import ENGINES, Server
from quire.base.errors import WorkerError
from quire.bench.cpu_use import CpuWatch
from quire.bench.machine import machine_card
from quire.bench.plots import plot_serving
from quire.bench.serve import GIVE_UP_SHARE, Load, measure_serving, serving_text
from quire.bench.workloads import mixed_lengths
from quire.config.machine import num_usable_cores
from quire.models.registry import open_model
from quire.obs.pictures import check_plots
from quire.obs.timing import Goals, knee


def main() -> None:
    parser = parser_of_models(__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--rates", default="0.25,0.5,0.75,1,1.5,2,3,4")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end_cleanly_on_sigterm()
    check_plots()
    out = args.out or REPOSITORY / "bench/results" / f"serving-{args.shape}-{args.precision}.json"
    checkpoint = random_checkpoint(args.shape)
    log = Path(tempfile.gettempdir()) / f"quire-load-{os.getpid()}.log"
    result: dict[str, Any] = {
        "bench": "serving",
        "machine": machine_card(),
        "quire": quire_state(),
        "engines": {},
        "failures": {},
    }
    with ExitStack() as stack:
        servers = []
        for engine in args.engines.split(","):
            settings = settings_for(engine, precision=args.precision, workload="w5")
            try:
                server = stack.enter_context(
                    Server(
                        engine,
                        checkpoint,
                        args.precision,
                        threads=args.threads,
                        log=log,
                        settings=settings,
                    )
                )
                server.wait()
            except (PeerFailed, Unavailable) as error:
                result["failures"][engine] = str(error)
                print(f"{engine}: {error}", flush=True)
                continue
            servers.append(server)
            result["engines"][engine] = {"settings": {**settings}, "rates": [], "knee": None}
        vocab_size = open_model(checkpoint).vocab_size
        for turn, rate in enumerate(sorted(float(one) for one in args.rates.split(","))):
            turned = servers[turn % max(len(servers), 1) :] + servers[: turn % max(len(servers), 1)]
            for server in turned:
                _measure(result, server, rate, vocab_size, args.seconds)
            servers = [one for one in servers if _goes_on(result["engines"][one.engine])]
            out.write_text(json.dumps(result, indent=1) + "\n")
    drawn = {name: entry for name, entry in result["engines"].items() if entry["rates"]}
    for name, entry in drawn.items():
        print(f"\n{name}: {serving_text(entry)}", flush=True)
    if drawn:
        plot_serving(
            drawn,
            out.with_suffix(".png"),
            title=f"Serving {args.shape} in {args.precision} under Poisson arrivals",
            machine=result["machine"],
        )


def _measure(
    result: dict[str, Any], server: Server, rate: float, vocab_size: int, seconds: float
) -> None:
    """Measure one server at one rate; the same seed means the same arrivals for all."""
    load = Load(
        rates=(rate,),
        seconds=seconds,
        lengths=mixed_lengths(64, (128, 512), (32, 128), seed=5),
        vocab_size=vocab_size,
        seed=round(1000 * rate),
    )
    watch = CpuWatch([server.pid, os.getpid()])
    try:
        outcome: dict[str, Any] = measure_serving(server.target, load, Goals())
    except WorkerError as error:
        result["failures"][server.engine] = f"rate {rate:g}: {error}"
        print(f"{server.engine} at {rate:g}/s: {error}", flush=True)
        return
    use = watch.use()
    entry = result["engines"][server.engine]
    [summary] = outcome["rates"]
    summary["foreign_cores"], summary["stolen_cores"] = use.foreign_cores, use.stolen_cores
    entry["rates"].append(summary)
    found = knee(entry["rates"])
    entry |= {
        "settings": entry["settings"]
        | {**outcome["settings"], "model": Path(str(outcome["settings"]["model"])).name},
        "knee": None if found is None else entry["rates"][found],
    }
    print(
        f"{server.engine} at {rate:g}/s: good {100 * summary['good_share']:.0f} %, goodput "
        f"{summary['goodput_per_s']:.2f}/s, TTFT p99 {summary['ttft_s'].get('p99', 0):.2f} s",
        flush=True,
    )


def _goes_on(entry: dict[str, Any]) -> bool:
    return not entry["rates"] or entry["rates"][-1]["good_share"] >= GIVE_UP_SHARE


if __name__ == "__main__":
    main()
