"""BeamStops: each beam is judged by its own tokens after any branching, and fails separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.records import Admission, Candidates, StepPlan
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.runner.beam_stops import BeamStops
from quire.runner.grammar_rows import GrammarRows
from quire.runner.model_runner import ModelRunner, OutputConstraints
from tests.unit.runner.scripted_executor import ScriptedExecutor

PROMPT = [1, 2, 3]


@dataclass
class EndsWithTheLastTwice:
    """End an answer when a token occurs twice in a row."""

    taken: list[int] = field(default_factory=list)

    def take(self, token_ids: Sequence[int]) -> None:
        self.taken += token_ids

    def ends_with(self, token_id: int) -> bool:
        return self.taken[-1:] == [token_id]

    def copy(self) -> EndsWithTheLastTwice:
        return EndsWithTheLastTwice(self.taken.copy())


class Source:
    """A source of watches; the request named "bad" has none."""

    def watch(self, admission: Admission) -> EndsWithTheLastTwice:
        if admission.request_id == "bad":
            raise WorkerError("the tokenizer cannot be read: no file")
        return EndsWithTheLastTwice()


def admission(slot: int, known: list[int], *, stop: str = "x", name: str = "good") -> Admission:
    return Admission(
        slot=slot,
        request_id=name,
        stream=0,
        token_ids=np.array(PROMPT + known, np.int32),
        num_prompt_tokens=len(PROMPT),
        stop_ids=(),
        sampling=SamplingParams(
            n=2, use_beam_search=True, temperature=0.0, seed=1, stop=stop or ()
        ),
        num_candidates=4,
    )


class Beams:
    """A table of tokens, and ends over it."""

    def __init__(self, source: Source | None = None) -> None:
        self.tokens = TokenTable(4, 32)
        self.ends = BeamStops(4, self.tokens, GrammarRows(4, self.tokens, None), source or Source())

    def admit(self, one: Admission) -> None:
        self.tokens.admit(one.slot, one.token_ids, one.num_prompt_tokens)
        self.ends.admit(one)

    def append(self, slot: int, token_id: int) -> None:
        length = int(self.tokens.lengths[slot])
        self.tokens.tokens[slot, length] = token_id
        self.tokens.lengths[slot] = length + 1

    def verdicts(self, *slots: int) -> tuple[list[list[bool]], dict[int, str]]:
        """Return the verdicts on candidates 5, 6, 7 and none."""
        ids = np.tile(np.array([5, 6, 7, -1], np.int32), (len(slots), 1))
        scores = ids.astype(np.float32)
        of = np.array(slots, np.int32)
        candidates, failed = self.ends.mark_ends(
            of, self.tokens.lengths[of], Candidates(ids=ids, scores=scores, logprobs=scores)
        )
        assert candidates is not None
        return candidates.ends.tolist(), failed


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_each_beam_is_judged_by_its_own_tokens() -> None:
    beams = Beams()
    beams.admit(admission(0, [5]))
    beams.admit(admission(2, [9, 7]))
    assert beams.verdicts(0, 2) == ([[True, False, False, False], [False, False, True, False]], {})
    beams.append(0, 6)
    assert beams.verdicts(2, 0)[0] == [[False, False, True, False], [False, True, False, False]]


def test_a_branch_starts_from_its_sources_state_and_is_independent() -> None:
    beams = Beams()
    beams.admit(admission(0, [5]))
    beams.admit(admission(1, []))
    beams.verdicts(0)
    beams.tokens.branch(ints(0), ints(1))
    beams.ends.branch(ints(0), ints(1))
    beams.append(0, 6)
    beams.append(1, 7)
    assert beams.verdicts(0, 1)[0] == [[False, True, False, False], [False, False, True, False]]


def test_changed_tokens_are_read_again() -> None:
    beams = Beams()
    beams.admit(admission(0, [5, 6]))
    beams.verdicts(0)
    beams.tokens.tokens[0, len(PROMPT) + 1] = 7
    assert beams.verdicts(0)[0] == [[False, False, True, False]]


def test_rows_without_watches_are_skipped() -> None:
    beams = Beams()
    beams.admit(admission(0, [5], stop=""))
    assert beams.verdicts(0) == ([], {})
    beams.admit(admission(1, [5]))
    assert beams.verdicts(0, 1)[0] == [[False] * 4, [True, False, False, False]]
    beams.ends.retire(1)
    assert beams.verdicts(0, 1) == ([], {})
    assert beams.ends.mark_ends(ints(0), ints(4), None) == (None, {})


@pytest.mark.parametrize("max_samples", [1, 8])
def test_a_failing_watch_fails_only_its_row(max_samples: int) -> None:
    runner = ModelRunner(
        ScriptedExecutor(),
        num_slots=4,
        max_model_len=32,
        block_size=16,
        max_samples=max_samples,
        constraints=OutputConstraints(watches=Source()),
    )
    plan = StepPlan(
        step=1,
        admissions=(
            admission(0, []),
            admission(1, [], name="bad"),
            admission(2, [], stop=""),
        ),
        table_slots=ints(0, 1, 2),
        table_columns=ints(0, 0, 0),
        table_blocks=ints(0, 1, 2),
        slots=ints(0, 1, 2),
        starts=ints(0, 0, 0),
        counts=ints(3, 3, 3),
        store_from=ints(0, 0, 0),
        sample_counts=np.ones(3, np.int32),
    )
    result = runner.collect(runner.submit(plan))
    assert [(one.row, one.message) for one in result.errors] == [
        (1, "the tokenizer cannot be read: no file")
    ]
    assert result.candidates is not None
    assert result.candidates.ids.tolist() == [[0, 1, 2, 3]] * 2
    assert result.candidates.ends.tolist() == [[False] * 4] * 2


def test_a_beam_that_needs_a_watch_without_a_source_fails_by_name() -> None:
    tokens = TokenTable(4, 32)
    ends = BeamStops(4, tokens, GrammarRows(4, tokens, None), None)
    one = admission(0, [5])
    tokens.admit(0, one.token_ids, one.num_prompt_tokens)
    ends.admit(one)
    table = np.zeros((1, 1), np.float32)
    candidates = Candidates(ids=table.astype(np.int32), scores=table, logprobs=table)
    _, failed = ends.mark_ends(ints(0), ints(4), candidates)
    assert failed == {0: "nothing here watches for stop strings"}
