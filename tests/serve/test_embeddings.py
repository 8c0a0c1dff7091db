"""Embeddings, scores and rankings of a live server, beside a stream that is not disturbed."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.api.embeddings.scores import DEFAULT_INSTRUCTION, JUDGE_AFTER, JUDGE_BEFORE
from tests.cases import each_case
from tests.serve.healthy_stream import HealthyStream
from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.tiny_models import write_tiny
from tests.unit.engine.library.test_embed import write_model

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["a little dog", "rain falls", "", "the same", "the same", "x" * 300]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "classifier_from_token": ["a", "b"],
}


def vectors(server: RunningServer, **body: Any) -> np.ndarray:
    status, answer = server.post(EMBEDDINGS, body)
    assert status == 200, answer
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def refused(server: RunningServer, path: str, body: dict[str, Any], param: str) -> str:
    status, answer = server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    return str(answer["error"]["message"])


def test_each_form_of_input_has_the_same_vectors(beside_a_healthy_stream: RunningServer) -> None:
    server = beside_a_healthy_stream
    together = vectors(server, input=TEXTS)
    for at, text in enumerate(TEXTS):
        assert (vectors(server, input=text) == together[at]).all()
    ids = [server.post("/tokenize", {"prompt": text})[1]["tokens"] for text in TEXTS]
    assert (vectors(server, input=ids) == together).all()
    assert (vectors(server, input=ids[0]) == together[:1]).all()
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-6
    assert (together[3] == together[4]).all()
    assert (together[0] != together[1]).any()


def test_forms_of_a_vector(beside_a_healthy_stream: RunningServer) -> None:
    server = beside_a_healthy_stream
    plain = vectors(server, input=TEXTS)
    status, answer = server.post(EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64"})
    assert status == 200
    raw = [base64.b64decode(one["embedding"], validate=True) for one in answer["data"]]
    assert (np.frombuffer(b"".join(raw), "<f4").reshape(plain.shape) == plain).all()
    cut = vectors(server, input=TEXTS, dimensions=8)
    kept = plain[:, :8] / np.linalg.norm(plain[:, :8], axis=1, keepdims=True)
    assert np.abs(cut - kept).max() < 1e-6
    loose = vectors(server, input=TEXTS, normalize=False)
    assert np.abs(loose / np.linalg.norm(loose, axis=1, keepdims=True) - plain).max() < 1e-6
    status, answer = server.post("/pooling", {"input": TEXTS, "task": "embed"})
    assert status == 200
    assert (np.array([one["data"] for one in answer["data"]], np.float32) == plain).all()


def test_usage_and_metrics_count_prompts_and_no_output(server: RunningServer) -> None:
    before = server.metric("quire_generation_tokens_total")
    status, answer = server.post(EMBEDDINGS, {"input": [[5, 6, 7], [8]], "user": "someone"})
    assert status == 200
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 0, 4)
    assert server.metric("quire_generation_tokens_total") == before
    assert answer["object"] == "list"
    assert answer["id"].startswith("embd-")


def test_scores_are_cosines_and_documents_come_in_their_order(
    beside_a_healthy_stream: RunningServer,
) -> None:
    server = beside_a_healthy_stream
    query, documents = TEXTS[0], TEXTS[1:5]
    found = vectors(server, input=[query, *documents]).astype(np.float64)
    wanted = found[1:] @ found[0]
    status, answer = server.post(SCORE, {"text_1": query, "text_2": documents})
    assert status == 200
    scores = [one["score"] for one in answer["data"]]
    assert np.allclose(scores, wanted, atol=1e-6)
    pairs = {"text_1": [query] * 4, "text_2": [{"text": text} for text in documents]}
    assert [one["score"] for one in server.post("/score", pairs)[1]["data"]] == scores
    order = sorted(range(4), key=lambda at: (-scores[at], at))
    for path in (RERANK, "/rerank", "/v2/rerank"):
        asked = {"query": query, "documents": documents, "return_documents": True}
        status, answer = server.post(path, asked)
        assert status == 200
        assert [one["index"] for one in answer["results"]] == order
        assert [one["relevance_score"] for one in answer["results"]] == [scores[at] for at in order]
        assert [one["document"]["text"] for one in answer["results"]] == [
            documents[at] for at in order
        ]
    for left, right in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        named = server.post(SCORE, {left: query, right: documents})[1]["data"]
        assert [one["score"] for one in named] == scores
    every = server.post(RERANK, {"query": query, "documents": documents, "top_n": 0})[1]["results"]
    assert [one["index"] for one in every] == order
    few = server.post(RERANK, {"query": query, "documents": documents, "top_n": 2})[1]["results"]
    assert [(one["index"], "document" in one) for one in few] == [(at, False) for at in order[:2]]


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[RunningServer]:
    """A server with a short context, so that inputs beyond it are cheap to compute."""
    flags = ("--convert", "embed", "--matryoshka-dimensions", "any", "--threads", "1")
    with RunningServer(tiny, "--max-model-len", "512", *flags) as server:
        yield server


def test_inputs_beyond_the_context_are_refused_or_cut(narrow: RunningServer) -> None:
    server, long = narrow, list(range(2, 302)) * 2
    message = refused(server, EMBEDDINGS, {"input": ["a", long]}, "input")
    assert "mixes kinds" in message
    message = refused(server, EMBEDDINGS, {"input": long}, "input")
    assert "512" in message
    assert "600" in message
    message = refused(server, RERANK, {"query": "a", "documents": ["b " * 1_400]}, "documents")
    assert "512" in message
    short = vectors(server, input=long[:10])
    assert (vectors(server, input=long, truncate_prompt_tokens=10) == short).all()
    end = vectors(server, input=long, truncate_prompt_tokens=10, truncation_side="left")
    assert (end == vectors(server, input=long[-10:])).all()
    # The special tokens around a text stay.
    tokens = server.post("/tokenize", {"prompt": "hello there"})[1]["tokens"]
    cut = vectors(server, input="hello there", truncate_prompt_tokens=4)
    assert (cut == vectors(server, input=tokens[:4])).all()
    assert (vectors(server, input="b " * 1_400, truncate_prompt_tokens=-1) != 0).any()


def test_long_documents_and_queries_are_cut_on_request(narrow: RunningServer) -> None:
    server, long = narrow, "a dog barks " * 400

    def first(text: str, count: int) -> str:
        ids = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
        return str(server.post("/detokenize", {"tokens": ids[:count]})[1]["prompt"])

    asked = {"query": "rain falls here", "documents": [long, "a dog"], "return_documents": True}
    refused(server, RERANK, asked, "documents")
    cut = server.post(RERANK, {**asked, "max_tokens_per_doc": 20})[1]
    found = {one["index"]: one["relevance_score"] for one in cut["results"]}
    by_hand = {**asked, "documents": [first(long, 20), "a dog"]}
    wanted = {
        one["index"]: one["relevance_score"] for one in server.post(RERANK, by_hand)[1]["results"]
    }
    assert found == wanted
    assert {one["index"]: one["document"]["text"] for one in cut["results"]}[0] == long
    assert cut["usage"]["prompt_tokens"] < 60
    sent = {"text_1": long, "text_2": "a dog"}
    (score,) = server.post(SCORE, {**sent, "max_tokens_per_query": 3})[1]["data"]
    (same,) = server.post(SCORE, {**sent, "text_1": first(long, 3)})[1]["data"]
    assert score == same


@each_case(
    ("path", "body", "param", "words"),
    [
        (EMBEDDINGS, {}, "input", "missing"),
        (EMBEDDINGS, {"input": []}, "input", "none of them empty"),
        (EMBEDDINGS, {"input": ["a", 5]}, "input", "mixes kinds"),
        (EMBEDDINGS, {"input": [5, "a"]}, "input", "token ids"),
        (EMBEDDINGS, {"input": [[5], []]}, "input", "empty"),
        (EMBEDDINGS, {"input": [[307]]}, "input", "0 to 306"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input", "2048"),
        (EMBEDDINGS, {"input": "a", "dimensions": 61}, "dimensions", "1 to 60"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "query"}, "prompt_name", "has none"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "not a field"),
        (EMBEDDINGS, {"input": "a", "messages": []}, "messages", "takes input"),
        (EMBEDDINGS, {"input": "a", "truncation_side": "middle"}, "truncation_side", "left"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task", "embed"),
        (SCORE, {"text_1": "a"}, "text_2", "missing"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "as many"),
        (SCORE, {"text_1": "a", "text_2": [7]}, "text_2", "texts"),
        (SCORE, {"queries": "a"}, "documents", "missing"),
        (SCORE, {"items": "a"}, "queries", "missing"),
        (SCORE, {"text_1": "a", "documents": "b"}, "documents", "data_1 and data_2"),
        (SCORE, {"text_1": "a", "text_2": "b", "data_2": "c"}, "data_2", "two texts"),
        (SCORE, {"data_1": ["a", "b"], "data_2": ["a"] * 3}, "data_1", "as many"),
        (
            SCORE,
            {"text_1": "a", "text_2": "b", "max_tokens_per_doc": True},
            "max_tokens_per_doc",
            "true",
        ),
        (
            RERANK,
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1},
            "max_tokens_per_doc",
            "0 to cut nothing",
        ),
        (
            RERANK,
            {"query": "a", "documents": ["b"], "max_tokens_per_query": 2.5},
            "max_tokens_per_query",
            "2.5",
        ),
        (RERANK, {"documents": ["a"]}, "query", "missing"),
        (RERANK, {"query": "a", "documents": "b"}, "documents", "a list"),
        (RERANK, {"query": "a", "documents": []}, "documents", "empty"),
        (RERANK, {"query": "a", "documents": [{"text": "b", "id": 1}]}, "documents", "text"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "from 1"),
        (RERANK, {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "query"),
        (RERANK, {"query": "a", "documents": ["b"], "input": "c"}, "input", "query and documents"),
    ],
)
def test_wrong_requests_are_refused_by_field_name(
    beside_a_healthy_stream: RunningServer,
    healthy_stream: HealthyStream,
    path: str,
    body: dict[str, Any],
    param: str,
    words: str,
) -> None:
    with healthy_stream.beside():
        assert words in refused(beside_a_healthy_stream, path, body, param)


def test_clients_that_leave_end_what_they_asked_for(server: RunningServer) -> None:
    """In the queue and in the middle: what no client waits for is not computed."""
    wanted = vectors(server, input=[5, 6, 7])
    for first in (2, 102):
        texts = [[first + at, *range(2, 300)] * 40 for at in range(20)]
        raw = json.dumps({"input": texts}).encode()
        lines = (f"POST {EMBEDDINGS} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}")
        head = "\r\n".join((*lines, "", ""))
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + raw)
            server.until(lambda: server.metric("quire_running_requests") > 0, "some run")
            server.until(lambda: server.metric("quire_waiting_requests") > 0, "others wait")
        server.until(lambda: server.metric("quire_running_requests") == 0, "they are ended")
        server.until(lambda: server.metric("quire_waiting_requests") == 0, "none waits")
    assert (vectors(server, input=[5, 6, 7]) == wanted).all()


def test_two_thousand_inputs_are_one_request(server: RunningServer) -> None:
    texts = [[2 + at % 300, 2 + at // 300] for at in range(2048)]
    found = vectors(server, input=texts)
    assert found.shape == (2048, 60)
    assert (vectors(server, input=texts[1500]) == found[1500]).all()


def test_ollamas_and_llama_cpps_forms_have_the_same_vectors(server: RunningServer) -> None:
    wanted = vectors(server, input=TEXTS)
    status, answer = server.post("/api/embed", {"input": TEXTS, "options": {"num_ctx": 64}})
    assert status == 200, answer
    assert (np.array(answer["embeddings"], np.float32) == wanted).all()
    assert answer["model"] == server.get("/v1/models")[1]["data"][0]["id"]
    assert answer["prompt_eval_count"] > 0
    assert answer["total_duration"] > 0 == answer["load_duration"]
    long = vectors(server, input=TEXTS[0], normalize=False)[0]
    status, answer = server.post("/api/embeddings", {"prompt": TEXTS[0], "keep_alive": "5m"})
    assert (status, answer.keys()) == (200, {"embedding"})
    assert (np.array(answer["embedding"], np.float32) == long).all()
    for path, name in (("/embedding", "content"), ("/embeddings", "input")):
        status, answer = server.post(path, {name: TEXTS})
        assert (status, [one["index"] for one in answer]) == (200, [*range(len(TEXTS))])
        assert (np.array([one["embedding"][0] for one in answer], np.float32) == wanted).all()
    status, answer = server.post("/embedding", {"content": [5, 6, 7], "embd_normalize": -1})
    as_ids = vectors(server, input=[5, 6, 7], normalize=False)
    assert (np.array(answer[0]["embedding"], np.float32) == as_ids).all()


def test_ollamas_form_cuts_inputs_beyond_the_context_unless_asked_not_to(
    narrow: RunningServer,
) -> None:
    server, long = narrow, "x" * 700
    status, answer = server.post("/api/embed", {"input": long, "dimensions": 8})
    assert (status, len(answer["embeddings"][0])) == (200, 8)
    cut = vectors(server, input=long, dimensions=8, truncate_prompt_tokens=-1)
    assert (np.array(answer["embeddings"], np.float32) == cut).all()
    status, answer = server.post("/api/embed", {"input": long, "truncate": False})
    assert status == 400
    assert "512" in answer["error"]


@each_case(
    ("path", "body", "words"),
    [
        ("/api/embed", {}, "input is missing"),
        ("/api/embed", {"input": [5, 6]}, "/v1/embeddings also takes token ids"),
        ("/api/embed", {"input": {}}, "list of texts is needed"),
        ("/api/embed", {"input": "a", "options": {"temperature": 1}}, "options.temperature"),
        ("/api/embed", {"input": "a", "options": {"num_predict": 4}}, "options.num_predict"),
        ("/api/embed", {"input": "a", "options": {"num_gpu": "all"}}, "options.num_gpu"),
        ("/api/embed", {"input": "a", "options": 5}, "options is 5"),
        ("/api/embed", {"input": "a", "keep_alive": []}, "keep_alive"),
        ("/api/embed", {"input": "a", "stream": True}, "stream"),
        ("/api/embed", {"input": "a", "dimensions": 61}, "1 to 60"),
        ("/api/embed", {"input": ["a"] * 2049}, "2048"),
        ("/api/embed", {"input": "a", "model": "other"}, "is not served here"),
        ("/api/embeddings", {"prompt": ["a"]}, "prompt is"),
        ("/api/embeddings", {"prompt": "x" * 40_000}, "32768"),
        ("/api/embeddings", {"input": "a"}, "input"),
        ("/embedding", {"content": "a", "input": "a"}, "leave one out"),
        ("/embedding", {"content": []}, "content"),
        ("/embedding", {}, "input is missing"),
        ("/embedding", {"content": "a", "embd_normalize": 1}, "embd_normalize is 1"),
        ("/embedding", {"content": "a", "embd_normalize": True}, "embd_normalize is true"),
    ],
)
def test_other_forms_refuse_by_name(
    beside_a_healthy_stream: RunningServer,
    healthy_stream: HealthyStream,
    path: str,
    body: dict[str, Any],
    words: str,
) -> None:
    with healthy_stream.beside():
        status, answer = beside_a_healthy_stream.post(path, body)
    assert status in (400, 404)
    error = answer["error"]
    if path.startswith("/api"):
        assert isinstance(error, str)
        assert words in error
    else:
        assert error["code"] == status
        assert words in error["message"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model with sentence-transformers files: the mean, prompts, no shorter vectors."""
    mean = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    folder: Path = tmp_path_factory.mktemp("models") / "mean"
    write_model(folder, pooling=mean)
    with RunningServer(folder, "--threads", "1", "--max-num-seqs", "8") as server:
        yield server


