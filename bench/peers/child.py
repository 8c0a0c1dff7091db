"""A peer as a child process that answers JSON lines, with time limits and certain termination.

Selects the interpreter and script of each peer. A child that does not answer in time is killed with
all it started, so that a benchmark ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.peers.places import REPOSITORY, environment_python, is_installed

# name -> (module, environment; "" is Quire's own)
SCRIPTS = MappingProxyType(
    {
        "quire": ("bench.peers.quire_engine", ""),
        "llama.cpp": ("bench.peers.llama_server", ""),
        "openvino": ("bench.peers.openvino_engine", "openvino"),
        "vllm": ("bench.peers.vllm_engine", "vllm"),
        "transformers": ("bench.peers.transformers_engine", "transformers"),
    }
)
NOT_OF_OURS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")


class PeerFailed(Exception):
    """The peer reported an error, ended, or did not answer in time."""


class Peer:
    """One engine in its own process. Its standard error goes to `log`."""

    def __init__(self, name: str, threads: int, log: Path) -> None:
        module, environment = SCRIPTS[name]
        if name != "quire" and not is_installed(name):
            raise PeerFailed(f"{name} is not installed; run: bench/peers/setup {name}")
        python = str(environment_python(environment)) if environment else sys.executable
        self.name = name
        self._threads = threads
        self._waiting = b""
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
            env=engine_environment(name, threads),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def load(self, model: str, settings: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Make the engine ready; return its description of itself."""
        return self.ask(
            {"do": "load", "model": model, "threads": self._threads, "settings": settings},
            limit_s=limit_s,
        )

    def ask(self, asked: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Send one line, read one line. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed(f"{self.name} ended; {self._log.name} says why") from error
        reply = json.loads(self._line(time.monotonic() + limit_s, limit_s))
        if not reply.pop("ok"):
            raise PeerFailed(f"{self.name}: {reply['error']}")
        return dict(reply)

    def close(self) -> None:
        """Ask it to quit, then end it and everything it started."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(b'{"do": "quit"}\n')
                self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self._end_group()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, end_s: float, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._waiting:
            left_s = end_s - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(left_s, 0))[0]
            if not ready:
                self._end_group()
                raise PeerFailed(f"{self.name} did not answer within {limit_s:.0f} s; it was ended")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise PeerFailed(f"{self.name} ended; {self._log.name} says why")
            self._waiting += piece
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def _end_group(self) -> None:
        """End the process and its children, which share its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _listed_cpus(threads: int) -> str:
    return ",".join(map(str, range(threads)))


def end_cleanly_on_sigterm() -> None:
    """Raise on SIGTERM, so that peers, which have their own sessions, are ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def engine_environment(name: str, threads: int) -> dict[str, str]:
    """Return the parent's environment with equal thread counts for all libraries."""
    kept = {key: value for key, value in os.environ.items() if key not in NOT_OF_OURS}
    kept["PYTHONPATH"] = str(REPOSITORY)
    kept["OMP_NUM_THREADS"] = str(threads)
    if name == "vllm":
        kept |= {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            # Its own worker manager would set these for Intel's OpenMP.
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{_listed_cpus(threads)}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
    if environment := SCRIPTS[name][1]:
        kept["VIRTUAL_ENV"] = str(environment_python(environment).parents[1])
        kept |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return kept
