"""NIXL: memory of another engine read by RDMA, or what else UCX finds, through the NIXL library.

The handing side registers its store, and describes it in a message of ours: an address, a size and
the metadata of its agent. The fetching side reads blocks from there by itself. NIXL has no
authentication, so nothing of this is sent before the handshake (handshake.py). Only the compiled
bindings are loaded: the library's Python layer needs PyTorch, and unpickles descriptors. Knows
memory and agents, no store. Always holds: a read ends within READ_S, or its buffer is never used
again; what was read is checked by its checksum like any other block.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.transfer.links.channel import LinkTimeout
from quire.transfer.links.messages import Agent
from quire.transfer.links.ways import Opener

Bytes = NDArray[np.uint8]

# What UCX may use on machines without network cards of its own; the environment wins.
CPU_TRANSPORTS = "cma,sysv,posix,self,tcp"
# Packages with the bindings, one for each version of CUDA; none of them needs a GPU.
PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_BACKEND = "UCX"
READ_S = 10.0
# The agent's thread waits for events; after so long it looks at all without one. The library's
# default of 0 is a thread that never waits: it takes a whole core from the steps.
PROGRESS_US = 10_000
_SPINS = 200  # of checks without a pause: a block of a local memory takes some of them
_PAUSE_S = 0.0002
# Agents that stay connected without a transfer: connecting again takes a fifth of a second.
MAX_UNREAD = 16


def bindings() -> Any:
    """Return the library's compiled bindings. Raises SettingError where it is not installed."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise SettingError(
                f"kv_transfer_backend is nixl and its library cannot be loaded ({error}); install "
                "it anew, or take --kv-transfer-backend auto"
            ) from error
    raise SettingError(
        "kv_transfer_backend is nixl and NIXL is not installed; install it: pip install "
        "'quire-llm[nixl]', or take --kv-transfer-backend auto"
    )


class NixlAgent:
    """The agent of one engine. name: of no other agent that it meets. Raises SettingError."""

    def __init__(self, name: str) -> None:
        os.environ.setdefault("UCX_TLS", CPU_TRANSPORTS)
        self._library = library = bindings()
        self._errors = _errors_of(library)
        # A thread of its own answers reads of other agents, and several of ours call it.
        config = library.nixlAgentConfig(True, False, 0, library.NIXL_THREAD_SYNC_STRICT)
        config.pthrDelay = PROGRESS_US
        try:
            self._agent = library.nixlAgent(name, config)
            self._agent.createBackend(_BACKEND, {})
            _skip_destructors()
        except self._errors as error:
            raise SettingError(
                f"kv_transfer_backend is nixl and its backend {_BACKEND} cannot start ({error}); "
                f"UCX_TLS is {os.environ['UCX_TLS']}: take transports that this machine has, or "
                "--kv-transfer-backend auto"
            ) from error
        self._registered: list[Any] = []
        self._lock = threading.Lock()
        self._names: OrderedDict[bytes, str] = OrderedDict()  # of known agents, by their metadata
        self._readers: Counter[str] = Counter()
        self._lost_names: set[str] = set()  # a read of these has failed
        self._lost: list[Bytes] = []  # buffers that a read may still write

    def own(self, memory: Bytes) -> NixlMemory:
        """Return memory that other agents can read. Raises SettingError."""
        try:
            self._register(memory)
            metadata = bytes(self._agent.getLocalMD())
        except self._errors as error:
            raise SettingError(
                f"kv_transfer_bytes is {memory.nbytes} and NIXL cannot register it ({error}); "
                "lower --kv-transfer-size, or raise what a process may lock (ulimit -l)"
            ) from error
        return NixlMemory(self, Agent(memory.ctypes.data, memory.nbytes, metadata))

    def opener(self, block_bytes: int) -> Opener:
        """Return what opens the memory of other agents, to read blocks of that size."""
        return Opener(Agent, lambda agent: NixlReader(self, agent, block_bytes))

    def close(self) -> None:
        """Withdraw all memory."""
        with self._lock:
            for registered in self._registered:
                self._agent.deregisterMem(registered)
            self._registered.clear()

    # ---- for readers

    def add_reader(self, metadata: bytes) -> str:
        """Return the name of another agent; one that is known stays connected. Raises OSError."""
        with self._lock:
            name = self._names.get(metadata)
            if name is None:
                try:
                    name = _text(self._agent.loadRemoteMD(metadata))
                except self._errors as error:
                    raise OSError(f"NIXL: the metadata of the other agent: {error}") from error
                self._names[metadata] = name
            self._names.move_to_end(metadata)
            self._readers[name] += 1
            self._forget_some()
            return name

    def remove_reader(self, name: str, *, is_lost: bool) -> None:
        """Note that a reader of another agent has ended; forget an agent that is lost."""
        with self._lock:
            self._readers[name] -= 1
            if is_lost:
                self._lost_names.add(name)
            if not self._readers[name] and name in self._lost_names:
                self._forget(name)

    def buffer(self, num_bytes: int) -> tuple[Bytes, Any]:
        """Return memory that reads may write, and what `release` takes. Raises OSError."""
        memory = np.empty(num_bytes, np.uint8)
        with self._lock:
            try:
                return memory, self._register(memory)
            except self._errors as error:
                raise OSError(f"NIXL: a buffer of {num_bytes} bytes: {error}") from error

    def release(self, registered: Any) -> None:
        """Withdraw a buffer."""
        with self._lock:
            if registered in self._registered:
                self._registered.remove(registered)
                self._agent.deregisterMem(registered)

    def abandon(self, memory: Bytes) -> None:
        """Keep a buffer as it is for good: a read that did not end may still write it."""
        self._lost.append(memory)

    def read(self, name: str, address: int, out: Bytes) -> None:
        """Read bytes at an address of another agent into a buffer. Raises OSError."""
        library, agent = self._library, self._agent
        local, remote = (
            library.nixlXferDList(library.DRAM_SEG, [(at, out.nbytes, 0)])
            for at in (out.ctypes.data, address)
        )
        try:
            with self._lock:
                request = agent.createXferReq(library.NIXL_READ, local, remote, name)
            try:
                status = agent.postXferReq(request)
                deadline_s, spins = time.monotonic() + READ_S, 0
                while status == library.NIXL_IN_PROG:
                    if time.monotonic() > deadline_s:
                        raise LinkTimeout(f"NIXL: a block was not read within {READ_S:g} s")
                    spins += 1
                    if spins > _SPINS:
                        time.sleep(_PAUSE_S)
                    status = agent.getXferStatus(request)
            finally:
                agent.releaseXferReq(request)  # which cancels it, if it is under way
        except self._errors as error:
            raise OSError(f"NIXL: {error}") from error

    def _forget_some(self) -> None:
        """Keep few agents without a reader, those that were met last."""
        unread = [name for name in self._names.values() if not self._readers[name]]
        for name in unread[: max(len(unread) - MAX_UNREAD, 0)]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        for metadata in [one for one, known in self._names.items() if known == name]:
            del self._names[metadata]
        self._lost_names.discard(name)
        del self._readers[name]
        with suppress(*self._errors):  # it is gone by itself
            self._agent.invalidateRemoteMD(name)

    def _register(self, memory: Bytes) -> Any:
        library = self._library
        described = library.nixlRegDList(
            library.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")]
        )
        self._agent.registerMem(described)
        self._registered.append(described)
        return described


