"""Placement: the replica for the next attempt of one request, and the wait for one.

A request without output goes where the policy sends it; where its replica has failed or drains, it
waits for another one. A stream that has output goes on at a replica of its fingerprint, and streams
that are interrupted at one time are placed in the order of their last events. Sends nothing. Always
holds: a request is tried on no third replica after two failed with it at one place (failures.py);
until its next event it waits no longer than resume_s in all, time at replicas not counted.
"""

from __future__ import annotations

import asyncio

from quire.router.answer_state import AnswerState
from quire.router.attempt import Attempt
from quire.router.faults import ClientGone, HasNoRoom, NoFiles, ProcessStopped, ReplicaFault
from quire.router.hedging import Hedger
from quire.router.replica import ASLEEP, Replica

_RETRY_EVERY_S = 0.25
# So long a stream waits for another replica before it goes on at the one that failed.
_RETURN_S = 1.0
# A request that all replicas refuse is sent again after 0.25, 0.5, 1, 2, 2, ... s.
_MAX_RETRY_EVERY_S = 2.0


class Placement:
    """Of one request. why_refused: by the last replica since one failed with it; "" for none.
    is_displaced: a replica that had the request has failed or drains."""

    def __init__(self, state: AnswerState) -> None:
        self._state = state
        self._fleet = state.parts.fleet
        self._metrics = state.parts.metrics
        self._features = state.parts.features
        self._loop = asyncio.get_running_loop()
        self._resume_until_s = self._left_s = 0.0
        self._wait_began_s = self._chosen_s = 0.0
        self._after_s = -1.0  # the last event before these waits
        self._is_refused = self._was_held = False
        self._draining: set[Replica] = set()
        self.why_refused = ""
        self.is_displaced = False
        self._needs_budget = False  # the request may be the cause of the last failure
        self._has_moved = False
        self._turn: int | None = None  # of MovePlaces, until an attempt has used it
        self._failed_s = 0.0
        self._full: set[Replica] = set()  # refused it since the last pause
        self._pause_s = _RETRY_EVERY_S

    def failed(self, fault: ReplicaFault) -> None:
        """Note that a replica has failed: from now on another one is waited for as long as is
        still allowed. The time at a replica does not count, unless that was full or could not be
        reached: nothing else bounds their number."""
        self._displace()
        self._is_refused = isinstance(fault, HasNoRoom | NoFiles)
        self._needs_budget = fault.is_suspect and not fault.is_shared
        has_worked = fault.is_suspect or fault.is_drain or isinstance(fault, ProcessStopped)
        if has_worked or not self._state.continuation.has_failed:
            self._begin_wait()
        else:
            self.why_refused = str(fault)

    def refused(self, replica: Replica, why: str, *, is_drain: bool) -> None:
        """Note that a replica was full, or drains: the next one is not asked at once. The first
        time that it drains, the time there does not count."""
        self._is_refused = True
        self._full.add(replica)
        self._state.leave_place()
        if is_drain:
            self._displace()
        if is_drain and replica not in self._draining:
            self._draining.add(replica)
            self._begin_wait()
        else:
            self.why_refused = why

    def begin_anew(self) -> None:
        """Note that another model is asked: no replica has failed with that or refused it."""
        self.is_displaced = self._needs_budget = self._is_refused = self._has_moved = False
        self.why_refused, self._pause_s = "", _RETRY_EVERY_S
        self._full.clear()
        self._draining.clear()
        self._after_s = -1.0
        self._state.leave_place()

    def _displace(self) -> None:
        self.is_displaced = True
        self._failed_s = self._loop.time()
        self._state.leave_place()

    def _begin_wait(self) -> None:
        """Allow what is left of the time to wait, or all of it after an event."""
        last_s = self._state.continuation.last_s
        if last_s != self._after_s:
            self._after_s, self._left_s = last_s, self._fleet.settings.resume_s
        else:
            self._left_s -= self._chosen_s - self._wait_began_s
        self._wait_began_s = self._chosen_s = self._loop.time()
        # Where a replica is able, the request moves however long it has waited before.
        self._resume_until_s = self._wait_began_s + max(self._left_s, _RETRY_EVERY_S)
        self.why_refused = ""

    async def next(self) -> Replica | None:
        """Return the next replica to try; None where the request ends here."""
        state = self._state
        if state.failures.are_final:
            return None
        if state.client.started:
            return await self._successor()
        if state.home is not None:
            is_able = state.home.is_available(self._loop.time())
            return state.home if is_able and state.home not in state.tried else None
        if self.is_displaced:
            return await self._displaced()
        found = await self._place()
        if found is not None and state.tried:
            if not state.parts.budget.take():
                return None
            self._metrics.retries.labels("refused").inc()
        return found

    def spare(self, hedger: Hedger, first: Replica) -> Replica | None:
        """Return a replica for a hedge; None where there is none or the budget is used up. One that
        sleeps is none: it would wake beside those that are awake, and late."""
        state = self._state
        asleep = {one for one in self._fleet.replicas.values() if one.state == ASLEEP}
        request, cost_tokens = state.request, hedger.cost_tokens(state.request)
        found = self._fleet.choose(
            state.key,
            request.model,
            fingerprint=first.fingerprint(request.model),
            exclude={first, *state.tried, *asleep},
            max_long=state.max_long,
        )
        if found is None:
            self._metrics.hedges.labels("no_replica").inc()
        elif not hedger.budget.take(cost_tokens):
            self._metrics.hedges.labels("no_budget").inc()
            return None
        else:
            self._metrics.hedged_tokens.inc(cost_tokens)
        return found

    def other(self) -> Replica | None:
        """Return another replica for a request that one has answered by a final error; None without
        one that is awake, or without budget."""
        state, replicas = self._state, self._fleet.replicas.values()
        exclude = state.tried | state.failures.at | state.failures.barred(replicas)
        exclude.update(one for one in replicas if one.state == ASLEEP)
        found = None
        if state.home is None:
            found = self._fleet.choose(
                state.key, state.request.model, exclude=exclude, max_long=state.max_long
            )
        if found is None or not state.parts.budget.take():
            return None
        self._metrics.retries.labels("final_error").inc()
        return found

    def attempt(self, replica: Replica) -> Attempt:
        """Return an attempt at a replica, with what it computes there."""
        state = self._state
        found = Attempt(self._fleet, replica, state.request, state.client, is_long=state.is_long)
        self._fleet.weigh(replica, state.key, found.load)
        if state.request.brings_blocks:  # its prompt is computed
            found.load.new_tokens = 0
        return found

    async def _place(self) -> Replica | None:
        """Return an available replica; a long prompt waits for one with room."""
        state, lanes = self._state, self._features.lanes
        model = state.request.model

        def choose() -> Replica | None:
            return self._fleet.choose(
                state.key, model, exclude=state.tried, max_long=state.max_long
            )

        await self._let_streams_go_first()
        if self._fleet.settings.wait_s:
            await self._wait_for_first(model)
        if lanes is None or not state.is_long:
            return choose()
        with state.parts.admission.waiting(state.request.expected_tokens):
            return await lanes.place(
                self._fleet,
                choose,
                lambda: self._fleet.is_served(model, state.tried),
                lambda: state.client.is_gone,
            )

    async def _let_streams_go_first(self) -> None:
        """Wait a moment, once, while many streams continue."""
        request = self._state.request
        if not (self._was_held or request.route.is_free):
            self._was_held = await self._fleet.resumes.hold(request.model)

    async def _displaced(self) -> Replica | None:
        """Return another replica for a request without output; waits for one for some time.

        What may have made its replica fail needs the budget of retries. Others move at once, and a
        second time once there is a place.
        """
        state = self._state
        if self._needs_budget:
            self._needs_budget = False
            if not state.parts.budget.take():
                return None
        with state.parts.admission.waiting(state.request.expected_tokens):
            await self._let_streams_go_first()
            return await self._successor()

    async def _wait_for_place(self) -> bool:
        """Wait for a place to move again; return whether there was one in time."""
        state, places = self._state, self._state.parts.admission.places
        if self._turn is None:
            self._turn = places.turn()
        place = places.ask(self._turn)
        try:
            while not place.done():
                self._check_client()
                left_s = self._resume_until_s - self._loop.time()
                if left_s <= 0:
                    return False
                with self._fleet.waiting():
                    await asyncio.wait({place}, timeout=min(left_s, _RETRY_EVERY_S))
            state.has_place = True
        finally:
            if not state.has_place:
                places.withdraw(place)
        return True

    async def _wait_for_first(self, model: str) -> None:
        """Wait while no replica is available, such as one that is still to be started."""
        fleet = self._fleet
        until_s = self._loop.time() + fleet.settings.wait_s
        with fleet.waiting():
            while not fleet.is_served(model) and self._state.choice.may_be_served():
                self._check_client()
                left_s = until_s - self._loop.time()
                if left_s <= 0:
                    return
                await fleet.wait_for_change(min(left_s, _RETRY_EVERY_S))

    async def _successor(self) -> Replica | None:
        """Return a replica that can continue the stream, or compute anew a request without output;
        waits for one for some time."""
        state, fleet = self._state, self._fleet
        request, started, is_counted = state.request, state.client.started, False
        if started and state.why_lost:
            return None
        if started and self._is_refused:  # the successor was full
            self._is_refused = False
            self._metrics.resume_retries.labels("refused").inc()
            await fleet.wait_for_change(_RETRY_EVERY_S)
        while True:
            if started:
                await fleet.resumes.turn(state.continuation.last_s)
            self._check_client()
            now_s = self._loop.time()
            if now_s > self._resume_until_s:
                return None
            if (found := self._able_successor(now_s)) is not None:
                if started:
                    self._metrics.resumed.inc()
                    state.continuation.chosen(request.model)
                elif self._has_moved and not state.has_place:
                    if not await self._wait_for_place():
                        return None
                    continue  # another one may be the better choice now
                else:
                    self._has_moved, self._turn = True, None
                    is_refused, self._is_refused = self._is_refused, False
                    self._metrics.retries.labels("refused" if is_refused else "failed").inc()
                self._chosen_s = self._loop.time()
                return found
            state.leave_place()
            left_s = self._resume_until_s - now_s
            # Where replicas are started on demand, one that is not known yet may have it.
            is_coming = fleet.settings.wait_s > 0
            is_known = not state.has_events or fleet.has_fingerprint(
                request.model, state.fingerprint
            )
            if left_s <= 0 or not (is_coming or is_known):
                return None
            with fleet.waiting():
                if self._full and not started:
                    await self._pause()
                else:
                    if started and not is_counted:
                        is_counted = True
                        self._metrics.resume_retries.labels("no_replica").inc()
                    await fleet.wait_for_change(min(left_s, _RETRY_EVERY_S))

    async def _pause(self) -> None:
        """Wait after all replicas have refused a request without output: longer each time, but
        only until there is another one."""
        until_s = min(self._loop.time() + self._pause_s, self._resume_until_s)
        self._pause_s = min(2 * self._pause_s, _MAX_RETRY_EVERY_S)
        while (left_s := until_s - self._loop.time()) > 0:
            await asyncio.sleep(min(left_s, _RETRY_EVERY_S))
            self._check_client()
            if self._able_successor(self._loop.time()) is not None:
                return
        self._full.clear()

    def _able_successor(self, now_s: float) -> Replica | None:
        """Return a replica that can go on now; one that failed is the last choice: it was fenced
        and checked since."""
        state, fleet = self._state, self._fleet
        started = state.client.started
        barred = state.failures.barred(fleet.replicas.values())
        away_s = state.continuation.since_s(now_s) if started else now_s - self._failed_s
        may_return = state.failures.are_at_two or away_s > _RETURN_S
        if not started:
            barred |= self._full
        if state.home is not None:  # others do not have the response that it needs
            barred.update(one for name, one in fleet.replicas.items() if name != state.home.name)
            may_return = True
        others = barred | state.failures.at
        for exclude in (others, barred) if may_return else (others,):
            found = fleet.choose(
                state.key,
                state.request.model,
                fingerprint=state.fingerprint,
                exclude=exclude,
                max_long=None if started else state.max_long,
                spreads=started,
            )
            if found is not None:
                return found
        return None

    def _check_client(self) -> None:
        if self._state.client.is_gone:
            raise ClientGone
