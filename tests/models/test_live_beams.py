"""Beam search against transformers, on the built-in model (marked `parity`: needs torch).

Both compute in f32. Sequences, order and scores must be equal, except for finished sequences with
scores so close that the last bits of sums may order them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.models.model_folder import box_path

pytestmark = pytest.mark.parity

SCORE_ERROR = 2e-4
NUM_TOKENS = 24
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"num_beams": 3, "early_stopping": True},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": False},
    {"num_beams": 2, "length_penalty": -1.0, "early_stopping": "never"},
]
PROMPTS = (
    "Once upon a time there was a little",
    "The dog ran to the",
    "Lily and Tom were playing in the garden when they saw a",
    "One day,",
)
Found = list[tuple[list[int], float]]


def test_beams_match_transformers() -> None:
    torch = pytest.importorskip("torch")
    import transformers

    folder = box_path()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Tokens that end sentences and clauses: the model's own end of text seldom comes so soon.
    ends = [tokenizer.encode(text).ids[-1] for text in (".", "!", ",", " and")]
    compared = stopped = 0
    with LLM(folder, dtype="f32", max_num_seqs=8, max_model_len=128) as llm:
        for prompt in (tokenizer.encode(text).ids for text in PROMPTS):
            for search in SEARCHES:
                for stop_ids in ([], ends[:1], ends):
                    theirs = _theirs(model, prompt, stop_ids, search)
                    ours = _ours(llm, prompt, stop_ids, search)
                    scores = [score for _, score in theirs]
                    np.testing.assert_allclose(
                        [score for _, score in ours], scores, rtol=SCORE_ERROR, atol=SCORE_ERROR
                    )
                    if min(np.abs(np.diff(scores)), default=1.0) < SCORE_ERROR:
                        continue
                    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs], search
                    compared += 1
                    stopped += any(ids[-1] in stop_ids for ids, _ in ours)
    print(f"compared {compared}, with ends by a token {stopped}")
    assert compared >= 50
    assert stopped >= 30


def _ours(llm: LLM, prompt: list[int], stop_ids: list[int], search: dict[str, Any]) -> Found:
    fields = {name: value for name, value in search.items() if name != "num_beams"}
    sampling = SamplingParams(
        n=search["num_beams"],
        use_beam_search=True,
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        stop_token_ids=tuple(stop_ids),
        **fields,
    )
    outputs = llm.generate([prompt], sampling)[0].outputs
    return [(list(one.token_ids), one.score or 0.0) for one in outputs]


def _theirs(model: Any, prompt: list[int], stop_ids: list[int], search: dict[str, Any]) -> Found:
    import torch

    # Set everything: generate() fills gaps from the model's own settings.
    model.generation_config.eos_token_id = stop_ids or None
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        num_return_sequences=search["num_beams"],
        eos_token_id=stop_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **search,
    )
    told = []
    for ids, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        new = ids[len(prompt) :]
        end = next((at + 1 for at, id_ in enumerate(new) if id_ in stop_ids), len(new))
        told.append((new[:end], score))
    return told
