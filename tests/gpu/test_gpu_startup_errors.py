"""`quire serve` on machines without a usable GPU, and with a GPU that fails while serving.

Real servers run; their engine sees an emulated machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import GIVE_UP_S, ROOT, RunningServer
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu

COMPLETIONS = "/v1/completions"
# Imported by Python at startup (sitecustomize); acts when the engine imports the named module.
BEFORE = """
import sys
from importlib.abc import MetaPathFinder

class Before(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "quire.execute.gpu.device":
            sys.meta_path.remove(self)
            pose()

def pose():
    import torch
    from types import SimpleNamespace
    {body}

sys.meta_path.insert(0, Before())
"""
# PyTorch as on a machine with a GPU, and Triton as if it detected one.
H200 = """
    torch.version.cuda, torch.version.hip = "13.0", None
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30)
    torch.cuda.init = lambda: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda index: card
    torch.cuda.get_arch_list = lambda: ["sm_80", "sm_90"]
    torch.cuda.mem_get_info = lambda device: (139 << 30, 140 << 30)
    import triton
    from triton.runtime import driver
    driver.set_active(SimpleNamespace(get_current_target=lambda: "cuda"))
"""
NO_DRIVER = (
    H200
    + """
    def init():
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")
    torch.cuda.init = init
"""
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_llama(folder, seed=5, max_position_embeddings=4096)


def posing(folder: Path, body: str) -> dict[str, str]:
    """Return an environment in which the engine imports `body`."""
    (folder / "sitecustomize.py").write_text(BEFORE.replace("{body}", body.strip()))
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": ":".join(filter(None, paths))}


CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "no driver": (
        NO_DRIVER,
        "cuda",
        ("Found no NVIDIA driver", "built for CUDA 13.0", "install one", "--device cpu"),
    ),
    "too old a driver": (
        NO_DRIVER.replace(
            "Found no NVIDIA driver on", "The NVIDIA driver is too old (found version 12040) on"
        ),
        "auto",
        ("found version 12040", "CUDA 13.0: it needs a driver at least as new", "--device cpu"),
    ),
    "no such card": (H200, "cuda:3", ("device is cuda:3; there is only cuda:0",)),
    "too old a card": (
        H200.replace("NVIDIA H200", "Tesla T4").replace("major=9, minor=0", "major=7, minor=5"),
        "auto",
        ("Tesla T4 of compute capability 7.5", "8.0 and newer", "--executor native"),
    ),
    "a PyTorch for other cards": (
        H200.replace("major=9, minor=0", "major=12, minor=0"),
        "auto",
        ("(sm_120)", "was built for sm_80, sm_90", "install a PyTorch built for the card"),
    ),
    "no Triton": (
        H200[: H200.index("    import triton")] + '    sys.modules["triton"] = None\n',
        "auto",
        ("written in Triton", "it is not installed", "pip install 'quire-llm[gpu]'"),
    ),
    "too old a Triton": (
        H200 + '    triton.__version__ = "3.2.0"\n',
        "auto",
        ("it is 3.2.0, and 3.4 or newer is needed", "pip install 'quire-llm[gpu]'"),
    ),
    "no C compiler": (
        H200[: H200.index("    driver.set_active")]
        + """
    class NoCompiler:
        def get_current_target(self):
            raise RuntimeError("Failed to find C compiler. Please specify via CC")
    driver.set_active(NoCompiler())
