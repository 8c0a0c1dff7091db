"""Take samples in turn, Quire and a peer on the same tokens: the pairs behind a ratio.

Memory speed is read before each sample, and use of the processors by other programs is read after
it. A pair in which another program ran, or the hypervisor took time, is kept apart and repeated.
The order within pairs alternates, so that a drift affects both sides alike. Refuses answers of a
wrong length, and everything if Quire answers a request differently alone and in a batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.floors import Work
from bench.peers.child import Peer, PeerFailed
from bench.record import TOOL_SUFFIX, is_settled
from quire.bench.cpu_use import CpuWatch, peak_rss_bytes
from quire.bench.reading import ReadProbe
from quire.bench.workloads import RequestSpec, Workload
from quire.obs.timing import RequestTimes, run_rates

_WARM_UP_REQUESTS = 4
SETTLE_S = 0.3  # busy-waiting threads stop before the next sample begins


class WrongAnswer(Exception):
    """An engine gave wrong answers, which are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """When a sample counts, and its time limit."""

    max_foreign_cores: float = 0.12
    max_stolen_cores: float = 0.1
    limit_s: float = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The work of a workload, whole and after the first token, and the arithmetic limit."""

    whole: Work
    decode: Work
    peak_gflops: float | None


class PairRun:
    """Quire and one peer, both loaded, on one workload."""

    def __init__(
        self,
        quire: Peer,
        other: Peer,
        workload: Workload,
        *,
        peer: str,
        vocab_size: int,
        probe: ReadProbe,
        conditions: Conditions,
        floor: Floor | None,
    ) -> None:
        self._sides = {"quire": quire, "other": other}
        self._workload = workload
        self._peer = peer
        self._vocab_size = vocab_size
        self._probe = probe
        self._conditions = conditions
        self._floor = floor
        self._rng = np.random.default_rng()

    def warm_up(self) -> None:
        """Run each side once, uncounted; compare Quire's answers with requests run alone.

        For a peer a few requests suffice: all of W3 take minutes on the slowest.
        """
        asks = self._workload.draw(self._vocab_size, self._rng)
        together = self._run("quire", asks)
        for index in {0, len(asks) - 1}:
            [alone] = self._run("quire", [asks[index]])
            if alone["token_ids"] != together[index]["token_ids"]:
                raise WrongAnswer(
                    f"{self._workload.name}: Quire answers request {index} differently alone and "
                    "among others; nothing is measured of wrong answers"
                )
        if not self._peer.endswith(TOOL_SUFFIX):
            asks = self._workload.draw(self._vocab_size, self._rng)
            self._run("other", asks[:_WARM_UP_REQUESTS])

    def pair(self, number: int) -> dict[str, Any]:
        """Take the next pair, and decide whether it counts. Raises PeerFailed, WrongAnswer."""
        asks = self._workload.draw(self._vocab_size, self._rng)
        order = ("quire", "other") if number % 2 == 0 else ("other", "quire")
        samples = {side: self._sample(side, asks) for side in order}
        problems = [
            f"{side}: {problem}" for side in order for problem in self._problems(samples[side])
        ]
        return {
            "workload": self._workload.name,
            "peer": self._peer,
            "first": order[0],
            "quire": samples["quire"],
            "other": samples["other"],
            "kept": not problems,
            "why": "; ".join(problems),
        }

    def _sample(self, side: str, asks: Sequence[RequestSpec]) -> dict[str, Any]:
        time.sleep(SETTLE_S)
        read_gb_per_s = self._probe.gb_per_s()
        watch = CpuWatch([self._sides[side].pid, os.getpid()])
        if side == "other" and self._peer.endswith(TOOL_SUFFIX):
            rates = self._own_tool()
        else:
            answers = self._run(side, asks)
            rates = run_rates(
                [_times(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
            )
        use = watch.use()
        sample: dict[str, Any] = {
            "rates": {name: round(value, 6) for name, value in rates.items()},
            "read_gb_per_s": round(read_gb_per_s, 2),
            "own_cores": use.own_cores,
            "foreign_cores": use.foreign_cores,
            "stolen_cores": use.stolen_cores,
            "peak_rss_bytes": peak_rss_bytes(self._sides[side].pid),
        }
        if side == "quire" and self._floor is not None:
            sample["floor_share"] = self._floor_share(rates, read_gb_per_s)
        return sample

    def _run(self, side: str, asks: Sequence[RequestSpec]) -> list[dict[str, Any]]:
        requests = [
            {"prompt_ids": list(ask.prompt_ids), "output_tokens": ask.output_tokens} for ask in asks
        ]
        reply = self._sides[side].ask(
            {"do": "run", "requests": requests}, limit_s=self._conditions.limit_s
        )
        answers: list[dict[str, Any]] = reply["answers"]
        for ask, answer in zip(asks, answers, strict=True):
            if len(answer["token_ids"]) != ask.output_tokens:
                raise PeerFailed(
                    f"{self._sides[side].name} answered {len(answer['token_ids'])} tokens where "
                    f"{ask.output_tokens} were asked for"
                )
        return answers

    def _own_tool(self) -> dict[str, float]:
        shape = {
            "num_requests": len(self._workload.lengths),
            "prompt_tokens": self._workload.prompt_tokens,
            "output_tokens": self._workload.output_tokens,
            "max_running": self._workload.max_running,
            "shared": self._workload.lengths[0].shared > 0,
        }
        reply = self._sides["other"].ask(
            {"do": "own_tool", "workload": shape}, limit_s=self._conditions.limit_s
        )
        rates: dict[str, float] = reply["rates"]
        return rates

    def _floor_share(self, rates: dict[str, float], read_gb_per_s: float) -> float:
        assert self._floor is not None
        only = self._workload.lengths[0]
        if len(self._workload.lengths) == 1 and only.output > 1:
            floor_s = self._floor.decode.floor_s(read_gb_per_s, self._floor.peak_gflops)
            return floor_s * rates["decode_tokens_per_s"] / (only.output - 1)
        floor_s = self._floor.whole.floor_s(read_gb_per_s, self._floor.peak_gflops)
        return floor_s / rates["wall_s"]

    def _problems(self, sample: dict[str, Any]) -> list[str]:
        most = self._conditions
        found = []
        if (sample["foreign_cores"] or 0) > most.max_foreign_cores:
            found.append(f"others used {sample['foreign_cores']:.2f} cores")
        if (sample["stolen_cores"] or 0) > most.max_stolen_cores:
            found.append(f"{sample['stolen_cores']:.2f} cores were stolen")
        return found


def _times(ask: RequestSpec, answer: dict[str, Any]) -> RequestTimes:
    return RequestTimes(
        sent_s=answer["sent_s"],
        first_s=answer["first_s"],
        last_s=answer["last_s"],
        prompt_tokens=len(ask.prompt_ids),
        output_tokens=ask.output_tokens,
    )


def take_pairs(
    run: PairRun,
    *,
    already: Sequence[dict[str, Any]],
    tried: int,
    wanted: int,
    add: Callable[[dict[str, Any]], None],
    has_time: Callable[[], bool],
    say: Callable[[str], None],
    headline: str,
) -> bool:
    """Take pairs until enough are kept (`already` counts), three times as many were tried, or time
    is up.

    Returns whether enough are kept.
    """
    kept, most = list(already), tried + 3 * (wanted - len(already))
    while not is_settled(kept, wanted) and tried < most and has_time():
        pair = run.pair(tried)
        add(pair)
        tried += 1
        kept += [pair] * bool(pair["kept"])
        ours, theirs = pair["quire"]["rates"][headline], pair["other"]["rates"][headline]
        say(
            f"{pair['workload']} {pair['peer']}: Quire {ours:.1f}, {pair['peer']} {theirs:.1f} "
            f"({headline}), {ours / theirs:.2f}x"
            + (f"; not kept: {pair['why']}" * (not pair["kept"]))
        )
    return is_settled(kept, wanted)
