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
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench import disaggregation
from bench.checkpoints import checkpoint_config, random_checkpoint
from quire.base.records import StepPlan
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.obs.timing import Goals
from quire.sim.fleet import Fleet, joined, simulate_fleet
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine, described_machine
from quire.sim.profile import read_machine
from quire.sim.roles import RolesSpec, simulate_roles
from quire.sim.run import Run, simulate
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
# The shortest first point, and about how long the engines of a point take to start.
MIN_CONFIRMED, STARTS_S = 128, 20.0
GOALS = Goals(ttft_s=2.0, tpot_s=0.05)


class Gaps:
    """A StepCost that keeps the times of steps in which `decoding` streams decode or more, once for
    each of them: the gaps between their tokens.

    beside: only of those that compute a part of a prompt, too.
    """

    def __init__(self, machine: Machine, decoding: int, *, beside: bool = False) -> None:
        self._cost, self._decoding, self._beside = machine.cost, decoding, beside
        self.gaps_ms: list[float] = []

    def step_ms(self, plan: StepPlan) -> float:
        """See StepCost."""
        ms, counts = self._cost.step_ms(plan), plan.counts
        decoding = int(((counts == 1) & plan.samples).sum())
        if decoding >= self._decoding and (not self._beside or int(counts.max()) > 1):
            self.gaps_ms += [ms] * decoding
        return ms


