"""Servers of the torch executor that hand KV blocks over or share a store, in processes of their
own: equal answers, counted hits, and what happens without the other side.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.serve.running_server import RunningServer
from tests.serve.test_disaggregation import (
    FLAGS,
    PARAMS,
    TRANSFER,
    alone,
    answer_of,
    drawn,
    failures,
    handed_over,
    is_quiet,
    transfer_port,
)
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu

ON_CPU_TENSORS = ("--executor", "torch", "--device", "cpu")
RECEIVED = "quire_kv_transfer_received_blocks_total"
FETCHED = "quire_kv_store_fetched_blocks_total"
HIT_TOKENS = "quire_prefix_hit_tokens_total"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disaggregation")
    key = root / "key"
    key.write_text("a key that both sides have\n")
    key.chmod(0o600)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 68}
    write_tiny_llama(root / "model", seed=12, dtype="bf16", max_position_embeddings=1024, **heads)
    return root


def start(folder: Path, role: str, *flags: str) -> RunningServer:
    key = ("--kv-transfer-key-file", str(folder / "key"), "--role", role)
    return RunningServer(folder / "model", *FLAGS, *TRANSFER, *key, *flags)


@pytest.fixture(scope="module")
def prefill(folder: Path) -> Iterator[RunningServer]:
    with start(folder, "prefill", *ON_CPU_TENSORS) as server:
        yield server


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("ranks", [(), ("-tp", "2", "--threads", "2")], ids=["one", "ranks"])
def test_a_pair_gives_the_answers_of_one_engine(
    folder: Path, prefill: RunningServer, backend: str, ranks: tuple[str, ...]
) -> None:
    random, num_blocks = Random(1), 0
    way = ("--kv-transfer-backend", "tcp") if backend == "tcp" else ()
    with start(folder, "decode", *ON_CPU_TENSORS, *ranks, *way) as decode:
        for number in range(4):
            body = drawn(random, random.randrange(40, 200))
            body["cache_salt"] = f"pair {backend} {len(ranks)} {number}"
            wanted = alone(prefill, body, body["cache_salt"])
            _, params = handed_over(prefill, body)
            num_blocks += len(body["prompt"]) // 16
            assert answer_of(decode.post(PATH, {**body, PARAMS: params})) == wanted
        assert decode.metric(RECEIVED) == num_blocks
        assert decode.metric(HIT_TOKENS) == 16 * num_blocks
        assert failures(decode) == {}
        prefill.until(lambda: is_quiet(prefill, decode), "the leases end")


def test_a_decode_engine_has_prompts_computed_and_outlives_its_peer(folder: Path) -> None:
    bodies = [drawn(Random(number), 300) for number in range(3)]
    with start(folder, "prefill", *ON_CPU_TENSORS) as peer:
        wanted = [alone(peer, body, f"peer {at}") for at, body in enumerate(bodies)]
        asking = ("--kv-transfer-peer", f"127.0.0.1:{transfer_port(peer)}")
        always = ("--kv-transfer-fetch", "always")
        with start(folder, "decode", *ON_CPU_TENSORS, *asking, *always) as decode:
            assert answer_of(decode.post(PATH, bodies[0])) == wanted[0]
            assert decode.metric(RECEIVED) == 300 // 16
            peer.process.send_signal(signal.SIGKILL)
            peer.process.wait()
            for at in (1, 2):
                assert answer_of(decode.post(PATH, bodies[at])) == wanted[at]
            assert decode.metric(RECEIVED) == 300 // 16
            assert set(failures(decode)) <= {"unreachable", "cut", "no_peer"}
            assert sum(failures(decode).values()) == 2


def test_engines_on_unlike_devices_are_refused_with_the_reason(
    folder: Path, prefill: RunningServer
) -> None:
    with start(folder, "decode") as native:
        body = drawn(Random(8), 120)
        wanted = answer_of(native.post(PATH, {**body, "cache_salt": "alone"}))
        _, params = handed_over(prefill, body)
        assert answer_of(native.post(PATH, {**body, PARAMS: params})) == wanted
        assert failures(native) == {"refused": 1}
        said = native.stderr()
        assert "instruction sets or devices differ: " in said
        assert "torch-cpu-elementwise-" in said


def test_a_cold_engine_finds_what_another_has_stored(folder: Path, tmp_path: Path) -> None:
    """Ranks find it too; an engine on another device computes its own blocks."""
    store = ("--kv-store", str(tmp_path / "store"), "--kv-store-fetch", "always")
    store += ("--kv-store-timeout", "60")

    def serving(*flags: str) -> RunningServer:
        return RunningServer(folder / "model", *FLAGS, *store, *flags)

    body: dict[str, Any] = drawn(Random(9), 200)
    with serving(*ON_CPU_TENSORS) as one:
        wanted = answer_of(one.post(PATH, body))
        one.until(lambda: one.metric("quire_kv_store_put_blocks_total") == 12, "all are stored")
    for ranks in ((), ("-tp", "2", "--threads", "2")):
        with serving(*ON_CPU_TENSORS, *ranks) as cold:
            assert answer_of(cold.post(PATH, body)) == wanted
            assert cold.metric(FETCHED) == 12
            assert cold.metric(HIT_TOKENS) == 16 * 12
    with serving() as native:
        assert native.post(PATH, body)[0] == 200
        assert native.metric(FETCHED) == 0
