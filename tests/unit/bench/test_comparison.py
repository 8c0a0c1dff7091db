"""Pairs, their records, when ratios are reported, floors, and the checkpoints behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from bench import pairs, readme_table
from bench.checkpoints import SHAPES, checkpoint_config, tensor_shapes, tokenizer_json
from bench.floors import Work, workload_work
from bench.measured import rows
from bench.pairs import Conditions, Floor, PairRun, WrongAnswer, take_pairs
from bench.peers.child import Peer, PeerFailed
from bench.record import MIN_PAIRS, Record, RecordMismatch, Subject, is_settled
from bench.scaling import threads_in_turn
from quire.bench.cpu_use import CpuUse
from quire.bench.floor import program_of
from quire.bench.limits import peak_gflops
from quire.bench.reading import ReadProbe
from quire.bench.workloads import WORKLOADS, Lengths, Workload
from quire.config.groups import EngineConfig
from quire.engine.assembly.programs import engine_program
from quire.models.registry import open_model
from quire.program.cost import StepShape

SUBJECT = Subject(shape="s", precision="bf16", threads=2, quire="abc", cpu="a processor")
MANY = Workload(
    name="w3",
    text="",
    lengths=(Lengths(prompt=4, output=3), Lengths(prompt=6, output=2)),
    max_running=2,
)
FLOOR = Floor(
    whole=Work(num_bytes=10**9, operations=10**9),
    decode=Work(num_bytes=10**9, operations=0),
    peak_gflops=100.0,
)


class _Peer:
    """A peer that answers at once with `tokens`, given a prompt and the number of
    concurrent requests.
    """

    pid = 1

    def __init__(self, name: str, *, short: bool = False, varies: bool = False) -> None:
        self.name = name
        self._short, self._varies, self.says = short, varies, 7
        self.asked: list[dict[str, Any]] = []

    def ask(self, asked: dict[str, Any], *, limit_s: float) -> dict[str, Any]:
        self.asked.append(asked)
        if asked["do"] == "own_tool":
            return {"rates": {"total_tokens_per_s": 5.0, "wall_s": 3.0}}
        count = len(asked["requests"])
        return {
            "answers": [
                {
                    "sent_s": 0.0,
                    "first_s": 0.5,
                    "last_s": 1.0,
                    "token_ids": [count if self._varies else self.says]
                    * (one["output_tokens"] - self._short),
                }
                for one in asked["requests"]
            ]
        }


class _Probe:
    def gb_per_s(self) -> float:
        return 2.0


def _run(quire: _Peer, other: _Peer, *, peer: str = "openvino") -> PairRun:
    return PairRun(
        cast(Peer, quire),
        cast(Peer, other),
        MANY,
        peer=peer,
        vocab_size=1000,
        probe=cast(ReadProbe, _Probe()),
        conditions=Conditions(),
        floor=FLOOR,
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return foreign cores of the next samples; none when the list is used up."""
    foreign: list[float] = []

    class Watch:
        def __init__(self, roots: object) -> None: ...

        def use(self) -> CpuUse:
            return CpuUse(
                own_cores=2.0, foreign_cores=foreign.pop(0) if foreign else 0.0, stolen_cores=0.0
            )

    monkeypatch.setattr(pairs, "CpuWatch", Watch)
    monkeypatch.setattr(pairs, "SETTLE_S", 0.0)
    return foreign


def test_both_sides_of_a_pair_get_the_same_tokens_and_pairs_get_others() -> None:
    quire, other = _Peer("quire"), _Peer("openvino")
    run = _run(quire, other)
    first, second = run.pair(0), run.pair(1)
    assert quire.asked == other.asked
    assert quire.asked[0] != quire.asked[1]
    assert (first["first"], second["first"]) == ("quire", "other")
    assert first["kept"]
    assert first["quire"]["rates"]["total_tokens_per_s"] == 15.0
    assert first["quire"]["floor_share"] == 0.5  # a gigabyte at two a second, in one second
    assert "floor_share" not in first["other"]


def test_a_pair_disturbed_by_others_is_dropped_and_repeated(quiet: list[float]) -> None:
    quiet += [0.0, 0.5]
    run, found = _run(_Peer("quire"), _Peer("openvino")), []
    said: list[str] = []
    enough = take_pairs(
        run,
        already=[],
        tried=0,
        wanted=2,
        add=found.append,
        has_time=lambda: True,
        say=said.append,
        headline="total_tokens_per_s",
    )
    assert enough
    assert [pair["kept"] for pair in found] == [False, True, True]
    assert "other: others used 0.50 cores" in found[0]["why"]
    assert len(said) == 3


def test_pairs_are_limited_by_time_and_attempts(quiet: list[float]) -> None:
    run, found = _run(_Peer("quire"), _Peer("openvino")), []
    shared: dict[str, Any] = {
        "already": [],
        "tried": 0,
        "wanted": 2,
        "add": found.append,
        "say": lambda text: None,
        "headline": "wall_s",
    }
    assert not take_pairs(run, has_time=lambda: False, **shared)
    assert not found
    quiet += [9.0] * 100
    assert not take_pairs(run, has_time=lambda: True, **shared)
    assert len(found) == 6


