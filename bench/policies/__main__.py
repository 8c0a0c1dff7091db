"""Scheduling policies on recorded traffic: simulated at rising speed, and on the real engine.

    python -m bench.policies table --scene accelerator
    python -m bench.policies piece --seconds 300 --policies fcfs,sjf

`table` writes bench/results/policies-SCENE.json and PNG: every policy at every speed with the goals
in the requests (which the engine may then reject early), and two policies without goals. `piece`
replays the beginning of the trace on the real engine and in the simulator, one policy after the
other, and adds to bench/results/policies-piece.json after each. `forecast` compares the predicted
time to first token, by which requests are rejected early, with the actual one.

All can be stopped at any time: the same command with the same settings continues after the last
complete run (`table` keeps those in a file beside its result until it is complete).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.data import outside
from bench.policies.forecast import held, held_text
from bench.policies.goals import goals_text, read_goals
from bench.policies.part import Part
from bench.policies.piece import agreement, measure_piece, piece_text
from bench.policies.scenes import MAX_TOKENS, RESULTS, SCENES, TRACE, Scene
from quire.bench.machine import machine_card
from quire.config.groups import SCHEDULING_POLICIES
from quire.obs.pictures import check_plots
from quire.obs.report import Progress
from quire.obs.timing import Goals
from quire.obs.trace import read_trace
from quire.sim.compare import Comparison, compare
from quire.sim.load import RequestDefaults, trace_requests
from quire.sim.plots import plot_policies
from quire.sim.run import simulate
from quire.sim.summary import comparison_text


def main() -> None:
    """Measure, print, and write JSON and pictures."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    tables = kinds.add_parser("table", help="all policies in the simulator")
    tables.add_argument("--scene", choices=SCENES, default="accelerator")
    tables.add_argument("--policies", default=",".join(SCHEDULING_POLICIES))
    tables.add_argument("--speeds", help="as in 1,2,4 (default: the scene's)")
    tables.add_argument("--max-requests", type=int, help="the first so many (default: all)")
    tables.add_argument("--light", type=int, default=20, help="one in so many; 0: no flood")
    tables.add_argument("--out", type=Path)
    piece = kinds.add_parser("piece", help="a piece of the trace on the real engine")
    piece.add_argument("--shape", default="qwen3-0.6b")
    # Fair share equals first-come here: the trace names no tenants.
    piece.add_argument("--policies", default="fcfs,sjf")
    piece.add_argument("--seconds", type=float, default=300.0, help="of arrivals, in real time")
    piece.add_argument("--speed", type=float, default=0.2, help="the order matters under overload")
    piece.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    piece.add_argument("--max-num-seqs", type=int, default=16)
    piece.add_argument("--kv-cache-memory", default="4GiB")
    piece.add_argument("--quantization", default="auto")
    piece.add_argument("--shorter", type=float, default=1.0, help="divide all lengths by this")
    piece.add_argument("--again", action="store_true", help="also what is known already")
    piece.add_argument("--out", type=Path, default=RESULTS / "policies-piece.json")
    forecast = kinds.add_parser("forecast", help="predicted first tokens against actual ones")
    forecast.add_argument("--scene", choices=SCENES, default="accelerator")
    forecast.add_argument("--policies", default="fcfs,sjf,fair")
    forecast.add_argument("--speeds", help="as in 1,2,4 (default: the scene's)")
    forecast.add_argument("--max-requests", type=int, help="the first so many (default: all)")
    forecast.add_argument("--goal", type=float, help="seconds (default: the scene's)")
    forecast.add_argument("--light", type=int, default=20, help="as of table, for fair share")
    forecast.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"table": _table, "piece": _piece, "forecast": _forecast}[args.kind](args)


def _asks(scene: Scene, *, with_goals: bool) -> RequestDefaults:
    goals = scene.goals
    return RequestDefaults(
        max_tokens=MAX_TOKENS,
        max_model_len=scene.settings["max_model_len"],
        ttft_slo_ms=1e3 * goals.ttft_s if with_goals else None,
        tpot_slo_ms=1e3 * goals.tpot_s if with_goals else None,
    )


