"""Trials: grammars that hang, use much memory or crash do so in a separate process."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.grammar import Grammar, choice, grammar, json_schema, regex
from quire.structured.compiler import NUM_THREADS, GrammarCompiler
from quire.structured.source import llguidance_grammar
from quire.structured.trial import MAX_UNTRIED_CHARS, Trial, needs_trial
from quire.structured.vocabulary import Vocabulary
from tests.unit.structured.test_compiler import wait_for

NAMES = frozenset({"<|x|>"})
NEVER = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")  # runs until it is killed
LIMIT_MS = 60_000.0


def rules(levels: int) -> Grammar:
    named = "\n".join(f'r{level}: "a" r{level + 1}' for level in range(levels))
    return grammar(f'start: r0\n{named}\nr{levels}: "x"')


def references(levels: int) -> Grammar:
    definitions: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{level + 1}"}},
        }
        for level in range(levels)
    }
    return json_schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {}}})


def long_choice(name: str) -> Grammar:
    return choice([f"{name} {number:020d}" for number in range(400)])


def test_only_long_or_expensive_grammars_are_tried() -> None:
    assert not needs_trial(regex("a" * MAX_UNTRIED_CHARS))
    assert needs_trial(regex("a" * (MAX_UNTRIED_CHARS + 1)))
    assert needs_trial(json_schema({"type": "integer", "multipleOf": 3}))
    assert needs_trial(grammar("start: A\nA: /a/ & /b/"))
    assert needs_trial(grammar("start: A\nA: ~/a/"))
    assert not needs_trial(regex("a&~b"))


def test_a_trial_returns_llguidances_grammar_or_error() -> None:
    with closing(Trial()) as trial:
        good = json_schema({"type": "integer", "multipleOf": 3})
        for tried in (good, grammar("start: <|x|>"), references(100)):
            told = trial.source(tried, NAMES, limit_ms=LIMIT_MS)
            assert told == llguidance_grammar(tried, NAMES)
        assert trial.source(grammar("start: nothing"), NAMES, limit_ms=LIMIT_MS)
        # nothing was returned
        assert not trial.source(json_schema(False), NAMES, limit_ms=LIMIT_MS)


@pytest.mark.parametrize("deep", [rules(10_000), references(2_500)], ids=["rules", "references"])
def test_a_stack_overflow_is_rejected_and_the_next_trial_has_a_new_process(deep: Grammar) -> None:
    with closing(Trial()) as trial:
        with pytest.raises(InvalidParameter, match="nests too deeply") as told:
            trial.source(deep, NAMES, limit_ms=LIMIT_MS)
        assert told.value.param == deep.param
        assert trial.source(regex("a+"), NAMES, limit_ms=LIMIT_MS)


def test_an_endless_trial_is_ended_with_its_process() -> None:
    trial = Trial(NEVER)
    with pytest.raises(InvalidParameter, match=r"not compiled within 0\.05 s"):
        trial.source(regex("a"), NAMES, limit_ms=50)
    assert trial._process is None


def test_a_divisor_that_takes_minutes_is_given_up(vocabulary: Vocabulary) -> None:
    # llguidance's own limit may apply first on a fast machine.
    refused = r"not compiled within 0\.3 s|fuel exhausted"
    made = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_compile_ms=300)
    with closing(made) as compiler, pytest.raises(InvalidParameter, match=refused):
        compiler.matcher(json_schema({"type": "integer", "multipleOf": 999_999_937}))


def test_without_a_process_the_grammar_fails_with_a_reason() -> None:
    with pytest.raises(WorkerError, match="process for trial compilations failed"):
        Trial((os.devnull,)).source(regex("a"), NAMES, limit_ms=LIMIT_MS)


def test_closing_a_trial_ends_the_running_one_and_starts_no_more() -> None:
    trial, outcome = Trial(NEVER), []

    def attempt() -> None:
        try:
            trial.source(regex("a"), NAMES, limit_ms=LIMIT_MS)
        except (InvalidParameter, WorkerError) as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    while trial._process is None and thread.is_alive():
        pass
    trial.end()
    thread.join(60)
    assert len(outcome) == 1
    with pytest.raises(WorkerError):
        trial.source(regex("a"), NAMES, limit_ms=LIMIT_MS)


class Gated(Trial):
    """A trial that waits for a gate; then all were too slow."""

    def __init__(self, gate: threading.Event, inside: threading.Semaphore) -> None:
        super().__init__(NEVER)
        self._gate, self._inside = gate, inside

    def source(self, grammar: Grammar, special_names: frozenset[str], *, limit_ms: float) -> str:
        self._inside.release()
        assert self._gate.wait(60)
        raise InvalidParameter("it took too long", param=grammar.param)


def test_hostile_grammars_in_all_threads_do_not_delay_a_short_one(
    vocabulary: Vocabulary,
) -> None:
    gate, inside = threading.Event(), threading.Semaphore(0)
    compiler = GrammarCompiler(
        lambda: vocabulary, now_ms=lambda: 0.0, new_trial=lambda: Gated(gate, inside)
    )
    hostile = [long_choice(str(number)) for number in range(NUM_THREADS + 1)]
    for one in hostile:
        compiler.want(one)
    for _ in range(NUM_THREADS):
        assert inside.acquire(timeout=60)  # all threads of that lane are busy
    short = regex("[a-z]+")
    compiler.want(short)
    wait_for(compiler, short)
    assert compiler.is_ready(short)
    assert not any(map(compiler.is_settled, hostile))
    gate.set()
    for one in hostile:
        wait_for(compiler, one)
        assert "too long" in str(compiler.error(one))
    compiler.close()


def test_a_long_grammar_that_passes_its_trial_is_compiled(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    for one in (long_choice("a"), long_choice("b")):
        compiler.want(one)
        wait_for(compiler, one)
        assert compiler.error(one) is None
        compiler.matcher(one)
    assert compiler.num_compiled == 2
    compiler.close()
