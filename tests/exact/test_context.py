"""One Answer over ranks that divide positions: long requests of drawn cases, computed by several
processes, get bit for bit the tokens and log-probabilities of one process.

Cases are those of test_ranks.py with long common beginnings, of up to five pieces of 256 positions;
the engine's blocks hold a piece of each rank. QUIRE_EXACT_RANK_CASES=500 runs more of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from quire.config.proposer_kinds import COMPUTED
from quire.program.declarations import PIECE_POSITIONS
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.runner.pipelined_runner import PipelinedRunner
from tests.conftest import SHOWN
from tests.exact.divided_models import DividedModel, compare_drafts, drafted_cases
from tests.exact.families import MAX_SHOWN, compare_layout
from tests.exact.rig import AloneRuns, Model
from tests.exact.test_ranks import GOALS, NUM_MORE, case_for_ranks, with_few_processes
from tests.exact.workload import VOCAB_SIZE, Arrival, Case
from tests.models.cases_experts import MIXTRAL, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_qwen import QWEN3
from tests.tiny_models import write_tiny, write_tiny_llama

MAX_MODEL_LEN = 1536
# Ranks of a stage, those that divide positions, and stages, by their place in families.py.
LAYOUTS = {"CP 2": (2, 2, 1), "CP 2 x TP 2": (4, 2, 1), "CP 2 x PP 2": (2, 2, 2)}
# Lengths of common beginnings: some end shortly before a block or piece does.
LENGTHS = (240, 495, 505, 700, 1010, 1030)
SIZE = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def long_wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Return models in one process, by the names of families.py; three heads, which two ranks
    cannot divide, windows, and integers."""
    root = tmp_path_factory.mktemp("context")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    even = {"num_attention_heads": 4, "num_key_value_heads": 2}
    windows = {"layer_types": ["sliding_attention", "full_attention"]}
    llama = write_tiny_llama(root / "llama", seed=25, hidden_size=52, **odd, **SIZE)
    gemma3 = write_tiny(root / "gemma3", GEMMA3 | SIZE | even | windows, seed=26, dtype="bf16")
    qwen3 = write_tiny(root / "qwen3", QWEN3 | SIZE | odd, seed=28)
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | even, seed=27)
    qwen3_moe = write_tiny(root / "qwen3_moe", QWEN3_MOE | SIZE | odd, seed=29)
    made = {
        "llama": Model(llama, DType.F32, max_model_len=MAX_MODEL_LEN),
        "gemma3": Model(gemma3, DType.BF16, max_model_len=MAX_MODEL_LEN),
        "qwen3": Model(qwen3, DType.BF16, "int8", "int8", MAX_MODEL_LEN),
        "mixtral": Model(mixtral, DType.BF16, max_model_len=MAX_MODEL_LEN),
        "qwen3_moe": Model(qwen3_moe, DType.F32, max_model_len=MAX_MODEL_LEN),
    }
    yield made
    for model in made.values():
        model.close()


@pytest.fixture(scope="module")
def long_alone() -> AloneRuns:
    """Cache the answers of one process."""
    return AloneRuns()


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_pieces_answer_as_one_process(
    long_wholes: dict[str, Model], long_alone: AloneRuns, layout: str, record_property: object
) -> None:
    degree, context, stages = LAYOUTS[layout]
    options: dict[str, Any] = {"binds": False, "poison": True, "shares_blocks": True}
    runner: dict[str, Any] = {}
    executor_class = RankedExecutorClass(degree=degree, context=context, **options)
    if stages > 1:
        executor_class = PipelineExecutorClass(
            degree=degree, context=context, stages=stages, **options
        )
        runner = {"runner_type": PipelinedRunner}
    reached = compare_layout(
        layout,
        long_wholes,
        lambda name: DividedModel(long_wholes[name], executor_class),
        lambda number: with_few_processes(long_case(number, 1, context, stages)),
        GOALS,
        alone=long_alone,
        num_more=NUM_MORE if layout == "CP 2" else NUM_MORE // 6,
        **runner,
    )
    record_property(SHOWN, f"{layout}: {reached}")  # type: ignore[operator]
    if layout == "CP 2":
        assert all(reached.values()), reached


def test_what_computes_drafts_changes_no_answer(long_wholes: dict[str, Model]) -> None:
    ranks = RankedExecutorClass(degree=2, context=2, binds=False, poison=True, shares_blocks=True)
    cases = drafted_cases((long_case(number, 1, 2, 1) for number in count()), COMPUTED, 1)
    model = DividedModel(long_wholes["llama"], ranks, draft_layers=2)
    lines, drafted = compare_drafts(model, cases)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafted[name] for name in COMPUTED), drafted
