"""A server with ranks that a launcher has started: each runs one command, with RANK and WORLD_SIZE
in its environment, as under torchrun. Rank 0 serves; a lost rank ends all.

The first layout starts from fresh interpreters, the others from preloaded processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.serve import preloaded
from tests.serve.running_server import GIVE_UP_S, ROOT, RunningServer, written_in
from tests.serve.serve_command import serve
from tests.serve.test_ranks import COMPLETIONS, LONG
from tests.tiny_models import write_tiny_llama

BACKEND = ("--distributed-executor-backend", "external_launcher")
ASKED = {"prompt": "abc", "max_tokens": 20, "logprobs": 5, "seed": 3, "temperature": 0.8}
# A KV cache of 16 or 32 blocks, with a disk tier below it.
SMALL = ("--max-model-len", "256", "--max-num-seqs", "2")
NUM_TRIES = 10
TIER = ("--kv-cache-memory", "64KiB", "--kv-tier-fetch", "always")
# Under --executor native one process per core is allowed; each rank counts its own machine.
LAYOUTS = {
    "two ranks": ("-tp", "2"),
    "two stages": ("-pp", "2"),
    "two stages of two ranks": ("-tp", "2", "-pp", "2"),
}


SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads and layers for two."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "even", seed=5, **SHAPE)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that rank 0 can listen at and that is given to no other socket meanwhile.

    A bound socket reserves it; rank 0 may bind it too, as both allow its reuse.
    """
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        yield int(one.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a launcher sets, as if each rank had a machine of its own."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


class Rank:
    """A process of a rank above 0."""

    def __init__(self, model: Path, *flags: str, fresh: bool = False, **variables: str) -> None:
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self.process: subprocess.Popen[bytes] | preloaded.Preloaded
        words = ["serve", str(model), *BACKEND, *flags]
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", *words],
                stdout=self._err,
                stderr=self._err,
                cwd=ROOT,
                env={**os.environ, **variables},
            )
        else:
            self.process = preloaded.start(words, self._err, self._err, variables)

    def exit_code(self) -> int:
        """Return the exit code; fail instead of waiting forever."""
        return self.process.wait(GIVE_UP_S)

    def stderr(self) -> str:
        """Return what it has printed."""
        return written_in(self._err)

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._err.close()


def rank_zero(model: Path, port: int, *flags: str) -> RunningServer:
    """Return the server of two ranks, without waiting until it is ready."""
    own = environment(0, 2, port)
    return RunningServer(model, *BACKEND, *flags, wait=False, fresh=False, environment=own)


@contextmanager
def launched(
    model: Path, world_size: int, *flags: str, fresh: bool = False
) -> Iterator[tuple[RunningServer, list[Rank]]]:
    """Run a server of so many ranks, and these ranks."""
    with reserved_port() as port, ExitStack() as stack:
        ranks = []
        for rank in range(1, world_size):
            ranks.append(Rank(model, *flags, fresh=fresh, **environment(rank, world_size, port)))
            stack.callback(ranks[-1].kill)
        own = environment(0, world_size, port)
        with RunningServer(model, *BACKEND, *flags, fresh=fresh, environment=own) as server:
            yield server, ranks


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, object]:
    """Return the answer of one process."""
    with RunningServer(model, *SMALL) as server:
        return answer_of(server)


def check_tier(server: RunningServer) -> None:
    """Let a prompt's blocks be evicted by those of others, and be found again in the tier."""
    for _ in range(NUM_TRIES):  # a disk that is too slow leaves some unsaved
        for number in (*range(8), 0):
            prompt = f"{number} {'ab ' * 60}"
            status, answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
            assert status == 200, answer
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached_tokens >= 96 or not server.metric("quire_tier_unsaved_blocks_total"):
            break
    assert cached_tokens >= 96
    assert server.metric("quire_tier_fetched_blocks_total") >= 6
    assert server.metric("quire_tier_failures_total") == 0