def mapped_machine() -> tuple[Machine, EngineConfig]:
    """Return the devices of the map, and the configuration of an engine on one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(checkpoint_config(SHAPE)))
        settings = {"model": name, "kv_cache_memory": "40GiB", "max_num_batched_tokens": 2048}
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
    fleet = Fleet(num_engines=num_engines, routing="turn", store=None)
    gaps = Gaps(machine, 1)
    runs, _ = simulate_fleet(requests, defaults, replace(machine, cost=gaps), config, fleet)
    whole = _times(joined(runs), requests, gaps)
    for gb_per_s in LINKS_GB_PER_S:
        found: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "load": load,
            "per_s": per_s,
            "gb_per_s": gb_per_s,
            "both": whole,
        }
        for num_prefill in range(1, num_engines):
            spec = RolesSpec(
                num_prefill=num_prefill,
                num_decode=num_engines - num_prefill,
                gb_per_s=gb_per_s,
                latency_ms=1.0,
            )
            gaps = Gaps(machine, 1)
            recorded = replace(machine, cost=gaps)
            one = simulate_roles(requests, defaults, recorded, config, spec)
            divided = _times(one.run, requests, gaps) | {
                "num_prefill": num_prefill,
                "fetched_share": one.num_fetches / NUM_REQUESTS,
            }
            # A division that does not keep up with its prompts is none.
            if divided["ttft_s"] > 3 * whole["ttft_s"] + 0.1:
                continue
            if "divided" not in found or divided["gap_ms"] < found["divided"]["gap_ms"]:
                found["divided"] = divided
        yield found


def computed(
    machine: Machine, config: EngineConfig, prompt_tokens: int, load: float, num_engines: int
) -> list[dict[str, Any]]:
    """Return the points of one load, and say that they are computed."""
    devices = f"{num_engines} devices at {100 * load:.0f} %"
    disaggregation.note(f"prompts of {prompt_tokens} tokens, {devices}")
    return list(points_of(machine, config, prompt_tokens, load, num_engines))


def _times(run: Run, requests: list[TraceRequest], gaps: Gaps) -> dict[str, Any]:
    summary = summary_of(run, requests, GOALS)
    return {
        "ttft_s": summary["ttft_s"]["p99"],
        "tpot_ms": 1e3 * summary["tpot_s"]["p99"],
        "gap_ms": float(np.percentile(gaps.gaps_ms, 99)),
    }


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each link: how much shorter the gap between tokens is at p99."""
    from quire.obs.pictures import pyplot

    plt = pyplot()
    figure, panels = plt.subplots(1, len(LINKS_GB_PER_S), figsize=(13, 3.9), sharey=True)
    for panel, gb_per_s in zip(panels, LINKS_GB_PER_S, strict=True):
        gains = np.full((len(PROMPTS), len(LOADS)), np.nan)
        for one in points:
            if one["gb_per_s"] != gb_per_s:
                continue
            row, column = PROMPTS.index(one["prompt_tokens"]), LOADS.index(one["load"])
            text = "none\nkeeps up"
            if "divided" in one:
                best, whole = one["divided"], one["both"]
                gains[row, column] = whole["gap_ms"] / best["gap_ms"]
                text = (
                    f"{gains[row, column]:.2f}x, {best['num_prefill']} + "
                    f"{NUM_ENGINES - best['num_prefill']}\n"
                    f"TTFT {best['ttft_s'] / whole['ttft_s']:.2f}x"
                )
            panel.text(column, row, text, ha="center", va="center", fontsize=8)
        panel.imshow(gains, cmap="RdYlGn", vmin=0.0, vmax=2.0, aspect="auto", origin="lower")
        panel.set_xticks(range(len(LOADS)), [f"{100 * load:.0f} %" for load in LOADS])
        panel.set_yticks(range(len(PROMPTS)), [f"{tokens:,}" for tokens in PROMPTS])
        panel.set_title(f"link of {gb_per_s:g} GB/s", fontsize=10)
        panel.set_xlabel("prompts' computing time, of all devices")
    panels[0].set_ylabel("prompt tokens")
    figure.suptitle(
        "Gap between tokens at p99: both roles over the best division (prefill + decode engines); "
        "computed",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def confirmed_points(model: str, minutes: float, scratch: Path) -> list[dict[str, Any]]:
    """Return the points of real engines beside their simulations, in about `minutes`.

    Where a prompt takes long, all points have shorter ones.
    """
    began_s, prompts = time.monotonic(), CONFIRMED_PROMPTS
    machines = {}
    for threads in (2, 1):
        disaggregation.note(f"measuring the steps of an engine on {threads} cores")
        machines[threads] = _measured(model, threads, prompts[-1] + ROOM, scratch)
    alone_s = disaggregation.MIN_PROMPT * machines[2].linear.token_ms / 1e3

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
        points.append(
            confirmed(model, tokens, machines, max(left_s(), 60.0) * share / 60.0, scratch)
        )
    return points


def confirmed(
    model: str, prompt_tokens: int, machines: Mapping[int, Machine], minutes: float, scratch: Path
) -> dict[str, Any]:
    """Return one point of real engines beside its simulation. machines: by threads."""
    out = scratch / "serving.json"
    sizes = ["--prompt", str(prompt_tokens), "--prompts", str(NUM_PROMPTS), "--room", str(ROOM)]
    sizes += ["--decoding", str(DECODING), "--minutes", str(minutes)]
    disaggregation.main(["--runs", "serving", "--model", model, *sizes, "--out", str(out)])
    real = json.loads(out.read_text())["serving"]
    prompt_tokens = real["prompt"]
    found: dict[str, Any] = {"prompt_tokens": prompt_tokens}
    for name, threads in (("one engine", 2), ("two engines", 1)):
        settings = {"kv_cache_memory": "6GiB", "max_num_seqs": DECODING + 2}
        length = prompt_tokens + ROOM
        config = engine_config({"model": model, **settings, "max_model_len": length})
        found[name] = {
            "real": {"tpot_p99_ms": real[name]["tpot_ms"]["p99"], "ttft_s": real[name]["ttft_s"]},
            "prompts": real[name]["num_prompts"],
            "simulated": _beside(machines[threads], config, real, name),
        }
    for kind in ("real", "simulated"):
        one, two = (found[name][kind]["tpot_p99_ms"] for name in ("one engine", "two engines"))
        found[f"{kind}_one_over_two"] = one / two
    return found


def _measured(model: str, threads: int, length: int, scratch: Path) -> Machine:
    """Return the machine of an engine on `threads` cores, measured in a process of its own."""
    path = scratch / f"profile-{threads}-{length}.json"
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    words = ["simulate", model, "--save-profile", str(path), "--max-model-len", str(length)]
    words += ["--max-num-seqs", str(DECODING + 2), "--threads", str(threads), "--max-requests", "1"]
    command = ["taskset", "-c", cores, sys.executable, "-m", "quire", *words]
    subprocess.run([*command, "--kv-cache-memory", "6GiB"], check=True, stdout=subprocess.DEVNULL)
    return read_machine(path)


def _beside(
    machine: Machine, config: EngineConfig, real: Mapping[str, Any], name: str
) -> dict[str, float]:
    """Simulate streams and prompts one after another, each when the one before has ended.

    real: what was measured, with as many prompts; name: of one engine or of two there.
    """
    prompt_tokens, num_prompts = real["prompt"], real[name]["num_prompts"]
    pair = name == "two engines"
    spec = RolesSpec(
        num_prefill=1,
        num_decode=1,
        gb_per_s=max(real["two engines"]["gb_per_s"], 1e-3),
        latency_ms=1.0,
        fetch="always",
    )
    streams = [TraceRequest(arrival_ms=0.0, prompt_tokens=STREAM_PROMPT, output_tokens=ROOM)]
    streams *= DECODING
    defaults = RequestDefaults(max_tokens=ROOM, max_model_len=prompt_tokens + ROOM)
    arrivals_ms: list[float] = [2_000.0]
    while True:
        gaps = Gaps(machine, DECODING, beside=not pair)
        recorded = replace(machine, cost=gaps)
        requests = [*streams, *(_prompt(at_ms, prompt_tokens) for at_ms in arrivals_ms)]
        if pair:
            run = simulate_roles(requests, defaults, recorded, config, spec).run
        else:
            run = simulate(requests, defaults, recorded, config)
        prompts = [one for one in run.finished if one.request.output_tokens == 1]
        prompts.sort(key=lambda one: one.request.arrival_ms)
        if len(arrivals_ms) == num_prompts:
            break
        arrivals_ms.append(prompts[-1].first_token_ms)
    ttfts_s = [(one.first_token_ms - one.request.arrival_ms) / 1e3 for one in prompts]
    return {
        "tpot_p99_ms": float(np.percentile(gaps.gaps_ms, 99)),
        "ttft_s": float(np.median(ttfts_s)),
    }


def _prompt(at_ms: float, prompt_tokens: int) -> TraceRequest:
    return TraceRequest(arrival_ms=at_ms, prompt_tokens=prompt_tokens, output_tokens=1)


def main() -> None:
    """Compute the map, or confirm points of it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation_map",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--confirm", action="store_true")
    parser.add_argument("--minutes", type=float, default=6.0, help="about how long --confirm takes")
    parser.add_argument("--engines", type=int, default=NUM_ENGINES, help="of the map; 4: all of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "disaggregation-map.json")
    parser.add_argument("--picture", type=Path, help="default: beside --out")
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.confirm:
        model = str(random_checkpoint(CONFIRMED_SHAPE))
        with tempfile.TemporaryDirectory() as name:
            known["confirmed"] = confirmed_points(model, args.minutes, Path(name))
        known["confirmed_shape"], known["machine"] = CONFIRMED_SHAPE, machine_card()
        print(json.dumps(known["confirmed"], indent=1))
    elif args.engines != NUM_ENGINES:
        machine, config = mapped_machine()
        points = []
        for load in LOADS:
            points += computed(machine, config, ONE_PROMPT, load, args.engines)
        known[f"{args.engines} engines"] = points
    else:
        machine, config = mapped_machine()
        known |= {
            "bench": "disaggregation map",
            "shape": SHAPE,
            "engines": NUM_ENGINES,
            "device": {"gb_per_s": GB_PER_S, "gflop_per_s": GFLOP_PER_S, "fixed_ms": FIXED_MS},
            "output_tokens": OUTPUT_TOKENS,
            "points": [],
        }
        for prompt_tokens, load in product(PROMPTS, LOADS):
            known["points"] += computed(machine, config, prompt_tokens, load, NUM_ENGINES)
        draw(known["points"], args.picture or args.out.with_suffix(".png"))
    args.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
