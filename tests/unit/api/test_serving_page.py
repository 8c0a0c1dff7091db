"""docs/serving.md keeps up with the code: fields, metrics, open paths and flags it names exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.api.auth import OPEN_PATHS
from quire.api.fields import (
    APPLY_TEMPLATE,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
)
from quire.cli.serve import add_arguments
from quire.obs.metrics import Metrics

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


def test_every_field_that_is_honoured_is_on_the_page() -> None:
    texts = TOKENIZE | DETOKENIZE | APPLY_TEMPLATE
    fields = CHAT | COMPLETIONS | texts
    missing = [name for name in fields if f"`{name}`" not in PAGE]
    assert missing == []


def test_every_metric_is_on_the_page_and_no_other() -> None:
    families = text_string_to_metric_families(Metrics().text().decode())
    shown = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if not family.name.endswith("_created")
    }
    assert set(re.findall(r"`(quire_\w+)", PAGE)) == shown


def test_every_open_path_is_on_the_page() -> None:
    assert all(f"`{path}`" in PAGE for path in OPEN_PATHS)


def test_every_flag_the_page_names_exists() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"`(--[\w-]+)", PAGE))
    assert named <= known
