"""One Answer over ranks that share no memory: requests of drawn cases, computed by processes that
are connected by sockets, get bit for bit the tokens and log-probabilities of one process.

The cases are those of test_ranks.py, test_stages.py and test_context.py, with disk tiers, to which
blocks go over links; QUIRE_EXACT_CONNECTED_CASES=100 runs more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
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
from tests.exact.test_context import MAX_MODEL_LEN, long_case
from tests.exact.test_ranks import case_for_ranks, with_few_processes
from tests.exact.test_stages import case_for_stages
from tests.exact.workload import VOCAB_SIZE, Case
from tests.models.cases_experts import MIXTRAL
from tests.tiny_models import write_tiny, write_tiny_llama

NUM_CASES = int(os.environ.get("QUIRE_EXACT_CONNECTED_CASES", "3"))
FETCHES = 12  # a case that fetches from its tier
NUMBERS = (*range(NUM_CASES - 1), FETCHES)
MAX_SHOWN = 10
GOALS = ("preempted", "chunked", "saved", "fetched")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models in one process."""
    root = tmp_path_factory.mktemp("connected")
    llama = write_tiny_llama(root / "llama", seed=35, hidden_size=68, dtype="bf16", **HEADS, **SIZE)
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | HEADS, seed=36)
    made = [Model(llama, DType.BF16), Model(mixtral, DType.BF16, "int8", "int8")]
    yield made
    for model in made:
        model.close()


def compare(
    wholes: list[Model], executor_class: RankedExecutorClass, cases: list[Case], **runner: Any
) -> dict[str, int]:
    """Return the goals that cases have reached; fail where an answer differs."""
    cases = [with_few_processes(case) for case in cases]
    models = [DividedModel(whole, executor_class) for whole in wholes]
    lines, reached = compare_with_one_process(models, cases, GOALS, **runner)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    return reached


@pytest.mark.parametrize(
    ("stages", "degree"), [(1, 2), (2, 2)], ids=["two ranks", "two stages of two ranks"]
)
def test_connected_ranks_answer_as_one_process(
    wholes: list[Model], stages: int, degree: int, record_property: object
) -> None:
    shared: dict[str, Any] = {
        "degree": degree,
        "binds": False,
        "poison": True,
        "shares_blocks": True,
        "site": connected_site(stages * degree),
    }
    used = wholes if stages * degree == 2 else wholes[:1]  # more ranks than cores are slow
    if stages == 1:
        reached = compare(
            used,
            RankedExecutorClass(**shared),
            [replace(case_for_ranks(n, 1), model=n % len(used)) for n in NUMBERS],
        )
    else:
        reached = compare(
            used,
            PipelineExecutorClass(stages=stages, **shared),
            [replace(case_for_stages(n, 1, stages), model=n % len(used)) for n in NUMBERS],
            runner_type=PipelinedRunner,
        )
    record_property(SHOWN, f"{stages} x {degree} connected: {NUM_CASES} cases; {reached}")  # type: ignore[operator]
    assert all(reached[goal] for goal in ("chunked", "saved", "fetched")), reached


def test_connected_ranks_with_pieces_answer_as_one_process(wholes: list[Model]) -> None:
    """The blocks of a tier are then divided by positions."""
    ranks = RankedExecutorClass(
        degree=2,
        context=2,
        binds=False,
        poison=True,
        shares_blocks=True,
        site=connected_site(2),
    )
    long = Model(wholes[0].folder, wholes[0].dtype, max_model_len=MAX_MODEL_LEN)
    try:
        reached = compare([long], ranks, [long_case(number, 1, 2, 1) for number in NUMBERS])
    finally:
        long.close()
    assert reached["saved"]
    assert reached["fetched"]
