"""Prefill and decode in two engines against one engine, and the links between them.

`serving`: a number of streams decode while prompts of 8k tokens arrive one after another. Measured
are the gaps between the tokens of the streams from the first prompt's arrival to the last one's
first token, and the prompts' times to first token: of one engine with two cores, and of a prefill
and a decode engine with one core each (processes are bound to cores; this one runs beside them).
Each prompt's tokens must be equal in both, or the run is refused. hidden_share: of all bytes that
were sent, those that the decode engine had before the prompt was computed, as the prefill engine
counts them. hidden_time_share (with --alone): how much of the time spent on the bytes did not delay
the first token. What has is the time to first token, less the prompt's time at the prefill engine
by itself, and less its time at the decode engine once that has its blocks, both beside the same
streams; what the prefill engine spends on copies and checksums counts as delay.
`links`: GB/s of each backend between the stores of two processes (nixl where it is installed),
beside memcpy of the same blocks; `first` is a transfer that touches the other store's pages for the
first time. Memory is touched before, since engines use theirs again and again.

`serving` takes about --minutes: one engine is asked how fast it computes a prompt, and where
prompts of --prompt tokens would take longer, fewer or shorter ones are sent. The result names what
was sent. What is being done is written to the standard error.

With --exact prompts are not made shorter, and fewer are sent. At least one is.

Run: python -m bench.disaggregation [--runs links,serving] [--model FOLDER | --shape qwen3-0.6b]
     [--prompt-tokens 8192] [--exact] [--prompts 4] [--decoding 16] [--minutes 6] [--alone]
     [--backend auto] [--out FILE] [--smoke]
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
from quire.base.prefill_load import PrefillLoad
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
# Prompts are not made shorter than that; one of so many tokens measures how fast they are computed.
MIN_PROMPT = 512
# Sent first to each engine.
WARM_PROMPT = 1024
# How much longer a prompt takes than alone on two cores: beside streams, on one core, and at so
# many tokens of depth.
_BESIDE, _ONE_CORE, _DEPTH = 2.0, 2.0, 8192.0
_BEGAN_S = time.monotonic()


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


def note(text: str) -> None:
    """Write what is being done to the standard error."""
    print(f"[{time.monotonic() - _BEGAN_S:4.0f} s] {text}", file=sys.stderr, flush=True)


def total_s(alone_s: float, prompt: int, prompts: int, *, alone: bool = False) -> float:
    """Return about how long all prompts of `serving` take. alone_s: of MIN_PROMPT tokens.

    alone: they are sent to the prefill engine by itself too.
    """
    one_s = alone_s * prompt / MIN_PROMPT * (1.0 + prompt / _DEPTH)
    at_one_engine = prompts * _BESIDE
    at_two = _ONE_CORE * (2 if alone else 1) * prompts
    return one_s * (at_one_engine + at_two)


def fitting(
    alone_s: float,
    left_s: float,
    prompt: int,
    prompts: int,
    *,
    alone: bool = False,
    min_prompt: int = MIN_PROMPT,
) -> tuple[int, int]:
    """Return the tokens and the number of prompts, at most these, that take no longer than left_s.

    Fewer prompts come before shorter ones; the shortest are sent whatever they take. alone: see
    total_s.
    """
    while True:
        is_shortest = prompt // 2 < min_prompt
        least = 1 if is_shortest else max(prompts // 2, 1)
        for count in range(prompts, least - 1, -1):
            if total_s(alone_s, prompt, count, alone=alone) <= left_s:
                return prompt, count
        if is_shortest:
            return prompt, least
        prompt //= 2


def sized(args: argparse.Namespace, server: Server, began_s: float) -> argparse.Namespace:
    """Return `args` with prompts that take no longer than args.minutes. began_s: of all."""
    start_s = time.monotonic() - began_s
    alone = argparse.Namespace(**{**vars(args), "prompt": min(MIN_PROMPT, args.prompt)})
    server.post(prompt_body(alone, -1))  # memory is in use
    before_s = time.monotonic()
    server.post(prompt_body(alone, -2))
    alone_s = (time.monotonic() - before_s) * MIN_PROMPT / alone.prompt
    left_s = 60.0 * args.minutes - 4.0 * start_s  # three starts, and streams that begin
    least = args.prompt if args.exact else MIN_PROMPT
    wanted = (args.prompt, args.prompts)
    prompt, prompts = fitting(alone_s, left_s, *wanted, alone=args.alone, min_prompt=least)
    note(f"{MIN_PROMPT} tokens take {alone_s:.2f} s: {prompts} prompts of {prompt} tokens")

    return argparse.Namespace(**{**vars(args), "prompt": prompt, "prompts": prompts})


def gaps_beside(
    server: Server, args: argparse.Namespace, until_s: float, prefill: Server | None = None
) -> dict[str, Any]:
    """Measure streams beside prompts at one server, which may have its prompts computed.

    until_s: when no further prompt is sent. prefill: where they are computed; prompts are then sent
    there too, beside the same streams.
    """
    warm = argparse.Namespace(**{**vars(args), "prompt": min(args.prompt, WARM_PROMPT)})
    server.post(prompt_body(warm, args.prompts))  # step costs are known
    stop = threading.Event()
    streams = [Stream(server, number, stop) for number in range(args.decoding)]
    for stream in streams:
        stream.start()
    while min(len(stream.times_s) for stream in streams) < args.steps_before:
        time.sleep(0.01)
    before = {} if prefill is None else transfer_counts(prefill, server)
    ttfts_s, tokens, began_s = [], [], time.monotonic()
    for number in range(args.prompts):
        note(f"prompt {number + 1} of {args.prompts} beside {args.decoding} streams")
        sent_s = time.monotonic()
        answer = server.post(prompt_body(args, number))
        ttfts_s.append(time.monotonic() - sent_s)
        tokens.append(answer["choices"][0]["token_ids"])
        if time.monotonic() > until_s:
            break
    ended_s = time.monotonic()
    counts = {} if prefill is None else transfer_counts(prefill, server)
    alone_s, again_s = [], []
    if prefill is not None and args.alone:
        note("the prompts alone at the prefill engine, and again at the decode engine")
        again_s = [prompt_s(server, args, at) for at in range(len(ttfts_s))]
        alone_s = [prompt_s(prefill, args, at, salt="alone") for at in range(len(ttfts_s))]
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
        "num_prompts": len(ttfts_s),
        **({"counts": {name: counts[name] - before[name] for name in counts}} if counts else {}),
        **({"prefill_s": statistics.median(alone_s)} if alone_s else {}),
        **({"again_s": statistics.median(again_s)} if again_s else {}),
    }


def prompt_body(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Return the request of a long prompt, which ends with its first token."""
    prompt = ids(f"prompt {number}", args.prompt)
    wanted = {"max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
    return {"prompt": prompt, **wanted}


def serving(args: argparse.Namespace) -> dict[str, Any]:
    """Compare one engine on two cores with two engines on one core each."""
    began_s = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    context = ("--max-model-len", str(args.prompt + args.room), "--access-log", "off")
    context += ("--max-num-seqs", str(args.decoding + 2), "--kv-cache-memory", args.kv)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        note("starting one engine on two cores")
        one = Server(args.model, folder, cores, *context)
        args = sized(args, one, began_s)
        until_s = began_s + 60.0 * args.minutes
        result["one engine"] = gaps_beside(one, args, began_s + 0.4 * (until_s - began_s))
        one.end()
        note("starting two engines on one core each")
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
        result["two engines"] = gaps_beside(decode, args, until_s, prefill)
        two = result["two engines"]
        two |= transfer_of(two.pop("counts"), two["num_prompts"])
    found = [result[name].pop("tokens") for name in ("one engine", "two engines")]
    if any(one != two for one, two in zip(*found, strict=False)):
        raise SystemExit("the prompts' first tokens differ: the run is wrong")
    one_ms, two_ms = (result[name]["tpot_ms"]["p99"] for name in ("one engine", "two engines"))
    result["p99_of_one_over_two"] = one_ms / two_ms
    result |= {"prompt": args.prompt, "prompts": args.prompts}
    return result


def prompt_s(server: Server, args: argparse.Namespace, number: int, salt: str = "") -> float:
    """Return the time of a prompt. salt: under which the engine has it not yet."""
    began_s = time.monotonic()
    server.post({**prompt_body(args, number), **({"cache_salt": salt} if salt else {})})
    return time.monotonic() - began_s


def transfer_counts(prefill: Server, decode: Server) -> dict[str, float]:
    """Return what both engines have counted so far."""
    of = {
        prefill: ("sent_bytes", "overlapped_bytes"),
        decode: ("received_bytes", "received_blocks", "early_blocks", "failures"),
    }
    counts = {
        name: server.metric(f"quire_kv_transfer_{name}_total")
        for server, names in of.items()
        for name in names
    }
    return {**counts, "receive_s": decode.metric("quire_kv_transfer_receive_seconds_total")}


def transfer_of(counts: dict[str, float], num_prompts: int) -> dict[str, Any]:
    """Return what was moved, how fast, and how much of it while the prompts were computed."""
    seconds = counts["receive_s"]
    return {
        **counts,
        "gb_per_s": counts["received_bytes"] / seconds / 1e9 if seconds else 0.0,
        "receive_s_per_prompt": seconds / num_prompts,
    }


def hidden_share(two: dict[str, Any]) -> float:
    """Return the share of the bytes that were there before the prompts were computed."""
    return two["overlapped_bytes"] / two["sent_bytes"] if two["sent_bytes"] else 0.0


def hidden_time_share(two: dict[str, Any]) -> float:
    """Return the share of the bytes' time that did not delay the first token."""
    exposed_s = max(two["ttft_s"] - two["prefill_s"] - two["again_s"], 0.0)
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
        woken = threading.Event()
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
            wake=woken.set,
            openers=openers,
            timeout_s=600.0,
        )
        for number, count in enumerate((1, len(sent), len(sent))):
            got[:] = 1
            source = Source(host="127.0.0.1", port=address, transfer_id=bytes([number]) * 16)
            job = FetchJob(source, _digests(count), range(count))
            began_s = time.monotonic()
            client.start(job)
            while job not in client.ended():
                woken.wait(600)
                woken.clear()
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
    if backend == "nixl":
        sent = sent.copy()  # in memory of the process, as an engine keeps blocks for NIXL
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

    def load(self) -> PrefillLoad:
        return PrefillLoad()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench.disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", default="links,serving")
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default=SHAPE, help="of random weights, without --model")
    parser.add_argument("--prompt-tokens", "--prompt", dest="prompt", type=int, default=8192)
    parser.add_argument("--exact", action="store_true", help="send no shorter prompts")
    parser.add_argument("--alone", action="store_true", help="measure hidden_time_share too")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--decoding", type=int, default=16)
    parser.add_argument("--steps-before", type=int, default=20)
    parser.add_argument("--room", type=int, default=4096, help="tokens of context beside a prompt")
    parser.add_argument("--kv", default="6GiB")
    parser.add_argument("--transfer-size", default="2GiB")
    parser.add_argument("--minutes", type=float, default=6.0, help="about how long serving takes")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--link-bytes", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path, default=Path("bench/results/disaggregation.json"))
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.prompt, args.prompts, args.decoding, args.room = 256, 2, 2, 256
        args.kv, args.transfer_size, args.link_bytes = "64MiB", "32MiB", 32 << 20
    elif not args.model:
        args.model = str(random_checkpoint(args.shape))
    # Parts of an earlier run stay, each with the load of its own beginning.
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    content |= {"bench": "disaggregation", "machine": machine_card()}
    content |= {"decoding": args.decoding, "model": Path(args.model).name}
    load = content["machine"]["load_at_start"]
    if "links" in args.runs.split(","):
        content["links"] = {**links(args), "load_at_start": load}
    if "serving" in args.runs.split(","):
        content["serving"] = {**serving(args), "load_at_start": load}
        two = content["serving"]["two engines"]
        content["hidden_share"] = hidden_share(two)
        content.pop("hidden_time_share", None)  # of an earlier run
        if "again_s" in two:
            content["hidden_time_share"] = hidden_time_share(two)
    print(json.dumps({name: one for name, one in content.items() if name != "machine"}, indent=1))
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
