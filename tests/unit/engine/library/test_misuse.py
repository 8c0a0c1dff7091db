"""Calls of the library with wrong arguments: each error names what was found and what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.base.errors import CapacityError, InvalidParameter, SettingError, StepRowError
from quire.models.model_folder import box_path
from tests.tiny_models import write_tiny_llama

ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=128, num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: SamplingParams(temprature=1), "'temprature' is not a field of SamplingParams; did "
         "you mean 'temperature'?"),
        (lambda: SamplingParams(max_new_tokens=5), "write max_tokens"),
        (lambda: SamplingParams(guided_decoding={}), "write structured_outputs={"),
        (lambda: SamplingParams(zzz=5, top_q=1), "top_p'?; 'zzz' is not a field of SamplingPar"),
        (lambda: SamplingParams(0.7), "by name, not 0.7; write SamplingParams(temperature=0.7)"),
        (lambda: SamplingParams().changed(temprature=1), "did you mean 'temperature'?"),
    ],
)  # fmt: skip
def test_an_unknown_field_of_sampling_leads_to_the_right_one(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"threads": "two"}, SettingError, "threads is 'two'; a whole number is expected"),
        ({"num_threads": "two"}, SettingError, "num_threads is 'two'"),
        ({"kv_cache_memory": 0}, SettingError, "kv_cache_memory is 0; at least 1 is needed"),
        ({"kv_cache_memory": 0.9}, SettingError, "or a text like '2GiB'; it is no share of the"),
        ({"kv_cache_memory": 4}, CapacityError, "kv_cache_memory is 4 bytes, less than one block"),
        ({"kv_cache_memory": 4}, CapacityError, "raise it or lower block_size"),
        ({"dtype": "float16"}, SettingError, 'with half the memory: dtype="bf16"'),
        ({"quantization": "awq"}, SettingError, 'while loading, as in quantization="int4"'),
    ],
)
def test_a_setting_is_named_as_it_was_given(
    settings: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        LLM(**settings)
    assert said in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda llm: llm.generate("a", temperature=0), TypeError,
         "LLM.generate has no argument 'temperature'; it is a field of the second argument: "
         "SamplingParams(temperature=0)"),
        (lambda llm: llm.generate("a", use_tqdm=False), TypeError, "'use_tqdm'; write progress"),
        (lambda llm: llm.generate("a", zzz=1), TypeError, "no argument 'zzz'; leave it out"),
        (lambda llm: llm.generate({"prompt": "a"}), InvalidParameter, "give the text or the ids"),
        (lambda llm: llm.generate([{"prompt_token_ids": [5]}]), InvalidParameter, "ids them"),
        (lambda llm: llm.generate({"text": "a"}), InvalidParameter, "a list of these is allowed"),
        (lambda llm: llm.get_tokenizer(), AttributeError, "it has generate, chat and embed"),
        (lambda llm: llm.chat(ASKED, max_tokens=3), TypeError, "SamplingParams(max_tokens=3)"),
        (lambda llm: llm.chat(ASKED, tools="f"), InvalidParameter, 'tools is "f"; a list of obj'),
        (lambda llm: llm.chat(ASKED, tools=["f"]), InvalidParameter, 'tools[0] is "f"; an object'),
        (lambda llm: llm.chat(ASKED, tools=[{"type": "function"}]), InvalidParameter,
         "without the name of a function"),
        (lambda llm: llm.chat(ASKED, documents=3), InvalidParameter, "documents is 3; a list of"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_a_call_is_named(
    llm: LLM, call: Callable[[LLM], Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        call(llm)
    assert said in str(caught.value)


def test_names_of_vllm_are_read_or_explained(llm: LLM) -> None:
    (answer,) = llm.generate("Once", SamplingParams(max_tokens=1))
    assert answer.prompt_token_ids == answer.prompt_ids != ()
    with pytest.raises(ImportError, match="write SamplingParams\\(structured_outputs="):
        from quire import GuidedDecodingParams  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(AttributeError, match="it has LLM, AsyncLLM"):
        _ = quire.Nothing
    assert not hasattr(quire, "Nothing")


def test_if_every_prompt_fails_without_a_token_it_is_an_exception(tmp_path: Path) -> None:
    """Weights that are NaN: the model is named as the cause, not what the request bans."""
    folder = write_tiny_llama(tmp_path / "nan", seed=1)
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    raw[begin:] = b"\xff" * (len(raw) - begin)
    weights.write_bytes(bytes(raw))
    with LLM(folder, num_threads=1) as llm:
        with pytest.raises(StepRowError, match=r"^the model computed NaN or infinity, so there is"):
            llm.generate([[5, 6]])
        with pytest.raises(StepRowError, match=r"^all 2 prompts failed; the first: the model comp"):
            llm.generate([[5, 6], [7]])
        with pytest.raises(StepRowError, match=r"ban less. Or the model computed NaN or infinity"):
            llm.generate([[5, 6]], SamplingParams(logit_bias={3: float("-inf")}))


def test_fp8_keys_on_a_cpu_are_named_by_the_setting() -> None:
    with pytest.raises(SettingError, match="kv_cache_dtype is 'fp8', which executor native"):
        LLM(box_path(), kv_cache_dtype="fp8")