def test_the_folder_decides_how_vectors_are_made(embedder: RunningServer) -> None:
    plain = vectors(embedder, input="abc")
    named = vectors(embedder, input="abc", prompt_name="query")
    assert (named != plain).any()
    assert (vectors(embedder, input="Instruct: find\nQuery:abc") == named).all()
    assert "query" in refused(
        embedder, EMBEDDINGS, {"input": "a", "prompt_name": "x"}, "prompt_name"
    )
    message = refused(embedder, EMBEDDINGS, {"input": "a", "dimensions": 8}, "dimensions")
    assert "--matryoshka-dimensions" in message
    # A score takes the prompts for queries and documents.
    both = np.concatenate([named, vectors(embedder, input="abcd")]).astype(np.float64)
    score = embedder.post(SCORE, {"text_1": "abc", "text_2": "abcd"})[1]["data"][0]["score"]
    assert score == pytest.approx(both[0] @ both[1], abs=1e-6)
    status, answer = embedder.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    assert status == 200, answer


def test_a_model_that_judges_scores_by_its_two_tokens(
    tmp_path: Path, server: RunningServer
) -> None:
    folder = write_tiny(tmp_path / "judge", QWEN3, seed=3)
    documents = ["one", "two", "three " * 30]
    with RunningServer(folder, "--threads", "1", "--max-num-seqs", "4") as judge:
        asked = {"query": "which?", "documents": documents}
        status, answer = judge.post(RERANK, asked)
        assert status == 200, answer
        scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
        assert all(0 < score < 1 for score in scores.values())
        assert len(set(scores.values())) == 3
        # The same from the log-probabilities of the two tokens after the documented prompt.

        def plain(text: str) -> list[int]:
            asked = {"prompt": text, "add_special_tokens": False}
            tokens: list[int] = judge.post("/tokenize", asked)[1]["tokens"]
            return tokens

        no, yes = plain("a")[0], plain("b")[0]
        ids: list[int] = []
        pair = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: which?\n<Document>: one"
        for part in (JUDGE_BEFORE, pair, JUDGE_AFTER):
            ids += plain(part)
        completion = judge.post(
            "/v1/completions",
            {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 0,
             "logprob_token_ids": [no, yes]},
        )[1]  # fmt: skip
        logprobs = completion["choices"][0]["logprobs"]["listed_logprobs"][0]
        wanted = 1 / (1 + np.exp(logprobs[0] - logprobs[1]))
        assert scores[0] == pytest.approx(wanted, abs=1e-9)
        alone = judge.post(SCORE, {"text_1": "which?", "text_2": "one"})[1]["data"][0]["score"]
        assert alone == scores[0]
        other = judge.post(RERANK, {**asked, "instruction": "the shortest"})[1]["results"]
        assert {one["index"]: one["relevance_score"] for one in other} != scores
        assert "judges" in refused(judge, EMBEDDINGS, {"input": "a"}, "model")
        message = refused(judge, RERANK, {"query": "a", "documents": ["b " * 4000]}, "documents")
        assert "2048" in message
        cut = {"query": "a", "documents": ["b " * 4000], "truncate_prompt_tokens": -1}
        assert judge.post(RERANK, cut)[0] == 200


