"""Prefill and decode in engines of their own, simulated: what the pair gains and what moving costs.

Each engine is the real scheduler on a clock of its own; the one that is furthest behind goes on.
Requests arrive at the decode engines in turn. When one is about to begin, its engine asks the
prefill engine with the fewest tokens to compute for the blocks that it lacks, if moving them is
predicted to be faster than computing them (as quire/engine/transfer/fetching.py does). Blocks
follow the chunks of the prompt on the link of the decode engine; those of the last chunk come
after it. Not simulated: lost transfers, leases and the bytes. Always holds: the same requests and
settings give the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import SettingError
from quire.base.records import StepOutputs
from quire.cache.store_map import StoreMap
from quire.config.groups import EngineConfig
from quire.obs.report import table
from quire.obs.timing import Goals
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.sim.fleet import Fleet, FleetFactory, divided, joined, replay_of, simulate_fleet
from quire.sim.load import RequestDefaults, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import Run, TraceReplay
from quire.sim.summary import summary_of
from quire.sim.virtual_link import Asked, VirtualLink

FETCH_WHEN = ("cost", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesSpec:
    """Engines of each role, and the link into a decode engine. fetch: as --kv-transfer-fetch."""

    num_prefill: int
    num_decode: int
    gb_per_s: float
    latency_ms: float
    fetch: str = "cost"

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise SettingError(
                f"there are {self.num_prefill} prefill and {self.num_decode} decode engines; each "
                "role needs one"
            )
        if not (self.gb_per_s > 0 and self.latency_ms >= 0):
            raise SettingError(
                f"the link has {self.gb_per_s} GB/s and {self.latency_ms} ms; the rate must be "
                "above 0 and the latency at least 0"
            )
        if self.fetch not in FETCH_WHEN:
            raise SettingError(f"fetch is {self.fetch!r}; allowed: {', '.join(FETCH_WHEN)}")


class PrefillEngine:
    """A prefill engine and the prompts that it was asked for."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        defaults: RequestDefaults,
        machine: Machine,
        config: EngineConfig,
        number: int,
    ) -> None:
        self._jobs: list[TraceRequest] = []
        self._on_end: list[Callable[[float], None]] = []
        factory = FleetFactory(trace, defaults, number)
        self.replay, _ = replay_of(self._jobs, factory, defaults, machine, config)
        self.replay.on_outputs = self._note_outputs
        self.pending_tokens = 0

    def ask(self, request: TraceRequest, now_ms: float, on_end: Callable[[float], None]) -> None:
        """Compute a prompt from `now_ms` on; on_end receives when that is done."""
        arrival_ms = max(now_ms, self._jobs[-1].arrival_ms if self._jobs else 0.0)
        self._jobs.append(replace(request, arrival_ms=arrival_ms, output_tokens=1))
        self._on_end.append(on_end)
        self.pending_tokens += request.prompt_tokens

    def _note_outputs(self, outputs: StepOutputs) -> None:
        for event in outputs.events:
            if event.finish_reason is not None:
                number = int(event.request_id)
                self.pending_tokens -= self._jobs[number].prompt_tokens
                self._on_end[number](self.replay.now_ms)


