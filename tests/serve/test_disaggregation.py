"""Prefill and decode in engines of their own: equal answers, whatever happens to either side.

Three servers of one model: one hands prompts over, one fetches them through shared memory or TCP,
one asks the first by itself. Answers are compared with those of the prefill engine computing the
whole request alone, under a cache salt of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.bench.arrivals import replay
from quire.bench.http_load import Target, open_loop, served_model
from quire.obs.trace import read_trace
from tests.certificates import authority, key_of, signed
from tests.flawed_link import Change, cutting, flawed_link, flipping
from tests.serve.running_router import RunningRouter
from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama

PARAMS = "kv_transfer_params"
TO_HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What makes a decode engine fetch, but for blocks.
SOURCE = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "remote_request_id": "0" * 32,
}
FLAGS = ("--threads", "1", "--max-num-seqs", "8", "--kv-cache-memory", "24MiB")
TRANSFER = ("--kv-transfer-size", "8MiB", "--kv-transfer-timeout", "20")
FAILURES = "quire_kv_transfer_failures_total"
VOCAB = 96
# At once, so that prompts lack servers, and each server that writes answers has open streams.
NUM_PROMPTS, NUM_STREAMS = 24, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disaggregation")
    key = root / "key"
    key.write_text("a key that both sides have\n")
    key.chmod(0o600)
    write_tiny_llama(root / "model", seed=12, max_position_embeddings=4096)
    return root


def start(folder: Path, role: str, *flags: str) -> RunningServer:
    key = ("--kv-transfer-key-file", str(folder / "key"))
    return RunningServer(folder / "model", *FLAGS, *TRANSFER, *key, "--role", role, *flags)


def transfer_port(server: RunningServer) -> int:
    found = re.search(r"transfer_address=[^ \n]*:(\d+)", server.stderr())
    assert found is not None, server.stderr()
    return int(found[1])


@pytest.fixture(scope="module")
def prefill(folder: Path) -> Iterator[RunningServer]:
    with start(folder, "prefill") as server:
        yield server


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[RunningServer]:
    with start(folder, "decode") as server:
        yield server


@pytest.fixture(scope="module")
def asking(folder: Path, prefill: RunningServer) -> Iterator[RunningServer]:
    """An engine that has its prompts computed by the prefill engine, over TCP."""
    peer = ("--kv-transfer-peer", f"127.0.0.1:{transfer_port(prefill)}")
    wanted = ("--kv-transfer-fetch", "always", "--kv-transfer-backend", "tcp")
    with start(folder, "both", *peer, *wanted) as server:
        yield server


def drawn(random: Random, num_tokens: int) -> dict[str, Any]:
    """Return a request with drawn parameters; none of them is deterministic by itself."""
    body: dict[str, Any] = {
        "prompt": [random.randrange(3, VOCAB) for _ in range(num_tokens)],
        "max_tokens": random.randrange(2, 24),
        "seed": random.randrange(1 << 30),
        "temperature": random.choice([0.0, 0.7, 1.3]),
        "logprobs": random.randrange(4),
        "return_token_ids": True,
        "ignore_eos": True,
    }
    if random.random() < 0.4:
        body |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 2}
    if random.random() < 0.3:
        body |= {"top_k": 20, "top_p": 0.9}
    return body


def answer_of(found: tuple[int, Any]) -> Any:
    """Return all of an answer that must not differ."""
    status, answer = found
    assert status == 200, answer
    choice = answer["choices"][0]
    return {
        name: choice[name] for name in ("text", "token_ids", "logprobs", "finish_reason", "seed")
    }


def alone(prefill: RunningServer, body: dict[str, Any], name: str) -> Any:
    """Return the answer of one engine without help and without cached blocks."""
    return answer_of(prefill.post("/v1/completions", {**body, "cache_salt": f"alone {name}"}))


def handed_over(prefill: RunningServer, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    status, answer = prefill.post("/v1/completions", {**body, PARAMS: TO_HAND_OVER})
    assert status == 200, answer
    return answer, answer[PARAMS]


def failures(server: RunningServer) -> dict[str, float]:
    text = server.request("GET", "/metrics")[2].decode()
    found = re.findall(rf'^{FAILURES}{{reason="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {reason: float(count) for reason, count in found if float(count)}


def is_quiet(*servers: RunningServer) -> bool:
    """Return whether nothing of a transfer is left."""
    names = ("quire_kv_transfer_leases", "quire_kv_transfer_fetching", "quire_running_requests")
    return all(server.metric(name) == 0 for server in servers for name in names)


def test_a_pair_driven_by_an_orchestrator_gives_the_answer_of_one_engine(
    prefill: RunningServer, decode: RunningServer
) -> None:
    random, received = Random(1), decode.metric("quire_kv_transfer_received_blocks_total")
    num_blocks = 0
    for number in range(10):
        body = drawn(random, random.randrange(1, 400))
        wanted = alone(prefill, body, f"pair {number}")
        first, params = handed_over(prefill, body)
        assert first["choices"][0]["token_ids"] == wanted["token_ids"][:1]
        assert params["do_remote_prefill"] is True
        assert len(params["remote_block_ids"]) == len(body["prompt"]) // 16
        num_blocks += len(params["remote_block_ids"])
        assert answer_of(decode.post("/v1/completions", {**body, PARAMS: params})) == wanted
    assert decode.metric("quire_kv_transfer_received_blocks_total") == received + num_blocks
    assert failures(decode) == {}
    prefill.until(lambda: is_quiet(prefill, decode), "the leases end")


def test_a_continuation_takes_the_first_token_of_the_prefill_engine(
    prefill: RunningServer, decode: RunningServer
) -> None:
    body = {**drawn(Random(2), 200), "max_tokens": 12}
    wanted = alone(prefill, body, "continued")
    first, params = handed_over(prefill, body)
    known = first["choices"][0]["token_ids"]
    rest = decode.post("/v1/completions", {**body, "output_ids": known, PARAMS: params})
    assert answer_of(rest)["token_ids"] == wanted["token_ids"][1:]


def test_what_vllm_and_its_orchestrators_add_is_accepted(
    prefill: RunningServer, decode: RunningServer
) -> None:
    """Blocks in one list for each group of layers, their expiry, and a name of the transfer."""
    body = drawn(Random(16), 200)
    wanted = alone(prefill, body, "of vLLM")
    named = {**TO_HAND_OVER, "transfer_id": "attempt-1", "remote_num_tokens": None}
    status, answer = prefill.post("/v1/completions", {**body, PARAMS: named})
    assert status == 200, answer
    params = answer[PARAMS]
    assert (params["transfer_id"], params["remote_num_tokens"]) == ("attempt-1", 200)
    params |= {"remote_block_ids": [params["remote_block_ids"]], "tp_size": 1}
    params |= {"remote_blocks_expiry_time": 1790000000.5}
    before = decode.metric("quire_kv_transfer_received_blocks_total")
    assert answer_of(decode.post("/v1/completions", {**body, PARAMS: params})) == wanted
    assert decode.metric("quire_kv_transfer_received_blocks_total") == before + 200 // 16


def test_chats_and_streams_carry_the_parameters(
    prefill: RunningServer, decode: RunningServer
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Once upon a time there was a hedgehog. " * 4}],
        "max_tokens": 9,
        "seed": 3,
        "logprobs": True,
    }
    path = "/v1/chat/completions"
    wanted = prefill.post(path, {**body, "cache_salt": "alone chat"})[1]["choices"]
    with prefill.stream(path, {**body, PARAMS: TO_HAND_OVER}) as reader:
        chunks = [event for event in reader if event != "[DONE]"]
    offers = [chunk[PARAMS] for chunk in chunks if PARAMS in chunk]
    assert len(offers) == 1
    assert chunks[-1][PARAMS] == offers[0]
    answer = decode.post(path, {**body, PARAMS: offers[0]})[1]
    assert answer["choices"] == wanted
    assert answer[PARAMS] is None


def test_a_decode_engine_may_speculate(folder: Path, prefill: RunningServer) -> None:
    """Its drafts come from fetched prompts, and from predictions."""
    with start(folder, "decode", "--speculate", "ngram") as server:
        random = Random(17)
        for number in range(6):
            body = drawn(random, 0) | {"prompt": [3 + number, 4, 5, 6] * 40, "max_tokens": 60}
            wanted = alone(prefill, body, f"drafted {number}")
            _, params = handed_over(prefill, body)
            assert answer_of(server.post("/v1/completions", {**body, PARAMS: params})) == wanted
        text = "Once upon a time there was a hedgehog. " * 4
        chat = {"messages": [{"role": "user", "content": text}], "seed": 3, "logprobs": True}
        path = "/v1/chat/completions"
        chat |= {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
        wanted = prefill.post(path, {**chat, "cache_salt": "alone drafted"})[1]["choices"]
        params = prefill.post(path, {**chat, PARAMS: TO_HAND_OVER})[1][PARAMS]
        said = wanted[0]["message"]["content"]
        chat["prediction"] = {"type": "content", "content": said}
        status, answer = server.post(path, {**chat, PARAMS: params})
        assert (status, answer["choices"]) == (200, wanted)
        assert server.metric("quire_kv_transfer_received_blocks_total") >= 6 * 10
        assert server.metric("quire_draft_tokens_total") > 0
        assert server.metric("quire_draft_errors_total") == 0
        assert failures(server) == {}
        prefill.until(lambda: is_quiet(prefill, server), "the leases end")


OTHER_APIS = {"/v1/messages": "messages", "/v1/responses": "input"}


@pytest.mark.parametrize("path", OTHER_APIS)
def test_other_apis_carry_the_parameters_too(
    prefill: RunningServer, decode: RunningServer, path: str
) -> None:
    """Whole, and as a stream, where the event with the usage has them."""
    said = [{"role": "user", "content": f"Once upon a time there was a hedgehog of {path}. " * 4}]
    limit = "max_tokens" if path == "/v1/messages" else "max_output_tokens"
    body = {OTHER_APIS[path]: said, limit: 9, "seed": 3, "temperature": 0.7}

    def text_of(answer: dict[str, Any]) -> Any:
        return [block.get("text") or block["content"][0]["text"] for block in answer[blocks]]

    blocks = "content" if path == "/v1/messages" else "output"
    wanted = text_of(prefill.post(path, {**body, "cache_salt": "alone"})[1])
    status, first = prefill.post(path, {**body, PARAMS: TO_HAND_OVER})
    assert status == 200, first
    with prefill.stream(path, {**body, PARAMS: TO_HAND_OVER}) as reader:
        events = list(reader)
    ends = [event.get("response", event) for event in events]
    [streamed] = [end[PARAMS] for end in ends if PARAMS in end]
    for params in (first[PARAMS], streamed):
        before = decode.metric("quire_kv_transfer_received_blocks_total")
        assert decode.post("/v1/cache/flush", {})[0] == 200
        status, answer = decode.post(path, {**body, PARAMS: params})
        assert (status, text_of(answer)) == (200, wanted)
        num_blocks = len(params["remote_block_ids"])
        assert decode.metric("quire_kv_transfer_received_blocks_total") == before + num_blocks > 0


def test_an_engine_asks_its_peer_by_itself(prefill: RunningServer, asking: RunningServer) -> None:
    random = Random(3)
    for number in range(6):
        body = drawn(random, random.randrange(20, 300))
        wanted = alone(prefill, body, f"asked {number}")
        assert answer_of(asking.post("/v1/completions", body)) == wanted
    assert asking.metric("quire_kv_transfer_received_blocks_total") > 0
    assert failures(asking) == {}
    prefill.until(lambda: is_quiet(prefill, asking), "the prompts at the peer end")


def test_requests_at_once_share_what_they_begin_with(
    prefill: RunningServer, asking: RunningServer
) -> None:
    random, beginning = Random(4), [Random(5).randrange(3, VOCAB) for _ in range(160)]
    bodies = [drawn(random, 30) for _ in range(8)]
    for body in bodies:
        body["prompt"] = beginning + body["prompt"]
    wanted = [alone(prefill, body, f"shared {at}") for at, body in enumerate(bodies)]
    answers: list[Any] = [None] * len(bodies)

    def ask(at: int) -> None:
        answers[at] = answer_of(asking.post("/v1/completions", bodies[at]))

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == wanted


def test_a_mooncake_trace_is_replayed_through_the_pair_at_its_times(
    prefill: RunningServer, asking: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": at, "input_length": 90, "output_length": 4, "hash_ids": [name]}
        for at, name in ((7_000, 1), (7_300, 1), (7_900, 2))
    )
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    specs, _ = replay(
        read_trace(file), speed=3, max_tokens=4096, vocab_size=VOCAB, rng=np.random.default_rng(1)
    )
    before = asking.metric("quire_kv_transfer_received_blocks_total")

    async def send() -> list[Any]:
        target = Target(url=asking.url, model="")
        model = (await served_model(target)).name
        return await open_loop(Target(url=asking.url, model=model), specs)

    times = asyncio.run(send())
    assert [(one.error, one.output_tokens) for one in times] == [("", 4)] * 3
    assert [one.sent_s for one in times] == pytest.approx([0.0, 0.1, 0.3])
    assert all(one.first_s > one.sent_s for one in times)  # none was sent before its time
    # Two prompts of five full blocks; the second request has those of the first.
    assert asking.metric("quire_kv_transfer_received_blocks_total") == before + 2 * 5
    prefill.until(lambda: is_quiet(prefill, asking), "the prompts at the peer end")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(flipping(20_000), "bad_bytes"), (cutting(20_000), "cut"), (cutting(5), "cut")],
    ids=["flips a bit", "is cut", "is cut at once"],
)
def test_a_bad_link_costs_time_and_no_token(
    prefill: RunningServer, asking: RunningServer, harm: Change, reason: str
) -> None:
    body = drawn(Random(6), 390)
    wanted, before = alone(prefill, body, "link"), failures(asking).get(reason, 0)
    # A salt of its own for each case, so that no block is there already.
    body["cache_salt"] = f"link {id(harm)}"
    _, params = handed_over(prefill, body)
    with flawed_link(transfer_port(prefill), harm) as port:
        params |= {"remote_port": port}
        assert answer_of(asking.post("/v1/completions", {**body, PARAMS: params})) == wanted
    assert failures(asking)[reason] == before + 1


def test_what_is_gone_is_computed(prefill: RunningServer, decode: RunningServer) -> None:
    body = drawn(Random(7), 200)
    wanted = alone(prefill, body, "gone")
    _, params = handed_over(prefill, body)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    for number, (change, reason) in enumerate(
        (
            ({"remote_port": closed}, "unreachable"),
            ({"remote_engine_id": "an engine before"}, "expired"),
            ({"remote_request_id": "0" * 32}, "expired"),
        )
    ):
        before = failures(decode).get(reason, 0)
        changed = {**body, "cache_salt": f"gone {number}", PARAMS: {**params, **change}}
        assert answer_of(decode.post("/v1/completions", changed)) == wanted
        assert failures(decode)[reason] == before + 1
    # Blocks of another prompt, or another salt, have other digests.
    other = {**body, "prompt": body["prompt"][::-1], PARAMS: params}
    assert answer_of(decode.post("/v1/completions", other)) == alone(
        prefill, {**body, "prompt": body["prompt"][::-1]}, "reversed"
    )


def test_another_model_is_refused_and_computed_here(
    folder: Path, prefill: RunningServer, tmp_path: Path
) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=13, max_position_embeddings=4096)
    key = ("--kv-transfer-key-file", str(folder / "key"), "--role", "decode")
    with RunningServer(other, *FLAGS, *TRANSFER, *key) as server:
        body = drawn(Random(8), 120)
        wanted = answer_of(server.post("/v1/completions", {**body, "cache_salt": "alone"}))
        _, params = handed_over(prefill, body)
        assert answer_of(server.post("/v1/completions", {**body, PARAMS: params})) == wanted
        assert failures(server) == {"refused": 1}
        assert "same model" in server.stderr()


def test_another_instruction_set_is_refused_with_the_reason(
    folder: Path, prefill: RunningServer
) -> None:
    """As of unlike machines, which round differently: the answer is the decode engine's own."""
    machine = _native.Pool(1).isa
    other = "portable" if machine != "portable" else ""
    if not other:
        pytest.skip("this machine has one instruction set only")
    key = ("--kv-transfer-key-file", str(folder / "key"), "--role", "decode")
    flags = (*FLAGS, *TRANSFER, *key)
    with RunningServer(folder / "model", *flags, environment={"QUIRE_ISA": other}) as server:
        body = drawn(Random(15), 120)
        wanted = answer_of(server.post("/v1/completions", {**body, "cache_salt": "alone"}))
        _, params = handed_over(prefill, body)
        assert answer_of(server.post("/v1/completions", {**body, PARAMS: params})) == wanted
        assert failures(server) == {"refused": 1}
        assert (
            f"instruction sets or devices differ: {other} at the fetching engine" in server.stderr()
        )