def test_a_model_without_embeddings_says_what_to_start(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "plain", {**QWEN3, "classifier_from_token": None}, seed=3)
    with RunningServer(folder, "--threads", "1") as plain:
        for path, body in (
            (EMBEDDINGS, {"input": "a"}),
            (RERANK, {"query": "a", "documents": ["b"]}),
            (SCORE, {"text_1": "a", "text_2": "b"}),
        ):
            assert "--convert embed" in refused(plain, path, body, "model")
        for path in ("/api/embed", "/embedding"):
            assert "--convert embed" in str(plain.post(path, {"input": "a"})[1]["error"])


def test_generation_goes_on_beside_many_embeddings(server: RunningServer) -> None:
    """A stream and a pile of prompts share the steps; both end, and the text is as ever."""
    asked = {"prompt": "a", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    wanted = server.post("/v1/completions", asked)[1]["choices"][0]["text"]
    found: list[np.ndarray] = []
    texts = [[2 + at, *range(2, 200)] for at in range(60)]
    pile = threading.Thread(target=lambda: found.append(vectors(server, input=texts)))
    pile.start()
    assert server.post("/v1/completions", asked)[1]["choices"][0]["text"] == wanted
    pile.join(GIVE_UP_S)
    assert found[0].shape == (60, 60)
