"""deploy/: alerts and dashboard use what a server exports; proxies and container keep promises."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.api.http.origins import ADMIN_PATHS
from quire.config.server_config import ServerConfig
from quire.obs.metrics import Metrics
from tests.repository.promql import PromqlError, check
from tests.repository.source_files import ROOT

DEPLOY = ROOT / "deploy"
_SERIES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


@cache
def exported() -> dict[str, frozenset[str]]:
    """Return the labels of each series that a server exports."""
    metrics, found = Metrics(("name",)), {}
    # A labelled metric that has counted nothing has no sample to read its labels from.
    collectors = metrics._shown._names_to_collectors
    for family in text_string_to_metric_families(metrics.text().decode()):
        labels = {label for sample in family.samples for label in sample.labels}
        labels.update(getattr(collectors.get(family.name), "_labelnames", ()))
        for suffix in _SERIES[family.type]:
            found[family.name + suffix] = frozenset(labels)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def test_every_alert_reads_exported_series_and_names_an_action() -> None:
    used = set()
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        used |= check(rule["expr"], exported())
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "action"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    assert "quire_preemptions_total" in used


@pytest.mark.parametrize(
    ("alert", "bound"),
    [
        ("QuireFirstTokenSlow", "> 0.2"),
        ("QuireTokensSlow", "> 0.05"),
        ("QuirePreemptions", "> 0.05"),
        ("QuireKVCacheFull", "> 0.9"),
        ("QuireKVCacheUnused", "< 0.7"),
        ("QuirePrefixHitRateLow", "< 0.3"),
        ("QuireDeviceIdle", "< 0.8"),
    ],
)
def test_the_bounds_are_the_presets_of_the_page(alert: str, bound: str) -> None:
    [rule] = [rule for rule in rules() if rule["alert"] == alert]
    assert bound in rule["expr"]


def test_every_panel_reads_exported_series_on_its_own_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        for target in panel["targets"]:
            check(target["expr"], exported())
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_variables_of_the_dashboard_are_defined_and_read_exported_series() -> None:
    text = (DEPLOY / "grafana-dashboard.json").read_text("utf-8")
    dashboard = json.loads(text)
    defined = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"} == defined.keys()
    for name in ("job", "instance"):
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", defined[name]["definition"])
        assert query is not None
        check(query[1], exported())
        assert query[2] == name


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("sum(rate(quire_steps_total[5m])", r"\) is missing"),
        ("quire_kv_blocks)", r"unexpected \)"),
        ("quire_kv_bloks", "quire_kv_bloks is no function"),
        ("rates(quire_steps_total[5m])", "rates is no function"),
        ("quire_requests", "quire_requests is no function"),
        ('quire_requests_total{reason="stop"}', "reason is no label"),
        ("quire_requests_total{finish_reason=stop}", "label matchers"),
        ("sum by (tier) (quire_kv_blocks)", "tier"),
        ("quire_kv_blocks > 0.9 %", "cannot be read"),
        ("rate quire_kv_blocks", "without arguments"),
    ],
)
def test_wrong_expressions_are_found(expression: str, message: str) -> None:
    with pytest.raises(PromqlError, match=message):
        check(expression, exported())


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_proxies_stream_forward_names_and_hide_the_admin_routes(name: str) -> None:
    text = (DEPLOY / name).read_text("utf-8")
    assert text.count("{") == text.count("}")
    no_buffering = {"nginx.conf": "proxy_buffering off;", "Caddyfile": "flush_interval -1"}
    assert no_buffering[name] in text
    assert "x-request-id" in text.lower()
    assert "reject requests with a forwarding header" in text
    for path in (*ADMIN_PATHS, "/metrics"):
        assert path.strip("/") in text
    assert f"--keep-alive-seconds ({ServerConfig().keep_alive_s:g})" in text
    if name == "nginx.conf":
        assert f"client_max_body_size {ServerConfig().max_body_bytes >> 20}m;" in text
        assert f"--heartbeat-seconds ({ServerConfig().heartbeat_s:g})" in text


# ---- the container


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, its words) of the Containerfile, in order."""
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = lines.replace("\\\n", " ").splitlines()
    found = [line.strip().partition(" ") for line in joined if line.strip()]
    return [(name, words.strip()) for name, _, words in found]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    start = max(at for at, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def test_the_image_runs_as_a_user_without_rights_on_a_small_base() -> None:
    bases = [words for name, words in instructions() if name == "FROM"]
    assert len(bases) == 2
    assert all(
        re.match(r"docker\.io/library/python:3\.1[1-4]-slim( AS build)?$", one) for one in bases
    )
    stage = last_stage()
    users = [words for name, words in stage if name == "USER"]
    assert users == ["10001:10001"]
    # Nothing that writes comes after it.
    at = stage.index(("USER", users[0]))
    assert {name for name, _ in stage[at:]} == {
        *("USER", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD")
    }
    assert ("ENTRYPOINT", '["quire"]') in stage
    assert ("CMD", '["serve"]') in stage


def test_what_is_copied_exists_and_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    sources = [
        word
        for name, words in instructions()
        if name == "COPY" and "--from" not in words
        for word in shlex.split(words)[:-1]
    ]
    assert {"native", "quire", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in rules
    excluded = [rule for rule in rules[1:] if not rule.startswith("!")]
    for built in ("quire/__pycache__", "quire/_native.cpython-313-x86_64-linux-gnu.so"):
        assert any(fnmatch.fnmatch(built, rule) for rule in excluded)


def test_the_version_of_python_is_the_same_in_all_lines() -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    assert len(set(re.findall(r"python:?(3\.\d+)", text))) == 1


def test_the_build_command_keeps_the_health_check() -> None:
    text = (DEPLOY / "Containerfile").read_text("utf-8")
    # The image format of the Open Container Initiative, podman's default, has no health checks.
    assert "podman build --format docker --file deploy/Containerfile" in text


def healthcheck() -> list[str]:
    [words] = [words for name, words in last_stage() if name == "HEALTHCHECK"]
    command: list[str] = json.loads(words.partition("CMD ")[2])
    return command


def settings() -> Iterator[tuple[str, str]]:
    for name, words in last_stage():
        if name == "ENV":
            yield from (tuple(word.split("=", 1)) for word in shlex.split(words))  # type: ignore[misc]


def test_settings_of_the_image_are_settings() -> None:
    from quire.config.environment import read_environment

    found, warnings = read_environment({k: v for k, v in settings() if k.startswith("QUIRE_")})
    assert not warnings
    assert found["host"].value == "0.0.0.0"
    assert found["port"].value == 8000
    assert ("EXPOSE", "8000") in last_stage()


def _size_script() -> ModuleType:
    path = ROOT / "scripts" / "container_size.py"
    spec = importlib.util.spec_from_file_location("container_size", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_image_fits_into_its_limit() -> None:
    script = _size_script()
    parts = script.parts()
    assert parts["quire"] > 5e6
    assert {"numpy", "uvicorn", "tokenizers", "jinja2"} <= parts.keys()
    assert "pytest" not in parts
    assert sum(parts.values()) <= script.LIMIT_BYTES


def test_the_size_leaves_out_what_the_containerfile_removes() -> None:
    script = _size_script()
    runs = " ".join(words for name, words in instructions() if name == "RUN")
    assert set(re.findall(r"(\w+)/(?:\*/)?\*\.so", runs)) == set(script.STRIPPED)
    assert re.findall(r"find (\w+) -type d -name tests", runs) == list(script.WITHOUT_TESTS)
