"""One Answer on CPU tensors: requests of drawn workloads match their run alone, bit for bit.

The cases, the engine and the comparison are those of tests/exact; QUIRE_GPU_EXACT_CASES draws more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from quire.execute.executor import Executor, StepLimits  # noqa: E402
from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.execute.gpu.first_layers import TorchFirstLayers  # noqa: E402
from quire.program.program import Program  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.exact.rig import AloneRuns, Model, SharedCache, differences, run_case  # noqa: E402
from tests.exact.workload import VOCAB_SIZE, draw_case  # noqa: E402
from tests.gpu.torch_models import BLOCK_SIZE, torch_executor  # noqa: E402
from tests.models.cases_mistral import MISTRAL  # noqa: E402
from tests.tiny_models import write_tiny, write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu

NUM_CASES = int(os.environ.get("QUIRE_GPU_EXACT_CASES", "8"))
MAX_ROWS = 512


class TorchModel(Model):
    """A model of tests/exact on the torch executor."""

    def make_first_layers(
        self, executor: Executor, program: Program, limits: StepLimits, own_threads: int
    ) -> SharedCache:
        assert isinstance(executor, TorchExecutor)
        return TorchFirstLayers(executor, program, limits, poison=True)

    def make_executor(self, num_threads: int) -> Executor:
        return torch_executor(self.folder, self.program, max_tokens=MAX_ROWS, blocks=BLOCK_SIZE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    root = tmp_path_factory.mktemp("exact")
    odd = write_tiny_llama(root / "odd", seed=5, num_hidden_layers=1)
    size = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 1}
    mistral = write_tiny(root / "mistral", MISTRAL | size, seed=7, dtype="bf16")
    made: list[Model] = [
        TorchModel(odd, DType.F32),
        TorchModel(mistral, DType.BF16),
        TorchModel(odd, DType.BF16, "int8", "int8"),
        TorchModel(odd, DType.BF16, "int4-g32"),
        TorchModel(odd, DType.BF16, "fp8", "fp8"),
    ]
    yield made
    for model in made:
        model.close()


def test_batched_requests_match_requests_run_alone(models: list[Model]) -> None:
    alone, lines, seen = AloneRuns(), [], 0
    for number in range(NUM_CASES):
        case = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        outcome = run_case(models[case.model], case)
        lines += differences(models[case.model], outcome, alone)
        seen += outcome.preempted + outcome.prefix_hit + outcome.chunked + outcome.forked
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:10])
    assert seen >= NUM_CASES, "the cases do not cover enough"
