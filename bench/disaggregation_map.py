"""When prefill and decode in engines of their own pay: prompt length by load by link, simulated.

    python -m bench.disaggregation_map                 the map; writes JSON and a picture
    python -m bench.disaggregation_map --engines 8     prompts of 8k tokens on eight devices
    python -m bench.disaggregation_map --confirm       three points on real engines (6 minutes)

The map: Llama-3.1-8B's shape on four described devices, as four engines of both roles and divided
in each way; the division with the shortest gap between tokens at p99 is kept. Load: the prompts'
computing time as a share of what the four devices have. Times are computed, not measured.

--confirm: the serving part of bench.disaggregation on two cores, beside a simulation of the same
requests with steps measured on one core and on two: the gap between tokens at p99 of one engine
over that of the pair, and the prompts' time to first token. Prompts are shorter where those of 8k
tokens would take longer than --minutes; the result names them. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench import disaggregation
from bench.checkpoints import checkpoint_config, random_checkpoint
from quire.base.records import StepOutputs
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.obs.timing import Goals
from quire.sim.engines import SimEngine
from quire.sim.fleet import Fleet, RolesSpec, simulate_fleet
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine, described_machine
from quire.sim.profile import machine_of
from quire.sim.summary import summary_of

RESULTS = Path(__file__).parent / "results"
SHAPE, NUM_ENGINES = "llama-3.1-8b", 4
GB_PER_S, GFLOP_PER_S, FIXED_MS = 2600.0, 500_000.0, 1.0  # of each device
PROMPTS = (512, 2048, 8192, 16_384)
LOADS = (0.2, 0.4, 0.6)
LINKS_GB_PER_S = (1.0, 10.0, 50.0)
ONE_PROMPT = 8192  # of maps of other numbers of devices
OUTPUT_TOKENS, NUM_REQUESTS = 200, 120
# --confirm: streams that decode, their prompts and most tokens, beside prompts one after another.
CONFIRMED_SHAPE, CONFIRMED_PROMPTS, NUM_PROMPTS = "qwen3-0.1b", (1024, 4096, 8192), 3
DECODING, STREAM_PROMPT, ROOM = 16, disaggregation.DECODING_PROMPT, 4096
THREADS = {"one engine": "2", "two engines": "1"}  # of each engine
# The shortest first point, and about how long the engines of a point take to start.
MIN_CONFIRMED, STARTS_S = 128, 20.0
GOALS = Goals(ttft_s=2.0, tpot_s=0.05)


class TokenGaps:
    """The gaps between the tokens of each request, as its client sees them: for `on_outputs` of a
    simulated fleet. ended_ms: when requests ended; num_answers: as many as are wanted."""

    def __init__(self, num_answers: int = 0) -> None:
        self._num_answers = num_answers
        self.ended_ms: list[float] = []
        self._last_ms: dict[tuple[int, str], float] = {}
        self._spans_ms: list[tuple[float, float]] = []

    def __call__(self, engine: SimEngine, outputs: StepOutputs) -> None:
        """Note the tokens of a step."""
        now_ms = engine.replay.now_ms
        with_events = (one.request_id for one in outputs.events if one.token_ids)
        for request_id in (*outputs.request_ids, *with_events):
            key = engine.number, request_id
            if (last_ms := self._last_ms.get(key)) is not None:
                self._spans_ms.append((last_ms, now_ms))
            self._last_ms[key] = now_ms
        num_ended = sum(one.finish_reason is not None for one in outputs.events)
        self.ended_ms += [now_ms] * num_ended

    def has_all(self) -> bool:
        """Return whether as many requests have ended as are wanted."""
        return len(self.ended_ms) >= self._num_answers

    def percentile_ms(
        self, percent: float, since_ms: float = 0.0, until_ms: float = math.inf
    ) -> float:
        """Return a percentile of the gaps that touch a time."""
        gaps = [
            end_ms - begin_ms
            for begin_ms, end_ms in self._spans_ms
            if end_ms > since_ms and begin_ms < until_ms
        ]
        return float(np.percentile(gaps, percent)) if gaps else 0.0


def mapped_machine() -> tuple[Machine, EngineConfig]:
    """Return the devices of the map, and the configuration of an engine on one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(checkpoint_config(SHAPE)))
        settings: dict[str, Any] = {
            "model": name,
            "kv_cache_memory": "40GiB",
            "max_num_batched_tokens": 2048,
        }
        settings |= {"block_size": 64}  # larger than in service: fewer to simulate
        config = engine_config({**settings, "max_num_seqs": 256, "dtype": "bf16"})
        machine = described_machine(
            config, gb_per_s=GB_PER_S, gflop_per_s=GFLOP_PER_S, fixed_ms=FIXED_MS
        )
    return machine, config


