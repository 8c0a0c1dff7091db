"""Weights read from disk in each step: which ones, in how much memory, with which answers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.base.errors import CapacityError, SettingError
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.config.memory import RESERVE_BYTES
from quire.engine.library.llm import LLM
from quire.execute import streamed_weights
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import NativeSizing
from quire.execute.streamed_weights import (
    StreamingExecutorClass,
    StreamSize,
    plan_stream,
)
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.weights import pack_cache
from quire.weights.checkpoint import open_checkpoint
from quire.weights.pack_cache import PackCache
from tests.models.cases_experts import MIXTRAL, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny, write_tiny_llama

PAGE = 4096
LIMITS = StepLimits(max_tokens=8, max_samples=2, max_sequences=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_llama(folder, dtype="bf16", hidden_size=96, num_hidden_layers=4)


@pytest.fixture(scope="module", autouse=True)
def preloaded_children() -> Iterator[None]:
    """Fork the processes of ranks from one that has their modules."""
    with forked_children():
        yield


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least window, so that every weight is dropped and read again."""
    monkeypatch.setattr(streamed_weights, "WINDOW_BYTES", 0)
    monkeypatch.setattr(pack_cache, "SETTLED_S", 0.0)


def program_of(model: Path) -> Program:
    return build_program(open_model(model), dtype=DType.BF16, max_positions=64)


def streaming(offload_bytes: int | None, kv_bytes: int | None = None) -> StreamingExecutorClass:
    return StreamingExecutorClass(StreamSize(offload_bytes=offload_bytes, kv_bytes=kv_bytes))


class File:
    """Ranges of random bytes in a file, the last of which ends with it."""

    def __init__(self, path: Path, sizes: list[int]) -> None:
        self.path, random = path, np.random.default_rng(3)
        self.parts = [random.bytes(size) for size in sizes]
        self.ranges, content = [], b""
        for part in self.parts:
            content += bytes(-len(content) % PAGE)
            self.ranges.append((len(content), len(part)))
            content += part
        path.write_bytes(content)

    def stream(self, window_bytes: int, *, direct: bool = False) -> _native.WeightStream:
        descriptor = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            return _native.WeightStream(descriptor, self.ranges, window_bytes, is_direct=direct)
        finally:
            os.close(descriptor)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "weights", [1, PAGE, 5 << 20, 70_000, 9 << 20, PAGE + 1, 100])


@pytest.mark.parametrize("direct", [False, True])
def test_a_range_is_what_the_file_has_in_any_order(file: File, direct: bool) -> None:
    try:
        stream = file.stream(15 << 20, direct=direct)
    except OSError:
        pytest.skip("this file system has no direct reads")
    order = [*range(7), *range(7), 4, 4, 2, 6, 0, 5, *range(7)]
    for index in order:
        assert stream.read(index) == file.parts[index], index
        assert stream.bytes_held <= 15 << 20
    assert stream.bytes_read >= 3 * sum(map(len, file.parts))


def test_a_window_of_the_largest_range_suffices(file: File) -> None:
    stream = file.stream(9 << 20)
    for index in [*range(7), *range(7), 4, 2, 4]:
        assert stream.read(index) == file.parts[index]
        assert stream.bytes_held <= 9 << 20
    with pytest.raises(ValueError, match="has no room for a range of 9437184"):
        file.stream((9 << 20) - 1)


def test_a_file_that_was_cut_fails_what_it_lacks_until_it_is_whole_again(file: File) -> None:
    whole = file.path.read_bytes()
    stream = file.stream(9 << 20)
    os.truncate(file.path, file.ranges[4][0] + 100)
    for _ in range(3):
        for index in range(4):
            assert stream.read(index) == file.parts[index]
        for index in (4, 5, 6):
            with pytest.raises(_native.Aborted, match=r"cannot be read from their file: the file"):
                stream.read(index)
        assert stream.bytes_held <= 9 << 20
    file.path.write_bytes(whole)
    for index in (4, 5, 6, 0):
        try:
            content = stream.read(index)
        except _native.Aborted:  # it was read ahead before the file was whole
            content = stream.read(index)
        assert content == file.parts[index]


@pytest.mark.parametrize("ranges", [[(1, 10)], [(-PAGE, 10)], [(0, 0)]])
def test_misplaced_ranges_are_rejected(file: File, ranges: list[tuple[int, int]]) -> None:
    file.ranges = ranges
    with pytest.raises(ValueError, match="ranges start at multiples of 4096"):
        file.stream(1 << 20)


def test_weights_are_chosen_evenly_and_suffice(model: Path) -> None:
    program = program_of(model)
    assert plan_stream(program, 0).names == ()
    total = sum(
        streamed_weights.empty_weight(weight).num_bytes
        for name, weight in program.weights.items()
        if "layers" in name and str(weight.form) == "matrix"
    )
    for share in (0.1, 0.3, 0.5, 0.9, 1.0):
        plan = plan_stream(program, int(share * total))
        assert plan.streamed_bytes >= int(share * total)
        layers = [name.split("layers.")[1].split(".")[0] for name in plan.names]
        assert layers == sorted(layers)
        if share >= 0.5:
            assert set(layers) == {"0", "1", "2", "3"}
        assert plan.window_bytes <= plan.streamed_bytes
    with pytest.raises(SettingError, match=r"disk_offload_gb asks for .* to stay on disk"):
        plan_stream(program, total + 1)


