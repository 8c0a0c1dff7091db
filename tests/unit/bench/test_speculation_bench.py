"""The measurement of speculation: its cells, and its refusal of wrong tokens."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.measured.speculation_rows import speculation_rows
from bench.speculation import llama, measure, sides, turns
from bench.speculation.__main__ import Run, _is_done, main
from bench.speculation.cells import FIXED_WARM_UP_STEPS, Cell, all_cells, quick_cells
from bench.speculation.engines import Engines
from bench.speculation.intervals import engines_interval, ratio_interval, verdict
from bench.speculation.measure import FIRST_ROUNDS, MIN_ROUNDS, Measurement
from bench.speculation.proposers import FixedAcceptance
from bench.speculation.race import SOME_ROUNDS, slower_sides
from bench.speculation.rounds import MAX_TIMES, Round, clipped, side_ratio
from bench.speculation.sides import PausedClock, Side, Stream, Task, answers_of
from bench.speculation.texts import word_ids
from quire.base.engine_stats import EngineStats
from quire.base.records import NO_INTS, Request, RequestOutput, StepOutputs
from quire.base.sampling_params import SamplingParams
from quire.speculative.control import FixedControl
from quire.speculative.rests import NoRests
from tests.unit.scheduler.test_draft_effort import Case, Repeats

CELL = Cell(part="repeats", model="m", proposer="ngram", batch=4)
SMALL = Cell(part="small", model="m", proposer="ngram", batch=4)
ANSWER = tuple(range(SMALL.num_tokens))
TASK = Task(prompt=(1, 2), sampling=SamplingParams(max_tokens=SMALL.num_tokens), expected=ANSWER)


class FakeCore:
    """Yields `num_tokens` of each answer in a step, which takes `cost_s` by `now_s`. The last token
    of an answer is another one where it `is_wrong`."""

    now_s = 0.0
    errors: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, num_tokens: int = 1, *, cost_s: float = 1.0, is_wrong: bool = False) -> None:
        self.num_steps = self.num_rows = self.max_running = 0
        self._running: dict[str, tuple[Request, int]] = {}
        self._num_tokens, self._cost_s, self._is_wrong = num_tokens, cost_s, is_wrong

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def add(self, requests: Any) -> None:
        self._running |= {request.request_id: (request, 0) for request in requests}

    def abort(self, request_ids: Any) -> None:
        for request_id in request_ids:
            del self._running[request_id]

    def stats(self) -> EngineStats:
        drafts = (self.num_rows,) * (self._num_tokens - 1)
        stats = EngineStats(**self.errors)
        stats.draft_rows_total = self.num_rows * (self._num_tokens > 1)
        stats.draft_tokens_total = stats.accepted_draft_tokens_total = drafts
        return stats

    def step(self, now_ms: Any) -> StepOutputs:
        FakeCore.now_s += self._cost_s
        self.num_steps += 1
        self.max_running = max(self.max_running, len(self._running))
        events = []
        for request_id, (request, begin) in list(self._running.items()):
            self.num_rows += 1
            most = request.max_total_tokens - len(request.prompt_ids)
            end = min(begin + self._num_tokens, most)
            self._running[request_id] = request, end
            if end == most:
                del self._running[request_id]
            reason: Any = "length" if end == most else None
            wrong = self._is_wrong and end == most
            tokens = (*ANSWER[begin : end - 1], ANSWER[end - 1] + wrong)
            events.append(
                RequestOutput(request_id=request_id, token_ids=tokens, finish_reason=reason)
            )
        return StepOutputs(step=0, request_ids=[], token_ids=NO_INTS, events=tuple(events))


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "time", SimpleNamespace(perf_counter=lambda: FakeCore.now_s))
    monkeypatch.setattr(turns, "_is_disturbed", lambda *_: False)


def side(name: str, core: FakeCore) -> Side:
    card: Any = SimpleNamespace(
        max_model_len=1000, vocab_size=1000, eos_ids=(), generates=True, speculates=False
    )
    card.banned_sequences = ()
    return Side(name=name, core=core, card=card, clock=PausedClock())


def measurement(*, cell: Cell = CELL, **cores: FakeCore | list[FakeCore]) -> Measurement:
    """Return that of sides with a core on each engine."""
    sides_ = {
        name: [side(name, one) for one in (many if isinstance(many, list) else [many])]
        for name, many in cores.items()
    }
    one = Measurement(cell, list(sides_), lambda name: sides_[name], [TASK])
    one.prepare()
    return one


def measured(*, cell: Cell = CELL, **cores: FakeCore | list[FakeCore]) -> dict[str, Any]:
    one = measurement(cell=cell, **cores)
    one.extend(lambda: True, lambda: True)
    assert one.has_ended
    return one.summary() | {"rounds": one.rounds}


@pytest.mark.parametrize("field", ["draft_errors_total", "draft_proposer_errors_total"])
def test_a_run_in_which_speculation_failed_is_not_reported(field: str) -> None:
    failed = FakeCore(2)
    failed.errors = {field: 1}
    with pytest.raises(SystemExit, match=r"auto: .* errors of the control .* nothing is reported"):
        measured(off=FakeCore(), auto=failed, k1=FakeCore(2))


def engines(num: int, cost_s: float, **options: Any) -> list[FakeCore]:
    """Return engines; the steps of each take 1 % more than those of the one before."""
    return [FakeCore(cost_s=cost_s * (1.0 + 0.01 * at), **options) for at in range(num)]


def rounds_of(**seconds: list[float]) -> list[Round]:
    return [
        Round(dict(zip(seconds, one, strict=True))) for one in zip(*seconds.values(), strict=True)
    ]


def test_sides_generate_the_same_tokens_in_each_round_and_drafts_are_counted() -> None:
    found = measured(off=FakeCore(), auto=FakeCore(4, cost_s=2.0), k2=FakeCore(2, cost_s=1.1))
    assert found["warm_up_steps"] == CELL.warm_up_steps
    assert found["tokens"] == len(found["rounds"]) * CELL.round_tokens
    assert len(found["rounds"]) == MIN_ROUNDS
    assert all(set(one.seconds) == {"off", "auto", "k2"} for one in found["rounds"])
    # Answers that are no multiple of the tokens of a step end with a shorter one.
    assert found["speedups"] == pytest.approx({"auto": 2.0, "k2": 2 / 1.1}, rel=0.02)
    assert found["best_fixed"] == "k2"
    assert found["acceptance"] == found["acceptance_of_fixed"] == 1.0
    num_tokens = found["tokens"] + CELL.run_in_tokens
    whole = 3 * CELL.batch * -(-num_tokens // (4 * CELL.batch))
    assert whole <= found["drafted"] <= 1.05 * whole
    assert found["disturbed"] == found["clipped"] == 0


def test_the_place_of_an_engine_cancels_where_sides_share_it() -> None:
    cores = {"auto": engines(4, 0.5), "k2": engines(4, 2.0)}
    found = measured(cell=SMALL, off=engines(4, 1.0), **cores)
    assert found["shared_engines"] == 4
    assert "engines" not in found
    assert [one.engine for one in found["rounds"]] == 3 * [0, 1, 2, 3]
    assert found["speedups"] == {"auto": 2.0, "k2": 0.5}
    assert found["half_width"] == pytest.approx(0.0, abs=1e-6)
    assert found["warm_up_steps"] == 4 * SMALL.warm_up_steps
    assert found["tokens"] == MIN_ROUNDS * SMALL.round_tokens
    assert not any(core.has_work for core in cores["auto"])


def test_sides_that_share_an_engine_have_the_same_requests_in_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[list[tuple[int, int]]] = []
    tasks = [replace(TASK, prompt=(at,)) for at in range(50)]

    class Core(FakeCore):
        def add(self, requests: Any) -> None:
            if not self.has_work:
                begun.append([])
            begun[-1] += [(int(one.prompt_ids[0]), one.max_total_tokens) for one in requests]
            super().add(requests)

    attached: list[str] = []
    names = ("off", "auto")
    sides_ = {
        name: 2 * [replace(side(name, Core()), attach=lambda name=name: attached.append(name))]
        for name in names
    }
    one = turns.SharedEngines(sides_, tasks, SMALL, {name: [0, 0, 0] for name in names})
    seconds = [one.take(name, 1, number) for number in (1, 2) for name in names]
    assert seconds == [SMALL.round_tokens / SMALL.batch] * 4
    assert begun[0] == begun[1] != begun[2] == begun[3]
    in_turn = SMALL.round_tokens // SMALL.num_tokens
    firsts = [25 + in_turn, 25 + 2 * in_turn]  # the second of two engines, of 50 tasks
    assert [one[0][0] for one in begun] == [firsts[0], firsts[0], firsts[1], firsts[1]]
    assert attached == [*names, *names]


def test_a_cell_has_some_rounds_whatever_its_time_unless_they_take_too_long() -> None:
    for has_more, num_rounds in ((True, FIRST_ROUNDS), (False, 1)):
        one = measurement(off=FakeCore(), auto=FakeCore())
        one.extend(lambda: False, lambda has_more=has_more: has_more)  # type: ignore[misc]
        assert len(one.rounds) == num_rounds


def test_the_order_of_a_round_is_turned_round_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    until = Stream.until

    def listed(stream: Stream, num_tokens: int) -> float:
        asked.append(id(stream))
        return until(stream, num_tokens)

    monkeypatch.setattr(Stream, "until", listed)
    cores = {f"k{at}": FakeCore() for at in range(1, 5)}
    found = measured(off=FakeCore(), auto=FakeCore(), **cores)
    rounds = [asked[at : at + 6] for at in range(0, len(asked), 6)][1:]  # the first do not count
    assert len(rounds) == len(found["rounds"])
    for first, second in zip(rounds[::2], rounds[1::2], strict=False):
        assert first == second[::-1]
    assert len({tuple(one) for one in rounds[::2]}) > 1


def test_a_number_of_drafts_that_is_clearly_slower_is_left_out_of_later_rounds() -> None:
    found = measured(
        off=FakeCore(),
        auto=FakeCore(),
        k2=FakeCore(cost_s=1.1),
        k4=FakeCore(cost_s=1.5),
        k8=FakeCore(cost_s=2.0),
    )
    for name, num in (("k2", SOME_ROUNDS), ("k4", 2), ("k8", 1)):
        in_race = [name in one.seconds for one in found["rounds"]]
        assert in_race == [True] * num + [False] * (MIN_ROUNDS - num)
    assert found["best_fixed"] == "off"
    assert found["speedups"]["k8"] == 0.5


@pytest.mark.parametrize(
    ("part", "batch", "slower"), [("shapes", 4, []), ("shapes", 64, ["k2"]), ("small", 4, ["k2"])]
)
def test_long_rounds_need_one_for_what_others_need_more(
    part: str, batch: int, slower: list[str]
) -> None:
    rounds = rounds_of(off=[1.0], k1=[1.1], k2=[1.4])
    cell = Cell(part=part, model="qwen3-0.6b", proposer="synthetic", batch=batch)
    assert slower_sides(cell, rounds, ["off", "k1", "k2"]) == slower


def test_a_cell_that_noise_leaves_open_has_so_many_rounds_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "MAX_ROUNDS", MIN_ROUNDS + 3)
    monkeypatch.setattr(measure, "NARROW", -1.0)
    monkeypatch.setattr(measure, "verdict", lambda *_: "not decided")
    assert len(measured(off=FakeCore(), auto=FakeCore())["rounds"]) == MIN_ROUNDS + 3


@pytest.mark.parametrize(("half_width", "ends"), [(0.017, False), (0.013, True)])
def test_a_cell_ends_early_where_its_goals_are_clearly_decided(
    half_width: float, ends: bool
) -> None:
    one = measurement(off=FakeCore(), auto=FakeCore())
    apart = half_width * (MIN_ROUNDS - 1) ** 0.5 / 2.2  # t of 11
    offs = [1.0 + (apart if at % 2 else -apart) for at in range(MIN_ROUNDS)]
    one.rounds = rounds_of(off=offs, auto=[1.0] * MIN_ROUNDS)
    assert one.speed.half_width == pytest.approx(half_width, rel=0.1)
    assert verdict(0.98, one.speed.shown()) == "met"
    assert one.has_ended == ends


def test_a_cell_can_be_measured_further() -> None:
    cores = {"off": FakeCore(), "auto": FakeCore(cost_s=1.01)}
    one = measurement(off=cores["off"], auto=cores["auto"])
    for num_rounds in (FIRST_ROUNDS + 2, FIRST_ROUNDS + 5):
        left = iter([True] * (num_rounds - len(one.rounds) - 1))
        one.extend(lambda left=left: next(left, False), lambda: True)  # type: ignore[misc]
        assert len(one.rounds) == num_rounds
        assert not any(core.has_work for core in cores.values())


def test_each_side_of_its_own_engine_is_warmed_up_once_and_the_control_each_time() -> None:
    cores = {name: FakeCore() for name in ("off", "auto", "k2")}
    one = measurement(cell=CELL, **cores)
    for times in (1, 2):
        one.extend(lambda: False, lambda: True)
        num_tokens = times * CELL.run_in_tokens + len(one.rounds) * CELL.round_tokens
        counted = num_tokens // CELL.batch
        assert cores["auto"].num_steps == times * CELL.warm_up_steps + counted
        for name in ("off", "k2"):
            assert cores[name].num_steps == FIXED_WARM_UP_STEPS + counted


@pytest.mark.parametrize("step_ms", [10.0, 300.0])
def test_a_fixed_number_of_drafts_is_made_in_all_steps_after_the_warm_up(step_ms: float) -> None:
    case = Case(64, Repeats(finds=True), FixedControl(4, NoRests()), step_ms=step_ms)
    case.counts = False
    num_plain = case.num_rows // 64
    assert not case.num_drafts  # steps are timed
    while not case.num_drafts and num_plain <= FIXED_WARM_UP_STEPS:
        case.turn()
        num_plain += not case.num_drafts
    assert num_plain <= FIXED_WARM_UP_STEPS
    for _ in range(40):
        case.num_drafts = 0
        case.turn()
        assert case.num_drafts


def test_rounds_that_others_disturb_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True] + [False] * 100)
    monkeypatch.setattr(turns, "_is_disturbed", lambda *_: next(answers))
    found = measured(off=FakeCore(), auto=FakeCore())
    assert (found["disturbed"], len(found["rounds"])) == (2, MIN_ROUNDS)
    monkeypatch.setattr(turns, "_is_disturbed", lambda *_: True)
    found = measured(off=FakeCore(), auto=FakeCore())
    assert len(found["rounds"]) == MIN_ROUNDS
    assert found["disturbed"] == turns.MAX_DISTURBED_TIMES * MIN_ROUNDS


def test_a_single_slow_turn_counts_as_a_few() -> None:
    rounds = rounds_of(off=[1.0] * 10, auto=[2.0] * 9 + [50.0])
    assert clipped(rounds)[-1].seconds == {"off": 1.0, "auto": 2.0 * MAX_TIMES}


def test_wrong_tokens_are_not_reported() -> None:
    with pytest.raises(SystemExit, match="k2: speculation changed the tokens"):
        measured(off=FakeCore(), auto=FakeCore(), k2=FakeCore(is_wrong=True))


def test_wrong_tokens_of_an_answer_that_has_not_ended_are_found() -> None:
    wrong = replace(TASK, expected=(7, *ANSWER[1:]))
    stream = Stream(side("auto", FakeCore()), [wrong], 1)
    stream.for_steps(1)
    with pytest.raises(SystemExit, match="changed the tokens"):
        stream.end()


def test_a_stream_keeps_its_batch_full_and_divides_steps_that_yield_more() -> None:
    core = FakeCore(8)
    stream = Stream(side("auto", core), [replace(TASK, expected=())], 4, ends_anywhere=False)
    assert stream.until(16) == 0.5  # of a step with 32 tokens
    assert stream.until(33) == pytest.approx(1 + 1 / 32)
    stream.for_steps(200)
    assert core.max_running == 4
    assert stream.tokens == 4 * 8 * stream.steps
    assert stream.drafted() == (4 * stream.steps, 28 * stream.steps, 28 * stream.steps)


def test_requests_of_the_first_batch_end_at_different_times() -> None:
    core = FakeCore()
    stream = Stream(side("off", core), [TASK], 16)
    num_ended = []
    for _ in range(SMALL.num_tokens):
        stream.for_steps(1)
        num_ended.append(16 - len(core._running))
    assert max(num_ended) <= 4
    assert np.count_nonzero(num_ended) >= 12


def test_answers_are_those_of_the_side_without_drafts() -> None:
    unknown = [replace(TASK, expected=()), replace(TASK, prompt=(3,), expected=())]
    assert [one.expected for one in answers_of(side("off", FakeCore()), unknown, 8)] == 2 * [ANSWER]


def test_an_engine_answers_in_full_what_another_has_answered() -> None:
    core = FakeCore(cost_s=0.0)
    assert answers_of(side("auto", core), 8 * [TASK], 8) == 8 * [TASK]
    assert core.num_rows == 8 * SMALL.num_tokens


@pytest.mark.parametrize(
    ("part", "name", "num_answers"),
    [("shapes", "off", 0), ("shapes", "k4", 0), ("history", "off", 0), ("history", "k4", 1)],
)
def test_an_engine_knows_all_prompts_and_has_an_answer_to_repeat(
    monkeypatch: pytest.MonkeyPatch, part: str, name: str, num_answers: int
) -> None:
    core = FakeCore()
    monkeypatch.setattr(Engines, "_start", lambda _, name: side(name, core))
    cell = Cell(part=part, model="qwen3-0.6b", proposer="synthetic", batch=1)
    tasks = [replace(TASK, prompt=(at,)) for at in range(3)]
    engines_ = Engines(cell, ExitStack())
    for _ in range(2):
        assert engines_.ready(tasks, name)[0].core is core
        assert core.num_rows == len(tasks) + num_answers * SMALL.num_tokens


def test_a_synthetic_proposer_is_right_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    request: Any = SimpleNamespace(prompt_ids=np.array([1, 2], np.int32))
    monkeypatch.setattr(FixedAcceptance, "answers", {request.prompt_ids.tobytes(): ANSWER})
    for rate in (0.3, 0.9):
        monkeypatch.setattr(FixedAcceptance, "rate", rate)
        proposer = FixedAcceptance(1)
        proposer.begin(0, request)
        assert np.count_nonzero(proposer._drafts[0] == ANSWER) == round(rate * len(ANSWER))


def test_a_ratio_of_sums_has_an_interval_that_covers_it() -> None:
    rng, covered, num = random.Random(3), 0, 400
    for _ in range(num):
        pairs = [(1.2 * rng.gauss(1.0, 0.1), rng.gauss(1.0, 0.1)) for _ in range(12)]
        found = ratio_interval([one for one, _ in pairs], [one for _, one in pairs])
        covered += found.low <= 1.2 <= found.high
    assert 0.93 * num <= covered <= 0.99 * num
    assert ratio_interval([1.0] * 5, [1.0] * 5).coverage == 0.0
    rare = ratio_interval([1.0] * 20, [0.9] * 19 + [2.9])
    assert rare.value == 1.0  # a rare loss counts in full


def test_the_ratio_of_shared_engines_has_an_interval_that_covers_that_of_all() -> None:
    rng, covered, num = random.Random(5), 0, 400
    for _ in range(num):
        rounds = []
        for engine in range(4):
            place, ratio = rng.gauss(1.0, 0.05), rng.gauss(0.98, 0.01)
            for _ in range(5):
                seconds = {"auto": place * rng.gauss(1.0, 0.02)}
                seconds["off"] = place * ratio * rng.gauss(1.0, 0.02)
                rounds.append(Round(seconds, engine))
        found = side_ratio(rounds, "off", "auto")
        assert found.half_width < 0.06  # engines differ by 5 %, and their ratios by 1 %
        covered += found.low <= 0.98 <= found.high
    assert 0.92 * num <= covered <= 0.98 * num


def test_the_interval_of_engines_is_students_of_their_sums() -> None:
    known = engines_interval([0.99, 1.01, 0.99, 1.01], [1.0] * 4)  # t of 3: 3.182
    assert known.half_width == pytest.approx(3.182 * 0.011547 / 2.0, rel=0.01)
    assert known.coverage == 0.95
    assert engines_interval([1.0, 2.0], [2.0, 4.0]).half_width == 0.0
    for num in (1, 3):
        assert engines_interval([1.0] * num, [1.0] * num).coverage == 0.0


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    in_turn, at_once = [1.0, 1.1] * 10, [1.0] * 10 + [1.1] * 10
    widths = [ratio_interval(overs, [1.0] * 20).half_width for overs in (in_turn, at_once)]
    assert widths[1] > 1.5 * widths[0]


def test_a_verdict_needs_an_interval_on_one_side_of_the_goal_and_some_values() -> None:
    def of(low: float, high: float, coverage: float = 0.97) -> str:
        return verdict(0.98, {"low": low, "high": high, "coverage": coverage})

    assert of(0.985, 1.1) == "met"
    assert of(0.97, 1.1) == of(0.96, 0.99) == "not decided"
    assert of(0.95, 0.97) == "missed"
    assert of(0.9, 0.9, 0.0) == "not decided"


def test_cells_have_names_of_their_own_and_those_of_an_engine_are_together() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    engines = [cell.engine for cell in cells]
    changes = sum(one != other for one, other in pairwise(engines))
    assert changes == len(set(engines)) - 1
    assert {cell.name for cell in quick_cells()} <= {cell.name for cell in cells}
    assert {cell.goal for cell in quick_cells()} == {0.98, 2.0, 2.5}


def test_a_quick_result_is_measured_again_by_a_whole_run_only() -> None:
    cell = all_cells()[0]
    assert not _is_done({}, cell, quick=True)
    num = cell.round_tokens
    found = {"speedup_interval": {"coverage": 0.75}, "quick": True, "shared_engines": 8}
    found |= {"rounds": 2, "tokens": 2 * num}
    assert _is_done({cell.name: found}, cell, quick=True)
    assert not _is_done({cell.name: found}, cell, quick=False)
    assert _is_done({cell.name: found | {"quick": False}}, cell, quick=False)
    cut = found | {"speedup_interval": {"coverage": 0.5}, "quick": False}  # the run ended
    assert not _is_done({cell.name: cut}, cell, quick=False)
    assert not _is_done({cell.name: {"quick": False, "tokens": num}}, cell, quick=False)
    old = {"speedup_interval": {"coverage": 0.95}, "quick": False}  # of whole generations
    assert not _is_done({cell.name: old}, cell, quick=False)
    longer = found | {"quick": False, "rounds": 1}  # rounds were longer once
    assert not _is_done({cell.name: longer}, cell, quick=False)
    own = {name: value for name, value in found.items() if name != "shared_engines"}
    own |= {"engines": {"off": 8}, "quick": False}
    assert not _is_done({cell.name: own}, cell, quick=False)
    large = next(cell for cell in all_cells() if cell.part == "shapes")
    own["tokens"] = 2 * large.round_tokens
    assert _is_done({large.name: own}, large, quick=False)
    assert not _is_done({cell.name: {"refused": "not installed"}}, cell, quick=True)


def test_a_run_keeps_earlier_cells_and_the_load_that_they_were_measured_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(found: dict[str, dict[str, Any]], load: float) -> dict[str, Any]:
        def measured(_: Run, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
            yield from ((cell, found[cell.name]) for cell in cells if cell.name in found)

        card = {"cpu": "C", "load_at_start": load}
        monkeypatch.setattr(f"{main.__module__}.machine_card", lambda: card)
        monkeypatch.setattr(Run, "measured", measured)
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "out.json"), "--again"])
        main()
        written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return written

    interval = {"low": 1.0, "high": 1.0, "coverage": 0.97}
    one = {"speedups": {"auto": 1.0}, "speedup_interval": interval, "rounds": 0}
    one |= {"control_of_best": 1.0, "control_interval": interval}
    first, second = (cell.name for cell in all_cells()[:2])
    run({first: one, second: {"refused": "why"}}, 9.0)
    found = run({first: {"refused": "why"}, second: one}, 1.0)
    assert found["cells"] == {
        first: one | {"quick": False, "load_at_start": 9.0},
        second: one | {"quick": False, "load_at_start": 1.0},
    }
    assert found["machine"]["load_at_start"] == 9.0  # of a cell that was kept
    cut = one | {"speedup_interval": interval | {"coverage": 0.0}}
    assert run({first: cut}, 1.0)["cells"][first] == found["cells"][first]
    written = json.loads((tmp_path / "out.json").read_text())
    written["cells"]["small/box/ngram/t9/b1"] = one  # no longer in the table
    (tmp_path / "out.json").write_text(json.dumps(written))
    found = run({first: one}, 2.0)
    assert found["machine"]["load_at_start"] == 2.0
    assert list(found["cells"]) == [first, second]


def test_what_is_missing_is_measured_before_what_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = all_cells()[0].engine
    found = {"speedup_interval": {"coverage": 0.95}, "rounds": 1, "quick": False}
    found["shared_engines"] = 8
    known = {
        cell.name: found | {"tokens": cell.round_tokens}
        for cell in all_cells()
        if cell.engine == done
    }
    card, asked = {"cpu": "C", "load_at_start": 0.0}, []
    (tmp_path / "out.json").write_text(json.dumps({"machine": card, "cells": known}))
    monkeypatch.setattr(f"{main.__module__}.machine_card", lambda: card)
    monkeypatch.setattr(f"{main.__module__}.summary_lines", lambda *_: [])
    monkeypatch.setattr(Run, "measured", lambda _, cells: asked.append(cells) or ())
    for again in ([], ["--again"]):
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "out.json"), *again])
        main()
    missing, all_ = asked
    assert missing == [cell for cell in all_cells() if cell.engine != done]
    assert all_ == missing + [cell for cell in all_cells() if cell.engine == done]


class FakePeer:
    """Answers with ANSWER, in so many seconds of its own and 1 s more for its client. A side named
    `other` has another token at the end."""

    others: tuple[str, ...] = ()

    def __init__(self, engine: str, threads: int, log: Path) -> None:
        self._engine, self._name = engine, log.stem.removeprefix("speculation-").replace("-", " ")

    def load(self, model: str, settings: dict[str, Any], *, limit_s: float) -> None:
        self._is_plain = self._name.endswith("plain")

    def ask(self, asked: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        own_s = {"quire": 2.0, "llama.cpp": 6.0}[self._engine] * (1 + self._is_plain)
        answer = {"first_s": 1.0, "last_s": 2.0 + own_s, "token_ids": list(ANSWER)}
        if self._name in self.others:
            answer["token_ids"][-1] += 1
        if self._engine == "llama.cpp":
            answer["generation_s"] = own_s
        if not self._is_plain:
            answer |= {"drafted": 10, "accepted": 4}
        return {"answers": [answer]}

    def close(self) -> None:
        pass


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "Peer", FakePeer)
    monkeypatch.setattr(llama, "is_installed", lambda _: True)
    monkeypatch.setattr(llama, "converted", lambda *_: Path("model"))
    monkeypatch.setattr(llama, "model_path", lambda _: "model")
    monkeypatch.setattr(llama, "proposer_settings", lambda _: {"draft_model": "draft"})
    monkeypatch.setattr(llama, "_prompts", lambda *_: [[1], [2]])
    drafts = {"speculate": "draft", "draft_model": "draft"}
    monkeypatch.setattr(llama, "proposer_settings", lambda _: drafts)  # not data from outside
    monkeypatch.setattr(FakePeer, "others", ())


LLAMA_CELL = Cell(part="llama.cpp", model="stories260K", proposer="draft", batch=1)


@pytest.mark.usefixtures("peers")
def test_llama_cpp_is_compared_by_its_own_time_and_its_tokens_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakePeer, "others", ("llama.cpp plain",))
    found = llama.measure_llama(LLAMA_CELL, lambda: False)
    assert found["rounds"] == llama.MIN_ROUNDS
    assert found["over_llama"] == 2.0  # 6 s, over 2 s and the client's one
    assert found["speedups"]["llama.cpp"] == 2.0
    assert found["speedups"]["quire"] == pytest.approx(5 / 3, abs=0.001)
    assert set(found["acceptance"]) == {"quire", "llama.cpp", "llama.cpp, drafts as quire"}
    assert found["acceptance"]["quire"] == 0.4
    num = len(ANSWER)
    assert found["equal_tokens"]["llama.cpp plain"] == pytest.approx((num - 1) / num, abs=1e-4)
    assert found["equal_tokens"]["llama.cpp"] == 1.0
    found["speedups"]["llama.cpp, drafts as quire"] = 2.5  # the fastest one is shown
    found["acceptance"] = {"quire": 0.4, "llama.cpp": 0.3}
    [line] = speculation_rows({"cells": {LLAMA_CELL.name: found}})
    assert line.endswith("| 2.00x; Quire 1.67x (40 %), llama.cpp 2.50x (no drafts) | 1x |")


@pytest.mark.usefixtures("peers")
def test_other_tokens_of_quire_with_drafts_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakePeer, "others", ("quire",))
    with pytest.raises(SystemExit, match="changed the tokens"):
        llama.measure_llama(LLAMA_CELL, lambda: False)


def test_tokens_are_equal_up_to_the_first_other_one() -> None:
    assert llama.num_equal([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert llama.num_equal([1, 2], [1, 2, 3]) == 2


def test_words_of_a_text_keep_their_ids() -> None:
    ids = word_ids("the boat and the sea", 1000).tolist()
    assert ids[0] == ids[3]
    assert len(set(ids)) == 4
    assert all(256 <= token_id < 1000 for token_id in ids)
