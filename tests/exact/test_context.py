"""One Answer over ranks that divide positions: long requests of drawn cases, computed by several
processes, get bit for bit the tokens and log-probabilities of one process.

Cases are those of test_ranks.py with long common beginnings, of up to five pieces of 256 positions;
the engine's blocks hold a piece of each rank. QUIRE_EXACT_RANK_CASES=500 runs more of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from quire.config.proposer_kinds import COMPUTED
from quire.program.declarations import PIECE_POSITIONS
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.runner.pipelined_runner import PipelinedRunner
from tests.conftest import SHOWN
from tests.exact.divided_models import (
    DividedModel,
    compare_drafts,
    compare_with_one_process,
    drafted_cases,
)
from tests.exact.rig import Model
from tests.exact.test_ranks import (
    FEWER_CASES,
    GOALS,
    MAX_SHOWN,
    NUM_CASES,
    SIZE,
    case_for_ranks,
    with_few_processes,
)
from tests.exact.workload import VOCAB_SIZE, Arrival, Case
from tests.models.cases_experts import MIXTRAL
from tests.models.cases_gemma import GEMMA3
from tests.tiny_models import write_tiny, write_tiny_llama

MAX_MODEL_LEN = 1536
FEWEST_CASES = range(1, 2) if NUM_CASES == 7 else range(max(NUM_CASES // 6, 1))
# Lengths of common beginnings: some end shortly before a block or piece does.
LENGTHS = (240, 495, 505, 700, 1010, 1030)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    """Return models in one process; three heads, which two ranks cannot divide, and windows."""
    root = tmp_path_factory.mktemp("context")
    size = SIZE | {"max_position_embeddings": MAX_MODEL_LEN}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    even = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = write_tiny_llama(root / "llama", seed=25, hidden_size=52, **heads, **size)
    gemma = write_tiny(
        root / "gemma",
        GEMMA3 | size | even | {"layer_types": ["sliding_attention", "full_attention"]},
        seed=26,
        dtype="bf16",
    )
    mixtral = write_tiny(root / "mixtral", MIXTRAL | size | even, seed=27)
    made = [
        Model(llama, DType.F32, max_model_len=MAX_MODEL_LEN),
        Model(gemma, DType.BF16, max_model_len=MAX_MODEL_LEN),
        Model(llama, DType.BF16, "int8", "int8", MAX_MODEL_LEN),
        Model(mixtral, DType.BF16, max_model_len=MAX_MODEL_LEN),
    ]
    yield made
    for model in made:
        model.close()


def long_case(number: int, num_models: int, ranks: int, stages: int) -> Case:
    """Return a case of which most requests begin with one of two long texts."""
    case = case_for_ranks(number, num_models)
    rng = random.Random(f"context {number}")
    texts = [
        np.array([rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice(LENGTHS))], np.int32)
        for _ in range(2)
    ]
    texts += [texts[0][:200], texts[0][:0]]

    def longer(arrival: Arrival) -> Arrival:
        text = rng.choice(texts)
        return replace(
            arrival,
            requests=tuple(
                replace(
                    request,
                    prompt_ids=np.concatenate([text, request.prompt_ids]),
                    max_total_tokens=request.max_total_tokens + len(text),
                )
                for request in arrival.requests
            ),
        )

    # A search needs a block of each beam; prompt scores of long prompts take many slices.
    arrivals = tuple(
        longer(one) for one in case.arrivals if not one.requests[0].sampling.use_beam_search
    )
    block_size = ranks * PIECE_POSITIONS
    longest = max(one.max_total_tokens for arrival in arrivals for one in arrival.requests)
    settings = replace(
        case.settings,
        block_size=block_size,
        num_blocks=-(-longest // block_size) + rng.choice((0, 0, 1, 2)),
        max_num_batched_tokens=rng.choice((24, 48, 160)),
        max_samples=8,
        max_model_len=MAX_MODEL_LEN,
        tenants=(),
        draft_blocks=rng.choice((20, 400)),
        **({"plans_in_flight": stages, "micro_batches": stages} if stages > 1 else {}),
    )
    return replace(case, settings=settings, arrivals=arrivals)


def compare(
    wholes: list[Model],
    executor_class: RankedExecutorClass,
    numbers: Iterable[int],
    **options: object,
) -> tuple[list[str], dict[str, int]]:
    """Return differences and reached goals over drawn cases."""
    models = [DividedModel(whole, executor_class) for whole in wholes]
    is_staged = isinstance(executor_class, PipelineExecutorClass)
    stages = executor_class.stages if is_staged else 1
    cases = (
        with_few_processes(long_case(number, len(models), executor_class.context, stages))
        for number in numbers
    )
    return compare_with_one_process(models, cases, GOALS, **options)


def test_ranks_with_pieces_answer_as_one_process(
    wholes: list[Model], record_property: object
) -> None:
    ranks = RankedExecutorClass(degree=2, context=2, binds=False, poison=True, shares_blocks=True)
    lines, reached = compare(wholes, ranks, FEWER_CASES)
    record_property(SHOWN, f"{len(FEWER_CASES)} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(reached.values()), reached


def test_what_computes_drafts_changes_no_answer(wholes: list[Model]) -> None:
    ranks = RankedExecutorClass(degree=2, context=2, binds=False, poison=True, shares_blocks=True)
    cases = drafted_cases((long_case(number, 1, 2, 1) for number in count()), COMPUTED, 1)
    lines, drafted = compare_drafts(DividedModel(wholes[0], ranks, draft_layers=2), cases)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafted[name] for name in COMPUTED), drafted


def test_ranks_with_pieces_and_heads_answer_as_one_process(wholes: list[Model]) -> None:
    ranks = RankedExecutorClass(degree=4, context=2, binds=False, poison=True, shares_blocks=True)
    lines, _ = compare(wholes[1:2], ranks, FEWEST_CASES)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])


def test_stages_of_ranks_with_pieces_answer_as_one_process(wholes: list[Model]) -> None:
    ranks = PipelineExecutorClass(
        degree=2, context=2, stages=2, binds=False, poison=True, shares_blocks=True
    )
    lines, _ = compare(wholes[:1], ranks, FEWEST_CASES, runner_type=PipelinedRunner)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
