"""Pairs of an engine's settings: each pair below starts an engine, or is refused by both names.

The table has what was built apart: ranks, engines, weights elsewhere, KV blocks elsewhere, drafts.
What depends on the model or the machine is not here.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config, server_and_engine_config
from quire.config.server_and_engine import check_together
from tests.cases import each_case

FEATURES: dict[str, dict[str, Any]] = {
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "context_parallel_size": {"context_parallel_size": 2},
    "data_parallel_size": {"data_parallel_size": 2},
    "disk_offload_gb": {"disk_offload_gb": "1", "pack_cache": "/packed"},
    "cpu_offload_gb": {"executor": "torch", "cpu_offload_gb": "1"},
    "kv_tier_path": {"kv_tier_path": "/tier"},
    "kv_transfer_key_file": {"kv_transfer_key_file": "key"},
    "kv_store": {"kv_store": "/store"},
    "kv_events_config": {"kv_events_config": '{"enable_kv_cache_events": true}'},
    "speculate ngram": {"speculate": "ngram"},
    "speculate draft": {"speculate": "draft", "draft_model": "/draft"},
    "speculate self": {"speculate": "self"},
}
DRAFTS_OF_OTHERS = "speculate-ngram speculate-draft"
DRAFTS = f"{DRAFTS_OF_OTHERS} speculate-self"
# Each feature with those that it goes with; all other pairs are refused.
TOGETHER = {
    "tensor_parallel_size": (
        "pipeline_parallel_size context_parallel_size data_parallel_size disk_offload_gb "
        "cpu_offload_gb kv_tier_path kv_transfer_key_file kv_store kv_events_config " + DRAFTS
    ),
    "pipeline_parallel_size": (
        "context_parallel_size data_parallel_size disk_offload_gb cpu_offload_gb kv_tier_path "
        f"kv_transfer_key_file kv_store kv_events_config {DRAFTS}"
    ),
    "context_parallel_size": (
        "data_parallel_size disk_offload_gb cpu_offload_gb kv_tier_path kv_transfer_key_file "
        f"kv_store kv_events_config {DRAFTS}"
    ),
    "data_parallel_size": (f"cpu_offload_gb kv_tier_path kv_store kv_events_config {DRAFTS}"),
    "disk_offload_gb": (
        f"kv_tier_path kv_transfer_key_file kv_store kv_events_config {DRAFTS_OF_OTHERS}"
    ),
    "cpu_offload_gb": (
        f"kv_tier_path kv_transfer_key_file kv_store kv_events_config {DRAFTS_OF_OTHERS}"
    ),
    "kv_tier_path": (f"kv_transfer_key_file kv_store kv_events_config {DRAFTS}"),
    "kv_transfer_key_file": f"kv_store kv_events_config {DRAFTS}",
    "kv_store": f"kv_events_config {DRAFTS}",
    "kv_events_config": DRAFTS,
    "speculate ngram": "",
    "speculate draft": "",
    "speculate self": "",
}
# How a refusal names a feature where it does so in other words.
WORDS = {
    "cpu_offload_gb": ("cpu_offload_gb", "executor is torch", "the native executor"),
    "speculate self": ("the model's first layers",),
}


def refusal_of(settings: dict[str, Any]) -> str:
    """Return why an engine's settings are refused; "" where they are not."""
    try:
        engine_config(settings)
    except SettingError as error:
        return str(error)
    return ""


def test_every_pair_goes_together_or_is_refused_by_name() -> None:
    found: dict[str, list[str]] = {name: [] for name in FEATURES}
    for one, other in combinations(FEATURES, 2):
        if one.startswith("speculate"):
            continue  # two values of one setting
        refusal = refusal_of(FEATURES[one] | FEATURES[other])
        if not refusal:
            found[one].append(other.replace(" ", "-"))
            continue
        for name in (one, other):
            said = any(words in refusal for words in WORDS.get(name, (name,)))
            assert said, (one, other, refusal)
    assert {name: " ".join(others) for name, others in found.items()} == TOGETHER


@each_case(
    ("settings", "words"),
    [
        (
            {"executor": "torch", "device": "cpu", "cpu_offload_gb": "1"},
            "no other memory than the host",
        ),
        ({"cpu_offload_gb": "1"}, "take --executor torch"),
        (
            {"kv_store": "/s", "kv_store_encoding": "int8", "kv_cache_dtype": "int8"},
            "kv_cache_dtype is int8, but only blocks of a bf16 cache are encoded",
        ),
        ({"context_parallel_size": 2, "block_size": 48}, "which 4, 8, 16, 32, 64 and 128 divide"),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2, "tp_mode": "fast"}, "sums whole"),
        ({"context_parallel_size": 2, "executor": "reference"}, "only the native executor"),
        ({"distributed_executor_backend": "ray"}, "there is one rank"),
        ({"distributed_executor_backend": "ray", "data_parallel_size": 2}, "there is one rank"),
        (
            {
                "distributed_executor_backend": "external_launcher",
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
            },
            "server for each engine, with a launch, a MASTER_PORT and a port of its own",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine_config(settings)


@pytest.mark.parametrize("blocks", ["kv_tier_path", "kv_transfer_key_file", "kv_store"])
@pytest.mark.parametrize("backend", ["mp", "ray", "external_launcher"])
def test_blocks_go_elsewhere_however_ranks_were_started(backend: str, blocks: str) -> None:
    settings = {"distributed_executor_backend": backend, "tensor_parallel_size": 2}
    assert not refusal_of(settings | FEATURES[blocks])


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_an_encoded_store_goes_with_a_bf16_cache(dtype: str) -> None:
    settings = {"kv_store": "/s", "kv_store_encoding": "int8", "kv_cache_dtype": dtype}
    assert engine_config(settings).kv_store.kv_store_encoding == "int8"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_processes": 2, "data_parallel_size": 2}, ""),
        (
            {
                "restart_engine": True,
                "distributed_executor_backend": "external_launcher",
                "tensor_parallel_size": 2,
            },
            "let the launcher start all ranks",
        ),
        ({"restart_engine": True, "data_parallel_size": 2}, ""),
        ({"restart_engine": True, "api_processes": 2}, ""),
        ({"restart_engine": True, "kv_store": "/s"}, ""),
        ({"restart_engine": True, "kv_transfer_key_file": "key"}, ""),
        (
            {
                "restart_engine": True,
                "distributed_executor_backend": "ray",
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
            },
            "",
        ),
    ],
)
def test_a_server_has_an_engine_that_it_can_have(settings: dict[str, Any], words: str) -> None:
    server, engine = server_and_engine_config(settings)
    if not words:
        check_together(server, engine)
        return
    with pytest.raises(SettingError, match=words):
        check_together(server, engine)