def drawn(prompt_tokens: int, per_s: float) -> list[TraceRequest]:
    """Return requests with Poisson arrivals, the same at each rate but for the pace."""
    gaps_s = np.random.default_rng(1).exponential(1.0 / per_s, NUM_REQUESTS)
    return [
        TraceRequest(
            arrival_ms=1e3 * float(at_s),
            prompt_tokens=prompt_tokens,
            output_tokens=OUTPUT_TOKENS,
        )
        for at_s in np.cumsum(gaps_s)
    ]


def points_of(
    machine: Machine, config: EngineConfig, prompt_tokens: int, load: float, num_engines: int
) -> Iterator[dict[str, Any]]:
    """Yield a point for each link: both roles everywhere, and the best division."""
    per_s = load * num_engines * 1e3 / (prompt_tokens * machine.linear.token_ms)
    requests = drawn(prompt_tokens, per_s)
    defaults = RequestDefaults(max_tokens=OUTPUT_TOKENS, max_model_len=machine.max_model_len)
    whole = _times(requests, defaults, machine, config, Fleet(num_engines=num_engines))
    for gb_per_s in LINKS_GB_PER_S:
        found: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "load": load,
            "per_s": per_s,
            "gb_per_s": gb_per_s,
            "both": whole,
        }
        for num_prefill in range(1, num_engines):
            roles = RolesSpec(
                num_prefill=num_prefill,
                num_decode=num_engines - num_prefill,
                gb_per_s=gb_per_s,
                latency_ms=1.0,
            )
            fleet = Fleet(num_engines=num_engines, roles=roles)
            divided = _times(requests, defaults, machine, config, fleet)
            divided["num_prefill"] = num_prefill
            # A division that does not keep up with its prompts is none.
            if divided["ttft_s"] > 3 * whole["ttft_s"] + 0.1:
                continue
            if "divided" not in found or divided["gap_ms"] < found["divided"]["gap_ms"]:
                found["divided"] = divided
        yield found


def computed(num_engines: int, cell: tuple[int, float]) -> list[dict[str, Any]]:
    """Return the points of one length and load, and say that they are computed."""
    machine, config = mapped_machine()
    points = list(points_of(machine, config, *cell, num_engines))
    prompt_tokens, load = cell
    devices = f"{num_engines} devices at {100 * load:.0f} %"
    disaggregation.note(f"prompts of {prompt_tokens} tokens, {devices}")
    return points