def _table(args: argparse.Namespace) -> None:
    check_plots()
    scene = SCENES[args.scene]
    trace = read_trace(outside(TRACE), max_requests=args.max_requests)
    machine, config = scene.machine(), scene.config()
    speeds = tuple(map(float, args.speeds.split(","))) if args.speeds else scene.speeds
    comparison = Comparison(
        trace_name=Path(TRACE).name,
        trace=trace,
        policies=tuple(args.policies.split(",")),
        speeds=speeds,
        defaults=_asks(scene, with_goals=True),
        goals=scene.goals,
        light_every=args.light,
        light_speed=scene.light_speed,
    )
    out = args.out or RESULTS / f"policies-{scene.name}.json"
    part = Part(out.with_suffix(".part.json"), {"scene": scene.text, "settings": vars(args)})
    outcome = compare(
        comparison,
        machine,
        config,
        progress=Progress(),
        known=part.known("with goals"),
        on_run=part.keeper("with goals"),
    )
    # With early rejection, means are of accepted requests only, so orders are compared without it.
    # A full queue must not reject either: then all orders wait for the same requests.
    orders = replace(
        comparison,
        defaults=_asks(scene, with_goals=False),
        policies=tuple(name for name in comparison.policies if name in ("fcfs", "sjf")),
        light_every=0,
    )
    endless = replace(config.scheduler, max_queued_requests=len(trace))
    open_ended = compare(
        orders,
        machine,
        replace(config, scheduler=endless),
        progress=Progress(),
        known=part.known("open-ended"),
        on_run=part.keeper("open-ended"),
    )
    requests, _ = trace_requests(
        trace, speed=speeds[len(speeds) // 2], defaults=comparison.defaults
    )
    began_s = time.process_time()
    simulate(requests, comparison.defaults, machine, config)
    outcome |= {
        "bench": "policies",
        "machine": machine_card(),
        "scene": scene.text,
        "open_ended": open_ended,
        "requests_per_minute": 60 * len(requests) / (time.process_time() - began_s),
    }
    outcome["goals"] = read_goals(outcome)
    out.write_text(json.dumps(outcome, indent=1) + "\n")
    plot_policies(outcome, out.with_suffix(".png"))
    part.remove()
    print(comparison_text(outcome))
    print("\ngoals kept back, nothing refused early\n" + comparison_text(open_ended))
    print(goals_text(outcome["goals"]))


def _piece(args: argparse.Namespace) -> None:
    def shorter(tokens: int) -> int:
        return max(round(tokens / args.shorter), 1)

    trace = [
        replace(
            one,
            prompt_tokens=shorter(one.prompt_tokens),
            output_tokens=shorter(one.output_tokens),
        )
        for one in read_trace(outside(TRACE))
        if one.arrival_s <= args.seconds * args.speed
    ]
    known: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    settings = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": 16_384,
        "kv_cache_memory": args.kv_cache_memory,
        "quantization": args.quantization,
    }
    asked = settings | {"shorter": args.shorter, "seconds": args.seconds, "speed": args.speed}
    asked |= {"shape": args.shape, "max_tokens": args.max_tokens}
    was = known.get("settings", {})
    runs = known["runs"] if all(was.get(name) == value for name, value in asked.items()) else {}
    policies = [name for name in args.policies.split(",") if args.again or name not in runs]

    def keep(outcome: dict[str, Any]) -> None:
        outcome["settings"] |= asked
        runs.update(outcome["runs"])
        whole = {**outcome, "runs": runs, "agreement": agreement(runs)}
        whole |= {"bench": "policies, a real piece", "machine": machine_card()}
        args.out.write_text(json.dumps(whole, indent=1) + "\n")
        print(piece_text(whole), flush=True)

    if not policies:
        print(f"all of {args.policies} are in {args.out}; --again measures them again")
        return
    measure_piece(
        trace,
        shape=args.shape,
        settings=settings,
        policies=policies,
        speed=args.speed,
        defaults=RequestDefaults(max_tokens=args.max_tokens, max_model_len=16_384),
        goals=Goals(ttft_s=10.0, tpot_s=0.5),
        profile=known.get("profile"),
        progress=Progress(),
        on_policy=keep,
    )


def _forecast(args: argparse.Namespace) -> None:
    scene = SCENES[args.scene]
    trace = read_trace(outside(TRACE), max_requests=args.max_requests)
    speeds = tuple(map(float, args.speeds.split(","))) if args.speeds else scene.speeds
    defaults, goal_s = _asks(scene, with_goals=False), args.goal or scene.goals.ttft_s
    rows = []
    for policy in args.policies.split(","):
        for speed in speeds:
            rows.append(held(trace, scene, policy, speed, defaults, goal_s, light_every=args.light))
            print(held_text(rows[-1]), flush=True)
    out = args.out or RESULTS / f"forecast-{scene.name}.json"
    about = {"bench": "policies, forecast", "scene": scene.text, "goal_s": goal_s}
    about |= {"num_requests": len(trace), "machine": machine_card()}
    out.write_text(json.dumps(about | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