""",
        "auto",
        ("Failed to find C compiler", "(gcc, clang, or CC=...)", "python3-dev"),
    ),
    "a PyTorch that does not load": (
        '    raise ImportError("libcudart.so.13: cannot open shared object file")\n',
        "auto",
        ("PyTorch cannot be loaded (libcudart.so.13", "install it anew"),
    ),
    "a card that another process has": (
        H200
        + """
    def busy(device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
    torch.cuda.mem_get_info = busy
""",
        "auto",
        ("cuda:0 is there and cannot be worked with", "are busy", "nvidia-smi", "cuda:N"),
    ),
    "less memory than the weights": (
        H200.replace("(139 << 30,", "(1 << 30,"),
        "auto",
        ("371.5 KiB weights", "memory of cuda:0 without", "take a smaller model"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_unusable_gpu_is_reported_once_with_a_remedy_and_exit_code_2(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    body, device, words = CASES[name]
    command = [sys.executable, "-m", "quire", "serve", str(tiny), "--port", "0"]
    command += ["--executor", "torch", "--device", device]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=GIVE_UP_S,
        env={**os.environ, **posing(tmp_path, body)},
    )
    assert ended.returncode == 2, ended.stderr
    _, *complaints = ended.stderr.split("quire serve: ")
    assert len(complaints) == 1, ended.stderr
    assert [word for word in words if word not in complaints[0]] == [], complaints[0]
    assert "Traceback" not in ended.stderr


def served(folder: Path, tiny: Path, body: str, device: str) -> RunningServer:
    flags = ("--executor", "torch", "--device", device, "--threads", "1", "--max-num-seqs", "4")
    return RunningServer(tiny, *flags, fresh=True, environment=posing(folder, body))


def test_auto_falls_back_to_the_cpu_without_a_driver_and_reports_it(
    tiny: Path, tmp_path: Path
) -> None:
    with served(tmp_path, tiny, NO_DRIVER, "auto") as server:
        line = re.search("engine: computing on .*", server.stderr())
        assert line is not None
        assert "device=cpu" in line[0]
        assert "auto found no GPU: Found no NVIDIA driver" in line[0]
        status, answer = server.post(COMPLETIONS, {"prompt": "the sea", "max_tokens": 3})
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 3


# CPU tensors that pose as a GPU with its own memory.
OWN_MEMORY = """
    from quire.config.machine import MachineMemory
    from quire.execute.gpu import kv_pool, memory
    from quire.execute.gpu.executor_class import TorchExecutorClass
    own = MachineMemory(available_bytes=1 << 30, limit="memory of cuda:0", is_own=True)
    TorchExecutorClass.available_memory = lambda self: own
    card = torch.device("cuda", 0)
    kv_pool.check_left = lambda device: memory.check_left(card, free_bytes={left} << 20)
"""


def test_the_memory_plan_is_logged_before_loading_and_the_rest_after(
    tiny: Path, tmp_path: Path
) -> None:
    with served(tmp_path, tiny, OWN_MEMORY.replace("{left}", "900"), "cpu") as server:
        log = server.stderr()
        printed = server.stdout()
    blocks = re.search(r"KV cache \((\d+) blocks of 16 tokens\)", printed)
    assert blocks is not None
    places = [
        log.index("computing on device=cpu"),
        log.index("1024.0 MiB; weights -371.5 KiB; "),
        log.index("cuda:0: 900.0 MiB left beside weights, buffers and KV cache"),
        log.index("engine: ready"),
    ]
    assert places == sorted(places)
    assert blocks[0] in log[places[1] : places[2]]


def test_too_little_memory_after_loading_fails_startup(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "serve", str(tiny), "--port", "0"]
    command += ["--executor", "torch", "--device", "cpu"]
    body = OWN_MEMORY.replace("{left}", "100")
    environment = {**os.environ, **posing(tmp_path, body)}
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=GIVE_UP_S, env=environment
    )
    assert ended.returncode == 2, ended.stderr
    assert "cuda:0: 100.0 MiB are left" in ended.stderr
    assert "lower --kv-cache-memory" in ended.stderr


# CPU tensors; launches report a GPU error once a file exists.
FAILING = """
    from pathlib import Path
    from quire.execute.gpu.executor import TorchExecutor
    launch = TorchExecutor._launch

    def failing(self, segment, counts):
        if counts.tokens >= {least} and Path({file!r}).exists():
            raise {error}
        launch(self, segment, counts)

    TorchExecutor._launch = failing
"""


def failing(file: Path, error: str, *, least: int = 1) -> str:
    return (
        FAILING.replace("{least}", str(least))
        .replace("{file!r}", repr(str(file)))
        .replace("{error}", error)
    )


def test_a_lost_device_sends_an_error_event_per_stream_and_exits_nonzero(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "lost"
    said = 'RuntimeError("CUDA error: an illegal memory access was encountered\\nCompile with")'
    long: dict[str, Any] = {"prompt": "on and on", "max_tokens": 3000, "ignore_eos": True}
    with served(tmp_path, tiny, failing(file, said), "cpu") as server:
        with (
            server.stream(COMPLETIONS, long) as first,
            server.stream(COMPLETIONS, {**long, "n": 2, "seed": 3}) as second,
        ):
            first.next()
            second.next()
            file.touch()
            for reader in (first, second):
                *_, last = reader
                assert last["error"]["code"] == "device_lost", last
                assert "illegal memory access" in last["error"]["message"]
                assert "Compile with" not in last["error"]["message"]
        assert server.exit_code() == 1
        assert "the device is lost" in server.stderr()


def test_a_request_that_does_not_fit_into_memory_fails_alone(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "full"
    said = 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")'
    body: dict[str, Any] = {"prompt": "the sea", "max_tokens": 200, "ignore_eos": True, "seed": 1}
    with served(tmp_path, tiny, failing(file, said, least=100), "cpu") as server:
        alone = server.post(COMPLETIONS, body)[1]["choices"][0]["text"]
        file.touch()
        with server.stream(COMPLETIONS, body) as reader:
            events = [reader.next()]
            status, answer = server.post(
                COMPLETIONS, {"prompt": list(range(3, 123)), "max_tokens": 2}
            )
            events += list(reader)
        assert status == 500
        assert answer["error"]["code"] == "step_row_error"
        assert "--max-num-batched-tokens" in answer["error"]["message"]
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == alone
        assert server.post(COMPLETIONS, body)[1]["choices"][0]["text"] == alone
