"""`quire bench kernels`: every operation of the built-in model is timed, and no wrong result."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import SettingError, WorkerError
from quire.bench import kernels
from quire.bench.kernels import KernelOptions, kernels_text, measure_kernels
from quire.bench.limits import ARITHMETIC, FORK_JOIN, READ
from quire.bench.reading import ReadProbe
from quire.execute.reference import ReferenceExecutor
from quire.sampling.batch import TokenChoice
from tests.unit.cli.command import quire_main

SETTINGS = {"num_threads": 2}


def _asked(**given: Any) -> KernelOptions:
    return KernelOptions(
        **{"precisions": ("none",), "rows": (1, 70), "depths": (40,), "seconds": 0.0, **given}
    )


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies, little memory read, and a fixed machine."""
    known = {READ: 10.0, FORK_JOIN: 1.0} | dict.fromkeys(ARITHMETIC, 100.0)
    monkeypatch.setattr(kernels, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "ReadProbe", partial(ReadProbe, num_bytes=1 << 20))
    monkeypatch.setattr(kernels, "machine_limits", lambda threads: known)


def _measured(settings: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    return measure_kernels("", {**SETTINGS, **(settings or {})}, _asked(**given))


def test_each_part_is_measured_in_each_precision_and_row_count() -> None:
    outcome = _measured(precisions=("none", "int8", "int4"))
    found = outcome["measured"]
    assert {one["part"] for one in found} == set(kernels.PARTS)
    products = [one for one in found if one["part"] == "products"]
    assert {one["what"].split()[-1] for one in products} == {"bf16", "int8", "int4-g32"}
    assert {one["rows"] for one in products} == {1, 70}
    assert all(one["seconds"] > 0 and one["share"] > 0 for one in found)
    whats = {one["what"] for one in found}
    assert {"row at depth 40", "16 rows at depth 40", "chunk of 256 at depth 40"} <= whats
    assert {"rope 256", "activation silu 512", "greedy", "top_p 0.9"} <= whats
    text = kernels_text(outcome)
    for words in ("products", "attention", "small", "choice", "of the limit", "GFLOP/s"):
        assert words in text


def test_integer_caches_and_f32_are_measured_too() -> None:
    settings = {"dtype": "f32", "kv_cache_dtype": "int8"}
    outcome = _measured(settings, parts=("products", "attention"), rows=(3,))
    assert (outcome["dtype"], outcome["kv_cache_dtype"]) == ("f32", "int8")
    assert {one["what"].split()[-1] for one in outcome["measured"]} >= {"f32"}


def test_depths_extend_to_the_context() -> None:
    outcome = _measured(parts=("attention",), depths=(500, 9000))
    whats = [one["what"] for one in outcome["measured"]]
    assert "chunk of 12 at depth 500" in whats
    assert "row at depth 511" in whats
    assert not any("9000" in what for what in whats)


@pytest.mark.parametrize("part", ["products", "attention", "small"])
def test_no_time_is_reported_for_a_wrong_result(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceExecutor.run_head

    def wrong(self: ReferenceExecutor, *given: Any) -> NDArray[np.float32]:
        rows = right(self, *given).copy()
        rows[-1, 3] += 1
        return rows

    monkeypatch.setattr(ReferenceExecutor, "run_head", wrong)
    with pytest.raises(WorkerError, match="no times of wrong results"):
        _measured(parts=(part,))


def test_no_time_is_reported_for_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.choose

    def wrong(*given: Any) -> TokenChoice:
        choice = right(*given)
        choice.token_ids[0] += 1
        return choice

    monkeypatch.setattr(kernels, "choose", wrong)
    with pytest.raises(WorkerError, match="token choice"):
        _measured(parts=("choice",))


@pytest.mark.parametrize("given", [{"parts": ("songs",)}, {"rows": (0,)}, {"depths": (-1,)}])
def test_meaningless_arguments_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        _asked(**given)


def test_json_is_one_object() -> None:
    words = ["--parts", "choice", "--seconds", "0.01", "--threads", "1"]
    done = quire_main("bench", "kernels", "--json", *words)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["bench"], outcome["threads"]) == ("kernels", 1)
    assert outcome["machine"]["cpu"]
