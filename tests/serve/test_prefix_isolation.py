"""No tenant and no key learns from cached prefixes what another has sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.serve.running_server import RunningServer

PROMPT = "the secret plan of the first caller, which nobody else may find out about " * 3
TENANTS = """
[tenants.one]
keys = ["one-a", "one-b"]
[tenants.two]
keys = ["two"]
[tenants.open-1]
keys = ["open-1"]
isolate_cache = false
[tenants.open-2]
keys = ["open-2"]
isolate_cache = false
"""


def cached(server: RunningServer, key: str, **fields: object) -> int:
    """Return how many cached tokens a request with this key finds."""
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    authorization: Mapping[str, str] = {"Authorization": f"Bearer {key}"}
    status, _, raw = server.request("POST", "/v1/completions", body, **authorization)
    assert status == 200, raw
    tokens: int = json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_keys_of_a_tenant_share_prefixes_and_tenants_do_not(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    flags = ("--threads", "1", "--tenants", str(file), "--api-key", "root")
    with RunningServer(tiny, *flags) as server:
        assert cached(server, "one-a") == 0
        assert cached(server, "one-b") >= 32
        assert [cached(server, "two"), cached(server, "root"), cached(server, "open-1")] == [0] * 3
        assert cached(server, "open-2") >= 32


@pytest.mark.parametrize("shares", [False, True])
def test_keys_share_prefixes_in_memory_and_on_disk_only_if_configured(
    tiny: Path, tmp_path: Path, shares: bool
) -> None:
    flags = ("--threads", "1", "--api-key", "a", "--api-key", "b")
    flags += ("--kv-tier-path", str(tmp_path / "tier"), "--kv-tier-fetch", "always")
    flags += ("--share-prefixes",) if shares else ()
    kept = "another text, which the first server has cached and the second one finds on disk " * 3
    with RunningServer(tiny, *flags) as server:
        assert cached(server, "a") == 0
        if shares:
            assert cached(server, "b") >= 32
        else:
            assert cached(server, "b") == 0
            assert min(cached(server, "a"), cached(server, "b")) >= 32
            assert cached(server, "b", cache_salt="x") == 0
            assert cached(server, "a", cache_salt="x") == 0
            assert cached(server, "a", cache_salt="x") >= 32
        assert cached(server, "a", prompt=kept) == 0
        for _ in range(
            3
        ):  # it goes to the disk while the engine is idle, and the server stops next
            assert cached(server, "a", prompt=kept) >= 32
    with RunningServer(tiny, *flags) as server:
        assert (cached(server, "b", prompt=kept) >= 32) is shares
        assert cached(server, "a", prompt=kept) >= 32
