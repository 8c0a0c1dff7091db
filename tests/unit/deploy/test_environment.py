"""What the environment of a Ray cluster must say, and what it should."""

from __future__ import annotations

import re

import pytest

from quire.base.errors import SettingError
from quire.deploy.ray_serve.environment import check_environment
from tests.repository.source_files import ROOT


def test_the_python_proxy_is_used_only_where_it_is_asked_for() -> None:
    with pytest.raises(SettingError, match="RAY_SERVE_ENABLE_HA_PROXY"):
        check_environment({}, "direct")
    check_environment({"RAY_SERVE_ENABLE_HA_PROXY": "1"}, "direct")
    check_environment({}, "proxy")


def test_missing_tokens_and_usage_statistics_are_reported() -> None:
    open_cluster = check_environment({"RAY_AUTH_MODE": "disabled"}, "proxy")
    assert [line.split()[0] for line in open_cluster] == [
        "RAY_AUTH_MODE",
        "RAY_USAGE_STATS_ENABLED",
    ]


def test_the_shipped_variables_satisfy_it() -> None:
    text = (ROOT / "deploy" / "ray" / "environment.sh").read_text("utf-8")
    variables = dict(re.findall(r"^export (\w+)=(\S+)$", text, re.MULTILINE))
    assert check_environment(variables, "direct") == []
