"""A continued answer: cut at a drawn token, the rest has the tokens and logprobs of the whole.

The cases are the first of test_one_answer.py, which has computed their requests alone, with their
settings, load and cancellations. Each request that can be continued gets the first tokens of its
answer as output_ids.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import count, islice
from random import Random

import numpy as np

from quire.base.records import FinishReason, Request
from tests.exact.conftest import VOCAB_SIZE
from tests.exact.rig import AloneRuns, Model, Stream, run_case
from tests.exact.workload import REDUNDANT_CASES, Case, draw_case

FIRST_CASE = int(os.environ.get("QUIRE_CONTINUATION_FIRST", "0"))
NUM_CASES = int(os.environ.get("QUIRE_CONTINUATION_CASES", "36"))
ENOUGH_FOR_COVERAGE = 36


def test_a_cut_answer_continues_with_the_tokens_of_the_whole(
    models: list[Model], alone: AloneRuns
) -> None:
    lines: list[str] = []
    seen: Counter[str] = Counter()
    drawn_there = (one for one in count(FIRST_CASE) if one not in REDUNDANT_CASES)
    for number in islice(drawn_there, NUM_CASES):
        drawn = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        model = models[drawn.model]
        case, wholes = _cut(model, drawn, alone)
        outcome = run_case(model, case, alone=alone)
        lines += outcome.problems
        seen["preempted"] += outcome.preempted
        seen["accepted"] += outcome.accepted
        seen[case.settings.proposer] += 1
        for request in case.requests:
            whole = wholes.get(request.request_id)
            if whole is None:
                continue
            rest = outcome.streams[request.request_id]
            wanted = whole.tokens[len(request.output_ids) :]
            if rest.finish_reason is FinishReason.ABORT:
                wanted = wanted[: len(rest.tokens)]
            seen["continued"] += 1
            seen["grammar"] += request.sampling.structured_outputs is not None
            seen["penalty"] += request.sampling.repetition_penalty != 1.0
            seen["logprobs"] += request.sampling.logprobs is not None
            if rest.tokens != wanted or rest.error is not None:
                lines.append(f"case {number}, {request.request_id}: {rest}, wanted {wanted}")
    assert not lines, "\n".join(lines[:5])
    if NUM_CASES < ENOUGH_FOR_COVERAGE:
        return
    least = {"continued": 60, "preempted": 10, "grammar": 8, "penalty": 8, "logprobs": 20}
    assert all(seen[name] >= num for name, num in least.items()), seen


def _cut(model: Model, case: Case, alone: AloneRuns) -> tuple[Case, dict[str, Stream]]:
    """Return the case with cut requests, and the whole answer of each of them."""
    wholes: dict[str, Stream] = {}

    def cut(request: Request) -> Request:
        sampling = request.sampling
        if sampling.use_beam_search or sampling.mirostat or sampling.max_tokens == 0:
            return request
        whole = alone.of(model, request)
        if whole.error is not None or len(whole.tokens) < 2:
            return request
        wholes[request.request_id] = whole
        num_known = Random(f"cut {request.request_id}").randrange(1, len(whole.tokens))
        known = np.array([token_id for token_id, _ in whole.tokens[:num_known]], np.int32)
        return replace(
            request,
            output_ids=known,
            group_id=request.request_id,  # a request with known output has no forks
            sampling=replace(sampling, prompt_logprobs=None),
            deadline_ms=None,
        )

    arrivals = tuple(
        replace(arrival, requests=tuple(map(cut, arrival.requests))) for arrival in case.arrivals
    )
    return replace(case, arrivals=arrivals), wholes
