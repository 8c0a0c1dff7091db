"""A long prompt among decoding requests: the effect of each on the other.

`alone` is the long prompt's time to first token on an idle engine. `beside`: a number of requests
decode; measured are their inter-token times before the prompt arrives, and from its arrival to its
first token. The engine runs in this process, without HTTP; a token's time is the end of its step.
Before, the engine has computed a prompt as long and been idle: a new engine would pay for the first
use of memory too. Refuses to report if the prompt's first token differs beside others. Runs add up
in the file and their medians are reported.

Run: python -m bench.policies.interference [--model FOLDER] [--runs alone,beside] [--prompt 8192]
     [--decoding 16] [--flags "tpot_target_ms=0 long_prompt_tokens=2048"] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import random_checkpoint
from quire.base.clock import Clock
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import assemble
from quire.engine.core import EngineCore
from quire.obs.timing import percentiles

SHAPE = "qwen3-0.6b"
KINDS = ("alone", "beside")
STEPS_BEFORE = 80
STEPS_LEFT_OUT = 16  # at the start: they still contain prompts, and the estimate still learns
DECODING_PROMPT = 64
LONG = "long"


class Loop:
    """An engine loop that records when each request got its tokens."""

    def __init__(self, core: EngineCore, vocab_size: int) -> None:
        self._core = core
        self._clock = Clock()
        self._vocab_size = vocab_size
        self.times_ms: dict[str, list[float]] = {}
        self.first_ids: dict[str, int] = {}

    def add(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Add a request that shares no prefix; return its arrival."""
        now_ms = self._clock.now_ms()
        drawn = np.random.default_rng([ord(letter) for letter in name])
        request = Request(
            request_id=name,
            group_id=name,
            stream=0,
            prompt_ids=drawn.integers(2, self._vocab_size, num_prompt_tokens).astype(np.int32),
            sampling=SamplingParams(temperature=0.0, seed=0),
            stop_ids=(),
            max_total_tokens=num_prompt_tokens + num_output_tokens,
            arrival_ms=now_ms,
        )
        self._core.add((request,))
        self.times_ms[name] = []
        return now_ms

    def step(self) -> None:
        """Run one step."""
        outputs = self._core.step(self._clock.now_ms)
        now_ms = self._clock.now_ms()
        for output in outputs or ():
            self.times_ms[output.request_id].append(now_ms)
            self.first_ids.setdefault(output.request_id, output.token_ids[0])

    def until_idle(self) -> None:
        """Run until all requests have ended."""
        while self._core.has_work:
            self.step()

    def until_first_token(self, name: str) -> float:
        """Run until `name` has its first token; return the time."""
        while not self.times_ms[name]:
            self.step()
        return self.times_ms[name][0]


def one_run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Run one measurement of a kind from the module docstring."""
    settings: dict[str, float] = {}
    for name, text in (pair.split("=", 1) for pair in args.flags.split()):
        settings[name] = float(text) if name.endswith("_ms") else int(text)
    config = engine_config(
        {
            "model": str(args.model),
            "max_model_len": args.prompt + 1024,
            "max_num_seqs": args.decoding + 1,
            "kv_cache_memory": args.kv,
            "enable_prefix_caching": False,
            **{
                name: float(text) if "_ms" in name else int(text) for name, text in settings.items()
            },
        }
    )
    engine = assemble(config, clock=Clock(), report=lambda what, **_: print(what))
    loop = Loop(engine.core, engine.card.vocab_size)
    # Another prompt as long, so that memory is in use and step costs are known.
    loop.add("warm", args.prompt, 2)
    loop.until_idle()
    while engine.core.touch():  # as a server does when idle
        pass
    if kind == "alone":
        came_ms = loop.add(LONG, args.prompt, 2)
        ttft_ms = loop.until_first_token(LONG) - came_ms
        return {"kind": kind, "ttft_ms": ttft_ms, "first_id": loop.first_ids[LONG]}
    names = [f"decoding-{number}" for number in range(args.decoding)]
    for name in names:
        loop.add(name, DECODING_PROMPT, 900)
    while min(len(loop.times_ms[name]) for name in names) < STEPS_BEFORE:
        loop.step()
    before = [gap for name in names for gap in np.diff(loop.times_ms[name])[STEPS_LEFT_OUT:]]
    num_before = {name: len(loop.times_ms[name]) for name in names}
    came_ms = loop.add(LONG, args.prompt, 2)
    ttft_ms = loop.until_first_token(LONG) - came_ms
    during = [gap for name in names for gap in np.diff(loop.times_ms[name][num_before[name] - 1 :])]
    return {
        "kind": kind,
        "ttft_ms": ttft_ms,
        "first_id": loop.first_ids[LONG],
        "median_before_ms": statistics.median(before),
        "median_during_ms": statistics.median(during),
        "p99_during_ms": percentiles(during, (99,))["p99"],
        "most_during_ms": max(during),
        "num_steps": len(during) // len(names),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the runs of each kind, and the two ratios with goals."""
    if len({run["first_id"] for run in runs}) > 1:
        raise SystemExit("the prompt's first token differs beside others: the run is wrong")
    result: dict[str, Any] = {}
    for kind in KINDS:
        of_kind = [run for run in runs if run["kind"] == kind]
        if of_kind:
            numbers = [name for name in of_kind[0] if name.endswith("_ms")]
            result[kind] = {n: statistics.median(run[n] for run in of_kind) for n in numbers}
            result[kind]["runs"] = len(of_kind)
    if "beside" in result:
        beside = result["beside"]
        result["p99_over_median_before"] = beside["p99_during_ms"] / beside["median_before_ms"]
        if "alone" in result:
            result["ttft_over_alone"] = beside["ttft_ms"] / result["alone"]["ttft_ms"]
    return result


def scene_of(run: Mapping[str, Any]) -> str:
    """Return the properties that runs must share to be summarized together."""
    name = f"{run['shape']}, {run['prompt']} beside {run['decoding']}"
    return f"{name}, {run['flags']}" if run["flags"] else name


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="bench.policies.interference", description=__doc__
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--decoding", type=int, default=16)
    parser.add_argument("--kv", default="2GiB")
    parser.add_argument("--runs", default="alone,beside")
    parser.add_argument("--flags", default="")
    parser.add_argument("--out", type=Path, default=Path("bench/results/interference.json"))
    args = parser.parse_args(arguments)
    args.model = args.model or str(random_checkpoint(args.shape))
    about = {"shape": args.shape, "prompt": args.prompt, "decoding": args.decoding}
    content: dict[str, Any] = {"runs": []}
    if args.out.exists():
        content = json.loads(args.out.read_text())
    for kind in args.runs.split(","):
        run = one_run(args, kind) | about | {"flags": args.flags}
        content["runs"].append(run)
        print({name: round(v, 1) if isinstance(v, float) else v for name, v in run.items()})
        alike = [one for one in content["runs"] if one["flags"] == args.flags]
        alike = [one for one in alike if {name: one[name] for name in about} == about]
        content |= {"bench": "policies interference", "machine": machine_card()}
        content.setdefault("summaries", {})[scene_of(run)] = summary(alike)
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["summaries"], indent=1))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
