"""One Answer over ranks that share no memory: requests of drawn cases, computed by processes that
are connected by sockets, get bit for bit the tokens and log-probabilities of one process.

The cases are those of test_ranks.py and test_stages.py; QUIRE_EXACT_CONNECTED_CASES=100 runs more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.runner.pipelined_runner import PipelinedRunner
from tests.conftest import SHOWN
from tests.connected_ranks import connected_site
from tests.exact.divided_models import DividedModel, compare_with_one_process
from tests.exact.rig import Model
from tests.exact.test_ranks import case_for_ranks, with_few_processes, without_tier
from tests.exact.test_stages import case_for_stages
from tests.exact.workload import VOCAB_SIZE
from tests.models.cases_experts import MIXTRAL
from tests.tiny_models import write_tiny, write_tiny_llama

NUM_CASES = int(os.environ.get("QUIRE_EXACT_CONNECTED_CASES", "3"))
MAX_SHOWN = 10
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models in one process."""
    root = tmp_path_factory.mktemp("connected")
    llama = write_tiny_llama(root / "llama", seed=35, hidden_size=68, dtype="bf16", **HEADS)
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | HEADS, seed=36)
    made = [Model(llama, DType.BF16), Model(mixtral, DType.BF16, "int8", "int8")]
    yield made
    for model in made:
        model.close()


@pytest.mark.parametrize(
    ("stages", "degree"), [(1, 2), (2, 1), (2, 2)], ids=["two ranks", "two stages", "both"]
)
def test_connected_ranks_answer_as_one_process(
    wholes: list[Model], stages: int, degree: int, record_property: object
) -> None:
    site = connected_site(stages * degree)
    used = wholes if stages * degree == 2 else wholes[:1]  # more ranks than cores are slow
    if stages == 1:
        executor_class = RankedExecutorClass(degree=degree, binds=False, poison=True, site=site)
        cases = [case_for_ranks(number, len(used)) for number in range(NUM_CASES)]
    else:
        executor_class = PipelineExecutorClass(
            stages=stages, degree=degree, binds=False, poison=True, site=site
        )
        cases = [case_for_stages(number, len(used), stages) for number in range(NUM_CASES)]
    cases = [with_few_processes(without_tier(case)) for case in cases]
    models = [DividedModel(whole, executor_class) for whole in used]
    runner: dict[str, Any] = {} if stages == 1 else {"runner_type": PipelinedRunner}
    lines, reached = compare_with_one_process(models, cases, ("preempted", "chunked"), **runner)
    record_property(SHOWN, f"{stages} x {degree} connected: {NUM_CASES} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert reached["chunked"]
