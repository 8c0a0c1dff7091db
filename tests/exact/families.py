"""Model families, layouts of ranks, and which case each family computes in each layout.

The tests of ranks, stages and pieces take their cases from CASES; test_families.py asserts that it
has every pair of a family and a layout, and of a layout or family and a feature. Models of one
process and their answers are shared by all layouts, since the requests of a case are those of its
number, whatever its settings. Knows no executor class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.program.tensors import DType
from tests.exact.divided_models import DividedModel, compare_with_one_process
from tests.exact.rig import AloneRuns, Model
from tests.exact.workload import VOCAB_SIZE, Case
from tests.models.cases_experts import MIXTRAL, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_qwen import QWEN3
from tests.tiny_models import write_tiny, write_tiny_llama

# The family of each model; further models of a family have another precision.
FAMILY = {
    "llama": "Llama",
    "llama int8": "Llama",
    "tied": "Llama",
    "tied int4": "Llama",
    "qwen3": "Qwen3",
    "gemma3": "Gemma 3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_moe int8": "Qwen3-MoE",
}
FAMILIES = frozenset(FAMILY.values())
MIXTURES = frozenset({"Mixtral", "Qwen3-MoE"})
# The layouts that every family meets; those of experts are for mixtures.
LAYOUTS = ("TP 2", "TP 4", "PP 2", "TP 2 x PP 2", "EP 2", "CP 2")

Cases = tuple[tuple[str, int], ...]  # names of models and numbers of cases
# Together these cases preempt, hit prefixes, use tiers, follow grammars and verify drafts.
_EACH: Cases = (("llama", 0), ("qwen3", 1), ("gemma3", 2), ("mixtral", 3), ("qwen3_moe", 6))
CASES: Mapping[str, Cases] = {
    "TP 2": (*_EACH, ("llama int8", 4), ("tied int4", 5)),
    "TP 4": _EACH,
    "PP 2": (*_EACH, ("tied int4", 5)),
    "PP 3": (("llama", 0), ("gemma3", 2)),
    "TP 2 x PP 2": _EACH,
    "EP 2": (
        *(("mixtral", 3), ("qwen3_moe", 6), ("qwen3_moe int8", 0)),
        *(("mixtral", 1), ("qwen3_moe", 2)),
    ),
    "EP 4": (("mixtral", 3), ("qwen3_moe", 6)),
    "CP 2": _EACH,
    "CP 2 x TP 2": (("gemma3", 1),),
    "CP 2 x PP 2": (("llama", 1),),
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 3}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
MAX_SHOWN = 10


@contextmanager
def whole_models(root: Path) -> Iterator[dict[str, Model]]:
    """Make the models in one process, by name, and close them: odd widths, heads that 2 and 4
    divide, and layers and experts that they do not divide."""
    llama = write_tiny_llama(root / "llama", seed=15, hidden_size=68, num_hidden_layers=3, **HEADS)
    tied = write_tiny_llama(
        root / "tied",
        seed=16,
        dtype="bf16",
        tie_word_embeddings=True,
        num_hidden_layers=3,
        **HEADS,
    )
    qwen3 = write_tiny(root / "qwen3", QWEN3 | SIZE | HEADS, seed=17)
    gemma3 = write_tiny(
        root / "gemma3", GEMMA3 | SIZE | HEADS | {"layer_types": _WINDOWS}, seed=18, dtype="bf16"
    )
    mixtral = write_tiny(
        root / "mixtral7", MIXTRAL | SIZE | HEADS | {"num_local_experts": 7}, seed=19
    )
    qwen3_moe = write_tiny(root / "qwen3_moe", QWEN3_MOE | SIZE | HEADS, seed=22)
    made = {
        "llama": Model(llama, DType.F32),
        "llama int8": Model(llama, DType.F32, "int8", "int8"),
        "tied": Model(tied, DType.BF16),
        "tied int4": Model(tied, DType.BF16, "int4-g32", "int8"),
        "qwen3": Model(qwen3, DType.BF16),
        "gemma3": Model(gemma3, DType.BF16),
        "mixtral": Model(mixtral, DType.BF16),
        "qwen3_moe": Model(qwen3_moe, DType.F32),
        "qwen3_moe int8": Model(qwen3_moe, DType.BF16, "int8"),
    }
    try:
        yield made
    finally:
        for model in made.values():
            model.close()


def compare_layout(
    layout: str,
    wholes: Mapping[str, Model],
    divide: Callable[[str], DividedModel],
    case_of: Callable[[int], Case],
    goals: tuple[str, ...],
    *,
    alone: AloneRuns,
    num_more: int = 0,
    **options: Any,
) -> dict[str, int]:
    """Return how often each goal was reached by the cases of a layout; fail where an answer
    differs from that of one process.

    divide: returns a model over ranks, by its name. num_more: further cases, from number 0 on, over
    the models of the layout in turn. options: of run_case.
    """
    names = list(dict.fromkeys(name for name, _ in CASES[layout]))
    more = [(names[number % len(names)], number) for number in range(num_more)]
    cases = (
        replace(case_of(number), model=names.index(name))
        for name, number in (*CASES[layout], *more)
    )
    models = [divide(name) for name in names]
    assert all(model.whole is wholes[name] for model, name in zip(models, names, strict=True))
    lines, reached = compare_with_one_process(models, cases, goals, alone=alone, **options)
    assert not lines, f"{layout}: {len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    return reached
