"""The classifier of a cascade: its features, its file, its training, and its decisions."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.cli.main import main
from quire.router.cascade import Cascade
from quire.router.classifier import Classifier, read_classifier
from quire.router.classifier_training import _is_held_out, file_bytes, report, train
from quire.router.features import Features as RouterFeatures
from quire.router.outcome_files import Example, read_outcomes
from quire.router.outcome_log import OutcomeLog
from quire.router.prompt_features import MAX_WORDS, NUM_BUCKETS, Features, features_of
from quire.router.route_file import CascadeTable
from tests.cases import each_case
from tests.unit.router.fake_replica import Router, run
from tests.unit.router.test_cascade import _answer, _chat, _decision, _replicas

EASY = ("name the capital of", "translate into french", "what colour is", "spell the word")
HARD = ("prove by induction that", "derive the gradient of", "why does the theorem of", "solve")


def prompt(drawn: Random, *, is_hard: bool) -> str:
    words = [f"w{drawn.randrange(300)}" for _ in range(drawn.randrange(4, 30))]
    return f"{drawn.choice(HARD if is_hard else EASY)} {' '.join(words)}"


def outcomes(count: int, *, noise: float = 0.1, seed: int = 5) -> list[Example]:
    drawn, found = Random(seed), []
    for _ in range(count):
        is_hard = drawn.random() < 0.4
        features = features_of(prompt(drawn, is_hard=is_hard), 20, {})
        found.append(Example(features, is_hard ^ (drawn.random() < noise)))
    return found


# ---- features


def test_equal_requests_have_equal_features_in_each_process() -> None:
    fields = {"messages": [{}] * 3, "max_tokens": 100, "response_format": {"type": "json_object"}}
    found = features_of("Prove it: 2+2\n```x```", 10, fields)
    assert found == features_of("prove it: 2+2\n```x```", 10, fields)
    # Of a file that was written long ago, so these numbers never change under one VERSION.
    assert features_of("Prove it", 10, {}) == Features(
        [1878, 3245, 4257, 31876, 44739, 57044], [5874, 19579, 32154, 36945, 44663]
    )
    assert len(found.facts) == 7


def test_features_are_bounded_and_take_any_text() -> None:
    drawn = Random(1)
    long = " ".join(str(drawn.random()) for _ in range(100_000))
    found = features_of(long, 2**40, {"messages": [{}] * 5000})
    assert 0 < len(found.words) <= MAX_WORDS
    assert all(0 <= one < NUM_BUCKETS for one in (*found.words, *found.facts))
    assert features_of("", 0, {}).words == []
    for text in ("\ud800\x00", "数学を証明する", "a" * 10**6, "\n" * 10_000):
        features_of(text, 1, {"max_tokens": -5, "input": 7})
    assert len(features_of("数学を証明", 1, {}).words) > 5, "without spaces each letter is a word"


# ---- files


def given(**fields: Any) -> dict[str, Any]:
    whole = {"format": "quire-cascade-classifier", "features": 1, "bias": 0.5}
    return {**whole, "buckets": [1, 7], "weights": [0.25, -2.0], **fields}


def test_a_file_gives_the_probability_of_its_weights(tmp_path: Path) -> None:
    (path := tmp_path / "hard.json").write_text(json.dumps(given()))
    found = read_classifier(str(path))
    assert found.probability(Features([], [])) == pytest.approx(1 / (1 + 2.718281828**-0.5))
    assert found.probability(Features([1], [])) > 0.5 > found.probability(Features([], [7]))
    assert 0 < Classifier(-1e9, {}).probability(Features([], [])) < 1e-9


@each_case(
    ("raw", "message"),
    [
        (b"", "is no file of weights"),
        (b"\x80\x04pickle", "is no file of weights"),
        (b"[" * 100_000, "is no file of weights"),
        (json.dumps(given(format="x")), "Invalid enum value"),
        (json.dumps(given(features=2)), "is of version 2 of the features"),
        (json.dumps(given(buckets=[1])), "1 buckets and 2 weights"),
        (json.dumps(given(buckets=[1, 1])), "a bucket twice"),
        (json.dumps(given(buckets=[1, 65536])), "Expected `int` <= 65535"),
        (json.dumps(given(buckets=[-1, 2])), "Expected `int` >= 0"),
        (json.dumps(given(weights=[1e9, 0])), "Expected `float` <= 1000"),
        (json.dumps(given(weights=["a", 0])), "Expected `float`, got `str`"),
        (json.dumps(given(bias=None)), "Expected `float`, got `null`"),
        (json.dumps(given()).replace("0.25", "NaN"), "is no file of weights"),
        (json.dumps(given()).replace("0.25", "1e999"), "is no file of weights"),
        (json.dumps(given(code="import os")), "unknown field `code`"),
        (b" " * ((8 << 20) + 1), "has more than"),
    ],
)
def test_other_files_are_refused_with_what_to_do(
    tmp_path: Path, raw: str | bytes, message: str
) -> None:
    path = tmp_path / "hard.json"
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    with pytest.raises(SettingError, match=message) as raised:
        read_classifier(str(path))
    assert "quire cascade OUTCOMES --out" in str(raised.value)
    with pytest.raises(SettingError, match="cannot be read"):
        read_classifier(str(tmp_path))


# ---- training


def test_what_is_learned_orders_requests_that_were_not_seen() -> None:
    examples = outcomes(300)
    found = report(examples, 0.5)
    assert found.num_held_out in range(40, 80)
    assert found.auc > 0.8, "of at most 0.9, with one label of ten wrong"
    assert found.log_loss < 0.8 * found.base_log_loss
    at = {row["hard_above"]: row for row in found.by_threshold}
    assert at[1.0]["large_at_once"] == 0, "the small model tries each request"
    assert at[0.5]["price"] < 0.9 * at[1.0]["price"]
    assert at[0.1]["large_at_once"] >= at[0.5]["large_at_once"] >= at[0.9]["large_at_once"]


def test_noise_teaches_nothing_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = outcomes(160, noise=0.5)
    found = report(examples, 0.1)
    assert 0.2 < found.auc < 0.8
    assert found.log_loss < 1.05 * found.base_log_loss
    log = OutcomeLog(str(tmp_path / "o"))
    for one in examples:
        log.note("auto", one.features, "length" if one.is_hard else "")
    assert main(["cascade", str(tmp_path / "o")]) == 0
    assert "do without a classifier" in capsys.readouterr().out


def test_the_same_outcomes_give_the_same_file(tmp_path: Path) -> None:
    written = [file_bytes(train(outcomes(160), "auto")) for _ in range(2)]
    assert written[0] == written[1]
    (path := tmp_path / "hard.json").write_bytes(written[0])
    found, drawn = read_classifier(str(path)), Random(77)
    hard, easy = (
        [found.probability(features_of(prompt(drawn, is_hard=is_hard), 20, {})) for _ in range(30)]
        for is_hard in (True, False)
    )
    assert sum(hard) / 30 > 0.6 > 0.4 > sum(easy) / 30


@pytest.mark.parametrize("examples", [[], outcomes(99), [one for one in outcomes(400) if one[1]]])
def test_too_few_outcomes_are_refused(examples: list[Example]) -> None:
    for learn in (lambda: train(examples), lambda: report(examples, 0.1)):
        with pytest.raises(SettingError, match="log more"):
            learn()


def test_outcomes_of_one_request_are_refused() -> None:
    one = features_of("hello", 1, {})
    with pytest.raises(SettingError, match="of one request"):
        report([Example(one, at % 2 == 0) for at in range(200)], 0.1)
    many = [features_of(f"hello {at}", 1, {}) for at in range(200)]
    one = next(one for one in many if _is_held_out(Example(one, False)))
    hard, easy = [Example(one, True)] * 20, [Example(at, False) for at in many]
    with pytest.raises(SettingError, match="of one request"):
        report(hard + easy, 0.1)
    train(hard + easy)


# ---- the command and its files


def log_of(path: Path, count: int, cascade: str = "auto") -> None:
    log = OutcomeLog(str(path))
    for one in outcomes(count):
        log.note(cascade, one.features, "refusal" if one.is_hard else "")


def test_the_command_writes_what_a_router_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "outcomes.jsonl", tmp_path / "hard.json"
    log_of(log, 120)
    with log.open("a") as file:
        file.write('{"features": 1, "casc')  # written when the router was killed
    assert main(["cascade", str(log), "--out", str(out)]) == 0
    shown, logged = capsys.readouterr()
    assert logged.count("not written to their ends are left out") == 1
    assert "120 outcomes" in shown
    assert "do without" not in shown
    assert f"written: {out}" in shown
    assert read_classifier(str(out)).probability(Features([], [])) < 1
    assert main(["cascade", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_examples"] == 120


@each_case(
    ("line", "message"),
    [
        ("x", "line 2: JSON is malformed"),
        ("[]", "line 2: Expected `object`"),
        ('{"request": {}}', "missing required field `hard`"),
        ('{"request": {}, "hard": true, "path": "/x"}', "'/x', which is not routed"),
        ('{"features": 9, "cascade": "a", "words": [], "facts": [], "outcome": ""}', "version 9"),
        ('{"features": 1, "cascade": "a", "words": [-1], "facts": [], "outcome": ""}', "buckets"),
        ('{"features": 1, "cascade": "a", "words": [], "facts": [1], "outcome": 3}', "outcome"),
    ],
)
def test_lines_that_are_no_outcomes_are_named(tmp_path: Path, line: str, message: str) -> None:
    (path := tmp_path / "o").write_text(
        '{"request": {"prompt": "a"}, "hard": true}\n' + line + "\n"
    )
    with pytest.raises(SettingError, match=message):
        read_outcomes([str(path)])


def test_lines_that_a_router_has_not_written_to_their_ends_are_left_out(tmp_path: Path) -> None:
    """A router was ended in the middle of a line; the next one begins a line of its own, and one
    before did not. Both are reported once, and the other outcomes are read."""
    log_of(path := tmp_path / "o", 3)
    whole = path.read_bytes()
    line = whole.splitlines()[0]
    path.write_bytes(whole + line[:30])
    log_of(path, 2)
    lines = path.read_bytes().splitlines()
    assert lines[3] == line[:30]
    assert len(lines) == 6
    path.write_bytes(path.read_bytes() + line[:40] + line + b"\n" + line[:20])
    torn: list[tuple[str, int]] = []
    found, cascades = read_outcomes([str(path)], on_torn=lambda *which: torn.append(which))
    assert (len(found), cascades, torn) == (5, {"auto"}, [(str(path), 3)])


def test_a_line_that_a_full_disk_has_cut_is_reported_and_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log, write = OutcomeLog(str(path := tmp_path / "o"), said.append), os.write
    features = features_of("one", 1, {})
    log.note("auto", features, "")
    monkeypatch.setattr(os, "write", lambda descriptor, raw: write(descriptor, raw[:9]))
    log.note("auto", features, "length")
    monkeypatch.undo()
    log.note("auto", features, "refusal")
    assert len(said) == 1
    first, cut, last = path.read_bytes().splitlines()
    assert (cut, json.loads(last)["outcome"]) == (first[:9], "refusal")
    assert len(read_outcomes([str(path)])[0]) == 2


def test_own_outcomes_are_read_and_the_newest_are_kept(tmp_path: Path) -> None:
    lines = [
        json.dumps({"request": {"messages": [{"role": "user", "content": text}]}, "hard": is_hard})
        for text, is_hard in (("one", True), ("two", False), ("three", True))
    ]
    (path := tmp_path / "o").write_text("\n".join(lines) + "\n\n")
    found, cascades = read_outcomes([str(path)], max_examples=2)
    assert [one.is_hard for one in found] == [False, True]
    assert found[0].features.words == features_of("two", 1, {}).words
    assert not cascades
    with pytest.raises(SettingError, match="cannot be read"):
        read_outcomes([str(tmp_path / "none")])


def test_outcomes_of_several_cascades_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_of(path := tmp_path / "o", 120)
    log_of(path, 120, "other")
    assert main(["cascade", str(path)]) == 2
    assert "auto, other" in capsys.readouterr().err
    assert main(["cascade", str(path), "--cascade", "other"]) == 0
    assert "120 outcomes" in capsys.readouterr().out
    for out in ([], ["--out", str(tmp_path / "c")]):
        assert main(["cascade", str(path), "--cascade", "nope", *out]) == 2
        said = "of auto, other, and none is of the cascade 'nope'; choose one of these"
        assert said in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert main(["cascade", str(path), "--small-price", "1"]) == 2


def test_own_outcomes_belong_to_each_cascade(tmp_path: Path) -> None:
    (path := tmp_path / "o").write_text('{"request": {"prompt": "a"}, "hard": true}\n')
    found, cascades = read_outcomes([str(path)], "auto")
    assert (len(found), cascades) == (1, set())
    log_of(path, 2)
    log_of(path, 3, "other")
    found, cascades = read_outcomes([str(path)], "other")
    assert (len(found), cascades) == (4, {"other"})


def test_a_log_is_bounded_and_private_and_never_fails(tmp_path: Path) -> None:
    path, said = tmp_path / "o", list[str]()
    log = OutcomeLog(str(path), said.append, max_bytes=500)
    for at in range(20):
        log.note("auto", Features([at], []), "")
    assert path.stat().st_size <= 500
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["o", "o.1"]
    os.mkfifo(pipe := tmp_path / "pipe")
    for place in (pipe, tmp_path, tmp_path / "none" / "o"):
        said.clear()
        log = OutcomeLog(str(place), said.append)
        for _ in range(3):
            log.note("auto", Features([], []), "")
        assert len(said) == 1


# ---- decisions


def classified(tmp_path: Path, **settings: Any) -> tuple[RouterFeatures, Path]:
    """Return the features of a router that finds requests with "prove" hard."""
    bucket = features_of("prove", 1, {}).words
    weights = {"buckets": sorted(bucket), "weights": [9.0] * len(bucket), "bias": -3.0}
    (path := tmp_path / "hard.json").write_text(json.dumps(given(**weights)))
    table = CascadeTable(
        small="small",
        large="large",
        classifier=str(path),
        outcomes=str(tmp_path / "outcomes"),
        **settings,
    )
    return RouterFeatures(cascades={"auto": Cascade("auto", table)}), tmp_path / "outcomes"


def logged(path: Path) -> list[tuple[list[int], str]]:
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(one["words"], one["outcome"]) for one in lines]


def test_hard_requests_go_to_the_large_model_and_outcomes_are_logged(tmp_path: Path) -> None:
    features, log = classified(tmp_path, explore=0.0)
    small, large = _replicas(_answer(logprob=-0.2))

    async def story(router: Router) -> None:
        for text in ("hello", "prove"):
            await router.post("/v1/chat/completions", _chat(text))
        await router.post("/v1/chat/completions", _chat("prove", stream=True))
        assert _decision(router, "classifier") == 2
        small.body = _answer(logprob=-9.0)
        await router.post("/v1/chat/completions", _chat("hi"))
        small.body = b"[1]"
        await router.post("/v1/chat/completions", _chat("unseen"))
        small.status, small.body = 400, b'{"error":{"message":"no"}}'
        await router.post("/v1/chat/completions", _chat("refused"))
        text = router.metrics.text().decode()
        for outcome in ("kept", "replaced"):
            labels = f'cascade="auto",guess="easy",outcome="{outcome}"'
            assert f"quire_router_cascade_guesses_total{{{labels}}} 1.0" in text

    run([small, large], story, features)
    assert (len(small.requests), len(large.requests)) == (4, 3)
    assert logged(log) == [
        (features_of("hello", 1, {}).words, "kept"),
        (features_of("hi", 1, {}).words, "low-confidence"),
    ]


def test_a_share_of_hard_requests_is_explored_where_their_outcome_is_known(tmp_path: Path) -> None:
    features, log = classified(tmp_path, explore=0.25)
    small, large = _replicas(_answer(logprob=-0.2))

    async def story(router: Router) -> None:
        for _ in range(8):
            await router.post("/v1/chat/completions", _chat("prove"))
            await router.post("/v1/chat/completions", _chat("prove", stream=True))
        assert _decision(router, "classifier") == 14
        labels = 'cascade="auto",guess="hard",outcome="kept"'
        found = f"quire_router_cascade_guesses_total{{{labels}}} 2.0"
        assert found in router.metrics.text().decode()

    run([small, large], story, features)
    assert len(small.requests) == 2, "streams are not judged, so they are not explored"
    assert [outcome for _, outcome in logged(log)] == ["kept", "kept"]


def test_a_log_without_a_classifier_changes_no_decision(tmp_path: Path) -> None:
    log = tmp_path / "o"
    table = CascadeTable(small="small", large="large", outcomes=str(log))
    small, large = _replicas(_answer(logprob=-0.2))

    async def story(router: Router) -> None:
        await router.post("/v1/chat/completions", _chat("prove"))
        assert "cascade_guesses_total{" not in router.metrics.text().decode()

    run([small, large], story, RouterFeatures(cascades={"auto": Cascade("auto", table)}))
    assert [outcome for _, outcome in logged(log)] == ["kept"]


def test_a_classifier_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        Cascade("auto", CascadeTable(small="a", large="b", classifier="/none/hard.json"))
