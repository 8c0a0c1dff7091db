"""gRPC beside HTTP: the same tokens, keys, TLS, errors with their codes, cancellation, health."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.running_server import RunningServer
from tests.serve.test_tls import made_in

grpc = pytest.importorskip("grpc")
messages = pytest.importorskip("quire.api.rpc.messages")
calls = pytest.importorskip("quire.api.rpc.calls")

KEY = "a-key-for-tests"
PROMPT = "the sea and the stone"
GIVE_UP_S = 60.0


class Client:
    """Calls to one server. metadata: of each call."""

    def __init__(self, channel: Any, metadata: Any = ()) -> None:
        self._channel, self._metadata = channel, metadata

    def unary(self, service: str, method: str, request: Any, **options: Any) -> Any:
        of = messages.kserve_v2 if service.startswith("inference") else messages.health_v1
        name = method if service.startswith("inference") else f"Health{method}"
        call = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(of, f"{name}Response").FromString,
        )
        return call(request, metadata=self._metadata, timeout=GIVE_UP_S, **options)

    def infer(self, request: Any) -> Any:
        return self.unary("inference.GRPCInferenceService", "ModelInfer", request)

    def generate(self, request: Any = None, **fields: Any) -> Any:
        call = self._channel.unary_stream(
            "/quire.v1.Generation/Generate",
            request_serializer=messages.quire_v1.GenerateRequest.SerializeToString,
            response_deserializer=messages.quire_v1.GenerateResponse.FromString,
        )
        if request is None:
            request = messages.quire_v1.GenerateRequest(**fields)
        return call(request, metadata=self._metadata, timeout=GIVE_UP_S)


def port_of(server: RunningServer) -> int:
    found = re.search(r"gRPC listens.*port=(\d+)", server.stderr())
    assert found is not None, server.stderr()
    return int(found[1])


@pytest.fixture(scope="module")
def rpc_server(tiny: Path) -> Iterator[RunningServer]:
    with RunningServer(
        tiny, "--grpc-port", "0", "--api-key", KEY, "--served-model-name", "tiny", "--threads", "1"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def channel(rpc_server: RunningServer) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port_of(rpc_server)}") as channel:
        yield channel


@pytest.fixture
def client(channel: Any) -> Client:
    return Client(channel, (("authorization", f"Bearer {KEY}"),))


def over_http(server: RunningServer, **fields: Any) -> Any:
    body = json.dumps({"return_token_ids": True, **fields}).encode()
    status, _, answer = server.request(
        "POST", "/v1/completions", body, authorization=f"Bearer {KEY}"
    )
    assert status == 200, answer
    return json.loads(answer)


def refused(call: Callable[[], Any]) -> Any:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value


def test_a_stream_has_the_tokens_of_the_same_request_over_http(
    client: Client, rpc_server: RunningServer
) -> None:
    asked = {"max_tokens": 24, "seed": 4, "temperature": 0.7}
    more = {"ignore_eos": True, "n": 2, "top_p": 0.9}
    answer = over_http(rpc_server, prompt=PROMPT, **asked, **more)
    prompt_ids = answer["choices"][0]["prompt_token_ids"]
    own = {"ignore_eos": True, "n": 2}
    ids = messages.quire_v1.TokenIds(ids=prompt_ids)
    for given in ({"prompt": PROMPT}, {"token_ids": ids}):
        *parts, last = client.generate(
            **given, **asked, top_p=0.9, model="tiny", fields_json=json.dumps(own)
        )
        for choice in answer["choices"]:
            of_choice = [part for part in parts if part.index == choice["index"]]
            assert "".join(part.text for part in of_choice) == choice["text"]
            tokens = [id_ for part in of_choice for id_ in part.token_ids]
            assert tokens == choice["token_ids"]
            assert of_choice[-1].finish_reason == choice["finish_reason"]
        assert len({part.id for part in [*parts, last]}) == 1
        usage = answer["usage"]
        assert last.usage.prompt_tokens == usage["prompt_tokens"]
        assert last.usage.completion_tokens == usage["completion_tokens"]


def infer_request(**options: Any) -> Any:
    kinds = messages.kserve_v2
    request = kinds.ModelInferRequest(model_name="tiny", id="mine")
    for name, value in options.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        request.parameters[name].CopyFrom(kinds.InferParameter(**{kind[type(value)]: value}))
    return request


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", ["text", "INT32", "INT64"])
def test_kserve_infers_the_tokens_of_the_same_request_over_http(
    client: Client, rpc_server: RunningServer, kind: str, raw: bool
) -> None:
    asked = {"max_tokens": 12, "seed": 4, "temperature": 0.5, "ignore_eos": True, "stop": "\n"}
    answer = over_http(rpc_server, prompt=PROMPT, **asked)
    (choice,) = answer["choices"]
    request = infer_request(**asked)
    if kind == "text":
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        contents = struct.pack("<I", len(PROMPT)) + PROMPT.encode()
        values = {"bytes_contents": [PROMPT.encode()]}
    else:
        ids = choice["prompt_token_ids"]
        tensor = request.inputs.add(name="input_ids", datatype=kind, shape=[1, len(ids)])
        contents = np.array(ids, "<i4" if kind == "INT32" else "<i8").tobytes()
        values = {"int_contents" if kind == "INT32" else "int64_contents": ids}
    if raw:
        request.raw_input_contents.append(contents)
    else:
        tensor.contents.CopyFrom(messages.kserve_v2.InferTensorContents(**values))
    found = client.infer(request)
    assert (found.id, found.model_name) == ("mine", "tiny")
    names = [output.name for output in found.outputs]
    assert names == ["text_output", "output_ids", "finish_reason"]
    if raw:
        text = found.raw_output_contents[0][4:].decode()
        tokens = np.frombuffer(found.raw_output_contents[1], "<i4").tolist()
    else:
        text = found.outputs[0].contents.bytes_contents[0].decode()
        tokens = list(found.outputs[1].contents.int_contents)
    assert (text, tokens) == (choice["text"], choice["token_ids"])
    assert list(found.outputs[1].shape) == [len(tokens)]


def test_kserve_describes_server_and_model(client: Client) -> None:
    kinds, service = messages.kserve_v2, "inference.GRPCInferenceService"
    assert client.unary(service, "ServerLive", kinds.ServerLiveRequest()).live
    assert client.unary(service, "ServerReady", kinds.ServerReadyRequest()).ready
    assert client.unary(service, "ModelReady", kinds.ModelReadyRequest(name="tiny")).ready
    assert client.unary(service, "ServerMetadata", kinds.ServerMetadataRequest()).name == "quire"
    model = client.unary(service, "ModelMetadata", kinds.ModelMetadataRequest(name="tiny"))
    assert [tensor.name for tensor in model.inputs] == ["text_input", "input_ids"]
    unknown = refused(
        lambda: client.unary(service, "ModelReady", kinds.ModelReadyRequest(name="other"))
    )
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    for method in ("ModelReady", "ModelMetadata"):
        request = getattr(kinds, f"{method}Request")(name="tiny", version="2")
        error = refused(
            lambda method=method, request=request: client.unary(service, method, request)
        )
        assert error.code() is grpc.StatusCode.NOT_FOUND


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({}, "INVALID_ARGUMENT", "prompt"),
    "a value out of range": (
        {"prompt": "a", "temperature": -1.0},
        "INVALID_ARGUMENT",
        "temperature",
    ),
    "an unknown model": ({"prompt": "a", "model": "no"}, "NOT_FOUND", "model"),
    "an unknown field": ({"prompt": "a", "fields_json": '{"x": 1}'}, "INVALID_ARGUMENT", "x"),
    "what has no place": (
        {"prompt": "a", "fields_json": '{"logprobs": 1}'},
        "INVALID_ARGUMENT",
        "logprobs",
    ),
    "no JSON": ({"prompt": "a", "fields_json": "{"}, "INVALID_ARGUMENT", "fields_json"),
    "a list": ({"prompt": "a", "fields_json": "[]"}, "INVALID_ARGUMENT", "fields_json"),
    "a field twice": (
        {"prompt": "a", "fields_json": '{"prompt": "b"}'},
        "INVALID_ARGUMENT",
        "fields_json",
    ),
    "best_of": ({"prompt": "a", "fields_json": '{"best_of": 2}'}, "INVALID_ARGUMENT", "best_of"),
    "a long prompt": ({"prompt": "a " * 40000}, "INVALID_ARGUMENT", "prompt"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_has_the_code_and_the_field(client: Client, case: str) -> None:
    fields, code, param = BAD[case]
    error = refused(lambda: list(client.generate(**fields)))
    assert error.code() is getattr(grpc.StatusCode, code), error
    assert dict(error.trailing_metadata())["quire-param"] == param
    assert error.details()


def hostile(change: Callable[[Any], Any], **options: Any) -> Any:
    request = infer_request(**options)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs[0].contents.bytes_contents.append(b"a")
    change(request)
    return request


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "no input": lambda r: r.ClearField("inputs"),
    "two inputs": lambda r: r.inputs.add(name="text_input", datatype="BYTES", shape=[1]),
    "another type": lambda r: setattr(r.inputs[0], "datatype", "FP32"),
    "a shape of three": lambda r: r.inputs[0].shape.extend([1, 1]),
    "a negative shape": lambda r: r.inputs[0].shape.__setitem__(0, -1),
    "no shape": lambda r: r.inputs[0].ClearField("shape"),
    "two texts": lambda r: r.inputs[0].contents.bytes_contents.append(b"b"),
    "no UTF-8": lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"),
    "a short raw text": lambda r: r.raw_input_contents.append(b"\xff"),
    "a wrong raw length": lambda r: r.raw_input_contents.append(b"\xff\xff\xff\xffab"),
    "two raw contents": lambda r: r.raw_input_contents.extend([b"a", b"b"]),
    "an unknown output": lambda r: r.outputs.add(name="logits"),
    "an empty parameter": lambda r: r.parameters["seed"].Clear(),
    "n": lambda r: r.parameters["n"].CopyFrom(messages.kserve_v2.InferParameter(int64_param=2)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_tensor_is_refused(client: Client, case: str) -> None:
    error = refused(lambda: client.infer(hostile(HOSTILE[case])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert error.details()


def test_bytes_that_are_no_message_end_their_call_only(channel: Any, client: Client) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    error = refused(lambda: call(b"\xff" * 100, timeout=GIVE_UP_S))
    assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    unknown = channel.unary_unary("/quire.v1.Generation/Other")
    assert refused(lambda: unknown(b"", timeout=GIVE_UP_S)).code() is grpc.StatusCode.UNIMPLEMENTED
    assert list(client.generate(prompt="a", max_tokens=1))


def test_a_call_needs_a_key_of_the_server(channel: Any) -> None:
    for metadata in ((), (("authorization", "Bearer no"),), (("x-api-key", "no"),)):
        other = Client(channel, metadata)
        for call in (
            lambda other=other: list(other.generate(prompt="a")),
            lambda other=other: other.infer(infer_request()),
        ):
            assert refused(call).code() is grpc.StatusCode.UNAUTHENTICATED
    own = Client(channel, (("x-api-key", KEY),))
    assert list(own.generate(prompt="a", max_tokens=1))


def test_a_cancelled_call_ends_its_request(client: Client, rpc_server: RunningServer) -> None:
    def state_of(id_: str) -> str:
        status, _, body = rpc_server.request(
            "GET", f"/v1/requests/{id_}", b"", authorization=f"Bearer {KEY}"
        )
        assert status == 200
        return str(json.loads(body)["state"])

    fields = '{"ignore_eos": true}'
    stream = client.generate(prompt=PROMPT, max_tokens=30_000, fields_json=fields)
    first = next(stream)
    assert state_of(first.id) == "running"
    stream.cancel()
    rpc_server.until(lambda: state_of(first.id) == "failed", "the request ends")


def test_a_call_that_is_aborted_by_its_id_has_that_code(
    client: Client, rpc_server: RunningServer
) -> None:
    fields = '{"ignore_eos": true}'
    stream = client.generate(prompt=PROMPT, max_tokens=30_000, fields_json=fields)
    first = next(stream)
    status, _, _ = rpc_server.request(
        "DELETE", f"/v1/requests/{first.id}", b"", authorization=f"Bearer {KEY}"
    )
    assert status == 200
    error = refused(lambda: list(stream))
    assert error.code() is grpc.StatusCode.ABORTED


def test_a_client_that_does_not_read_gets_its_status_when_it_reads(
    rpc_server: RunningServer, client: Client
) -> None:
    """Its messages are blocked on their way, and other calls are not."""
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{port_of(rpc_server)}", options=options) as narrow:
        slow = Client(narrow, (("authorization", f"Bearer {KEY}"),))
        fields = '{"ignore_eos": true}'
        stream = slow.generate(prompt=PROMPT, max_tokens=30_000, fields_json=fields)
        first = next(stream)
        assert list(client.generate(prompt="a", max_tokens=4))[-1].usage.completion_tokens <= 4
        status, _, _ = rpc_server.request(
            "DELETE", f"/v1/requests/{first.id}", b"", authorization=f"Bearer {KEY}"
        )
        assert status == 200
        messages_read, error = [first], None
        try:
            messages_read += stream
        except grpc.RpcError as ended:
            error = ended
        assert error is not None
        assert error.code() is grpc.StatusCode.ABORTED
        assert sum(len(one.token_ids) for one in messages_read) < 30_000
        assert list(slow.generate(prompt="a", max_tokens=4))[-1].usage.completion_tokens <= 4


def test_the_status_of_a_cancelled_call_waits_for_its_message() -> None:
    """As gRPC refuses a status beside a first message that is half written."""
    done: list[str] = []
    writing, may_end = asyncio.Event(), asyncio.Event()

    class Context:
        invocation_metadata = None

        async def write(self, message: str) -> None:
            writing.set()
            await may_end.wait()
            done.append(message)

        async def abort(self, code: Any, details: str, metadata: Any) -> None:
            done.append(details)

    async def cancelled_call() -> None:
        context = calls.WholeMessages(Context())
        try:
            await context.write("message")
        except asyncio.CancelledError:
            await context.abort(grpc.StatusCode.ABORTED, "status")

    async def cancel() -> None:
        call = asyncio.ensure_future(cancelled_call())
        await writing.wait()
        call.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert done == []
        may_end.set()
        await call

    asyncio.run(cancel())
    assert done == ["message", "status"]


def test_health_needs_no_key(channel: Any) -> None:
    kinds, open_client = messages.health_v1, Client(channel)
    for service in ("", "quire.v1.Generation", "inference.GRPCInferenceService"):
        request = kinds.HealthCheckRequest(service=service)
        assert open_client.unary("grpc.health.v1.Health", "Check", request).status == 1
    unknown = kinds.HealthCheckRequest(service="x")
    error = refused(lambda: open_client.unary("grpc.health.v1.Health", "Check", unknown))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=kinds.HealthCheckRequest.SerializeToString,
        response_deserializer=kinds.HealthCheckResponse.FromString,
    )
    stream = watch(kinds.HealthCheckRequest(), timeout=GIVE_UP_S)
    assert next(stream).status == 1
    stream.cancel()


def test_tls_has_the_certificate_of_https(tiny: Path, tmp_path: Path) -> None:
    certificate, key = made_in(tmp_path)
    flags = ("--tls-cert", certificate, "--tls-key", key, "--threads", "1")
    with RunningServer(tiny, "--grpc-port", "0", *flags) as server:
        address = f"127.0.0.1:{port_of(server)}"
        trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
        with grpc.secure_channel(address, trusted) as channel:
            assert list(Client(channel).generate(prompt="a", max_tokens=1))
        with grpc.insecure_channel(address) as channel:
            call = Client(channel).generate(prompt="a", max_tokens=1)
            assert refused(lambda: list(call)).code() is grpc.StatusCode.UNAVAILABLE
