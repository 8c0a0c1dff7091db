"""The calls of the GPU check in docs/gpu.md: every section once, each call within ten minutes."""

from __future__ import annotations

import re

from bench.gpu.sections import SECTIONS
from tests.repository.source_files import ROOT

BUDGET_S = 580
_ROW = re.compile(r"^\| `([a-z_0-9,]+)` \| ([\d, ]+) \| (\d+) \|$", re.MULTILINE)


def test_the_documented_calls_have_every_section_and_fit_ten_minutes() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = [(found[1].split(","), found[2], int(found[3])) for found in _ROW.finditer(text)]
    assert sorted(name for names, _, _ in rows for name in names) == sorted(SECTIONS)
    for names, limits, together_s in rows:
        assert [float(one) for one in limits.split(",")] == [SECTIONS[name].max_s for name in names]
        assert together_s == sum(SECTIONS[name].max_s for name in names) < BUDGET_S
    all_s = sum(section.max_s for section in SECTIONS.values())
    assert f"{all_s / 60:.0f} minutes" in text
    assert f"--time-budget-s {BUDGET_S}" in text
