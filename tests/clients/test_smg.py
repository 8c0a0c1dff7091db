"""smg, a gateway, in front of two servers: answers are the server's, and warm prompts stay.

In front of a prefill and a decode server it drives the pair.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.fleet.clients import normal
from bench.fleet.processes import Smg
from bench.peers.places import is_installed
from tests.clients.conftest import BOX
from tests.serve.running_server import GIVE_UP_S, RunningServer

pytestmark = pytest.mark.skipif(
    not is_installed("smg"), reason="smg is not installed (bench/peers/setup smg)"
)
PLAIN: dict[str, Any] = {"model": "box", "prompt": "Once upon", "max_tokens": 24}
CHAT: dict[str, Any] = {
    "model": "box",
    "messages": [{"role": "user", "content": "Tell me of a dog"}],
    "max_tokens": 24,
}
CASES = (
    ("/v1/completions", {**PLAIN, "seed": 1, "logprobs": 2}),
    ("/v1/completions", {**PLAIN, "seed": 2, "stream": True, "repetition_penalty": 1.3}),
    ("/v1/completions", {**PLAIN, "seed": 3, "structured_outputs": {"regex": "[a-z ]{20,40}"}}),
    ("/v1/chat/completions", {**CHAT, "seed": 4}),
    ("/v1/chat/completions", {**CHAT, "seed": 5, "stream": True, "logprobs": True}),
)


class Behind(NamedTuple):
    """A gateway and the servers behind it."""

    port: int
    servers: list[RunningServer]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Behind]:
    with ExitStack() as stack:
        servers = [stack.enter_context(RunningServer(BOX, "--threads", "1")) for _ in range(2)]
        replicas: Any = servers
        smg = stack.enter_context(Smg(replicas, policy="cache_aware"))
        yield Behind(smg.port, servers)


def _post(port: int, path: str, body: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_answers_are_those_of_the_server(gateway: Behind) -> None:
    for path, body in CASES:
        status, raw = _post(gateway.port, path, body)
        alone, wanted = _post(gateway.servers[0].port, path, body)
        assert (status, normal(raw)) == (alone, normal(wanted)), path
        assert status == 200, raw


def test_a_prompt_that_comes_again_finds_its_blocks(gateway: Behind) -> None:
    texts = [f"A {animal} went home. " * 30 for animal in ("dog", "cat", "cow", "hen")]
    for turn in range(3):
        for text in texts:
            status, raw = _post(
                gateway.port, "/v1/completions", {"model": "box", "prompt": text, "max_tokens": 1}
            )
            assert status == 200, raw
            cached = json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 100) == (turn > 0)


def test_a_prefill_and_a_decode_server_are_driven_as_a_pair(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a key that both sides have\n")
    key.chmod(0o600)
    flags = ("--threads", "1", "--kv-transfer-key-file", str(key), "--role")
    with (
        RunningServer(BOX, *flags, "prefill") as prefill,
        RunningServer(BOX, *flags, "decode") as decode,
        Smg([decode], prefill=prefill) as smg,  # type: ignore[list-item, arg-type]
    ):
        text = "Once upon a time there was a little dog. " * 12
        messages = [{"role": "user", "content": text}]
        for path, body in (
            ("/v1/completions", {**PLAIN, "prompt": text, "seed": 6}),
            ("/v1/chat/completions", {**CHAT, "messages": messages, "seed": 7, "stream": True}),
        ):
            before = decode.metric("quire_kv_transfer_received_blocks_total")
            status, raw = _post(smg.port, path, body)
            # The last, partly filled block of a prompt is computed by the decode server.
            assert decode.metric("quire_kv_transfer_received_blocks_total") - before >= 8
            alone, wanted = _post(prefill.port, path, {**body, "cache_salt": "alone"})
            assert (status, normal(raw)) == (alone, normal(wanted)), path
            assert status == 200, raw
        prefill.until(
            lambda: not prefill.metric("quire_kv_transfer_leases"), "all leases have ended"
        )
