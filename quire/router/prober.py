"""Prober: active health of the replicas, by progress.

GET /health of a replica is 200 only while it makes progress. A replica that neither answers nor
streams is fenced after 1 to 2 s, or sooner where its beats stop as well (beats.py). One that
answers while its steps do not advance and its streams are silent is fenced after its stall time.
What is open there ends, and goes on elsewhere. All take longer while all replicas seem to be slow
(silence.py), and a prober that was late itself judges no silence. A silent replica is looked at
when its time is over, and not only with the next probe. A fenced replica is used again after its
health and its fingerprints (GET /v1/models) were read. Reads nothing else of a replica.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import Any

import msgspec

from quire.router.beats import BeatHealth, FleetBeats
from quire.router.faults import NoFiles, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.replica import ASLEEP, MAX_BEGINNING, REMOVED, Replica
from quire.router.silence import SilenceLimit
from quire.router.silence_report import SilenceReport
from quire.routing.engine_silence import MIN_SILENT_S, EngineSilence

# A replica that is paused may hold requests that it counts as open only later.
_PAUSED = "paused"
# States in which a replica takes no requests but finishes those it has.
_LEAVING = ("draining", _PAUSED)
# An answer without heartbeats may take so many times as long as a stream may be silent, while its
# replica works: it may have been lost although other requests are computed.
MAX_SILENCES = 10
_MODELS_EVERY_S = 30.0
# Answers to /v1/models without models.
_REFUSALS = (401, 403, 503)
# A server answers probes beside its engine, so it need not be waited for as long as for a step: a
# multiple of its longest answer lately, within these bounds; and longer than that answer at least.
MIN_ANSWER_S, ANSWER_S = 1.0, 2.0
_ANSWER_MULTIPLE = 4.0
_LONGEST_MULTIPLE = 1.5
_NUM_ANSWERS, _MIN_ANSWERS = 24, 8
# A probe waits for longer than a replica may be silent: one that is only slow answers it at last.
PROBE_S = 5.0
_SOON_S = 0.005
# How often it is checked that beats come.
_GLANCE_S = 0.1


class _Health(msgspec.Struct):
    ok: bool
    state: str
    reason: str = ""
    pending: int = 0
    steps_total: int = 0
    silent_ms: float = 0.0


class _Models(msgspec.Struct):
    entries: list[dict[str, Any]] = msgspec.field(name="data")


class Prober:
    """Probes all replicas of a fleet until it is cancelled. can_do_without: requests need none of
    them, so a silent one is given up even where no other works."""

    def __init__(self, fleet: Fleet, *, can_do_without: bool = False) -> None:
        self._fleet = fleet
        self._can_do_without = can_do_without
        self._settings = fleet.settings
        self._loop = asyncio.get_running_loop()
        self._answer_s = min(self._settings.stall_s, ANSWER_S)
        self._silence = SilenceLimit(fleet.log)
        # A replica that is slow, as after the failure of another one, has no late beats.
        self._beat_silence = SilenceLimit(fleet.log, together=1.0)
        self._asked_s: dict[Replica, float] = {}  # of the first probe without an answer since
        self._answer_times: dict[Replica, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_ANSWERS)
        )
        self._engines: dict[Replica, EngineSilence] = defaultdict(EngineSilence)
        self._look_s = 0.0  # when the first silent replica has been silent for too long
        self._read_models_s: dict[Replica, float] = {}
        self._heard_s: dict[Replica, float] = {}  # when it last said that it cannot serve
        self._silent_s: dict[Replica, float] = {}  # since when its engine is, by its own finding
        self._probing: dict[Replica, asyncio.Task[None]] = {}
        self._beats = FleetBeats(fleet, self._hear)
        self._report = SilenceReport(fleet, self._beats, fleet.log)

    async def run(self) -> None:
        """Probe until cancelled."""
        fleet, is_late = self._fleet, False
        try:
            while True:
                fleet.probe_now.clear()
                fleet.follow()
                for silence in (self._silence, self._beat_silence):
                    silence.tick(self._loop.time())
                    silence.keep(fleet.replicas.values())
                self._look_s = self._loop.time() + self._settings.probe_s
                self._note_failed()
                for replica in [*fleet.replicas.values(), *fleet.leaving()]:
                    if not is_late:
                        self._check_stall(replica)
                        self._check_answers(replica)
                        self._check_engine(replica)
                    self._begin_probe(replica)
                    if replica.is_up:
                        self._beats.follow(replica)
                self._forget_removed()
                is_late = await self._pause()
        finally:
            await self._beats.close()
            probing = list(self._probing.values())
            for task in probing:
                task.cancel()
            await asyncio.gather(*probing, return_exceptions=True)

    def _note_failed(self) -> None:
        """Let replicas that take over many requests of another be silent for longer."""
        for replica in self._fleet.replicas.values():
            if replica.num_handed_over > MAX_BEGINNING:
                self._silence.failed(replica, self._loop.time())
            replica.num_handed_over = 0

    def _forget_removed(self) -> None:
        self._beats.keep(self._fleet.replicas.values())
        of_replicas: tuple[dict[Replica, Any], ...]
        of_replicas = (self._answer_times, self._asked_s, self._read_models_s, self._engines)
        of_replicas += (self._heard_s, self._silent_s)
        for known in of_replicas:
            for replica in [one for one in known if one.state == REMOVED and not one.loads]:
                del known[replica]

    def _begin_probe(self, replica: Replica) -> None:
        if replica not in self._probing:
            task = asyncio.ensure_future(self._probe(replica))
            self._probing[replica] = task
            task.add_done_callback(lambda _: self._probing.pop(replica, None))

    async def _pause(self) -> bool:
        """Wait until the next round, with an eye on the beats; return whether it begins so late
        that what replicas have sent meanwhile may not have been read yet."""
        waiting = asyncio.ensure_future(self._fleet.probe_now.wait())
        late_s = 0.0
        try:
            while not waiting.done():
                until_s = min(self._look_s, self._loop.time() + _GLANCE_S)
                await asyncio.wait({waiting}, timeout=max(until_s - self._loop.time(), 0.0))
                now_s = self._loop.time()
                late_s = max(now_s - until_s, 0.0)
                if late_s < _GLANCE_S:
                    self._check_beats(now_s)
                if until_s == self._look_s:
                    break
        finally:
            waiting.cancel()
        await asyncio.sleep(0.02)  # failures of one replica come together
        return late_s > min(self._answer_s, MIN_ANSWER_S) / 2

    async def first_round(self) -> None:
        """Wait until each replica was probed once."""
        await asyncio.gather(*map(self._probe, self._fleet.replicas.values()))

    def _check_stall(self, replica: Replica) -> None:
        """Fence a replica with silent streams; cut streams without even heartbeats. An answer that
        has none is silent until its output: it is cut where its replica has nothing to compute, and
        after MAX_SILENCES."""
        now_s, reading, silence_s = self._loop.time(), [], self._settings.silence_s
        for load in list(replica.loads):
            if load.is_paused():
                continue
            heard_s = last_s = load.last_s()
            if load.is_new and not load.has_heartbeats:
                waits_s = load.began_s + (MAX_SILENCES - 1) * silence_s
                heard_s = max(last_s, min(replica.busy_s, waits_s))
            if now_s - heard_s > silence_s:
                why = f"no byte came for {now_s - last_s:.1f} s"
                load.cut(ReplicaFault(why, is_suspect=True))  # its connection is lost
            else:
                reading.append(load)
        # A fenced replica is judged by its probes.
        if replica.is_fenced or replica.said == _PAUSED or not reading:
            return
        stall_s = replica.stall_s(self._settings.stall_s, self._others_gap_s(replica))
        quiet_s = now_s - max(replica.progress_s, min(load.began_s for load in reading))
        limit_s = self._exceeded_s(replica, quiet_s, stall_s, now_s)
        if limit_s is not None:
            self._give_up(replica, now_s)
            self._report.given_up(replica, "progress", quiet_s, limit_s, now_s)
            self._fence(replica, "stalled", f"no progress for {quiet_s:.1f} s, limit {limit_s:.1f}")

    def _give_up(self, replica: Replica, now_s: float) -> None:
        """Note that a replica computes nothing: a step is the sign of its return."""
        replica.stalled_steps = replica.steps_total
        self._silence.given_up(replica, now_s)
        replica.breaker.stalled(now_s)

    def _check_answers(self, replica: Replica) -> None:
        """Fence a replica that neither answers a probe nor sends anything: it is stopped or gone,
        however long its steps may take. One with beats is neither: it gets the time of a stall."""
        asked_s = self._asked_s.get(replica)
        if replica.is_fenced or asked_s is None:
            return
        now_s, usual_s = self._loop.time(), self._answer_limit_s(replica)
        silent_s = self._beats.quiet_s(replica, now_s)
        if silent_s is not None and silent_s <= self._beats.limit_s(replica, usual_s):
            stall_s = replica.stall_s(self._settings.stall_s, self._others_gap_s(replica))
            usual_s = max(usual_s, stall_s)
        quiet_s = now_s - max(asked_s, replica.progress_s)
        limit_s = self._exceeded_s(replica, quiet_s, usual_s, now_s)
        if limit_s is not None:
            self._silence.given_up(replica, now_s)
            self._report.given_up(replica, "answers", quiet_s, limit_s, now_s)
            why = f"no answer to /health for {quiet_s:.1f} s, limit {limit_s:.1f}"
            self._fence(replica, "stalled", why)

    def _check_beats(self, now_s: float) -> None:
        """Fence replicas that are stopped: no beat, no event and no answer to a probe comes."""
        for replica in list(self._fleet.replicas.values()):
            quiet_s = self._beats.quiet_s(replica, now_s)
            if quiet_s is None or replica.is_fenced:
                continue
            limit_s = self._beats.limit_s(replica, self._answer_limit_s(replica))
            if quiet_s <= limit_s / 2:
                self._report.ended(replica)
                continue
            # Without output it may be the time at which a request was sent.
            heard_s = max((one.last_s() for one in replica.loads if not one.is_new), default=0.0)
            quiet_s = min(quiet_s, now_s - max(heard_s, replica.progress_s))
            if quiet_s <= limit_s / 2:
                continue
            self._begin_probe(replica)
            unanswered_s = now_s - self._asked_s.get(replica, now_s)
            others_live = self._others_beat(replica, limit_s, now_s) or self._others_work(
                replica, quiet_s, now_s
            )
            limit_s *= self._beat_silence.factor_of(replica, now_s, others_work=True)
            if min(quiet_s, 2 * unanswered_s) <= limit_s:
                continue
            if not others_live:  # nothing is gained by haste: _check_answers decides
                self._report.kept(replica, "beats", quiet_s, limit_s, now_s)
            else:
                self._report.given_up(replica, "beats", quiet_s, limit_s, now_s)
                for silence in (self._silence, self._beat_silence):
                    silence.given_up(replica, now_s)
                replica.has_stopped = True
                self._beats.has_stopped(replica)
                why = f"no sign of life for {quiet_s:.1f} s, limit {limit_s:.1f}"
                self._fence(replica, "stalled", why)

    def _others_beat(self, replica: Replica, lately_s: float, now_s: float) -> bool:
        """Return whether another replica that can continue its streams has just had a beat: one
        with an open breaker takes none, and they would wait for this one's return."""
        able = [one for one in self._fleet.equals(replica) if one.breaker.allows(now_s)]
        times = (self._beats.quiet_s(one, now_s) for one in able)
        return any(quiet_s is not None and quiet_s < lately_s / 2 for quiet_s in times)

    def _hear(self, replica: Replica, health: BeatHealth) -> None:
        """Act on what a replica says of itself, without a probe."""
        self._silent_s.pop(replica, None)
        if health.ok and health.silent_ms and not replica.is_fenced:
            self._hear_silence(replica, health.silent_ms / 1000)
        elif health.ok or health.state == ASLEEP or replica.is_fenced:
            if not (health.ok and replica.is_up):
                self._fleet.probe_now.set()
        elif health.state in _LEAVING:
            self._leaves(replica, health.state, health.reason)
        else:
            self._heard_s[replica] = self._loop.time()
            state = "stalled" if health.state == "ready" else health.state
            self._fence(replica, state, health.reason)

    def _hear_silence(self, replica: Replica, silent_s: float) -> None:
        """Fence a replica that finds its engine to be stopped; later where others are slow, too, or
        were lately."""
        now_s = self._loop.time()
        if (
            self._others_work(replica, silent_s, now_s)
            and self._silence.factor_of(replica, now_s, others_work=True) == 1.0
        ):
            self._fence_silent_engine(replica, silent_s, None, now_s)
        else:
            self._silent_s[replica] = now_s - silent_s
            self._check_engine(replica)

    def _check_engine(self, replica: Replica) -> None:
        """Fence a replica with an engine that has been silent, by its own finding, for 1 s times
        the factor. The limit by which it finds that adapts to false alarms, so it is not
        multiplied."""
        since_s, now_s = self._silent_s.get(replica), self._loop.time()
        beat_s = self._beats.quiet_s(replica, now_s)
        if replica.is_fenced or since_s is None or beat_s is None or beat_s > MIN_SILENT_S / 2:
            return  # the end of the silence may not have been read
        silent_s = now_s - since_s  # events relayed since then left the engine earlier
        limit_s = self._exceeded_s(replica, silent_s, MIN_SILENT_S, now_s)
        if limit_s is not None:
            self._fence_silent_engine(replica, silent_s, limit_s, now_s)

    def _fence_silent_engine(
        self, replica: Replica, silent_s: float, limit_s: float | None, now_s: float
    ) -> None:
        """Fence a replica by its own finding; see _give_up_engine."""
        self._silent_s.pop(replica, None)
        self._heard_s[replica] = now_s
        self._engines[replica].report(silent_s)
        self._give_up_engine(replica, silent_s, limit_s, now_s)

    def _leaves(self, replica: Replica, state: str, reason: str) -> None:
        """Note that a replica takes no requests and finishes those it has."""
        if replica.state not in (state, REMOVED):
            self._fleet.log.event("replica takes no requests", replica=replica.name, state=state)
        replica.state, replica.reason = state, reason

    def _exceeded_s(
        self, replica: Replica, quiet_s: float, usual_s: float, now_s: float
    ) -> float | None:
        """Return the exceeded limit, or None and schedule the next check."""
        others_work = quiet_s <= usual_s or self._others_work(replica, quiet_s, now_s)
        limit_s = usual_s * self._silence.factor_of(replica, now_s, others_work=others_work)
        if quiet_s > limit_s:
            return limit_s
        self._look_s = min(self._look_s, now_s + limit_s - quiet_s + _SOON_S)
        return None

    def _others_work(self, replica: Replica, quiet_s: float, now_s: float) -> bool:
        """Return whether another replica, which can continue its streams, has made progress in the
        last half of its silence. One without requests does so with each probe; one that is started
        on demand may take the place of the only one."""
        lately_s = max(quiet_s / 2, 1.5 * self._settings.probe_s)
        is_replaced = self._settings.wait_s > 0 and len(self._fleet.replicas) == 1
        return (
            self._can_do_without
            or is_replaced
            or any(
                one.breaker.allows(now_s) and now_s - one.progress_s < lately_s
                for one in self._fleet.equals(replica)
            )
        )

    def _others_gap_s(self, replica: Replica) -> float:
        """Return the longest of the usual gaps of the other replicas, while that is needed."""
        if replica.has_history:
            return 0.0
        others = [one for one in self._fleet.replicas.values() if one is not replica]
        return max((one.usual_gap_s for one in others), default=0.0)

    def _answer_limit_s(self, replica: Replica) -> float:
        """Return how long a probe may be without an answer."""
        times = self._answer_times[replica]
        if len(times) < _MIN_ANSWERS:
            return self._answer_s
        longest_s = max(times)
        usual_s = min(max(_ANSWER_MULTIPLE * longest_s, MIN_ANSWER_S), self._answer_s)
        return max(usual_s, _LONGEST_MULTIPLE * longest_s)

    @property
    def _probe_limit_s(self) -> float:
        return max(self._settings.stall_s / 2, PROBE_S) * self._silence.factor

    async def _probe(self, replica: Replica) -> None:
        asked_s = self._loop.time()
        self._asked_s.setdefault(replica, asked_s)
        try:
            try:
                async with asyncio.timeout(self._probe_limit_s):
                    status, health = await self._get(replica, b"/health", _Health)
            except TimeoutError:
                if replica.is_fenced:  # another is for _check_answers
                    self._fence(replica, "stalled", "it does not answer /health")
                return
            if not replica.has_stopped:  # else it was asked before that was over
                self._answer_times[replica].append(self._loop.time() - asked_s)
            self._asked_s.pop(replica, None)
            if asked_s > self._heard_s.get(replica, 0.0):  # else it has said that this is over
                await self._judge(replica, status, health)
        except NoFiles:  # it cannot be seen now whether the replica works
            self._asked_s.pop(replica, None)
            replica.progress_s = self._loop.time()
        except ReplicaFault as fault:
            is_quiet = self._loop.time() - replica.progress_s > self._settings.probe_s
            if replica.said != "unreachable" and (is_quiet or replica.is_fenced):
                self._fence(replica, "unreachable", str(fault))
        except (msgspec.MsgspecError, TimeoutError) as error:
            self._fence(replica, "invalid", _why_invalid(replica, error))

    async def _judge(self, replica: Replica, status: int, health: _Health) -> None:
        now_s = self._loop.time()
        has_fewer = health.steps_total < replica.steps_total
        if has_fewer and not replica.had_fewer_steps:
            # One of several API processes may know of fewer steps: the next answer decides.
            replica.had_fewer_steps = True
            return
        replica.had_fewer_steps = False
        if has_fewer:
            self._fence(replica, "restarted", "it has begun anew; it is checked again")
        is_idle = not (health.pending or self._has_output(replica))
        has_computed = health.steps_total != replica.steps_total
        if has_computed or is_idle:
            replica.progressed(now_s)
        if has_computed or health.pending or health.state == _PAUSED:
            replica.busy_s = now_s
        replica.steps_total = health.steps_total
        is_asleep = health.state == ASLEEP
        if is_asleep:
            replica.steps_total = -1  # the next engine begins anew
            replica.progressed(now_s)
        elif not health.ok or status != 200:
            if health.state in _LEAVING:
                self._leaves(replica, health.state, health.reason)
                if replica.state == REMOVED:
                    replica.unfence()
                return
            state = "stalled" if health.state == "ready" else health.state
            self._fence(replica, state, health.reason)
            return
        if self._has_silent_engine(replica, health.silent_ms / 1000, now_s):
            return
        state = ASLEEP if is_asleep else "ready"
        if replica.state == REMOVED:  # it only ends what it has
            replica.state = state
            replica.unfence()
            return
        old = now_s - self._read_models_s.get(replica, -_MODELS_EVERY_S) >= _MODELS_EVERY_S
        if (replica.is_fenced or old) and not await self._read_models(replica):
            return
        if replica.state == REMOVED:  # meanwhile
            return
        if not replica.is_up:
            self._fleet.log.event(
                "replica ready", replica=replica.name, models=",".join(replica.models)
            )
            replica.progressed(now_s)
        # A server may answer for an engine that is stopped: without a step it is tried by one
        # request at a time.
        was_stopped = replica.stalled_steps != -1
        is_stopped = health.steps_total == replica.stalled_steps
        was_away = replica.state not in ("ready", ASLEEP)  # and not only suspected
        if not is_stopped:
            self._silence.works(replica, now_s)
            self._beat_silence.works(replica, now_s)
        if not is_stopped and (was_away or was_stopped):
            if was_stopped:
                replica.breaker.succeeded()
            else:
                replica.breaker.returned()
            replica.stalled_steps = -1
        replica.state, replica.reason = state, ""
        replica.unfence()
        self._fleet.became_available()

    def _has_output(self, replica: Replica) -> bool:
        """Return whether streams with output are open at a replica: it is not idle then, whatever
        it reports. Of several API processes each reports what it has itself."""
        if self._fleet.pool(replica).has_processes:
            return False
        return any(not (one.is_new or one.is_paused()) for one in replica.loads)

    def _has_silent_engine(self, replica: Replica, silent_s: float, now_s: float) -> bool:
        """Return whether the engine behind a server that answers is stopped; fence it then, and
        until it sends something again."""
        engine = self._engines[replica]
        engine.report(silent_s)
        known_s, limit_s = engine.known_s, None
        if replica.is_fenced:
            is_silent = replica.said == "stalled" and known_s > MIN_SILENT_S / 2
        else:
            # A server that answers late reads its engine's messages late.
            usual_s = max(engine.usual_s, self._answer_limit_s(replica))
            limit_s = self._exceeded_s(replica, known_s, usual_s, now_s)
            is_silent = limit_s is not None
        if is_silent:
            self._give_up_engine(replica, known_s, limit_s, now_s)
        return is_silent

    def _give_up_engine(
        self, replica: Replica, silent_s: float, limit_s: float | None, now_s: float
    ) -> None:
        """limit_s: None where the server has judged the silence by its own limit."""
        if not replica.is_fenced:
            self._give_up(replica, now_s)
            self._report.given_up(replica, "engine", silent_s, limit_s, now_s)
        self._fence(replica, "stalled", f"its engine has sent nothing for {silent_s:.1f} s")

    async def _read_models(self, replica: Replica) -> bool:
        """Read the fingerprints; return whether they could be read."""
        async with asyncio.timeout(self._probe_limit_s):
            status, models = await self._get(replica, b"/v1/models", _Models, none_at=_REFUSALS)
        if status == 503:  # it was ready when it answered /health
            self._fence(replica, "dead", "/v1/models answers 503, as where its engine is down")
            return False
        if models is None:
            reason = f"/v1/models answers {status}; give the replicas' key (--replica-key-file)"
            self._fence(replica, "locked", reason)
            return False
        found = {
            str(entry["id"]): str(entry.get("system_fingerprint", ""))
            for entry in models.entries
            if "id" in entry
        }
        if replica.models and found != replica.models:
            self._fleet.log.warning("models of a replica changed", replica=replica.name)
            self._fence(replica, "changed", "it serves another model now; it is checked again")
        replica.models, replica.model_entries = found, models.entries
        self._read_models_s[replica] = self._loop.time()
        return True

    def _fence(self, replica: Replica, state: str, reason: str) -> None:
        if replica.said == state and replica.is_fenced and not replica.loads:
            replica.reason = reason
            return
        replica.fence(state, reason)

    async def _get(
        self, replica: Replica, path: bytes, kind: Any, *, none_at: tuple[int, ...] = ()
    ) -> tuple[int, Any]:
        headers = self._fleet.own_headers(replica)
        status, body = await self._fleet.pool(replica).request(b"GET", path, headers)
        if status in none_at:
            return status, None
        return status, msgspec.json.decode(body, type=kind)


def _why_invalid(replica: Replica, error: Exception) -> str:
    """Return what is wrong with a replica after an answer that cannot be read."""
    url = replica.url
    advice = (
        f"give the server's address without a path: {url.shown}"
        if url.path
        else "give the address of a server of Quire"
    )
    return f"its /health is not that of a server of Quire ({error}); {advice}"