def test_answers_that_differ_alone_and_together_are_not_measured() -> None:
    with pytest.raises(WrongAnswer, match="alone and among others"):
        _run(_Peer("quire", varies=True), _Peer("openvino")).warm_up()
    quire, other = _Peer("quire"), _Peer("openvino")
    _run(quire, other).warm_up()
    assert [len(asked["requests"]) for asked in quire.asked] == [2, 1, 1]
    assert len(other.asked) == 1


def test_an_answer_of_a_wrong_length_is_a_failure() -> None:
    run = _run(_Peer("quire"), _Peer("openvino", short=True))
    with pytest.raises(PeerFailed, match="openvino answered 2 tokens where 3"):
        run.pair(0)


def test_rates_of_a_peers_own_tool_are_recorded() -> None:
    other = _Peer("llama.cpp")
    run = _run(_Peer("quire"), other, peer="llama.cpp tool")
    run.warm_up()
    assert run.pair(0)["other"]["rates"]["total_tokens_per_s"] == 5.0
    assert other.asked == [
        {
            "do": "own_tool",
            "workload": {
                "num_requests": 2,
                "prompt_tokens": 10,
                "output_tokens": 5,
                "max_running": 2,
                "shared": False,
            },
        }
    ]


def _pair(peer: str, ours: float, theirs: float, *, kept: bool = True) -> dict[str, Any]:
    def side(rate: float) -> dict[str, Any]:
        return {
            "rates": {"total_tokens_per_s": rate},
            "read_gb_per_s": 40.0,
            "peak_rss_bytes": 1,
            "floor_share": 0.25,
        }

    return {
        "workload": "w3",
        "peer": peer,
        "quire": side(ours),
        "other": side(theirs),
        "kept": kept,
        "why": "",
    }


def _filled(file: Path, *, peers: tuple[str, ...], pairs_each: int = MIN_PAIRS) -> Record:
    record = Record(file, SUBJECT, {"cpu": "a processor", "cores": 2, "memory_gb": 8})
    for peer in peers:
        record.content["checks"][peer] = {"ok": True}
        record.content["engines"][peer] = {
            "scheme": "int9",
            "kv_dtypes": {"w3": "<Type: 'uint8_t'>"},
        }
        for _ in range(pairs_each):
            record.add_pair(_pair(peer, 30.0, 10.0 if peer == "openvino" else 20.0))
    record.content["engines"]["quire"] = {
        "scheme": "bf16",
        "kv_dtypes": {"w1": "bf16", "w3": "int8"},
    }
    record.save()
    return record


def test_ratios_are_reported_only_if_both_required_peers_ran(tmp_path: Path) -> None:
    record = _filled(tmp_path / "one.json", peers=("openvino", "vllm"))
    assert not record.is_reportable("w3")
    assert "ratio" not in record.content["summary"]["w3"]["openvino"]
    assert record.strongest("w3") is None
    both = _filled(tmp_path / "two.json", peers=("openvino", "llama.cpp"))
    assert both.is_reportable("w3")
    assert both.content["summary"]["w3"]["openvino"]["ratio"]["median"] == 3.0
    strongest = both.strongest("w3")
    assert strongest is not None
    assert (strongest[0], strongest[1]["ratio"]["median"]) == ("llama.cpp", 1.5)


def test_too_few_pairs_or_unchecked_tokens_give_no_ratio(tmp_path: Path) -> None:
    peers = ("openvino", "llama.cpp")
    few = _filled(tmp_path / "few.json", peers=peers, pairs_each=MIN_PAIRS - 1)
    few.add_pair(_pair("openvino", 1, 1, kept=False))
    assert not few.is_reportable("w3")
    assert few.num_tried("w3", "openvino") == MIN_PAIRS
    assert len(few.kept("w3", "openvino")) == MIN_PAIRS - 1
    wrong = _filled(tmp_path / "wrong.json", peers=peers)
    wrong.content["checks"]["openvino"]["ok"] = False
    assert not wrong.is_reportable("w3")


def test_two_pairs_settle_only_that_a_peer_is_far_behind() -> None:
    far, near = _pair("llama.cpp", 30.0, 10.0), _pair("llama.cpp", 30.0, 10.5)
    assert not is_settled([], MIN_PAIRS)
    assert not is_settled([far], MIN_PAIRS)
    assert is_settled([far, far], MIN_PAIRS)
    assert not is_settled([far, near, far, far], MIN_PAIRS)
    assert is_settled([far, near, far, far, near], MIN_PAIRS)


def test_a_record_continues_and_mixes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    _filled(file, peers=("openvino",), pairs_each=2)
    again = Record(file, SUBJECT, {})
    assert len(again.kept("w3", "openvino")) == 2
    other = Subject(shape="s", precision="bf16", threads=2, quire="def", cpu="a processor")
    with pytest.raises(RecordMismatch, match=r"quire \(abc, now def\)"):
        Record(file, other, {})


