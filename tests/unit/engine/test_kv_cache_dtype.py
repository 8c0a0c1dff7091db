"""--kv-cache-dtype from the setting to the answer: cards, memory, errors, both executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.base.sampling_params import SamplingParams
from quire.engine.library.llm import LLM
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)


def answer(path: Path, **settings: Any) -> tuple[tuple[int, ...], str, str, int]:
    """Return tokens; the card's KV dtype, fingerprint and blocks."""
    with LLM(path, threads=1, **settings) as llm:
        (told,) = llm.generate([[0, 5, 9, 200, 31]], GREEDY)
        card = llm.card
        return tuple(told.token_ids), card.kv_cache_dtype, card.fingerprint, card.num_blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("kv"), seed=1)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "bf16", "int8"])
def test_both_executors_give_one_answer(folder: Path, dtype: str, kv_cache_dtype: str) -> None:
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    native = answer(folder, **settings)
    reference = answer(folder, executor="reference", **settings)
    assert native[:2] == reference[:2]
    assert native[1] == kv_cache_dtype


def test_card_fingerprint_and_blocks_show_the_precision(folder: Path) -> None:
    made = [
        answer(folder, kv_cache_dtype=name, kv_cache_memory="256KiB", max_model_len=32)
        for name in ("auto", "float32", "bfloat16", "int8")
    ]
    assert [kept for _, kept, _, _ in made] == ["f32", "f32", "bf16", "int8"]
    auto, wide, narrow, ints = made
    assert auto == wide
    assert len({auto[2], narrow[2], ints[2]}) == 3
    assert auto[3] < narrow[3] < ints[3]


def test_an_unknown_precision_is_rejected_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(SettingError, match="kv_cache_dtype is 'fp4'; allowed: auto, f32, bf16"):
        LLM(folder, kv_cache_dtype="fp4")


def test_fp8_is_rejected_by_the_native_executor_and_runs_in_the_reference(folder: Path) -> None:
    with pytest.raises(SettingError, match=r"kv_cache_dtype is 'fp8', .* int8, which takes as"):
        LLM(folder, kv_cache_dtype="fp8")
    tokens, told, *_ = answer(folder, kv_cache_dtype="fp8", executor="reference")
    assert (len(tokens), told) == (24, "fp8")