def test_a_pair_with_certificates_of_both_sides(folder: Path, prefill: RunningServer) -> None:
    """By TCP, over TLS; an engine without a certificate computes its prompts."""
    signer = authority(folder, "authority")
    tls: list[str] = ["--kv-transfer-backend", "tcp", "--kv-transfer-tls-ca", str(signer)]
    own = [signed(folder, name, signer) for name in ("handing", "fetching")]
    certs = [
        ("--kv-transfer-tls-cert", str(one), "--kv-transfer-tls-key", str(key_of(one)))
        for one in own
    ]
    body = drawn(Random(13), 200)
    wanted = alone(prefill, body, "certificates")
    with start(folder, "prefill", *tls, *certs[0]) as handing:
        with start(folder, "decode", *tls, *certs[1]) as fetching:
            _, params = handed_over(handing, body)
            assert answer_of(fetching.post("/v1/completions", {**body, PARAMS: params})) == wanted
            assert fetching.metric("quire_kv_transfer_received_blocks_total") == 200 // 16
            assert failures(fetching) == {}
            # All blocks are there: the lease ends without a fetch.
            _, params = handed_over(handing, body)
            assert answer_of(fetching.post("/v1/completions", {**body, PARAMS: params})) == wanted
            assert fetching.metric("quire_kv_transfer_received_blocks_total") == 200 // 16
            handing.until(lambda: is_quiet(handing, fetching), "both leases end")
        with start(folder, "decode", *tls) as stranger:
            _, params = handed_over(handing, body)
            assert answer_of(stranger.post("/v1/completions", {**body, PARAMS: params})) == wanted
            assert set(failures(stranger)) <= {"refused", "cut"}
            assert sum(failures(stranger).values()) == 1