def mapped(num_engines: int, prompts: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """Return the points of all these lengths and of all loads, so many at once."""
    with ProcessPoolExecutor(jobs) as pool:
        parts = pool.map(partial(computed, num_engines), product(prompts, LOADS))
        return [point for part in parts for point in part]


def _times(
    requests: list[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    fleet: Fleet,
) -> dict[str, Any]:
    """Run a fleet; return its times at p99, and the share of prompts that came over a link."""
    gaps = TokenGaps()
    found = simulate_fleet(requests, defaults, machine, config, fleet, on_outputs=gaps)
    summary = summary_of(found.run, requests, GOALS)
    return {
        "ttft_s": summary["ttft_s"]["p99"],
        "tpot_ms": 1e3 * summary["tpot_s"]["p99"],
        "gap_ms": gaps.percentile_ms(99),
        "fetched_share": found.num_fetches / len(requests),
    }


Cells = Sequence[Sequence[Mapping[str, Any] | None]]


def draw(known: Mapping[str, Any], path: Path) -> None:
    """Draw how much shorter the gap between tokens is at p99, by length, load and link: a panel for
    each link, and one for each other number of devices."""
    from quire.obs.pictures import pyplot

    plt = pyplot()
    by_place = {
        (one["gb_per_s"], one["prompt_tokens"], one["load"]): one for one in known["points"]
    }
    others = [name for name in known if name.endswith(" engines")]
    num_panels = len(LINKS_GB_PER_S) + len(others)
    figure, panels = plt.subplots(
        1, num_panels, figsize=(4.7 * num_panels + 1.2, 5.2), layout="constrained"
    )
    for panel, gb_per_s in zip(panels, LINKS_GB_PER_S, strict=False):
        cells = [[by_place.get((gb_per_s, one, load)) for load in LOADS] for one in PROMPTS]
        drawn = _draw_cells(panel, cells, known["engines"])
        panel.set_yticks(range(len(PROMPTS)), [f"{tokens:,}" for tokens in PROMPTS])
        panel.set_title(f"{known['engines']} devices, link of {gb_per_s:g} GB/s")
    panels[0].set_ylabel("tokens of a prompt")
    for panel, name in zip(panels[len(LINKS_GB_PER_S) :], others, strict=True):
        of_load = {(one["gb_per_s"], one["load"]): one for one in known[name]}
        cells = [[of_load.get((link, load)) for load in LOADS] for link in LINKS_GB_PER_S]
        num_engines = int(name.split()[0])
        _draw_cells(panel, cells, num_engines)
        panel.set_yticks(range(len(LINKS_GB_PER_S)), [f"{one:g}" for one in LINKS_GB_PER_S])
        panel.set_ylabel("link, GB/s")
        panel.set_title(f"{num_engines} devices, prompts of {ONE_PROMPT:,} tokens")
    bar = figure.colorbar(drawn, ax=panels, shrink=0.8, pad=0.01, ticks=[0.5, 0.7, 1.0, 1.4, 2.0])
    bar.ax.set_yticklabels(["0.5", "0.7", "1", "1.4", "2"])
    bar.ax.minorticks_off()
    bar.set_label("gap of both roles over divided (above 1: divide)")
    figure.supxlabel("load: computing time of prompts, as a share of what all devices have")
    figure.suptitle(
        "Gap between tokens at p99, engines of both roles over the best division into prefill and "
        "decode engines; computed, not measured"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_cells(panel: Any, cells: Cells, num_engines: int) -> Any:
    """Draw one panel of points; return its colors."""
    from matplotlib.colors import LogNorm

    gains = np.full((len(cells), len(LOADS)), np.nan)
    for row, column in product(range(len(cells)), range(len(LOADS))):
        point = cells[row][column]
        if point is None or "divided" not in point:
            panel.text(column, row, "no division\nkeeps up", ha="center", va="center", color="0.35")
            continue
        best, whole = point["divided"], point["both"]
        gains[row, column] = gain = whole["gap_ms"] / best["gap_ms"]
        num_decode = num_engines - best["num_prefill"]
        later = best["ttft_s"] / whole["ttft_s"]
        text = (
            f"{best['num_prefill']} prefill + {num_decode} decode\nfirst token {later:.1f}x later"
        )
        if not best["fetched_share"]:
            text = f"no block moves\nfirst token {later:.1f}x later"
        # Dark colors are far from 1.
        color = "white" if abs(math.log(gain)) > math.log(1.65) else "black"
        panel.text(column, row + 0.2, f"{gain:.2f}", ha="center", va="center", color=color, size=13)
        panel.text(column, row - 0.16, text, ha="center", va="center", color=color, size=7.5)
    drawn = panel.imshow(
        gains, cmap="BrBG", norm=LogNorm(1 / 2.4, 2.4), aspect="auto", origin="lower"
    )
    panel.set_facecolor("0.93")
    panel.set_xticks(range(len(LOADS)), [f"{100 * load:.0f} %" for load in LOADS])
    return drawn


def confirmed_points(
    model: str, profiles: Mapping[str, Any], minutes: float, scratch: Path
) -> list[dict[str, Any]]:
    """Return the points of real engines, in about `minutes`. profiles: of their steps, by threads.

    Where a prompt takes long, all points have shorter ones.
    """
    began_s = time.monotonic()
    prompts: tuple[int, ...] = CONFIRMED_PROMPTS
    token_ms = machine_of(profiles["2"]).linear.token_ms
    alone_s = disaggregation.MIN_PROMPT * token_ms / 1e3

    def seconds(prompt_tokens: int) -> float:
        return STARTS_S + disaggregation.total_s(alone_s, prompt_tokens, NUM_PROMPTS)

    def left_s() -> float:
        return 60.0 * minutes - (time.monotonic() - began_s)

    while sum(map(seconds, prompts)) > left_s() and prompts[0] // 2 >= MIN_CONFIRMED:
        prompts = tuple(tokens // 2 for tokens in prompts)
    points = []
    for at, tokens in enumerate(prompts):
        share = seconds(tokens) / sum(map(seconds, prompts[at:]))
        disaggregation.note(f"point {at + 1} of {len(prompts)}: prompts of {tokens} tokens")
        points.append(confirmed(model, tokens, max(left_s(), 60.0) * share / 60.0, scratch))
    return points


def confirmed(model: str, prompt_tokens: int, minutes: float, scratch: Path) -> dict[str, Any]:
    """Return one point of real engines."""
    out = scratch / "serving.json"
    sizes = ["--prompt", str(prompt_tokens), "--prompts", str(NUM_PROMPTS), "--room", str(ROOM)]
    sizes += ["--decoding", str(DECODING), "--minutes", str(minutes)]
    disaggregation.main(["--runs", "serving", "--model", model, *sizes, "--out", str(out)])
    real = json.loads(out.read_text())["serving"]
    found: dict[str, Any] = {
        "prompt_tokens": real["prompt"],
        "gb_per_s": real["two engines"]["gb_per_s"],
    }
    for name in THREADS:
        found[name] = {
            "prompts": real[name]["num_prompts"],
            "real": {
                "tpot_p50_ms": real[name]["tpot_ms"]["p50"],
                "tpot_p99_ms": real[name]["tpot_ms"]["p99"],
                "ttft_s": real[name]["ttft_s"],
            },
        }
    one, two = (found[name]["real"]["tpot_p99_ms"] for name in THREADS)
    found["real_one_over_two"] = one / two
    return found


def add_simulations(points: Sequence[dict[str, Any]], profiles: Mapping[str, Any]) -> None:
    """Simulate the points of real engines, with the steps of these profiles."""
    for point in points:
        disaggregation.note(f"simulating prompts of {point['prompt_tokens']} tokens")
        length = point["prompt_tokens"] + ROOM
        settings = {"kv_cache_memory": "6GiB", "max_num_seqs": DECODING + 2}
        config = engine_config({**settings, "max_model_len": length})
        for name, threads in THREADS.items():
            machine = machine_of(profiles[threads])
            point[name]["simulated"] = _beside(machine, config, point, name)
        one, two = (point[name]["simulated"]["tpot_p99_ms"] for name in THREADS)
        point["simulated_one_over_two"] = one / two


def _measured(model: str, threads: str, length: int, scratch: Path) -> dict[str, Any]:
    """Return the profile of an engine on `threads` cores, measured in a process of its own."""
    path = scratch / f"profile-{threads}-{length}.json"
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: int(threads)]))
    words = ["simulate", model, "--save-profile", str(path), "--max-model-len", str(length)]
    words += ["--max-num-seqs", str(DECODING + 2), "--threads", threads, "--max-requests", "1"]
    command = ["taskset", "-c", cores, sys.executable, "-m", "quire", *words]
    subprocess.run([*command, "--kv-cache-memory", "6GiB"], check=True, stdout=subprocess.DEVNULL)
    profile: dict[str, Any] = json.loads(path.read_text())
    return profile


def _beside(
    machine: Machine, config: EngineConfig, point: Mapping[str, Any], name: str
) -> dict[str, float]:
    """Simulate streams and prompts one after another, each when the one before has ended.

    Gaps count from the first prompt's arrival to the last one's first token, as there. point: what
    was measured, with as many prompts; name: of one engine or of two there.
    """
    prompt_tokens, num_prompts = point["prompt_tokens"], point[name]["prompts"]
    roles = RolesSpec(
        num_prefill=1,
        num_decode=1,
        gb_per_s=max(point["gb_per_s"], 1e-3),
        latency_ms=1.0,
        fetch="always",
    )
    fleet = Fleet(num_engines=1)
    if name == "two engines":
        fleet = Fleet(num_engines=2, roles=roles)
    streams = [TraceRequest(arrival_ms=0.0, prompt_tokens=STREAM_PROMPT, output_tokens=ROOM)]
    streams *= DECODING
    defaults = RequestDefaults(max_tokens=ROOM, max_model_len=prompt_tokens + ROOM)
    arrivals_ms: list[float] = [2_000.0]
    while True:
        gaps = TokenGaps(num_answers=len(arrivals_ms))
        requests = [
            *(replace(one) for one in streams),
            *(_prompt(at_ms, prompt_tokens) for at_ms in arrivals_ms),
        ]
        simulate_fleet(
            requests,
            defaults,
            machine,
            config,
            fleet,
            on_outputs=gaps,
            should_stop=gaps.has_all,
        )
        if len(arrivals_ms) == num_prompts:
            break
        arrivals_ms.append(gaps.ended_ms[-1])
    ttfts_ms = [end - begin for begin, end in zip(arrivals_ms, gaps.ended_ms, strict=True)]
    window_ms = arrivals_ms[0], gaps.ended_ms[-1]
    return {
        "tpot_p50_ms": gaps.percentile_ms(50, *window_ms),
        "tpot_p99_ms": gaps.percentile_ms(99, *window_ms),
        "ttft_s": float(np.median(ttfts_ms)) / 1e3,
    }


def _prompt(at_ms: float, prompt_tokens: int) -> TraceRequest:
    return TraceRequest(arrival_ms=at_ms, prompt_tokens=prompt_tokens, output_tokens=1)


def confirm(known: dict[str, Any], minutes: float) -> None:
    """Measure steps and engines, into `known`."""
    model, began_s = str(random_checkpoint(CONFIRMED_SHAPE)), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        profiles = {}
        for threads in THREADS.values():
            disaggregation.note(f"measuring the steps of an engine, cores: {threads}")
            length = CONFIRMED_PROMPTS[-1] + ROOM
            profiles[threads] = _measured(model, threads, length, scratch)
        left = minutes - (time.monotonic() - began_s) / 60.0
        known["machine"] = machine_card()
        known["confirmed"] = confirmed_points(model, profiles, left, scratch)
    known["confirmed_shape"], known["profiles"] = CONFIRMED_SHAPE, profiles


def main() -> None:
    """Compute the map, or confirm points of it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation_map",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--confirm", action="store_true")
    parser.add_argument(
        "--resimulate", action="store_true", help="the simulations of --confirm, without engines"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="about how long --confirm takes")
    parser.add_argument("--engines", type=int, default=NUM_ENGINES, help="of the map; 4: all of it")
    parser.add_argument("--jobs", type=int, default=1, help="points of the map at once")
    parser.add_argument("--draw", action="store_true", help="only draw what --out has")
    parser.add_argument("--out", type=Path, default=RESULTS / "disaggregation-map.json")
    parser.add_argument("--picture", type=Path, help="default: beside --out")
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.confirm or args.resimulate:
        if args.confirm:
            confirm(known, args.minutes)
        if "profiles" not in known:
            raise SystemExit(f"{args.out} has no profiles of steps; run --confirm first")
        add_simulations(known["confirmed"], known["profiles"])
        print(json.dumps(known["confirmed"], indent=1))
    elif args.draw:
        pass
    elif args.engines != NUM_ENGINES:
        known[f"{args.engines} engines"] = mapped(args.engines, (ONE_PROMPT,), args.jobs)
    else:
        known |= {
            "bench": "disaggregation map",
            "shape": SHAPE,
            "engines": NUM_ENGINES,
            "device": {"gb_per_s": GB_PER_S, "gflop_per_s": GFLOP_PER_S, "fixed_ms": FIXED_MS},
            "output_tokens": OUTPUT_TOKENS,
            "points": mapped(NUM_ENGINES, PROMPTS, args.jobs),
        }
    if "points" in known:
        draw(known, args.picture or args.out.with_suffix(".png"))
    args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
