"""Teacher: the hidden states that heads are trained on are those that an engine gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.base.errors import ModelError
from quire.speculative.hidden_states import HiddenStateRing
from quire.train.teacher import Teacher
from tests.draft_heads import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from tests.fp8_checkpoints import write_fp8_of
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama

HIDDEN, VOCAB = 64, 307
SHAPE = {"hidden_size": HIDDEN, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 3}
SETTINGS: dict[str, Any] = {"threads": 1, "max_num_seqs": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain"), seed=3, dtype="bf16", **SHAPE)


def model_of(plain: Path, folder: Path, kind: str) -> Path:
    """Return a file or directory with the weights of `plain`, stored in another way."""
    if kind == "plain":
        return plain
    if kind == "fp8":
        return write_fp8_of(plain, folder / "fp8", kind="channel")
    return write_gguf_of(plain, folder / "model.gguf", kind=kind)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("plain", {}),
        ("plain", {"quantization": "int8"}),
        ("plain", {"quantization": "int4", "head_precision": "none", "kv_cache_dtype": "int8"}),
        ("Q8_0", {}),
        ("Q4_0", {}),
        ("Q8_0", {"quantization": "none"}),
        ("fp8", {"quantization": "none"}),
    ],
)
@pytest.mark.parametrize("is_eagle", [True, False])
def test_hidden_states_are_those_of_the_served_model(
    plain: Path,
    tmp_path: Path,
    kind: str,
    precision: dict[str, str],
    is_eagle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(plain, tmp_path, kind)
    if is_eagle:
        tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
        head = write_eagle(tmp_path / "head", tensors, vocab_size=VOCAB, hidden_size=HIDDEN)
    else:
        heads = medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB)
        head = write_medusa(tmp_path / "head", heads)
    served = dict[int, NDArray[np.float32]]()
    put = HiddenStateRing.put

    def watching(self: Any, slots: Any, tenancies: Any, positions: Any, rows: Any) -> None:
        put(self, slots, tenancies, positions, rows)
        served.update(zip(positions.tolist(), rows.copy(), strict=True))

    monkeypatch.setattr(HiddenStateRing, "put", watching)
    given = {**SETTINGS, **precision, "draft_model": str(head)}
    with LLM(model, **given) as llm:
        served.clear()  # of the warm-up and of passes that were timed
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        answer = llm.generate([[5, 6, 7, 8]], sampling)[0]
    text = [5, 6, 7, 8, *answer.outputs[0].token_ids]
    layers = (0, 1, 2) if is_eagle else ()
    teacher = Teacher(model, max_tokens=64, num_threads=1, layers=layers, precision=precision)
    lesson = teacher.lesson(text)
    teacher.close()
    computed = lesson.taps if is_eagle else lesson.head_input
    assert len(served) >= 20 - 1
    assert max(served) == len(text) - 2
    for position, row in served.items():
        np.testing.assert_array_equal(row, computed[position])


def test_fp8_is_refused_on_a_cpu_as_an_engine_refuses_it(plain: Path, tmp_path: Path) -> None:
    model = model_of(plain, tmp_path, "fp8")
    for make in (
        lambda: Teacher(model, max_tokens=64, num_threads=1),
        lambda: LLM(model, **SETTINGS),
    ):
        with pytest.raises(ModelError, match=r"kept in fp8 .*CPUs have no"):
            make()


def test_a_digest_is_of_weights_and_precision(plain: Path, tmp_path: Path) -> None:
    def model_digest(model: Path, **settings: Any) -> str:
        teacher = Teacher(model, num_threads=1, **settings)
        teacher.close()
        return str(teacher.own["model"])

    first = model_digest(plain, max_tokens=64)
    assert model_digest(plain, max_tokens=32, layers=(0, 2)) == first
    assert model_digest(plain, max_tokens=64, precision={"quantization": "int8"}) != first
    other = write_tiny_llama(tmp_path / "other", seed=4, dtype="bf16", **SHAPE)
    assert model_digest(other, max_tokens=64) != first