def test_a_client_that_leaves_frees_both_sides(
    prefill: RunningServer, asking: RunningServer
) -> None:
    body = {**drawn(Random(9), 3000), "max_tokens": 400}
    leases = prefill.metric("quire_kv_transfer_leases")  # of what was never fetched, until they end

    def is_free() -> bool:
        running = (one.metric("quire_running_requests") for one in (prefill, asking))
        fetching = asking.metric("quire_kv_transfer_fetching")
        return (
            not any(running)
            and not fetching
            and (prefill.metric("quire_kv_transfer_leases") <= leases)
        )

    for wait in (False, True):
        with asking.stream("/v1/completions", {**body, "cache_salt": f"leaves {wait}"}) as reader:
            if wait:
                reader.next()
        prefill.until(is_free, "both sides are free again")
    wanted = alone(prefill, {**body, "max_tokens": 5}, "after leaving")
    assert answer_of(asking.post("/v1/completions", {**body, "max_tokens": 5})) == wanted


def test_a_store_without_room_fetches_what_fits(folder: Path, prefill: RunningServer) -> None:
    with start(folder, "decode", "--kv-transfer-size", "64KiB") as server:
        body = drawn(Random(10), 600)
        wanted = alone(prefill, body, "no room")
        _, params = handed_over(prefill, body)
        assert answer_of(server.post("/v1/completions", {**body, PARAMS: params})) == wanted
        assert failures(server)["no_room"] == 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (7, "an object"),
        ({"do_remote_prefill": 1}, "true or false"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "not both"),
        ({"remote_hots": "x"}, "allowed names"),
        ({"do_remote_prefill": True}, "remote_host"),
        ({"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1}, "loopback"),
        ({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 0}, "65535"),
        ({"do_remote_prefill": True, "remote_host": "::1", "remote_port": 9}, "remote_request_id"),
        ({"do_remote_decode": True}, "role is decode"),
        ({"do_remote_decode": True, "tp_size": 0}, "1 to 64"),
        ({"do_remote_decode": True, "remote_num_tokens": -1}, "from 0"),
        ({"do_remote_decode": True, "remote_num_tokens": True}, "from 0"),
        ({"do_remote_decode": True, "transfer_id": 7}, "a text"),
        ({"do_remote_decode": True, "remote_blocks_expiry_time": "soon"}, "a number"),
        (SOURCE | {"remote_block_ids": [[1], [2]]}, "one such list"),
        (SOURCE | {"remote_block_ids": [-1]}, "from 0"),
    ],
)
def test_malformed_parameters_are_refused_by_name(
    decode: RunningServer, params: Any, words: str
) -> None:
    status, answer = decode.post("/v1/completions", {"prompt": [5, 6], PARAMS: params})
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["param"] == PARAMS


