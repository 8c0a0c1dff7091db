"""StoredResponses: which replica has the response with an id.

A stored response is at the replica that created it. The router remembers the ids that it passed on;
an id that it does not know (it was restarted, or another router passed it on) is asked for at all
available replicas, with the client's own headers. Always holds: an id is remembered for the key
that created it only, so no client learns of the responses of others.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

from quire.router.api_forms import objects_in
from quire.router.client_response import HOP_BY_HOP
from quire.router.faults import Refusal, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.replica import Replica
from quire.router.routed_request import RoutedRequest
from quire.router.routes import INPUT_TOKENS, RESPONSES

_MAX_IDS = 65_536
_ASK_S = 5.0
_ID = re.compile(r"resp_[0-9a-f]{24}")
_ITEM = re.compile(r"[a-z]{2,3}_([0-9a-f]{24})[io][0-9]{1,5}")
_CREATED = re.compile(rb'"id": ?"(resp_[0-9a-f]{24})"')
# The first event of a stream has the id.
MAX_START_BYTES = 65_536


def created_id(body: bytes) -> str:
    """Return the id of the response that a body or the start of a stream has; "" without one."""
    found = _CREATED.search(body)
    return found[1].decode() if found is not None else ""


def needed_id(request: RoutedRequest) -> str:
    """Return the id of the stored response that a request needs; "" for none."""
    if request.path not in (RESPONSES, INPUT_TOKENS):
        _, below, rest = request.path.partition(RESPONSES + "/")
        return rest.partition("/")[0] if below else ""
    previous = request.fields.get("previous_response_id")
    if isinstance(previous, str) and previous:
        return previous
    for item in objects_in(request.fields.get("input")):
        if item.get("type") == "item_reference":
            found = _ITEM.fullmatch(str(item.get("id")))
            if found is not None:
                return f"resp_{found[1]}"
    return ""


class StoredResponses:
    """The replicas of the newest responses, by name: one that returns still has them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._holders: OrderedDict[tuple[bytes, str], str] = OrderedDict()

    def note(self, key: bytes, id_: str, replica: Replica) -> None:
        """Note that a replica has created a response for a key."""
        self._holders[key, id_] = replica.name
        self._holders.move_to_end((key, id_))
        while len(self._holders) > _MAX_IDS:
            self._holders.popitem(last=False)

    async def holder(self, key: bytes, id_: str, request: RoutedRequest) -> Replica | None:
        """Return the replica with a response; None where any replica can say that there is none.

        Raises Refusal where the response is, or may be, at a replica that is not available.
        """
        now_s = asyncio.get_running_loop().time()
        name = self._holders.get((key, id_))
        if name is not None:
            known = self._fleet.replicas.get(name)
            if known is None:
                raise _unavailable(id_, f"it is stored at {name}, which was removed")
            if known.is_available(now_s):
                return known
            raise home_unavailable(id_, known)
        if not _ID.fullmatch(id_):
            return None
        replicas = list(self._fleet.replicas.values())
        able = [one for one in replicas if one.is_available(now_s)]
        if len(replicas) == 1 and able:
            return able[0]
        answers = await asyncio.gather(*(self._has(one, id_, request) for one in able))
        for replica, has in zip(able, answers, strict=True):
            if has:
                self.note(key, id_, replica)
                return replica
        silent = [one for one, has in zip(able, answers, strict=True) if has is None]
        silent += [one for one in replicas if one not in able]
        if not silent:
            return None
        states = "; ".join(f"{one.name} is {_state(one)}" for one in silent[:4])
        raise _unavailable(id_, f"no available replica has it, and it may be stored where {states}")

    async def _has(self, replica: Replica, id_: str, request: RoutedRequest) -> bool | None:
        """Return whether a replica has a response; None where it did not answer."""
        pool = self._fleet.pool(replica)
        drop = HOP_BY_HOP | {b"content-type"}
        headers = [header for header in request.headers if header[0] not in drop]
        target = f"{RESPONSES}/{id_}".encode()
        try:
            async with asyncio.timeout(_ASK_S):
                status, _ = await pool.request(b"GET", target, headers)
        except (ReplicaFault, TimeoutError):
            return None
        return status == 200 if status < 500 else None


def home_unavailable(id_: str, home: Replica) -> Refusal:
    """Return the refusal of a request while its only replica is away."""
    return _unavailable(id_, f"it is stored at {home.name}, which is {_state(home)}")


def _state(replica: Replica) -> str:
    return f"{replica.state} ({replica.reason})" if replica.reason else replica.state


def _unavailable(id_: str, why: str) -> Refusal:
    return Refusal(
        503,
        "response_unavailable",
        f"response {id_} cannot be read now: {why}; try again later, or send the whole "
        "conversation as input",
        retry_after_s=1.0,
    )
