"""Check that the generated reference pages are current, and that other pages name real flags."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterable
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.base.engine_stats import EngineStats
from quire.base.kv_store import KVStoreStats
from quire.base.kv_transfer import TransferStats
from quire.cli.serve import add_arguments
from quire.config.proposer_kinds import PROPOSERS
from quire.obs.metrics import Metrics
from tests.repository.source_files import ROOT

PAGES = (
    *("start", "serving", "flags", "routes", "request-fields", "metrics", "scheduling", "tenants"),
    *("prefix-cache", "errors", "operations"),
)


def _script() -> ModuleType:
    path = ROOT / "scripts" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def _metric_names() -> Iterable[str]:
    shown = Metrics(("name",))
    shown.see(EngineStats(transfer=TransferStats(), kv_store=KVStoreStats()))
    for family in text_string_to_metric_families(shown.text().decode()):
        if not family.name.endswith("_created"):
            yield f"{family.name}_total" if family.type == "counter" else family.name


def test_the_generated_parts_are_current() -> None:
    stale = [path.name for path, text, wanted in _script().pages() if text != wanted]
    assert not stale, "run python scripts/reference_pages.py and commit the pages"


def test_a_changed_field_makes_its_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    script = _script()
    monkeypatch.setattr(script, "GROUPS", {"Input": {"prompt": "", "messages": ""}})
    assert "request-fields.md" in [p.name for p, text, wanted in script.pages() if text != wanted]


def test_pages_name_every_kind_of_proposer() -> None:
    speculation = _text("speculation")
    sources = speculation[: speculation.index("\nAnswers that repeat")]
    assert not [name for name in PROPOSERS if f"`--speculate {name}`" not in sources]


def test_every_metric_named_by_a_page_exists() -> None:
    shown = set(_metric_names())
    named = {name for page in PAGES for name in re.findall(r"`(quire_\w+)", _text(page))}
    assert named == shown


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_named_by_a_page_exists(page: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    commands = re.sub(r"```.*?```", "", _text(page), flags=re.S)
    named = set(re.findall(r"`(--[\w-]+)", commands))
    assert named <= known
