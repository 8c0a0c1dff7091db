"""Settings of a shared KV store: values, places, and what they do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.config.kv_store import KVStoreConfig, StorePlace, store_place
from tests.cases import each_case

ON = {"kv_store": "/shared/kv"}
MOONCAKE = {"kv_store": "mooncakestore://10.0.0.7:50051", "kv_store_key_file": "key"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/shared/kv", StorePlace(directory="/shared/kv")),
        ("~/kv", StorePlace(directory="~/kv")),
        ("file:///shared/kv", StorePlace(directory="/shared/kv")),
        ("mooncakestore://10.0.0.7:50051", StorePlace(host="10.0.0.7", port=50051)),
        ("mooncakestore://master.local:50051/", StorePlace(host="master.local", port=50051)),
        ("mooncakestore://[fd00::7]:1", StorePlace(host="[fd00::7]", port=1)),
    ],
)
def test_a_store_is_a_directory_or_a_master(text: str, place: StorePlace) -> None:
    assert store_place(text) == place


@each_case(
    "text",
    [
        *("", "file://relative", "s3://bucket", "mooncakestore://host", "mooncakestore://:1"),
        *("mooncakestore://host:0", "mooncakestore://host:70000", "mooncakestore://a b:1"),
        *("mooncakestore://host:1/x", "redis://host:6379"),
    ],
)
def test_malformed_places_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="mooncakestore://10"):
        KVStoreConfig(kv_store=text)


@each_case(
    ("settings", "words"),
    [
        ({"kv_store_bytes": 5}, "add kv_store"),
        ({"kv_store_encoding": "int8"}, "add kv_store"),
        (ON | {"kv_store_fetch": "maybe"}, "cost, always, never"),
        (ON | {"kv_store_encoding": "int4"}, "none, int8"),
        (ON | {"kv_store_bytes": 0}, "at least 1"),
        (ON | {"kv_store_timeout_s": 0.0}, "at least"),
        (ON | {"kv_store_key_file": "key"}, "keeps its own key"),
        (ON | {"kv_store_host": "10.0.0.1"}, "reached by no address"),
        ({"kv_store": MOONCAKE["kv_store"]}, "kv_store_key_file is not given"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(settings: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        KVStoreConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_prefix_caching": False}, "found by their prefix"),
        ({"executor": "torch", "kv_tier_host_bytes": 1}, "in host memory already: leave it out"),
        ({"kv_tier_path": "/tmp/x", "kv_tier_fetch": "always"}, "kv_store_fetch decides"),
    ],
)
def test_unsupported_combinations_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config({**ON, **settings})


@pytest.mark.parametrize("parallelism", ["tensor", "pipeline", "context"])
def test_ranks_go_with_a_store(parallelism: str) -> None:
    assert engine_config({**ON, f"{parallelism}_parallel_size": 2}).kv_store.is_on


def test_a_disk_tier_goes_with_a_store() -> None:
    config = engine_config({**ON, "kv_tier_path": "/tmp/x", "kv_store_size": "2GiB"})
    assert config.kv_store.is_on
    assert config.kv_store.kv_store_bytes == 2 << 30
    assert not engine_config({}).kv_store.is_on