def answer_of(server: RunningServer) -> dict[str, object]:
    """Return tokens, log-probabilities and fingerprint of an answer."""
    status, answer = server.post(COMPLETIONS, ASKED)
    assert status == 200, answer
    return {"choices": answer["choices"], "fingerprint": answer["system_fingerprint"]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_launcher_answer_as_one_process_and_end_together(
    model: Path, wanted: dict[str, object], layout: str, tmp_path: Path
) -> None:
    world_size = 4 if len(LAYOUTS[layout]) > 2 else 2
    fresh = layout == "two ranks"
    flags = (*LAYOUTS[layout], *SMALL, *TIER, "--kv-tier-path", str(tmp_path / "tier"))
    with launched(model, world_size, *flags, fresh=fresh) as (server, ranks):
        assert answer_of(server) == wanted
        check_tier(server)
        for rank in ranks:
            rank.process.send_signal(signal.SIGTERM)  # as a launcher does to all: rank 0 ends them
        assert answer_of(server) == wanted
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert [rank.exit_code() for rank in ranks] == [0] * len(ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_lost_rank_is_an_error_of_every_open_stream_and_a_failed_exit(
    model: Path, number: signal.Signals
) -> None:
    with launched(model, 2, "-tp", "2") as (server, (rank,)):
        with server.stream(COMPLETIONS, LONG) as first, server.stream(COMPLETIONS, LONG) as second:
            first.next()
            second.next()
            rank.process.send_signal(number)
            for reader in (first, second):
                *_, last = reader
                assert last["error"]["code"] == "device_lost"
        assert server.exit_code() == 1
        dead = number is signal.SIGKILL
        assert ("has closed its connection" if dead else "does not respond") in server.stderr()


def test_a_rank_lost_while_idle_ends_the_server_and_all_ranks(model: Path) -> None:
    with launched(model, 4, "-tp", "2", "-pp", "2") as (server, ranks):
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
        ranks[1].process.kill()
        assert server.exit_code() == 1
        assert [ranks[0].exit_code(), ranks[2].exit_code()] == [1, 1]
        assert "rank 2 has closed its connection" in server.stderr()


def test_ranks_end_with_rank_zero(model: Path) -> None:
    with launched(model, 2, "-tp", "2") as (server, (rank,)):
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.exit_code() == 1
        assert rank.exit_code() == 1
        assert "rank 0 has closed its connection" in rank.stderr()


def test_another_key_and_a_missing_rank_are_named(model: Path, tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "other"]
    for number, key in enumerate(keys):
        key.write_bytes(bytes([65 + number]) * 32)
        key.chmod(0o600)
    flags, limit = ("-tp", "2", "--distributed-key-file"), "--distributed-timeout-seconds"
    with reserved_port() as port, ExitStack() as stack:
        # The other rank waits for rank 0 however late it is, and starts first.
        of_rank = (*flags, str(keys[1]), limit, str(int(GIVE_UP_S)))
        rank = Rank(model, *of_rank, **environment(1, 2, port))
        stack.callback(rank.kill)
        server = rank_zero(model, port, *flags, str(keys[0]), limit, "3")
        stack.callback(server.kill)
        assert server.exit_code() == 1
        assert rank.exit_code() == 1
        assert "of 2 ranks, rank 1 did not connect" in server.stderr()
        assert "connections with another key came from 127.0.0.1" in server.stderr()
        assert "has another key" in rank.stderr()


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-pp", "2")], ids=["ranks", "stages"])
def test_a_rank_with_the_weights_of_another_model_is_refused(
    model: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Stages read different tensors, of which each is right by itself."""
    other = write_tiny_llama(tmp_path, seed=99, **SHAPE)
    with reserved_port() as port, ExitStack() as stack:
        rank = Rank(other, *flags, **environment(1, 2, port))
        stack.callback(rank.kill)
        server = rank_zero(model, port, *flags)
        stack.callback(server.kill)
        assert server.exit_code() != 0
        assert rank.exit_code() != 0
        assert "rank 1 has" in server.stderr()
        assert "one model" in server.stderr()


def test_a_port_in_use_is_refused(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = rank_zero(model, port, "-tp", "2")
        assert server.exit_code() != 0
        assert f"rank 0 cannot listen at 127.0.0.1:{port}" in server.stderr()
        server.kill()


@pytest.mark.parametrize(
    ("flags", "variables", "found"),
    [
        (("-tp", "2"), {"RANK": ""}, "RANK is not set: start the ranks with torchrun"),
        (("-tp", "2"), {"RANK": "2"}, "RANK is '2'; a number from 0 to 1 is allowed"),
        (("-tp", "2"), {"MASTER_PORT": "x"}, "MASTER_PORT is 'x'; a number from 1 to 65535"),
        (("-tp", "2"), {"LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE says how many ranks"),
        (("-pp", "2", "-tp", "2"), {}, "WORLD_SIZE is 2 and --tensor-parallel-size is 2 and"),
        (("-tp", "2"), {"MASTER_ADDR": "10.1.2.3"}, "--distributed-key-file is not given"),
        (("-tp", "2", "--restart-engine"), {}, "let the launcher start all ranks again"),
        ((), {}, "there is one rank, which this process is"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path,
    flags: tuple[str, ...],
    variables: dict[str, str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (environment(1, 2, 29500) | variables).items():
        monkeypatch.setenv(name, value)
    failed = serve(str(model), *BACKEND, *flags)
    assert failed.returncode != 0
    assert found in failed.stderr
