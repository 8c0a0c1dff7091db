"""Device selection, and the errors of unusable devices, on emulated machines of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from quire.base.errors import (  # noqa: E402
    CapacityError,
    DeviceLost,
    ModelError,
    SettingError,
    WorkerError,
)
from quire.config.memory import MemoryNeeds, plan_memory  # noqa: E402
from quire.execute.executor import ExecutorOptions, StepLimits, StepMemoryError  # noqa: E402
from quire.execute.gpu import device as devices  # noqa: E402
from quire.execute.gpu import executor_class  # noqa: E402
from quire.execute.gpu.device import (  # noqa: E402
    Card,
    Machine,
    choose,
    device_errors,
    has_fp8,
    look,
    reason,
)
from quire.execute.gpu.executor_class import TorchExecutorClass  # noqa: E402
from quire.execute.gpu.graphs import capture_of  # noqa: E402
from quire.execute.gpu.memory import (  # noqa: E402
    GPU_RESERVE_BYTES,
    DeviceMemory,
    check_left,
    planned,
)
from quire.models.registry import build_program, open_model  # noqa: E402
from quire.program.kv_cache import with_kv_cache_dtype  # noqa: E402
from quire.program.quantize import quantize  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.models.cases import CASES  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu

GIB = 2**30
CARD = Card(
    name="Some H200",
    capability=(9, 0),
    architecture="sm_90",
)
MACHINE = Machine(
    torch_version="2.11.0+cu128",
    built_for="CUDA 12.8",
    architectures=("sm_80", "sm_86", "sm_90"),
    cards=(CARD, CARD),
    trouble="",
    triton_trouble="",
)
NONE = replace(MACHINE, cards=(), architectures=())


def _said(wanted: str, machine: Machine) -> str:
    with pytest.raises(SettingError) as caught:
        choose(wanted, machine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_an_available_gpu_is_selected(wanted: str, device: str) -> None:
    assert str(choose(wanted, MACHINE)) == device


def test_auto_selects_the_cpu_only_without_signs_of_a_gpu() -> None:
    assert str(choose("auto", NONE)) == "cpu"
    assert str(choose("cpu", MACHINE)) == "cpu"
    assert "too old" in _said("auto", replace(NONE, trouble="The NVIDIA driver is too old"))
    hidden = "No CUDA GPUs are available"  # by CUDA_VISIBLE_DEVICES
    assert str(choose("auto", replace(NONE, trouble=hidden))) == "cpu"


def test_the_reason_states_what_was_found() -> None:
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert reason("auto", card, MACHINE) == "--device auto: the first of 2 found"
    assert reason("cuda:0", card, MACHINE) == "--device cuda:0"
    assert reason("cpu", cpu, MACHINE) == "--device cpu"
    said = reason("auto", cpu, replace(NONE, torch_version="2.13.0+cpu", built_for=""))
    assert "2.13.0+cpu" in said
    assert "without CUDA" in said
    assert "Found no NVIDIA" in reason("auto", cpu, replace(NONE, trouble="Found no NVIDIA driver"))
    assert reason("auto", cpu, NONE).endswith("the driver shows none")


def test_a_build_without_cuda_names_what_to_install() -> None:
    said = _said("cuda", replace(NONE, torch_version="2.13.0+cpu", built_for=""))
    assert "2.13.0+cpu" in said
    assert "without CUDA" in said
    assert "--device cpu" in said


def test_a_missing_driver_is_reported_with_the_drivers_message() -> None:
    said = _said("cuda:0", replace(NONE, trouble="Found no NVIDIA driver on your system."))
    assert "Found no NVIDIA driver" in said
    assert "CUDA 12.8" in said
    assert "the driver shows none" in _said("cuda", NONE)


def test_a_missing_device_index_is_reported_with_the_existing_ones() -> None:
    assert "cuda:0 to cuda:1" in _said("cuda:2", MACHINE)
    assert "only cuda:0" in _said("cuda:1", replace(MACHINE, cards=(CARD,)))


def test_fp8_needs_a_supporting_gpu(tmp_path: Path) -> None:
    old = replace(MACHINE, cards=(replace(CARD, capability=(8, 6), architecture="sm_86"), CARD))
    assert [has_fp8(torch.device("cuda", index), old) for index in (0, 1)] == [False, True]
    assert has_fp8(torch.device("cpu"), old)
    made = TorchExecutorClass(torch.device("cuda", 0), has_fp8=False)
    spec = open_model(write_tiny_llama(tmp_path))
    plain = build_program(spec, dtype=DType.BF16, max_positions=64)
    made.check_program(plain)
    for program in (quantize(plain, "fp8"), with_kv_cache_dtype(plain, "fp8")):
        with pytest.raises(ModelError, match=r"in fp8, which cuda:0 .* 8.9 and newer can"):
            made.check_program(program)


def test_a_mixture_of_experts_is_accepted_on_a_gpu(tmp_path: Path) -> None:
    spec = open_model(next(case for case in CASES if case.has_experts).write(tmp_path))
    program = build_program(spec, dtype=DType.BF16, max_positions=64)
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        TorchExecutorClass(device).check_program(program)


def test_a_block_packed_embedding_is_not_gathered_on_a_gpu(tmp_path: Path) -> None:
    spec = open_model(write_tiny_llama(tmp_path, tie_word_embeddings=True))
    plain = build_program(spec, dtype=DType.BF16, max_positions=64)
    made = TorchExecutorClass(torch.device("cuda", 0))
    for precision in ("int4", "fp8-block"):
        made.check_program(quantize(plain, precision))
        with pytest.raises(ModelError, match="--head-precision int8, fp8 or none"):
            made.check_program(quantize(plain, precision, head=precision))


def test_steps_are_captured_on_a_gpu_unless_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(executor_class, "load", lambda *_, **__: None)
    monkeypatch.setattr(executor_class, "capture_of", lambda device: f"graphs of {device}")
    folder = write_tiny_llama(tmp_path)
    spec = open_model(folder)
    program = build_program(spec, dtype=DType.F32, max_positions=64)
    card = torch.device("cuda", 0)

    def executor(*_: object, **named: object) -> None:
        given.append(named)

    for captures in (True, False):
        made = replace(TorchExecutorClass(card, captures=captures), executor=cast("Any", executor))
        made(
            program,
            open_checkpoint(folder),
            ExecutorOptions(limits=StepLimits(max_tokens=8, max_samples=2, max_sequences=2)),
        )
    assert [named["launch"].capture for named in given] == ["graphs of cuda:0", None]
    assert capture_of(torch.device("cpu")) is None


def test_an_old_gpu_is_rejected_by_its_compute_capability() -> None:
    old = replace(CARD, name="Tesla T4", capability=(7, 5), architecture="sm_75")
    said = _said("cuda", replace(MACHINE, cards=(old,), architectures=("sm_75", "sm_90")))
    assert "Tesla T4" in said
    assert "7.5" in said
    assert "8.0" in said


@pytest.mark.parametrize(
    ("capability", "architectures", "fits"),
    [
        ((8, 9), ("sm_80", "sm_90"), True),  # a later minor version
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_80", "compute_90"), True),  # compiled by the driver
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_90a",), True),
    ],
)
def test_a_pytorch_built_for_other_gpus_is_reported(
    capability: tuple[int, int], architectures: tuple[str, ...], fits: bool
) -> None:
    name = f"sm_{capability[0]}{capability[1]}"
    card = replace(CARD, capability=capability, architecture=name)
    machine = replace(MACHINE, cards=(card,), architectures=architectures)
    if fits:
        assert choose("cuda", machine).type == "cuda"
    else:
        said = _said("cuda", machine)
        assert name in said
        assert architectures[0] in said


def test_an_unusable_triton_is_reported_with_its_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = _said("cuda", replace(MACHINE, triton_trouble="Failed to find C compiler."))
    assert "Failed to find C compiler" in said
    assert "pip install 'quire-llm[gpu]'" in said
    assert "python3-dev" in said
    assert bool(devices._triton_trouble()) != torch.cuda.is_available()  # Triton supports no CPU
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert devices._triton_trouble() == "it is not installed"


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("3.3.1", True), ("2.9", True), ("3", True), ("3.4.0", False), ("3.10.0+git1", False)],
)
def test_an_old_triton_is_reported(
    version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    said = f"it is {version}, and 3.4 or newer is needed"
    assert (devices._triton_trouble() == said) == is_old


def test_gpus_of_other_vendors_are_not_rejected_by_nvidia_versions() -> None:
    card = replace(CARD, name="MI300X", capability=(9, 4), architecture="gfx942")
    rocm = replace(MACHINE, built_for="ROCm 6.3", cards=(card,), architectures=("gfx942",))
    assert choose("auto", rocm).type == "cuda"
    assert "gfx90a" in _said("auto", replace(rocm, architectures=("gfx90a",)))


def test_detection_on_this_machine_agrees_with_pytorch() -> None:
    machine = look()
    assert machine.torch_version == torch.__version__
    assert bool(machine.cards) == torch.cuda.is_available()


def test_weights_larger_than_memory_are_rejected_before_loading() -> None:
    needs = MemoryNeeds(
        weights_bytes=16 * GIB,
        step_bytes=GIB,
        token_bytes=2**17,
        block_size=16,
        max_num_seqs=8,
        model_max_len=4096,
        max_model_len=None,
        kv_cache_memory_bytes=None,
    )
    small = planned(DeviceMemory(free_bytes=12 * GIB, limit="memory of cuda:0"))
    with pytest.raises(CapacityError, match=r"16384\.0 MiB weights.*memory of cuda:0"):
        plan_memory(needs, small)
    free_bytes = 80 * GIB
    plan = plan_memory(needs, planned(DeviceMemory(free_bytes=free_bytes, limit="cuda:0")))
    assert plan.lines[0].num_bytes == free_bytes - GPU_RESERVE_BYTES
    assert sum(line.num_bytes for line in plan.lines[:-1]) == plan.lines[-1].num_bytes


def test_the_kv_cache_takes_the_rest_of_device_memory() -> None:
    needs = MemoryNeeds(
        weights_bytes=GIB,
        step_bytes=0,
        token_bytes=2**17,
        block_size=16,
        max_num_seqs=256,
        model_max_len=8192,
        max_model_len=None,
        kv_cache_memory_bytes=None,
    )
    plan = plan_memory(needs, planned(DeviceMemory(free_bytes=24 * GIB, limit="cuda:0")))
    assert plan.lines[-1].num_bytes < 2**21  # less than a block


def test_the_memory_left_after_loading_is_checked() -> None:
    assert check_left(torch.device("cpu")) == ""
    card = torch.device("cuda", 0)
    assert "2048.0 MiB left" in check_left(card, free_bytes=2 * GIB)
    with pytest.raises(CapacityError, match="another process took memory"):
        check_left(card, free_bytes=GIB // 8)


def test_out_of_memory_fails_a_step_and_a_lost_device_ends_the_engine() -> None:
    memory = pytest.raises(WorkerError, match="no memory left for this step")
    with memory as caught, device_errors("step"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert not isinstance(caught.value, DeviceLost)
    with pytest.raises(DeviceLost, match="illegal memory access"), device_errors("step"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="shapes"), device_errors("step"):
        raise RuntimeError("shapes disagree")


# The text that PyTorch appends to each driver error, from its second line on.
ADDED = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory" + ADDED,  # a graph, or pinned memory
        "Triton Error [CUDA]: out of memory",  # a kernel while it is loaded
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "HIP error: out of memory",
    ],
)
def test_driver_out_of_memory_shrinks_the_step(said: str) -> None:
    with pytest.raises(StepMemoryError, match="no memory left"), device_errors("step"):
        raise RuntimeError(said)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered" + ADDED,
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
        "CUDA error: unspecified launch failure" + ADDED,
        "CUDA error: device-side assert triggered" + ADDED,
        "CUDA error: uncorrectable ECC error encountered" + ADDED,
        "CUDA error: unknown error" + ADDED,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ],
)
def test_a_permanent_device_error_is_a_lost_device_from_any_source(said: str) -> None:
    with pytest.raises(DeviceLost), device_errors("step"):
        raise RuntimeError(said)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: operation not permitted when stream is capturing" + ADDED,
        "CUDA error: invalid configuration argument" + ADDED,
        "Triton Error [CUDA]: invalid argument",
        "mat1 and mat2 shapes cannot be multiplied" + ADDED,
    ],
)
def test_a_rejected_call_fails_its_step_and_not_the_engine(said: str) -> None:
    with pytest.raises(RuntimeError) as caught, device_errors("step"):
        raise RuntimeError(said)
    assert not isinstance(caught.value, WorkerError)
