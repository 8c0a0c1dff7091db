"""The greedy text of real weights, byte for byte, through the HTTP server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.data import outside
from tests.serve.running_server import RunningServer, text_of

COMPLETIONS = "/v1/completions"


def test_stories260k_generates_its_published_text(tmp_path: Path) -> None:
    folder = outside("stories260K")
    expected = json.loads((folder / "greedy_200.json").read_text())
    asked = {
        "prompt": expected["prompt_ids"],
        "temperature": 0,
        "max_tokens": len(expected["ids"]),
        "ignore_eos": True,
    }
    with RunningServer(folder) as server:
        status, whole = server.post(COMPLETIONS, asked)
        assert status == 200, whole
        assert whole["choices"][0]["text"] == expected["text"]
        assert whole["usage"]["completion_tokens"] == len(expected["ids"])
        with server.stream(COMPLETIONS, asked) as reader:
            assert text_of(list(reader)) == expected["text"]
        status, whole = server.post(COMPLETIONS, {**asked, "prompt": ""})
        assert whole["choices"][0]["text"] == expected["text"]  # "" is the begin token


def test_the_server_answers_as_the_library(tiny: Path, server: RunningServer) -> None:
    """The synthetic counterpart: HTTP server and library give one answer."""
    from quire import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(str(tiny), num_threads=1) as llm:
        (output,) = llm.generate(["once upon a time"], sampling)
    asked = {
        "prompt": "once upon a time",
        "temperature": 0,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    _, whole = server.post(COMPLETIONS, asked)
    assert whole["choices"][0]["text"] == output.text
    with server.stream(COMPLETIONS, asked) as reader:
        assert text_of(list(reader)) == output.text