class PrefillLink(VirtualLink):
    """A decode engine's use of prefill engines."""

    def __init__(
        self,
        scheduler: Scheduler,
        tier: StoreMap,
        spec: RolesSpec,
        prefill: Sequence[PrefillEngine],
        requests: Sequence[TraceRequest],
        *,
        block_size: int,
        block_bytes: int,
        step_blocks: int,
        now_ms: Callable[[], float],
    ) -> None:
        super().__init__(
            scheduler,
            tier,
            block_size=block_size,
            block_ms=block_bytes / (spec.gb_per_s * 1e6),
            now_ms=now_ms,
        )
        self._spec, self._prefill, self._requests = spec, prefill, requests
        self._step_blocks = step_blocks
        self.num_fetches = self.num_local = 0

    def next_ms(self) -> float:
        """Return when blocks will have arrived, or until when that is open."""
        waits = [asked.ready_ms for asked in self._asked.values() if not asked.is_open]
        known_ms = min(waits, default=math.inf)
        if math.inf not in waits:
            return known_ms
        # A prompt is still computed: not beyond what its engine has come to.
        return min(known_ms, *(one.replay.now_ms for one in self._prefill if one.pending_tokens))

    def _begin(self, sequence: SequenceState, now_ms: float) -> Asked:
        chain = self._hand_overs.chain(sequence.request, sequence.token_ids)
        keys = self._hand_overs.lacking(chain)
        num, size = len(chain.digests), self._block_size
        moving_ms = 2 * self._spec.latency_ms + len(keys) * self._block_ms
        compute_ms = self._scheduler.speed.span_ms((num - len(keys)) * size, num * size)
        asked = Asked(ready_ms=math.inf)
        if keys and (self._spec.fetch == "always" or moving_ms < compute_ms):
            self._await(asked, keys)
            if 2 * len(asked.places) < len(keys):
                for place in asked.places:
                    self._tier.land(place, arrived=False)
                asked.places.clear()
        asked.is_open = not asked.places
        if asked.is_open:
            self.num_local += 1
            return asked
        self.num_fetches += 1
        engine = min(self._prefill, key=lambda one: one.pending_tokens)

        def on_end(ended_ms: float) -> None:
            num_blocks = len(asked.places)
            # The link was free for these blocks since the request began, or since the last ones.
            begun_ms = max(self._free_ms, now_ms + self._spec.latency_ms)
            last_ms = min(self._step_blocks, num_blocks) * self._block_ms
            whole_ms = begun_ms + num_blocks * self._block_ms
            self._free_ms = max(whole_ms, ended_ms + last_ms)
            asked.ready_ms = self._free_ms + self._spec.latency_ms

        request = self._requests[int(sequence.request.request_id)]
        engine.ask(request, now_ms + self._spec.latency_ms, on_end)
        return asked


@dataclass(slots=True, kw_only=True)
class RolesRun:
    """What the decode engines answered; busy_ms of both roles, and how prompts were computed."""

    run: Run
    prefill_busy_share: float
    decode_busy_share: float
    num_fetches: int
    num_local: int


