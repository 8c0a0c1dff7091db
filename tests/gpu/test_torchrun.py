"""A server with ranks that a real torchrun has started: answers are those of one process, byte for
byte, and a killed rank ends them all. The environment alone is tested without PyTorch, in
tests/serve/test_launched.py."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.conftest import SHOWN
from tests.serve.running_server import RunningServer, alive, children_of
from tests.serve.test_launched import ASKED, BACKEND
from tests.serve.test_ranks import COMPLETIONS, LONG
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu

LAYOUTS = {"two ranks": ("-tp", "2"), "two stages": ("-pp", "2")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads and layers for two."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "even"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=32768, **heads)


@pytest.fixture(scope="module")
def wanted(model: Path) -> bytes:
    """Return the answer of one process."""
    with RunningServer(model) as server:
        return answer_of(server)


def two_free_ports() -> int:
    """Return a port that is free like the one after it: torchrun listens at the first itself, and
    rank 0 at the second. Both are below those that the system gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def torchrun(model: Path, *flags: str) -> RunningServer:
    """Start a server of two ranks."""
    at = ("--master-addr", "127.0.0.1", "--master-port", str(two_free_ports()))
    launcher = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", *at)
    return RunningServer(model, *BACKEND, *flags, launcher=launcher)


def answer_of(server: RunningServer) -> bytes:
    """Return the bytes of an answer without what differs between two requests of one server."""
    status, answer = server.post(COMPLETIONS, ASKED)
    assert status == 200, answer
    kept = {key: answer[key] for key in ("choices", "system_fingerprint", "usage")}
    return repr(kept).encode()


def process_of_rank(server: RunningServer, rank: int) -> int:
    """Return the process that torchrun has started for a rank."""
    (found,) = (
        pid
        for pid in children_of(server.process.pid)
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_torchrun_answer_as_one_process_and_end_together(
    model: Path, wanted: bytes, layout: str, record_property: object
) -> None:
    with torchrun(model, *LAYOUTS[layout]) as server:
        assert answer_of(server) == wanted
        ranks = [process_of_rank(server, rank) for rank in range(2)]
        with server.stream(COMPLETIONS, LONG) as reader:
            reader.next()
            os.kill(ranks[1], signal.SIGKILL)
            began_s = time.monotonic()
            *_, last = reader
            told_s = time.monotonic() - began_s
        assert last["error"]["code"] == "device_lost"
        server.until(lambda: not any(map(alive, ranks)), "the other rank ends")
        ended_s = time.monotonic() - began_s
        assert server.exit_code() != 0, "torchrun's own code"
        assert "rank 1 has closed its connection" in server.stderr()
        shown = (
            f"{layout}: after the loss streams ended in {told_s:.2f} s, ranks in {ended_s:.2f} s"
        )
        record_property(SHOWN, shown)  # type: ignore[operator]
