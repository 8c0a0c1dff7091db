"""Requests with a common prefix read it once per step, from the setting to the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.sampling_params import SamplingParams
from quire.engine.library.llm import LLM
from quire.execute import native
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)
PREFIX = np.random.default_rng(8).integers(5, 300, 1024).tolist()
PROMPTS = [[*PREFIX, 7 + number, 9] for number in range(8)]


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[native.NativeExecutor]:
    """Collect executors created from here on."""
    made = []

    class Kept(native.NativeExecutor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(native, "NativeExecutor", Kept)
    return made


def pieces_read(llm: LLM, executor: native.NativeExecutor, prompts: list[list[int]]) -> int:
    """Return the pieces read while these are answered."""
    before = executor.pieces_read
    assert all(len(told.token_ids) == 24 for told in llm.generate(prompts, GREEDY))
    return executor.pieces_read - before


@pytest.mark.parametrize("window", [None, 700])
def test_a_cached_prefix_is_read_once_for_all_requests_with_it(
    window: int | None, tmp_path: Path, executors: list[native.NativeExecutor]
) -> None:
    config: dict[str, Any] = {"max_position_embeddings": 2048, "num_hidden_layers": 1}
    if window is not None:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config |= {"sliding_window": window, "attention_bias": None, "mlp_bias": None}
    model = write_tiny_llama(tmp_path, seed=1, **config)
    with LLM(model, threads=1, kv_cache_memory="16MiB") as llm:
        [executor] = executors
        pieces_read(llm, executor, PROMPTS)  # caches the prefix
        alone = sum(pieces_read(llm, executor, [prompt]) for prompt in PROMPTS)
        together = pieces_read(llm, executor, PROMPTS)
        own = [[*PREFIX[number:], 9, 9] for number in range(8)]
        pieces_read(llm, executor, own)
        apart = sum(pieces_read(llm, executor, [prompt]) for prompt in own)
        own_together = pieces_read(llm, executor, own)
    # Of five pieces four are shared; of four under the window (from 326 on) two. Not all requests
    # need to have begun in the same step.
    assert together < (0.5 if window is None else 0.75) * alone
    assert own_together == apart