def test_a_failure_is_recorded_once(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", SUBJECT, {})
    for _ in range(2):
        record.add_failure("w3", "vllm", "not installed")
    assert json.loads(record.path.read_text())["failures"] == [
        {"workload": "w3", "peer": "vllm", "why": "not installed"}
    ]


def test_the_readme_shows_the_strongest_peer_and_only_reportable_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    assert readme_table.table() == "Not yet measured."
    _filled(tmp_path / "cpu-a.json", peers=("openvino", "vllm"))
    assert readme_table.table() == "Not yet measured."
    _filled(tmp_path / "cpu-b.json", peers=("openvino", "llama.cpp"))
    assert "**1.50x** llama.cpp, s bf16" in readme_table.table()
    page = readme_table.page()
    cells = (
        "| bf16 | int8 | 30.0 | 25 % | llama.cpp (int9, uint8_t) | 20.0 | **1.50** (1.50 to 1.50)"
    )
    assert cells in page
    assert "| OpenVINO (int9, uint8_t) | 10.0 |" in page  # the others are on the page


def test_the_floor_of_one_request_is_its_bytes_or_its_operations() -> None:
    program = program_of("")
    work = workload_work(program, WORKLOADS["w1"], decode_only=True)
    steps = [program.step_cost(StepShape([1], [depth])) for depth in range(128, 255)]
    assert work.operations == sum(step.operations for step in steps)
    assert work.num_bytes == sum(step.memory_bytes for step in steps)
    assert Work(num_bytes=8 * 10**9, operations=10**9).floor_s(4.0, 100.0) == 2.0
    assert Work(num_bytes=10**9, operations=10**12).floor_s(4.0, 100.0) == 10.0
    assert Work(num_bytes=10**9, operations=10**12).floor_s(4.0, None) == 0.25


def test_a_shared_prefix_is_computed_once_in_the_floor() -> None:
    program = program_of("")
    alone = Workload(name="x", text="", lengths=(Lengths(prompt=40, output=4),), max_running=1)
    shared = Workload(
        name="x", text="", lengths=(Lengths(prompt=40, output=4, shared=36),) * 3, max_running=3
    )
    apart = Workload(name="x", text="", lengths=alone.lengths * 3, max_running=3)
    one, three, whole = (workload_work(program, w) for w in (alone, shared, apart))
    assert one.operations < three.operations < whole.operations == 3 * one.operations
    assert one.num_bytes < three.num_bytes < whole.num_bytes < 3 * one.num_bytes


def test_the_limit_of_a_precision_is_the_fastest_loop_for_it() -> None:
    limits = {"fma_f32": 5.0, "dot_bf16": 4.0, "tile_bf16": 9.0}
    assert peak_gflops(limits, "f32") == 5.0
    assert peak_gflops(limits, "bf16") == 9.0
    assert peak_gflops(limits, "int8") is None


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_hold_what_the_program_reads(shape: str, tmp_path: Path) -> None:
    config = checkpoint_config(shape)
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = engine_program(EngineConfig(), open_model(tmp_path), None)
    assert dict(tensor_shapes(config)) == program.source_shapes()


def test_a_generated_tokenizer_has_every_token_and_completes_text_at_once() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(12_000)))
    assert tokenizer.get_vocab_size() == 12_000
    assert all(tokenizer.decode([id_]).isascii() for id_ in range(300, 12_000, 7))
    text = "Once upon a time."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer_json(500) == tokenizer_json(500)


def test_threads_are_measured_in_turn_and_must_agree() -> None:
    one, two = _Peer("quire"), _Peer("quire")
    told = threads_in_turn({1: cast(Peer, one), 2: cast(Peer, two)}, 1000, 3)
    assert told["ratio"] == 1.0
    assert {threads: len(found) for threads, found in told["prefill_tokens_per_s"].items()} == {
        "1": 3,
        "2": 3,
    }
    assert one.asked == two.asked
    assert len(one.asked) == 4  # the first one warms up
    two.says = 8
    with pytest.raises(WrongAnswer, match="threads answer differently"):
        threads_in_turn({1: cast(Peer, one), 2: cast(Peer, two)}, 1000, 3)


def test_the_readme_shows_serving_only_beside_a_peer() -> None:
    def knee_at(goodput: float) -> dict[str, Any]:
        return {"knee": {"goodput_per_s": goodput}}

    slow = {"offered_per_s": 0.1, "ttft_s": {"p50": 2.5}, "tpot_s": {"p50": 0.15}}
    engines = {
        "quire": knee_at(1.5),
        "vllm": knee_at(0.75),
        "llama.cpp": {"knee": None, "rates": [slow]},
    }
    [row] = rows._serving_rows({"engines": engines})
    assert "1.50; vllm 0.75: 2.00x" in row
    del engines["vllm"]
    [row] = rows._serving_rows({"engines": engines})
    assert (
        "1.50; no peer met the objective at any rate: llama.cpp 2.5 s and 150 ms at 0.10/s" in row
    )
    del engines["llama.cpp"]
    assert rows._serving_rows({"engines": engines}) == []


def test_pages_match_the_committed_results() -> None:
    assert readme_table.README.read_text() == readme_table.readme()
    assert readme_table.PAGE.read_text() == readme_table.page()
    assert readme_table.SIMULATE.read_text() == readme_table.simulate()