class NixlMemory:
    """An OwnMemory: registered until its agent closes, which lives as long as this."""

    def __init__(self, agent: NixlAgent, described: Agent) -> None:
        self._agent, self._described = agent, described

    def message(self) -> Agent:
        """See OwnMemory."""
        return self._described

    def close(self) -> None:
        """See OwnMemory; the agent withdraws it."""


class NixlReader:
    """A Reader of another agent's memory. Raises OSError where that cannot be met.

    A thread reads the next block while one is viewed: within a machine a read is a copy by the
    thread that asks for it, so that nothing else would run beside the copy out of the buffer.
    """

    ahead = 1

    def __init__(self, agent: NixlAgent, other: Agent, block_bytes: int) -> None:
        self._agent, self._other = agent, other
        self._is_lost = self._is_open = False  # the other agent; a read that may still go on
        self._name = agent.add_reader(other.metadata)
        try:
            self._memory, self._registered = agent.buffer((1 + self.ahead) * block_bytes)
        except OSError:
            agent.remove_reader(self._name, is_lost=False)
            raise
        self._buffers = deque(self._memory.reshape(1 + self.ahead, block_bytes))
        self._thread = ThreadPoolExecutor(1, "quire-kv-read")
        self._expected: deque[Future[Bytes]] = deque()

    def expect(self, offset: int) -> None:
        """See Reader."""
        assert len(self._expected) <= self.ahead, "the oldest one is viewed first"
        self._buffers.rotate(-1)
        self._expected.append(self._thread.submit(self._read, offset, self._buffers[-1]))

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """See Reader; num_bytes are those of a block."""
        assert num_bytes == len(self._buffers[0]), "blocks have one size"
        if not self._expected:
            self.expect(offset)
        return self._expected.popleft().result()

    def close(self) -> None:
        """See Reader; waits for a read that is under way."""
        self._thread.shutdown(cancel_futures=True)
        if self._is_open:
            self._agent.abandon(self._memory)
        else:
            self._agent.release(self._registered)
        self._agent.remove_reader(self._name, is_lost=self._is_lost)

    def _read(self, offset: int, buffer: Bytes) -> Bytes:
        """Read a block, in the thread; none once a read of the other agent has failed, so that
        the blocks that are expected do not wait for READ_S each."""
        if self._is_lost:
            raise OSError("NIXL: an earlier read of this agent failed")
        if not 0 <= offset <= self._other.num_bytes - len(buffer):
            raise OSError(f"a block lies at {offset}, beyond {self._other.num_bytes} shared bytes")
        try:
            self._agent.read(self._name, self._other.address + offset, buffer)
        except LinkTimeout:
            self._is_lost = self._is_open = True
            raise
        except OSError:
            self._is_lost = True
            raise
        return buffer


def _errors_of(library: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of the bindings, which have no base of their own."""
    named = (getattr(library, name) for name in dir(library))
    own = [one for one in named if isinstance(one, type) and issubclass(one, Exception)]
    return (RuntimeError, *own)


@cache
def _skip_destructors() -> None:
    """Let this process end without the destructors of libraries.

    One that UCX loads (libnl-route, as NIXL 1.5 packs it) crashes in its own, after everything else
    has ended well. on_exit calls _exit with the exit code, before any of them.
    """
    with suppress(OSError, AttributeError):  # another C library than that of NIXL's packages
        system = ctypes.CDLL(None)
        system.on_exit(ctypes.cast(system._exit, ctypes.c_void_p), None)


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode()
