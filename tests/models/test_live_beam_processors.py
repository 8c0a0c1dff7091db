"""Beam search with logits processors and stopping criteria, against transformers (marked `parity`).

As in test_live_beams.py, and needs torch. A grammar becomes a function of allowed tokens, with a
stopping criterion that ends a complete sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.base.grammar import Grammar, choice, regex
from quire.models.model_folder import box_path
from tests.models.grammar_answers import GrammarAnswers
from tests.models.test_live_beams import NUM_TOKENS, PROMPTS, SCORE_ERROR, Found

pytestmark = pytest.mark.parity

SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.6},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
]
JUNK = -1e8  # the score transformers reports if it has fewer sequences than beams
# Our fields, and theirs.
PENALTIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bias": (
        {"logit_bias": {300: 3.0, 410: -100.0, 57: 1.5}},
        {"sequence_bias": [[[300], 3.0], [[410], -100.0], [[57], 1.5]]},
    ),
    "several": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "logit_bias": {300: 2.0}},
        {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "sequence_bias": [[[300], 2.0]],
        },
    ),
}
# None begins in a prompt: transformers matches stop strings across the border, Quire in answers
# only.
STOPS = ((".",), ("little", "he sa"), ("she ", "he wa"), (" the",))
GRAMMARS: tuple[Grammar, ...] = (
    choice(["a cat", "a camel", "a cat and a camel", "the dog"]),
    regex("[a-z]{2,6} [0-9]{1,3}"),
    regex(" [A-Z][a-z]+ (went|ran) to the [a-z ]+\\."),
)


class Theirs:
    """transformers on the built-in model."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        import transformers

        folder = box_path()
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )

    def find(self, prompt: list[int], search: dict[str, Any], **more: Any) -> Found:
        """Return new tokens and scores of the found sequences, best first."""
        found = self.model.generate(
            self.torch.tensor([prompt]),
            attention_mask=self.torch.ones(1, len(prompt), dtype=self.torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_return_sequences=search["num_beams"],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **search,
            **more,
        )
        told = []
        scores = found.sequences_scores.tolist()
        for ids, score in zip(found.sequences.tolist(), scores, strict=True):
            new = ids[len(prompt) :]
            while new and new[-1] <= 0:  # padding, -1 if it holds more beams than it returns
                new.pop()
            if score > JUNK:
                told.append((new, score))
        return told


@pytest.fixture(scope="module")
def theirs() -> Theirs:
    return Theirs()


def compare(llm: LLM, theirs: Theirs, ours: dict[str, Any], **more: Any) -> int:
    """Return how many searches were compared token by token; scores are always compared."""
    tokenizer = Tokenizer.from_file(str(box_path() / "tokenizer.json"))
    compared = 0
    for prompt in (tokenizer.encode(text).ids for text in PROMPTS):
        for search in SEARCHES:
            expected = theirs.find(prompt, search, **more)
            got = _ours(llm, prompt, search, ours)
            scores = [score for _, score in expected]
            assert [score for _, score in got] == pytest.approx(
                scores, rel=SCORE_ERROR, abs=SCORE_ERROR
            ), (search, ours)
            if min(np.abs(np.diff(scores)), default=1.0) < SCORE_ERROR:
                continue
            assert [ids for ids, _ in got] == [ids for ids, _ in expected], (search, ours)
            compared += 1
    return compared


def _ours(llm: LLM, prompt: list[int], search: dict[str, Any], fields: dict[str, Any]) -> Found:
    named = {name: value for name, value in search.items() if name != "num_beams"}
    sampling = SamplingParams(
        n=search["num_beams"],
        use_beam_search=True,
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        **named,
        **fields,
    )
    outputs = llm.generate([prompt], sampling)[0].outputs
    return [(list(one.token_ids), one.score or 0.0) for one in outputs if one.error is None]


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(box_path(), dtype="f32", max_num_seqs=8, max_model_len=128) as llm:
        yield llm


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_and_bias_match_transformers(llm: LLM, theirs: Theirs, kind: str) -> None:
    ours, named = PENALTIES[kind]
    assert compare(llm, theirs, ours, **named) >= 5


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings_end_beams_as_in_transformers(
    llm: LLM, theirs: Theirs, stop: tuple[str, ...]
) -> None:
    named = {"stop_strings": list(stop), "tokenizer": theirs.tokenizer}
    assert compare(llm, theirs, {"stop": stop}, **named) >= 5


@pytest.mark.parametrize("place", range(len(GRAMMARS)))
def test_grammars_constrain_beams_like_a_list_of_allowed_tokens(
    llm: LLM, theirs: Theirs, place: int
) -> None:
    import transformers

    answers = GrammarAnswers(GRAMMARS[place])
    tokenizer = Tokenizer.from_file(str(box_path() / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]

    def answer(ids: list[int]) -> list[int]:
        return ids[next(len(prompt) for prompt in prompts if ids[: len(prompt)] == prompt) :]

    class Complete(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            done = [answers.is_complete(answer(ids)) for ids in input_ids.tolist()]
            return theirs.torch.tensor(done)

    def allowed(_: int, ids: Any) -> list[int]:
        return answers.allowed(answer(ids.tolist())) or [0]  # a dead beam may continue anywhere

    compared = compare(
        llm,
        theirs,
        {"structured_outputs": GRAMMARS[place]},
        prefix_allowed_tokens_fn=allowed,
        stopping_criteria=transformers.StoppingCriteriaList([Complete()]),
    )
    assert compared >= 5