def simulate_roles(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    spec: RolesSpec,
    *,
    prefill_machine: Machine | None = None,
    prefill_config: EngineConfig | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> RolesRun:
    """Run `requests` until all have ended.

    prefill_machine, prefill_config: of the prefill engines; None: the same. Raises SettingError
    where the machines were measured with different blocks.

    Raises what `simulate` raises.
    """
    prefill_machine = prefill_machine or machine
    if prefill_machine.token_bytes != machine.token_bytes:
        raise SettingError(
            f"a token takes {prefill_machine.token_bytes} bytes at {prefill_machine.name} "
            f"and {machine.token_bytes} at {machine.name}; measure both profiles with one model, "
            "--dtype and --kv-cache-dtype"
        )
    engines = [
        PrefillEngine(requests, defaults, prefill_machine, prefill_config or config, number)
        for number in range(spec.num_prefill)
    ]
    block_size, links = config.kv_block_tokens, []
    block_bytes = block_size * machine.token_bytes
    step_blocks = -(-prefill_machine.step_tokens_of(prefill_config or config) // block_size)
    decoding: list[TraceReplay] = []
    for number, part in enumerate(divided(requests, spec.num_decode, "turn")):

        def make_link(
            scheduler: Scheduler,
            tier: StoreMap,
            now_ms: Callable[[], float],
            part: Sequence[TraceRequest] = part,
        ) -> PrefillLink:
            return PrefillLink(
                scheduler,
                tier,
                spec,
                engines,
                part,
                block_size=block_size,
                block_bytes=block_bytes,
                step_blocks=step_blocks,
                now_ms=now_ms,
            )

        factory = FleetFactory(requests, defaults, spec.num_prefill + number)
        replay, link = replay_of(
            part,
            factory,
            defaults,
            machine,
            config,
            tier_blocks=machine.num_blocks(config),
            make_link=make_link,
        )
        assert isinstance(link, PrefillLink), "the engine has one"
        decoding.append(replay)
        links.append(link)
    _advance([one.replay for one in engines], decoding, should_stop)
    run = joined([replay.result for replay in decoding])
    end_ms = max(run.end_ms, 1e-9)
    return RolesRun(
        run=run,
        prefill_busy_share=sum(one.replay.busy_ms() for one in engines) / len(engines) / end_ms,
        decode_busy_share=run.busy_ms / end_ms,
        num_fetches=sum(link.num_fetches for link in links),
        num_local=sum(link.num_local for link in links),
    )


def _advance(
    prefill: Sequence[TraceReplay],
    decoding: Sequence[TraceReplay],
    should_stop: Callable[[], bool] | None,
) -> None:
    """Let the engine go on that is furthest behind, a prefill engine first, until all have ended.

    A prefill engine without prompts waits, whatever its clock says.
    """
    live = list(decoding)
    while live:
        if should_stop is not None and should_stop():
            for replay in live:
                replay.stop()
            return
        working = [one for one in prefill if one.has_more]
        behind = min([*working, *live], key=lambda one: one.now_ms)
        if not behind.advance():
            live.remove(behind)


def compare_roles(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    *,
    spec: RolesSpec,
    goals: Goals,
    prefill_machine: Machine | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return times of as many engines in all, each of both roles, and of the divided ones.

    prefill_machine: of the prefill engines; None: the machine of all others.
    """
    num_engines = spec.num_prefill + spec.num_decode
    fleet = Fleet(num_engines=num_engines, routing="turn", store=None)
    whole, _ = simulate_fleet(requests, defaults, machine, config, fleet, should_stop=should_stop)
    both = joined(whole)
    runs: list[dict[str, Any]] = []
    if both.finished:
        share = both.busy_ms / max(both.end_ms, 1e-9)
        runs.append(
            {
                "roles": f"{num_engines} of both roles"
                + (", as decode" if prefill_machine else ""),
                "complete": both.complete,
                "summary": summary_of(both, requests, goals),
                "busy": {"both": share},
                "num_fetches": 0,
            }
        )
    if both.complete:
        found = simulate_roles(
            requests,
            defaults,
            machine,
            config,
            spec,
            prefill_machine=prefill_machine,
            should_stop=should_stop,
        )
        if found.run.finished:
            runs.append(
                {
                    "roles": f"{spec.num_prefill} prefill, {spec.num_decode} decode",
                    "complete": found.run.complete,
                    "summary": summary_of(found.run, requests, goals),
                    "busy": {
                        "prefill": found.prefill_busy_share,
                        "decode": found.decode_busy_share,
                    },
                    "num_fetches": found.num_fetches,
                }
            )
    return {
        "bench": "simulate roles",
        "settings": {
            "machine": machine.name,
            "prefill_machine": (prefill_machine or machine).name,
            "num_requests": len(requests),
            "roles": asdict(spec),
            "goals": asdict(goals),
            "token_bytes": machine.token_bytes,
        },
        "complete": len(runs) == 2 and all(run["complete"] for run in runs),
        "runs": runs,
    }


def roles_text(outcome: Mapping[str, Any]) -> str:
    """Return the table of `compare_roles`."""
    settings = outcome["settings"]
    spec, goals = settings["roles"], settings["goals"]
    rows = []
    for one in outcome["runs"]:
        summary = one["summary"]
        ttft_s, tpot_s = summary["ttft_s"], summary["tpot_s"]
        rows.append(
            (
                one["roles"] + "*" * (not one["complete"]),
                *(f"{ttft_s[name]:.2f} s" for name in ("p50", "p99")),
                *(f"{1e3 * tpot_s[name]:.1f} ms" if tpot_s else "-" for name in ("p50", "p99")),
                f"{summary['goodput_per_s']:.3g}/s",
                ", ".join(f"{100 * share:.0f} %" for share in one["busy"].values()),
                str(one["num_fetches"]),
            )
        )
    headings = ("engines", "TTFT p50", "p99", "TPOT p50", "p99", "goodput", "busy", "fetches")
    return "\n".join(
        [
            f"{settings['machine']}: {settings['num_requests']} requests; a link of "
            f"{spec['gb_per_s']:g} GB/s and {spec['latency_ms']:g} ms into each decode engine",
            f"goal: first token within {goals['ttft_s']:g} s, {1e3 * goals['tpot_s']:g} ms per "
            "output token after it",
            table(headings, rows),
        ]
    )
