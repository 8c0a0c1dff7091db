"""Prefill and decode engines with a Mooncake Store: the answers of one engine, whatever is lost.

Engines in this process run drawn cases, with blocks over shared memory and, where it is installed,
through NIXL. Servers in processes of their own are killed and stopped in the middle: a prefill
engine, of which the memory is a part of the store, and the master.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.program.tensors import DType
from tests.exact.rig import Model
from tests.exact.test_disaggregation import key, nixl_is_installed
from tests.exact.test_disaggregation_and_store import compare_on_pairs
from tests.mooncake.master import Master, skip_without_mooncake
from tests.serve.running_server import RunningServer, engines_of, kill
from tests.serve.test_disaggregation import PARAMS, answer_of, drawn, failures, handed_over
from tests.tiny_models import write_tiny_llama

__all__ = ["key"]

skip_without_mooncake()

FIRST_CASE, NUM_CASES = 1500, 8
BACKENDS = [
    "auto",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(not nixl_is_installed(), reason="no NIXL (make nixl)")
    ),
]
STORE_TIMEOUT_S = 4.0


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.kill()


class MasterPlace:
    """A Place (see test_disaggregation_and_store.py): the memory of both engines."""

    def __init__(self, master: Master, key: Path) -> None:
        self._master, self._key = master, key

    def settings(self, block_bytes: int) -> dict[str, Any]:
        return {
            "kv_store": self._master.url,
            "kv_store_key_file": str(self._key),
            "kv_store_size": "16MiB",
            "kv_store_timeout": STORE_TIMEOUT_S,
        }

    def tamper(self, random: Random) -> None:
        """Do nothing: what others write is refused in test_mooncake.py."""

    def lose(self) -> None:
        self._master.kill()

    def restore(self) -> None:
        self._master.start()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_with_mooncake_gives_the_answers_of_one_engine(
    master: Master, key: Path, tmp_path: Path, backend: str
) -> None:
    folder = write_tiny_llama(tmp_path / "model", seed=5)
    seen: Counter[str] = Counter()
    numbers = range(FIRST_CASE, FIRST_CASE + NUM_CASES)
    for _ in compare_on_pairs(
        numbers,
        [Model(folder, DType.F32)],
        key,
        lambda at: MasterPlace(master, key),
        seen,
        kv_transfer_backend=backend,
    ):
        pass
    # On a busy machine calls to the library take seconds, and the store counts as slow.
    assert min(seen["stored"], seen["received"]) > 0, seen


class Servers:
    """Servers with one store. Each request has a cache salt of its own."""

    def __init__(self, root: Path, master: Master, backend: str) -> None:
        self.root, self.master, self.backend = root, master, backend
        self.model = write_tiny_llama(root / "model", seed=12, max_position_embeddings=4096)
        (root / "key").write_text("a key that both sides have")
        (root / "key").chmod(0o600)

    def start(self, role: str, *flags: str) -> RunningServer:
        return RunningServer(
            self.model,
            *("--threads", "1", "--max-num-seqs", "8", "--kv-cache-memory", "24MiB"),
            *("--role", role, "--kv-transfer-key-file", str(self.root / "key")),
            *("--kv-transfer-size", "8MiB", "--kv-transfer-timeout", "20"),
            *("--kv-transfer-backend", self.backend),
            *("--kv-store", self.master.url, "--kv-store-key-file", str(self.root / "key")),
            *("--kv-store-size", "16MiB", "--kv-store-buffer-size", "8MiB"),
            *("--kv-store-fetch", "always", "--kv-store-timeout", str(STORE_TIMEOUT_S)),
            *flags,
        )


@pytest.fixture(params=BACKENDS)
def servers(tmp_path: Path, master: Master, request: pytest.FixtureRequest) -> Servers:
    return Servers(tmp_path, master, request.param)


def test_servers_go_on_when_engine_or_master_is_killed_or_hangs(servers: Servers) -> None:
    random, path = Random(31), "/v1/completions"
    master = servers.master
    with servers.start("decode") as decode, servers.start("prefill") as prefill:
        bodies = [{**drawn(random, 300), "cache_salt": f"s{at}"} for at in range(5)]
        wanted = [answer_of(prefill.post(path, body)) for body in bodies[:4]]
        num_put = "quire_kv_store_put_blocks_total"
        prefill.until(lambda: prefill.metric(num_put) >= 4 * 18, "all blocks are stored")

        # From the store alone, and over the link with a store that has it all.
        assert answer_of(decode.post(path, bodies[0])) == wanted[0]
        assert decode.metric("quire_kv_store_fetched_blocks_total") == 18
        _, params = handed_over(prefill, bodies[1])
        assert answer_of(decode.post(path, {**bodies[1], PARAMS: params})) == wanted[1]

        # A master that hangs accepts connections and answers nothing.
        master.stop()
        try:
            _, params = handed_over(prefill, bodies[2])
            assert answer_of(decode.post(path, {**bodies[2], PARAMS: params})) == wanted[2]
        finally:
            master.go_on()
        received = decode.metric("quire_kv_transfer_received_blocks_total")
        assert received >= 18, failures(decode)  # of which the store says nothing
        decode.until(
            lambda: decode.metric("quire_kv_transfer_fetching") == 0, "the transfer has ended"
        )

        # What the prefill engine's memory held is gone with it, and the master does not know yet;
        # other blocks lie in the memory of the decode engine.
        _, params = handed_over(prefill, bodies[3])
        for pid in engines_of(prefill):
            kill(pid)
        prefill.kill()
        assert answer_of(decode.post(path, {**bodies[3], PARAMS: params})) == wanted[3]

        master.kill()
        alone = answer_of(decode.post(path, bodies[4]))
        repeated = {**bodies[4], "cache_salt": "another"}
        assert answer_of(decode.post(path, repeated)) == alone
        running = ("quire_running_requests", "quire_waiting_requests")
        decode.until(lambda: not any(map(decode.metric, running)), "no request is left")
        assert not re.search("Traceback", decode.stderr()), decode.stderr()
