"""The part of NIXL's compiled bindings that quire uses, within one process.

Agents find each other by their metadata; a read copies bytes. As in the library, only registered
memory can be read or written, and only of agents with metadata that was loaded.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

NIXL_READ = "read"
NIXL_IN_PROG, NIXL_SUCCESS = 1, 0
NIXL_THREAD_SYNC_STRICT = "strict"
DRAM_SEG = "dram"
_AGENTS: dict[bytes, nixlAgent] = {}


class nixlBackendError(Exception):
    pass


class nixlAgentConfig:
    """pthrDelay: microseconds; at 0 the library's thread never waits."""

    def __init__(self, *settings: Any) -> None:
        self.settings = settings
        self.pthrDelay = 0


class nixlRegDList:
    def __init__(self, kind: str, descriptors: list[tuple[int, int, int, str]]) -> None:
        self.spans = [(address, address + size) for address, size, _, _ in descriptors]


class nixlXferDList:
    def __init__(self, kind: str, descriptors: list[tuple[int, int, int]]) -> None:
        self.spans = [(address, address + size) for address, size, _ in descriptors]


class nixlAgent:
    """num_pending: how often a read is under way before it is done; -1: always."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        self.name, self.config, self.num_pending = name, config, 2
        self.registered: list[tuple[int, int]] = []
        self.known: dict[str, nixlAgent] = {}
        self.requests: dict[int, list[Any]] = {}
        self.numbers = count(1)  # of requests; one that was released is not given again

    def createBackend(self, backend: str, settings: dict[str, str]) -> int:
        if backend != "UCX":
            raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        return 1

    def registerMem(self, memory: nixlRegDList) -> int:
        self.registered += memory.spans
        return NIXL_SUCCESS

    def deregisterMem(self, memory: nixlRegDList) -> int:
        for span in memory.spans:
            self.registered.remove(span)
        return NIXL_SUCCESS

    def getLocalMD(self) -> bytes:
        metadata = b"md " + self.name.encode()
        _AGENTS[metadata] = self
        return metadata

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        if metadata not in _AGENTS:
            raise nixlBackendError("NIXL_ERR_MISMATCH")
        other = _AGENTS[metadata]
        self.known[other.name] = other
        return other.name.encode()

    def invalidateRemoteMD(self, name: str) -> int:
        if self.known.pop(name, None) is None:
            raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        return NIXL_SUCCESS

    def createXferReq(
        self, operation: str, local: nixlXferDList, remote: nixlXferDList, name: str
    ) -> int:
        other = self.known.get(name)
        if other is None or not (_covers(self, local) and _covers(other, remote)):
            raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        number = next(self.numbers)
        self.requests[number] = [local, remote, self.num_pending]
        return number

    def postXferReq(self, request: int) -> int:
        return self.getXferStatus(request)

    def getXferStatus(self, request: int) -> int:
        local, remote, num_pending = self.requests[request]
        if num_pending:
            self.requests[request][2] -= 1
            return NIXL_IN_PROG
        for (to, _), (start, end) in zip(local.spans, remote.spans, strict=True):
            ctypes.memmove(to, start, end - start)
        return NIXL_SUCCESS

    def releaseXferReq(self, request: int) -> int:
        del self.requests[request]
        return NIXL_SUCCESS


def _covers(agent: nixlAgent, memory: nixlXferDList) -> bool:
    return all(
        any(first <= start and end <= last for first, last in agent.registered)
        for start, end in memory.spans
    )
