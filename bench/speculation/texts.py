"""Prompts of the measurement, and answers that repeat their prompts.

Prompts of models that write text come from published sets of questions. A model with random weights
repeats nothing: `Forced` replaces each token it chooses by that of a given answer, after all of the
model was computed, so that a real text is answered at the real cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.data import outside
from quire.execute.native import NativeExecutor
from quire.sampling.batch import SampleBatch, TokenChoice

Int32s = NDArray[np.int32]
Prompts = list[list[int]]
QUESTION_FILES = ("spec-bench.jsonl", "mt-bench.jsonl", "gsm8k-test.jsonl")
PASSAGE = "text/wikitext2-test.txt"
PASSAGE_WORDS = 97  # whole blocks and a token, as all prompts
# Of the words of a repeated passage, one in so many is another one, as in an edited text.
EDITED = 16
FIRST_WORD = 256  # token ids below are control tokens and bytes
FIRST_SEED = 1000


def questions(num: int) -> list[str]:
    """Return `num` questions, in turn from each set."""
    sets = []
    for name in QUESTION_FILES:
        lines = outside(f"prompts/{name}").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
        sets.append([one["question"] if "question" in one else one["turns"][0] for one in found])
    chosen = [(sets[at % len(sets)], at // len(sets)) for at in range(num)]
    return [texts[at % len(texts)] for texts, at in chosen]  # again from the first, where few


def word_ids(text: str, vocab_size: int) -> Int32s:
    """Return a token id for each word and mark of `text`; equal ones have equal ids."""
    known: dict[str, int] = {}
    ids = [known.setdefault(word, len(known)) for word in text.split()]
    return (np.array(ids, np.int32) % (vocab_size - 300) + FIRST_WORD).astype(np.int32)


def repeated_passages(num: int, num_tokens: int, vocab_size: int) -> tuple[Prompts, Prompts]:
    """Return prompts that hold a passage, and answers that repeat it with some words changed."""
    text = outside(PASSAGE).read_text(encoding="utf-8")
    ids = word_ids(text[: 12 * num * PASSAGE_WORDS + 10_000], vocab_size)
    rng = np.random.default_rng(1)
    passages = [ids[number * PASSAGE_WORDS :][:PASSAGE_WORDS] for number in range(num)]
    answers = [_edited(passage, ids, num_tokens, rng) for passage in passages]
    return [passage.tolist() for passage in passages], answers


def edited_answers(num: int, num_tokens: int, vocab_size: int) -> Prompts:
    """Return versions of one passage, each with some words changed."""
    text = outside(PASSAGE).read_text(encoding="utf-8")
    ids, rng = word_ids(text[:10_000], vocab_size), np.random.default_rng(3)
    return [_edited(ids[:PASSAGE_WORDS], ids, num_tokens, rng) for _ in range(num)]


def other_text(answer: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return as many tokens as an answer has, none of which is in it."""
    others = np.setdiff1d(np.arange(FIRST_WORD, vocab_size), answer)
    drawn = np.random.default_rng(sum(answer)).choice(others, len(answer))
    return tuple(drawn.tolist())


def _edited(passage: Int32s, ids: Int32s, num_tokens: int, rng: np.random.Generator) -> list[int]:
    """Return `num_tokens` of a passage, one in EDITED replaced by one of `ids`."""
    is_edited = rng.random(num_tokens) < 1.0 / EDITED
    others = ids[rng.integers(0, len(ids), num_tokens)]
    edited: list[int] = np.where(is_edited, others, np.resize(passage, num_tokens)).tolist()
    return edited


class Forced:
    """Replaces the choices of an executor, by the seed and the position of each row."""

    def __init__(self) -> None:
        self._answers: Mapping[int, tuple[int, Int32s]] = {}
        sample = NativeExecutor.sample

        def forced(executor: Any, logits: Any, batch: SampleBatch) -> TokenChoice:
            choice = sample(executor, logits, batch)
            seeds = batch.noise.seeds.tolist()
            for row, (seed, position) in enumerate(
                zip(seeds, batch.positions.tolist(), strict=True)
            ):
                if seed in self._answers:
                    first, answer = self._answers[seed]
                    choice.token_ids[row] = answer[min(position - first, len(answer) - 1)]
            return choice

        NativeExecutor.sample = forced  # type: ignore[method-assign]

    def answer(self, prompts: Prompts, answers: Prompts) -> list[int]:
        """Answer `prompts` so; return the seeds that their requests must have."""
        seeds = [FIRST_SEED + number for number in range(len(prompts))]
        self._answers = {
            seed: (len(prompt), np.array(answer, np.int32))
            for seed, prompt, answer in zip(seeds, prompts, answers, strict=True)
        }
        return seeds
