"""Many answers of the built-in model, for randomly composed schemas: all of them validate.

Each schema bounds its answers, so a truncated one is a failure. QUIRE_STRUCTURED_ANSWERS=1000 runs
more.
"""

from __future__ import annotations

import json
import os
import random

from bench.structured import MAX_TOKENS, PROMPTS, failure
from bench.structured_schemas import random_schema
from quire import LLM, SamplingParams
from quire.base.grammar import json_schema

NUM_ANSWERS = int(os.environ.get("QUIRE_STRUCTURED_ANSWERS", "160"))


def test_every_answer_validates_and_none_is_cut_off() -> None:
    rng = random.Random("every answer")
    schemas = [random_schema(rng) for _ in range(NUM_ANSWERS)]
    sampling = [
        SamplingParams(
            temperature=rng.choice((0.0, 1.0, 2.0)),
            seed=rng.randrange(2**40),
            max_tokens=MAX_TOKENS,
            structured_outputs=json_schema(schema),
        )
        for schema in schemas
    ]
    prompts = [rng.choice(PROMPTS) for _ in schemas]
    with LLM(max_num_seqs=32, num_threads=1) as llm:
        answers = llm.generate(prompts, sampling)
    failed = [
        (why, answer.text, json.dumps(schema))
        for schema, answer in zip(schemas, answers, strict=True)
        if (why := failure(schema, answer.text, answer.finish_reason))
    ]
    assert failed == []
