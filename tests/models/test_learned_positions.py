"""Models with learned positions: served to the last one, never beyond; files as on the hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import ContextTooLong, SettingError
from quire.weights.checkpoint import open_checkpoint
from tests.models import cases_gpt2, cases_opt
from tests.models.case import Case
from tests.models.generate import EXECUTORS, greedy, logits_of, open_executor
from tests.tiny_models import write_weights

POSITIONS = 83
# Large enough for a tokenizer; with a tied head random weights would repeat one token.
SERVED = {"vocab_size": 307, "tie_word_embeddings": False}
CASES = (
    Case("gpt2", SERVED, base=cases_gpt2.BASE, seed=91),
    Case("opt", SERVED, base=cases_opt.BASE, seed=92),
    Case("opt_350m", SERVED | cases_opt.AS_350M, base=cases_opt.BASE, seed=93),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_the_last_token_is_at_the_last_learned_position(case: Case, tmp_path: Path) -> None:
    folder, prompt = case.write(tmp_path), case.token_ids
    num_tokens = POSITIONS - len(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(folder, threads=1, max_num_seqs=4, max_num_batched_tokens=17) as llm:
        (answer,) = llm.generate([prompt], params)
    executor = open_executor(folder, kind="reference")
    expected = greedy(executor, prompt, num_tokens, max_positions=POSITIONS)
    assert list(answer.token_ids) == expected
    assert len(set(expected)) > 5


@each_case
def test_no_request_or_setting_exceeds_the_learned_positions(case: Case, tmp_path: Path) -> None:
    folder = case.write(tmp_path)
    with LLM(folder, threads=1) as llm:
        with pytest.raises(ContextTooLong, match=r"length is 83 tokens; .* lower max_tokens to 43"):
            llm.generate([case.token_ids], SamplingParams(max_tokens=44))
        with pytest.raises(ContextTooLong, match="maximum context length is 83 tokens"):
            llm.generate([[5] * POSITIONS], SamplingParams(max_tokens=1))
    with pytest.raises(SettingError, match="the model allows at most 83 positions"):
        LLM(folder, threads=1, max_model_len=POSITIONS + 1)


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_a_file_without_the_decoder_prefix_gives_the_same_logits(
    case: Case, kind: str, tmp_path: Path
) -> None:
    """Like gpt2 on the hub: no `transformer.` prefix, and stored masks that can be computed."""
    folder = case.write(tmp_path)
    full = logits_of(open_executor(folder, kind=kind), case.token_ids, max_positions=POSITIONS)
    checkpoint = open_checkpoint(folder)
    short = {
        name.removeprefix("transformer.").removeprefix("model."): checkpoint.read_f32(name)
        for name in checkpoint.names
    }
    if case.name == "gpt2":
        mask = np.tril(np.ones((1, 1, POSITIONS, POSITIONS), np.float32))
        short |= {f"h.{layer}.attn.bias": mask for layer in range(3)}
        short["h.0.attn.masked_bias"] = np.full((1,), -1e4, np.float32)
    write_weights(folder, short, dtype="f32")
    found = logits_of(open_executor(folder, kind=kind), case.token_ids, max_positions=POSITIONS)
    np.testing.assert_array_equal(found, full)
