"""Record what transformers computes for the cases, so that parity is checked without PyTorch.

    python -m tests.models.record [NAME ...]

Writes recorded/NAME.json for each case (or the named ones): a digest of the checkpoint, the logits
of a few rows, the most likely token of every row, its margin over the second; for checkpoints
stored in bfloat16 the largest error of transformers' own bfloat16 run; for some a greedy
continuation. All relative numbers are shares of the row's largest absolute logit. Needs torch and
transformers; run it when cases change.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models.registry import open_model
from tests.models.case import Case
from tests.models.cases import CASES

RECORDED = Path(__file__).parent / "recorded"
NUM_ROWS = 5
NUM_GREEDY = 80
CONTINUED = (
    "mqa_untied",
    "biases",
    "rope_llama3",
    "mistral_window_5",
    "qwen3_biases_untied",
    "smollm3_default_theta_untied",
    "qwen3_moe",
)

# Share of rows that must keep their most likely token, in a mixture of experts in bf16.
MIN_SAME_SHARE = 0.9


def _expert_options(folder: Path) -> dict[str, str]:
    """The library's default multiplies rows grouped by expert, which takes even widths only."""
    is_mixture = open_model(folder).experts is not None
    return {"experts_implementation": "eager"} if is_mixture else {}


def transformers_logits(
    folder: Path, token_ids: Sequence[int], *, dtype: str = "float32"
) -> NDArray[np.float32]:
    """Return logits [len(token_ids), vocab] of transformers' own model computed in `dtype`.

    Raises ValueError if the directory has missing or unexpected tensors.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        output_loading_info=True,
        **_expert_options(folder),
    )
    if wrong := {kind: names for kind, names in loaded.items() if names}:
        raise ValueError(f"{folder}: transformers disagrees about the tensors: {wrong}")
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].float().numpy()


def transformers_greedy(folder: Path, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation in float32, with each step computed from all tokens."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(transformers_logits(folder, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def relative_error(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Return the largest difference in any row, as a share of that row's largest absolute logit."""
    return float(row_errors(found, right).max())


def row_errors(found: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest difference in each row, as a share of the row's largest absolute logit."""
    errors: NDArray[np.float32] = np.abs(found - right).max(1) / np.abs(right).max(1)
    return errors


def bf16_error(case: Case, found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """How far logits in bf16 are from those in f32: the worst row's error.

    Of a mixture of experts it is the median: near a tie any rounding makes a router choose another
    expert, which changes that row, and those that attend to it, by much.
    """
    errors = row_errors(found, right)
    return float(np.median(errors) if case.has_experts else errors.max())


def same_tokens(case: Case, same: NDArray[np.bool_]) -> bool:
    """Whether the most likely tokens agree in as many rows as `bf16_error` allows to compare."""
    return bool(same.mean() > MIN_SAME_SHARE if case.has_experts else same.all())


def margins(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the margin of each row's largest logit over the second, as a share of the largest."""
    ordered = np.sort(logits, axis=1)
    return (ordered[:, -1] - ordered[:, -2]) / np.abs(logits).max(1)


def recorded_rows(length: int) -> list[int]:
    """Return the rows with logits to keep: spread evenly, the last among them."""
    return sorted({round(i * (length - 1) / (NUM_ROWS - 1)) for i in range(NUM_ROWS)})


def weights_digest(folder: Path) -> str:
    """Return a digest that identifies the checkpoint a test wrote."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Return the content of recorded/NAME.json."""
    logits = transformers_logits(folder, case.token_ids)
    of_bf16 = None
    if case.stored == "bf16":
        rounded = transformers_logits(folder, case.token_ids, dtype="bfloat16")
        of_bf16 = round(bf16_error(case, rounded, logits), 6)
    return {
        "weights": weights_digest(folder),
        "argmax": logits.argmax(1).tolist(),
        "margins": [round(float(margin), 5) for margin in margins(logits)],
        "bf16_error": of_bf16,
        "greedy": transformers_greedy(folder, case.token_ids[:5], NUM_GREEDY)
        if case.name in CONTINUED
        else [],
        "logits": {
            str(row): [float(f"{value:.7g}") for value in logits[row]]
            for row in recorded_rows(case.length)
        },
    }


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    chosen = sys.argv[1:]
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            recording = record(case, case.write(Path(folder)))
        text = json.dumps(recording, separators=(",", ":")).replace('],"', '],\n"')
        (RECORDED / f"{case.name}.json").write_text(text + "\n")
        sys.stdout.write(f"{case.name}: {len(text)} bytes\n")


if __name__ == "__main__":
    main()