def test_what_cannot_be_handed_over_is_refused(prefill: RunningServer) -> None:
    for change, words in (
        ({"n": 2}, "one choice"),
        ({"prompt": [[5], [6]]}, "2 prompts"),
        ({"output_ids": [5], "seed": 1}, "output_ids"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ):
        body = {"prompt": [5, 6], PARAMS: TO_HAND_OVER, **change}
        status, answer = prefill.post("/v1/completions", body)
        assert (status, words in answer["error"]["message"]) == (400, True), answer
    body = {"input": "Once", "background": True, PARAMS: TO_HAND_OVER}
    status, answer = prefill.post("/v1/responses", body)
    assert (status, "leave background out" in answer["error"]["message"]) == (400, True), answer
    both_false = {"do_remote_decode": False, "do_remote_prefill": False}
    for params in ({}, both_false):
        assert prefill.post("/v1/completions", {"prompt": [5, 6], PARAMS: params})[0] == 200


def test_a_server_without_a_key_says_how_to_exchange_blocks(server: RunningServer) -> None:
    status, answer = server.post("/v1/completions", {"prompt": [5, 6], PARAMS: TO_HAND_OVER})
    assert status == 400
    assert "--kv-transfer-key-file" in answer["error"]["message"]
    assert "quire_kv_transfer" not in server.request("GET", "/metrics")[2].decode()


def test_a_router_sends_long_prompts_through_the_pair(
    prefill: RunningServer, decode: RunningServer
) -> None:
    body = drawn(Random(12), 400)
    wanted = alone(prefill, body, "routed")
    before = decode.metric("quire_kv_transfer_received_blocks_total")
    arguments = (decode.url, "--prefill", prefill.url, "--min-prefill-tokens", "64")
    with RunningRouter(*arguments) as router:
        status, raw = router.request("POST", "/v1/completions", body)
        assert answer_of((status, json.loads(raw))) == wanted
        said = [{"role": "user", "content": "Once upon a time a router was in between. " * 8}]
        message = {"messages": said, "max_tokens": 7, "seed": 4}
        wanted = prefill.post("/v1/messages", {**message, "cache_salt": "alone"})[1]["content"]
        status, raw = router.request("POST", "/v1/messages", message)
        assert (status, json.loads(raw)["content"]) == (200, wanted)
        num_blocks = decode.metric("quire_kv_transfer_received_blocks_total") - before
        metrics = router.request("GET", "/metrics")[1].decode()
    assert 'quire_router_prefills_total{outcome="handed_over"} 2.0' in metrics
    assert num_blocks > 400 // 16


def test_a_movable_server_computes_prompts_where_no_other_does(
    asking: RunningServer, decode: RunningServer
) -> None:
    body = drawn(Random(14), 400)
    wanted = alone(asking, body, "movable")
    arguments = (decode.url, "--movable", asking.url, "--min-prefill-tokens", "64")
    with RunningRouter(*arguments) as router:
        status, raw = router.request("POST", "/v1/completions", body)
        assert answer_of((status, json.loads(raw))) == wanted
        metrics = router.request("GET", "/metrics")[1].decode()
    assert 'quire_router_prefills_total{outcome="handed_over"} 1.0' in metrics
    assert "quire_router_role_changes 0.0" in metrics


def test_a_server_changes_its_role_when_its_streams_have_ended(
    folder: Path, prefill: RunningServer, decode: RunningServer
) -> None:
    """Prompts lack servers while streams are open at all servers that write answers."""
    random = Random(17)
    prompts = [{**drawn(random, 3000), "max_tokens": 2} for _ in range(4)]
    stream = {**drawn(random, 20), "max_tokens": 1000}
    wanted = [alone(prefill, body, f"role {at}") for at, body in enumerate(prompts)]
    text = alone(prefill, stream, "stream")["text"]
    with start(folder, "both") as movable:
        arguments = (decode.url, "--prefill", prefill.url, "--movable", movable.url)
        arguments += ("--policy", "least-tokens", "--min-prefill-tokens", "256")
        with RunningRouter(*arguments, "--role-seconds", "0.3") as router:
            is_moving, has_computed = threading.Event(), threading.Event()

            def until(done: threading.Event, ask: Callable[[int], None]) -> None:
                number = 0
                while not done.is_set():
                    ask(number)
                    number += 1

            def ask_prompt(at: int, number: int) -> None:
                body = {**prompts[at % 4], "cache_salt": f"prompt {at} {number}"}
                status, raw = router.request("POST", "/v1/completions", body)
                assert answer_of((status, json.loads(raw))) == wanted[at % 4]

            def ask_stream(number: int) -> None:
                body = {**stream, "stream": True}
                lines = router.lines("POST", "/v1/completions", body)
                events = [json.loads(one[6:]) for one in lines if one.startswith(b"data: {")]
                assert "".join(one["choices"][0]["text"] for one in events) == text

            with ThreadPoolExecutor(NUM_PROMPTS + NUM_STREAMS) as threads:
                open_ = [
                    threads.submit(
                        until, has_computed, lambda number, at=at: ask_prompt(at, number)
                    )
                    for at in range(NUM_PROMPTS)
                ]
                open_ += [threads.submit(until, is_moving, ask_stream) for _ in range(NUM_STREAMS)]
                try:
                    router.until(
                        lambda: (
                            "a server changes its role" in router.stderr()
                            or any(one.done() for one in open_)
                        ),
                        "prompts lack servers",
                    )
                    is_moving.set()
                    sent = "quire_kv_transfer_sent_blocks_total"
                    router.until(
                        lambda: (
                            movable.metric(sent) > 0
                            or any(one.done() for one in open_[:NUM_PROMPTS])
                        ),
                        "it computes prompts for others",
                    )
                finally:
                    is_moving.set()
                    has_computed.set()
                for one in open_:
                    one.result()
            log = router.stderr()
            begins = re.search(r"a server changes its role.*open=(\d+)", log)
            ends = re.search(r"a server has changed its role.*role=prefill", log)
            assert begins is not None, log
            assert ends is not None, log
            assert int(begins[1]) > 0
            assert begins.start() < ends.start()
            assert router.metric("quire_router_role_changes") >= 1
            assert movable.metric(sent) > 0
