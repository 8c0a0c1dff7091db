"""A file of packed weights that is cut while an engine has it: the server goes on with
`--restart-engine`, which packs the weights anew, and the answers are the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "abc", "max_tokens": 8, "logprobs": 2, "seed": 3, "temperature": 0.8}


def answer_of(server: RunningServer) -> Any:
    status, answer = server.post(COMPLETIONS, ASKED)
    assert status == 200, answer
    return answer["choices"], answer["system_fingerprint"]


@pytest.mark.parametrize("flags", [("--disk-offload-gb", "0.0001"), ()], ids=["on disk", "mapped"])
def test_a_cut_file_is_packed_anew_and_answers_stay(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Weights in memory are pages of the file, which end the engine process where they are gone."""
    model = write_tiny_llama(tmp_path / "model", seed=5, num_hidden_layers=4)
    folder = tmp_path / "packed"
    settings = ("--restart-engine", "--pack-cache", str(folder), *flags)
    with RunningServer(model, *settings) as server:  # it packs, the next one maps
        wanted = answer_of(server)
    (path,) = folder.iterdir()
    whole = path.stat().st_size
    with RunningServer(model, *settings) as server:
        assert answer_of(server) == wanted
        os.truncate(path, 8192)
        assert answer_of(server) == wanted
        assert "packed weights are made anew" in server.stderr()
        assert path.stat().st_size == whole
        assert answer_of(server) == wanted
