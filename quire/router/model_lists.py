"""ModelLists: the models of all replicas as one list, in OpenAI's and in Ollama's form.

OpenAI's list is put together from what the prober has read; Ollama's is asked for at one replica of
each set of models. Aliases and cascades are listed beside the models. Always holds: each name is
listed once; an alias comes before a model of the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.router.api_forms import objects_in
from quire.router.client_response import HOP_BY_HOP
from quire.router.faults import Refusal, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.model_names import ModelNames
from quire.router.replica import Replica

_ASK_S = 5.0


class ModelLists:
    """cascades: their names."""

    def __init__(self, fleet: Fleet, names: ModelNames, cascades: Sequence[str]) -> None:
        self._fleet = fleet
        self._names = names
        self._cascades = cascades

    def openai(self, name: str) -> Any:
        """Return all models, or the one of that name. Raises Refusal."""
        served: dict[str, dict[str, Any]] = {}
        for replica in self._fleet.replicas.values():
            for entry in replica.model_entries:
                served.setdefault(str(entry.get("id")), entry)
        entries = {one["id"]: one for one in self._names.entries(served)}
        for cascade in self._cascades:
            entries[cascade] = {"id": cascade, "object": "model", "created": 0, "owned_by": "quire"}
        entries |= {id_: entry for id_, entry in served.items() if id_ not in entries}
        if not name:
            return {"object": "list", "data": list(entries.values())}
        if name in entries:
            return entries[name]
        listed = " or ".join(map(repr, entries)) or "none yet"
        raise Refusal(
            404,
            "model_not_found",
            f"model {name[:200]!r} is not served here; served are: {listed}",
            param="model",
        )

    async def ollama(
        self, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of a list of Ollama's API. query: for replicas to refuse. Raises
        Refusal."""
        target = path.encode() + (b"?" + query if query else b"")
        now_s = asyncio.get_running_loop().time()
        of_models: dict[frozenset[str], Replica] = {}
        for replica in self._fleet.replicas.values():
            if replica.is_available(now_s):
                of_models.setdefault(frozenset(replica.models), replica)
        answers = await asyncio.gather(
            *(self._ask(replica, target, headers) for replica in of_models.values())
        )
        found: dict[str, Any] = {}
        for status, body in answers:
            if status != 200:
                continue
            for entry in _entries(body):
                found.setdefault(str(entry.get("name")), entry)
        if not found:
            refused = next((one for one in answers if one[0]), None)
            if refused is not None:  # such as a missing key
                return refused
            raise Refusal(
                503,
                "no_replica",
                f"no replica is available: {self._fleet.why_none()}; try again later",
                retry_after_s=1.0,
            )
        found = self._aliased(found) | found
        return 200, msgspec.json.encode({"models": list(found.values())})

    def _aliased(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry for each alias: that of its first target."""
        aliased = {}
        for name in self._names.names:
            target = next((one for one in self._names.targets(name) if one in found), None)
            if target is not None:
                aliased[name] = {**found[target], "name": name, "model": name}
        return aliased

    async def _ask(
        self, replica: Replica, target: bytes, headers: list[tuple[bytes, bytes]]
    ) -> tuple[int, bytes]:
        """Return status and body; status 0 where there was no answer."""
        pool = self._fleet.pool(replica)
        kept = [header for header in headers if header[0] not in HOP_BY_HOP]
        try:
            async with asyncio.timeout(_ASK_S):
                return await pool.request(b"GET", target, kept)
        except (ReplicaFault, TimeoutError):
            return 0, b""


def _entries(body: bytes) -> list[dict[str, Any]]:
    try:
        return objects_in(msgspec.json.decode(body)["models"])
    except (msgspec.MsgspecError, TypeError, KeyError):
        return []