def test_memory_is_planned_without_what_stays_on_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(model)
    whole = NativeExecutor.memory_for(program, LIMITS)
    some = streaming(300_000).memory_for(program, LIMITS)
    plan = plan_stream(program, 300_000)
    assert some.weights_bytes == whole.weights_bytes - plan.streamed_bytes + plan.window_bytes
    ample = streaming(None).memory_for(program, LIMITS)
    assert ample.weights_bytes == whole.weights_bytes
    room = whole.step_bytes + RESERVE_BYTES + 1000
    tight = streaming(None, kv_bytes=1000)
    memory = NativeExecutor.available_memory()
    monkeypatch.setattr(
        NativeSizing,
        "available_memory",
        staticmethod(
            lambda: type(memory)(
                available_bytes=room + whole.weights_bytes - 200_000, limit=memory.limit
            )
        ),
    )
    least = tight.memory_for(program, LIMITS)
    assert 0 < least.weights_bytes <= whole.weights_bytes - 200_000
    assert tight.memory_for(program, LIMITS) == least
    everything = streaming(None, kv_bytes=1 << 40)
    assert 0 < everything.memory_for(program, LIMITS).weights_bytes < least.weights_bytes


def answers(folder: Path, **settings: Any) -> list[Any]:
    """Return tokens and log-probabilities of requests that share steps, with chunked prompts."""
    params = SamplingParams(seed=5, temperature=0.8, max_tokens=9, logprobs=2, ignore_eos=True)
    prompts = [[(7 * row + 3 * place) % 200 for place in range(5 + 9 * row)] for row in range(4)]
    with LLM(folder, threads=2, max_num_batched_tokens=16, max_num_seqs=4, **settings) as llm:
        found = [
            (one.token_ids, [lp.logprob for lp in one.logprobs or ()])
            for one in llm.generate(prompts, params)
        ]
        return [found, llm.card.fingerprint]


@pytest.mark.parametrize("quantization", ["none", "int4-g32"])
def test_answers_equal_those_of_weights_in_memory(
    model: Path, tmp_path: Path, quantization: str
) -> None:
    expected = answers(model, quantization=quantization)
    folder = str(tmp_path / "packed")
    for size in ("0.0001", "0.00005"):  # the first makes the file, the second finds it
        found = answers(model, quantization=quantization, pack_cache=folder, disk_offload_gb=size)
        assert found == expected


@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_ranks_answer_as_one_process_in_memory(tmp_path: Path, layout: str, family: str) -> None:
    more = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "llama":
        folder = write_tiny_llama(tmp_path / "model", dtype="bf16", num_hidden_layers=4, **more)
    else:
        more |= {"vocab_size": 307, "max_position_embeddings": 64}
        folder = write_tiny(tmp_path / "model", QWEN3_MOE | more, seed=2, dtype="bf16")
    expected = answers(folder)
    settings = {"pack_cache": str(tmp_path / "packed"), "disk_offload_gb": "0.0001", layout: 2}
    assert answers(folder, **settings) == expected
    files = list((tmp_path / "packed").iterdir())
    assert len(files) == 2, "each rank has its share in a file of its own"


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "TP 2"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_draft_model_drafts_from_memory(
    tmp_path: Path, layout: dict[str, int], family: str
) -> None:
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "llama":
        folder = write_tiny_llama(tmp_path / "model", dtype="bf16", **more)
    else:
        folder = write_tiny(
            tmp_path / "model", GEMMA3 | more | {"vocab_size": 307}, seed=3, dtype="bf16"
        )
    expected = answers(folder)
    settings = {"pack_cache": str(tmp_path / "packed"), "disk_offload_gb": "0.00001", **layout}
    found = answers(folder, speculate="draft", draft_model=str(folder), **settings)
    assert found == expected


def test_mixtures_and_layered_prefill_answer_alike(tmp_path: Path) -> None:
    config = MIXTRAL | {"vocab_size": 307, "max_position_embeddings": 64}
    model = write_tiny(tmp_path / "mixture", config, seed=1)
    settings = {"long_prompt_tokens": 20, "layered_prefill": True}
    expected = answers(model, **settings)
    found = answers(
        model, pack_cache=str(tmp_path / "packed"), disk_offload_gb="0.0002", **settings
    )
    assert found == expected


def open_streamed(model: Path, folder: Path, log: io.StringIO) -> NativeExecutor:
    return streaming(300_000)(
        program_of(model),
        open_checkpoint(model),
        ExecutorOptions(
            limits=LIMITS, num_threads=2, pack_cache=PackCache(folder, Log("engine", log))
        ),
    )


def test_the_file_is_made_anew_where_it_was_changed(model: Path, tmp_path: Path) -> None:
    log = io.StringIO()
    folder = tmp_path / "packed"
    first = open_streamed(model, folder, log)
    assert "weights are read from disk in each step" in log.getvalue()
    (path,) = folder.iterdir()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"changed!")
    second = open_streamed(model, folder, log)
    assert "packed weights are made anew" in log.getvalue()
    assert second.weights_digest == first.weights_digest


def test_a_full_disk_is_an_error_that_says_how_much_is_needed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_cache, "_check_room", full)
    with pytest.raises(CapacityError, match=r"cannot be written \(No space left.*are needed"):
        open_streamed(model, tmp_path / "packed", io.StringIO())
    assert list((tmp_path / "packed").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disk_offload_gb": "auto"}, "pack_cache is not given"),
        ({"disk_offload_gb": "-1", "pack_cache": "x"}, "a number of GiB"),
        ({"disk_offload_gb": "much", "pack_cache": "x"}, "a number of GiB"),
        (
            {"disk_offload_gb": "1", "pack_cache": "x", "executor": "reference"},
            "only the native executor",
        ),
        (
            {"disk_offload_gb": "1", "pack_cache": "x", "speculate": "self"},
            "would be read from disk for each draft token",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(
    model: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingError, match=reason):
        LLM(model, **settings)
