"""Prefill and decode in two engines against one engine, and the links between them.

`serving`: a number of streams decode while prompts of 8k tokens arrive one after another. Measured
are the gaps between the tokens of the streams from the first prompt's arrival to the last one's
first token, and the prompts' times to first token: of one engine with two cores, and of a prefill
and a decode engine with one core each (processes are bound to cores; this one runs beside them).
Each prompt's tokens must be equal in both, or the run is refused. hidden_share: how much of the
bytes' time was covered by the prefill, from the prompts' times at the prefill engine itself beside
the same streams.
`links`: GB/s of each backend between the stores of two processes (nixl where it is installed),
beside memcpy of the same blocks; `first` is a transfer that touches the other store's pages for the
first time. Memory is touched before, since engines use theirs again and again.

Run: python -m bench.disaggregation [--runs links,serving] [--model FOLDER] [--prompt 8192]
     [--prompts 4] [--decoding 16] [--backend auto] [--out FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import random_checkpoint
from quire.base.errors import SettingError
from quire.bench.machine import machine_card
from quire.obs.timing import percentiles
from quire.transfer.links.block_client import BlockClient, FetchJob, Source
from quire.transfer.links.block_server import BlockServer
from quire.transfer.links.handshake import TransferKeys
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import Identity
from quire.transfer.links.nixl import NixlAgent, bindings
from quire.transfer.links.security import LinkSecurity
from quire.transfer.links.shared_memory import MappedSegments, OwnSegment
from quire.transfer.links.ways import Opener, OwnMemory

SHAPE = "qwen3-0.6b"
READY_S = 600.0
LINK_BLOCK_BYTES = 1 << 20
DECODING_PROMPT = 64
_VOCAB = 1000  # ids that every checkpoint has


class Server:
    """A server bound to `cores`, in a directory for its log and key."""

    def __init__(self, model: str, folder: Path, cores: Sequence[int], *flags: str) -> None:
        self._log = folder / f"{secrets.token_hex(4)}.log"
        threads = ("--threads", str(len(cores)), "--port", "0")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire", "serve", model, *threads, *flags],
                stdout=log,
                stderr=log,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        self.port = int(self.logged(r"\baddress=http://[^:\s]+:(\d+)"))
        self.logged(r"ready in ([0-9.]+) s")

    def logged(self, pattern: str) -> str:
        """Wait for a pattern in the log; return its group."""
        deadline_s = time.monotonic() + READY_S
        while (found := re.search(pattern, self._log.read_text(errors="replace"))) is None:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start:\n{self._log.read_text()}")
            time.sleep(0.05)
        return found[1]

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {answer}")
        return answer

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READY_S)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)))

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The engine process, its only child."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0])

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait(60)

    def end(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait(60)


class Stream(threading.Thread):
    """A stream that decodes until `stop` is set; times of its events."""

    def __init__(self, server: Server, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server, self._number, self._stop_event = server, number, stop
        self.times_s: list[float] = []

    def run(self) -> None:
        """Read events."""
        body = {
            "prompt": ids(f"stream {self._number}", DECODING_PROMPT),
            "max_tokens": 100_000,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        body["max_tokens"] = self._server_room() - DECODING_PROMPT
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=READY_S)
        connection.request("POST", "/v1/completions", json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                self.times_s.append(time.monotonic())
            if self._stop_event.is_set():
                break
        connection.close()

    def _server_room(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=READY_S)
        connection.request("GET", "/v1/models")
        entry = json.loads(connection.getresponse().read())["data"][0]
        connection.close()
        return int(entry["max_model_len"])


def ids(name: str, count: int) -> list[int]:
    """Return token ids drawn by a name."""
    drawn = np.random.default_rng([ord(letter) for letter in name])
    return [int(one) for one in drawn.integers(2, _VOCAB, count)]


def gaps_beside(
    server: Server, args: argparse.Namespace, prefill: Server | None = None
) -> dict[str, Any]:
    """Measure streams beside prompts at one server, which may have its prompts computed.

    prefill: where they are computed; prompts are then sent there too, beside the same streams.
    """
    server.post(prompt_body(args, args.prompts))  # memory is in use, and step costs are known
    stop = threading.Event()
    streams = [Stream(server, number, stop) for number in range(args.decoding)]
    for stream in streams:
        stream.start()
    while min(len(stream.times_s) for stream in streams) < args.steps_before:
        time.sleep(0.01)
    ttfts_s, tokens, began_s = [], [], time.monotonic()
    for number in range(args.prompts):
        sent_s = time.monotonic()
        answer = server.post(prompt_body(args, number))
        ttfts_s.append(time.monotonic() - sent_s)
        tokens.append(answer["choices"][0]["token_ids"])
    ended_s = time.monotonic()
    alone_s = [] if prefill is None else [prompt_s(prefill, args, at) for at in range(args.prompts)]
    stop.set()
    for stream in streams:
        stream.join(60)
    gaps_ms = [
        1000.0 * (later - earlier)
        for stream in streams
        for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)
        if later > began_s and earlier < ended_s
    ]
    return {
        "tokens": tokens,
        "tpot_ms": percentiles(gaps_ms, (50, 99)),
        "most_ms": max(gaps_ms),
        "ttft_s": statistics.median(ttfts_s),
        "num_gaps": len(gaps_ms),
        **({"prefill_s": statistics.median(alone_s)} if alone_s else {}),
    }


def prompt_body(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Return the request of a long prompt, which ends with its first token."""
    prompt = ids(f"prompt {number}", args.prompt)
    wanted = {"max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
    return {"prompt": prompt, **wanted}


def serving(args: argparse.Namespace) -> dict[str, Any]:
    """Compare one engine on two cores with two engines on one core each."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    context = ("--max-model-len", str(args.prompt + args.room), "--access-log", "off")
    context += ("--max-num-seqs", str(args.decoding + 2), "--kv-cache-memory", args.kv)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        one = Server(args.model, folder, cores, *context)
        result["one engine"] = gaps_beside(one, args)
        one.end()
        key = folder / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        shared = ("--kv-transfer-key-file", str(key), "--kv-transfer-backend", args.backend)
        shared += ("--kv-transfer-size", args.transfer_size)
        prefill = Server(args.model, folder, cores[:1], *context, *shared, "--role", "prefill")
        ending.callback(prefill.end)
        address = prefill.logged(r"transfer_address=(\S+)")
        flags = ("--role", "decode", "--kv-transfer-peer", address, "--kv-transfer-fetch", "always")
        decode = Server(args.model, folder, cores[1:], *context, *shared, *flags)
        ending.callback(decode.end)
        result["two engines"] = gaps_beside(decode, args, prefill)
        result["two engines"] |= transfer_of(decode, args.prompts)
    if result["one engine"].pop("tokens") != result["two engines"].pop("tokens"):
        raise SystemExit("the prompts' first tokens differ: the run is wrong")
    one_ms, two_ms = (result[name]["tpot_ms"]["p99"] for name in ("one engine", "two engines"))
    result["p99_of_one_over_two"] = one_ms / two_ms
    return result


def prompt_s(prefill: Server, args: argparse.Namespace, number: int) -> float:
    """Return the time of a prompt at the prefill engine, which has it not yet."""
    began_s = time.monotonic()
    prefill.post({**prompt_body(args, number), "cache_salt": "alone"})
    return time.monotonic() - began_s


def transfer_of(decode: Server, num_prompts: int) -> dict[str, Any]:
    """Return what was moved, and how fast."""
    num_bytes = decode.metric("quire_kv_transfer_received_bytes_total")
    seconds = decode.metric("quire_kv_transfer_receive_seconds_total")
    return {
        "received_bytes": num_bytes,
        "gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0,
        "receive_s_per_prompt": seconds / (num_prompts + 1),
        "failures": decode.metric("quire_kv_transfer_failures_total"),
    }


def hidden_share(two: dict[str, Any]) -> float:
    """Return the share of the bytes' time that did not delay the first token."""
    exposed_s = max(two["ttft_s"] - two["prefill_s"], 0.0)
    moved_s = two["receive_s_per_prompt"]
    return max(1.0 - exposed_s / moved_s, 0.0) if moved_s else 0.0


def links(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the backends, and memcpy of the same blocks."""
    num_blocks = args.link_bytes // LINK_BLOCK_BYTES
    total = num_blocks * LINK_BLOCK_BYTES
    segment = OwnSegment(total)
    sent = segment.memory.reshape(num_blocks, -1)
    sent[:] = np.random.default_rng(1).integers(0, 256, sent.shape, np.uint8)
    result: dict[str, Any] = {"block_bytes": LINK_BLOCK_BYTES, "num_blocks": num_blocks}
    memcpy_s = _copied_s(sent)
    result["memcpy_gb_per_s"] = total / memcpy_s / 1e9
    for backend in ("tcp", "shm", *(["nixl"] if _has_nixl() else [])):
        first_s, seconds = _moved(backend, segment, sent)
        result[f"{backend}_first_gb_per_s"] = total / first_s / 1e9
        result[f"{backend}_gb_per_s"] = total / seconds / 1e9
        result[f"{backend}_of_memcpy"] = memcpy_s / seconds
    segment.close()
    return result


def _touched(sent: np.ndarray) -> np.ndarray:
    """Return memory for as many blocks, of which all pages are there."""
    got = np.empty_like(sent)
    got[:] = 1
    return got


def _copied_s(sent: np.ndarray) -> float:
    """Return the seconds of a copy of all blocks, one by one."""
    got = _touched(sent)
    began_s = time.monotonic()
    for place in range(len(sent)):
        got[place] = sent[place]
    return time.monotonic() - began_s


def _moved(backend: str, segment: OwnSegment, sent: np.ndarray) -> tuple[float, float]:
    """Return the seconds from a job's start to its end, of the first transfer and of the second,
    from the store of a process of its own.

    Before that one block is moved, which connects what is connected once.
    """
    security = LinkSecurity(TransferKeys.derive(secrets.token_bytes(32)).links)
    identity = Identity("a", b"f" * 32, 16, LINK_BLOCK_BYTES, "m", "r", "bf16", (backend,))
    listening = socket.create_server(("127.0.0.1", 0))
    ready, is_ready = os.pipe()
    child = os.fork()
    if not child:
        _hand_over(backend, security, identity, listening, segment, sent, is_ready)
    got = _touched(sent)  # after the fork: a page of two processes is copied when it is written
    took_s = []
    address = listening.getsockname()[1]
    listening.close()
    try:
        os.read(ready, 1)
        ended = threading.Event()
        agent = NixlAgent("fetching") if backend == "nixl" else None
        openers: dict[str, Opener] = {}
        if backend == "shm":
            openers["shm"] = MappedSegments().opener()
        if agent is not None:
            openers["nixl"] = agent.opener(LINK_BLOCK_BYTES)
        client = BlockClient(
            security=security,
            identity=identity,
            room=lambda place: got[place],
            wake=ended.set,
            openers=openers,
            timeout_s=600.0,
        )
        for number, count in enumerate((1, len(sent), len(sent))):
            got[:] = 1
            source = Source(host="127.0.0.1", port=address, transfer_id=bytes([number]) * 16)
            job = FetchJob(source, _digests(count), range(count))
            ended.clear()
            began_s = time.monotonic()
            client.start(job)
            ended.wait(600)
            took_s.append(time.monotonic() - began_s)
            if job.failure is not None:
                raise SystemExit(f"{backend}: {job.failure} {job.detail}")
            if not np.array_equal(sent[:count], got[:count]):
                raise SystemExit(f"{backend}: the bytes differ")
        client.close()
        if agent is not None:
            agent.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(is_ready)
    return took_s[1], took_s[2]


def _hand_over(
    backend: str,
    security: LinkSecurity,
    identity: Identity,
    listening: socket.socket,
    segment: OwnSegment,
    sent: np.ndarray,
    is_ready: int,
) -> None:
    """Serve `sent` until this process is killed."""
    sent[:, ::4096].max()  # as an engine that has written its blocks has their pages
    shared: dict[str, OwnMemory] = {}
    if backend == "shm":
        shared["shm"] = segment
    elif backend == "nixl":
        shared["nixl"] = NixlAgent("handing").own(sent.reshape(-1))
    digests = _digests(len(sent))
    leases = LeaseBook(lambda: time.monotonic() * 1000.0, 600_000.0)
    for number in range(3):
        leases.open(bytes([number]) * 16, digests)
    for place, digest in enumerate(digests):
        leases.landed(digest, place)
    BlockServer(
        listening,
        security=security,
        identity=identity,
        leases=leases,
        room=lambda place: sent[place],
        desk=_NoDesk(),
        shared=shared,
        report=lambda what, **fields: print(what, fields),
    )
    os.write(is_ready, b"r")
    while True:
        signal.pause()


def _digests(count: int) -> tuple[bytes, ...]:
    return tuple(at.to_bytes(16, "little") for at in range(count))


def _has_nixl() -> bool:
    try:
        bindings()
    except SettingError:
        return False
    return True


class _NoDesk:
    """A PrefillDesk that is asked for nothing."""

    def prefill(self, transfer_id: bytes, salt: str, token_ids: bytes) -> None:
        raise AssertionError("no prompt is asked for")

    def cancel(self, transfer_id: bytes) -> None:
        raise AssertionError("no prompt is asked for")

    def settle(self) -> None:
        pass


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", default="links,serving")
    parser.add_argument("--model", default="")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--decoding", type=int, default=16)
    parser.add_argument("--steps-before", type=int, default=20)
    parser.add_argument("--room", type=int, default=4096, help="tokens of context beside a prompt")
    parser.add_argument("--kv", default="6GiB")
    parser.add_argument("--transfer-size", default="2GiB")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--link-bytes", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path, default=Path("bench/results/disaggregation.json"))
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.prompt, args.prompts, args.decoding, args.room = 256, 2, 2, 256
        args.kv, args.transfer_size, args.link_bytes = "64MiB", "32MiB", 32 << 20
    elif not args.model:
        args.model = str(random_checkpoint(SHAPE))
    content: dict[str, Any] = {"bench": "disaggregation", "machine": machine_card()}
    content |= {"prompt": args.prompt, "decoding": args.decoding, "model": Path(args.model).name}
    if "links" in args.runs.split(","):
        content["links"] = links(args)
    if "serving" in args.runs.split(","):
        content["serving"] = serving(args)
        content["hidden_share"] = hidden_share(content["serving"]["two engines"])
    print(json.dumps({name: one for name, one in content.items() if name != "machine"}, indent=1))
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
