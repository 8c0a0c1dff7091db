"""Flags: generated from the groups' fields, and read back into them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config import flags
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import add_flags, config_from_flags, engine_config, flag_of, parse_bytes
from quire.config.groups import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quire.config.kv_store import KVStoreConfig
from quire.config.server_config import ServerConfig
from quire.config.speculation import SpeculationConfig
from quire.config.transfer import TransferConfig
from tests.cases import each_case

GROUPS = (
    *(ModelConfig, CacheConfig, SchedulerConfig, SpeculationConfig, ExecutorConfig),
    *(TransferConfig, KVStoreConfig, ServerConfig),
)
MAX_FIELDS = 130  # each is a flag
MAX_FIELDS_OF_ENGINE_GROUP = 21
FIELD_FLAGS = """
    --max-model-len --max-num-seqs --max-num-batched-tokens --block-size --kv-cache-memory
    --served-model-name --api-key --host --port --max-output-tokens --dtype
    --enable-prefix-caching --no-enable-prefix-caching --threads --executor --plans-in-flight
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, *GROUPS)
    return parser


def test_flags_have_the_names_of_their_fields() -> None:
    known = set(_parser()._option_string_actions)
    assert set(FIELD_FLAGS.split()) <= known


def test_every_field_has_a_help_text_and_their_number_is_bounded() -> None:
    every = [setting for group in GROUPS for setting in fields(group)]
    assert len(every) <= MAX_FIELDS
    of_engine = [group for group in GROUPS if group is not ServerConfig]
    assert max(len(fields(group)) for group in of_engine) <= MAX_FIELDS_OF_ENGINE_GROUP
    assert [setting.name for setting in every if not setting.metadata.get("help")] == []
    assert len({flag_of(setting) for setting in every}) == len(every)


def test_no_flags_give_the_defaults() -> None:
    arguments = _parser().parse_args([])
    for group in GROUPS:
        assert config_from_flags(group, arguments) == group()


@pytest.mark.parametrize("spelling", ["-tp 2", "--tensor-parallel-size 2", "-tp=2"])
def test_the_degree_of_tensor_parallelism_is_spelled_as_elsewhere(spelling: str) -> None:
    arguments = _parser().parse_args(spelling.split())
    assert config_from_flags(ExecutorConfig, arguments).tensor_parallel_size == 2


@pytest.mark.parametrize("spelling", ["-pp 2", "--pipeline-parallel-size=2"])
def test_the_number_of_stages_is_spelled_as_elsewhere(spelling: str) -> None:
    arguments = _parser().parse_args(spelling.split())
    assert config_from_flags(ExecutorConfig, arguments).pipeline_parallel_size == 2


def test_a_flag_sets_its_group() -> None:
    line = (
        "--kv-cache-memory 2GiB --no-enable-prefix-caching --api-key a --api-key b --threads 3 "
        "--step-budget-ms 7.5 --dtype bf16 --insecure"
    )
    arguments = _parser().parse_args(line.split())
    assert config_from_flags(CacheConfig, arguments) == CacheConfig(
        kv_cache_memory_bytes=2 * 2**30, enable_prefix_caching=False
    )
    assert config_from_flags(ServerConfig, arguments).api_key == ("a", "b")
    assert config_from_flags(ServerConfig, arguments).insecure
    assert config_from_flags(ExecutorConfig, arguments).num_threads == 3
    assert config_from_flags(SchedulerConfig, arguments).step_budget_ms == 7.5
    assert config_from_flags(ModelConfig, arguments).dtype == "bf16"


@pytest.mark.parametrize(
    "line", ["--kv-cache-memory lots", "--dtype fp8", "--threads two", "--executor gpu"]
)
def test_unreadable_values_are_rejected(line: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        _parser().parse_args(line.split())


@each_case(
    ("group", "values", "named"),
    [
        (ModelConfig, {"max_model_len": 1}, "max_model_len is 1"),
        (ModelConfig, {"dtype": "fp8"}, "auto, f32, bf16"),
        (ModelConfig, {"served_model_name": ""}, "served_model_name is empty"),
        (CacheConfig, {"block_size": 2}, "4, 8, and multiples of 16"),
        (CacheConfig, {"block_size": 12}, "4, 8, and multiples of 16"),
        (CacheConfig, {"block_size": 40}, "4, 8, and multiples of 16"),
        (CacheConfig, {"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs is 0"),
        (SchedulerConfig, {"plans_in_flight": 3}, "plans_in_flight is 3"),
        (SchedulerConfig, {"step_budget_ms": float("nan")}, "step_budget_ms is nan"),
        (SchedulerConfig, {"max_num_batched_tokens": 32}, "less than max_num_seqs 64"),
        (ExecutorConfig, {"executor": "gpu"}, "native, reference"),
        (ExecutorConfig, {"num_threads": 0}, "num_threads is 0"),
        (ExecutorConfig, {"num_threads": 9999}, "at most 1024"),
        (ServerConfig, {"port": 65536}, "port is 65536"),
        (ServerConfig, {"port": -1}, "port is -1"),
        (ServerConfig, {"api_key": ("",)}, "API key is empty"),
        (ServerConfig, {"grace_s": -1.0}, "grace_s is -1"),
        (ServerConfig, {"request_timeout_s": 0.0}, "request_timeout_s is 0"),
        (ServerConfig, {"max_output_tokens": 0}, "max_output_tokens is 0"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_allowed_ones(
    group: type[Any], values: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingError, match=named):
        group(**values)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("2GiB", 2**31),
        ("2g", 2**31),
        ("1.5 GiB", 3 * 2**29),
        ("3MB", 3_000_000),
        ("1k", 1024),
        ("7b", 7),
        ("1tib", 2**40),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@each_case("text", ["", "GiB", "-1", "1XB", "nan", "inf", "1 2", "1e30GiB", "0x10"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size"):
        parse_bytes(text)


def test_keywords_accept_field_and_flag_names_and_sizes_as_text() -> None:
    config = engine_config(
        {"model": Path("m"), "kv_cache_memory": "1MiB", "threads": 2, "step_budget_ms": 5}
    )
    assert config == EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(kv_cache_memory_bytes=2**20),
        scheduler=SchedulerConfig(step_budget_ms=5.0),
        executor=ExecutorConfig(num_threads=2),
    )
    assert engine_config({"max_model_len": None}) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("trust_remote_code", "code that comes with a model is never run"),
        ("nnodes", "ranks on several machines are started by torchrun, Slurm or Ray"),
        ("gpu_memory_utilization", "the KV cache's size is kv_cache_memory, as in 2GiB"),
        ("max_seq_len", "is max_model_len"),
        ("draft_device", "a draft model is computed as the model is; leave it out"),
        ("spec_ngram_size_n", "prompt lookup is speculate ngram, with at most max_draft_tokens"),
    ],
)
def test_keywords_of_other_engines_are_rejected_with_the_alternative(name: str, told: str) -> None:
    with pytest.raises(SettingError, match=told) as caught:
        engine_config({name: 1})
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "in_flags"),
    [
        ("num_threads is 0; at least 1 is needed", "--threads is 0; at least 1 is needed"),
        ("port is 99999; 0 to 65535 is allowed", "--port is 99999; 0 to 65535 is allowed"),
        ("a port, and max_num_seqs 3", "a port, and --max-num-seqs 3"),
        ("--max-model-len is 3", "--max-model-len is 3"),
        ("grace_s is nan", "--grace-seconds is nan"),
        ("max_body_bytes is 0", "--max-body is 0"),
    ],
)
def test_an_error_about_a_setting_names_the_flag_on_a_command_line(
    told: str, in_flags: str
) -> None:
    assert flags.in_flags(told) == in_flags


def test_an_unknown_keyword_is_rejected_with_the_nearest_one() -> None:
    with pytest.raises(SettingError, match="did you mean 'max_num_seqs'"):
        engine_config({"max_num_seq": 3})
    with pytest.raises(SettingError, match="known: block_size"):
        engine_config({"zzz": 3})


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": "8"},
        {"max_num_seqs": True},
        {"max_num_seqs": 8.5},
        {"enable_prefix_caching": 1},
        {"dtype": 3},
        {"kv_cache_memory": "lots"},
        {"block_size": None},
    ],
)
def test_a_keyword_of_another_type_is_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        engine_config(settings)


def test_a_setting_given_under_both_names_is_rejected() -> None:
    with pytest.raises(SettingError, match="the same setting"):
        engine_config({"kv_cache_memory": "1GiB", "kv_cache_memory_bytes": 1})


@pytest.mark.parametrize("value", ["a", ["a"], ("a",)])
def test_a_setting_of_several_texts_accepts_one_or_a_list(value: Any) -> None:
    setting = next(field for field in fields(ServerConfig) if field.name == "api_key")
    assert flags.checked(setting, tuple[str, ...], value) == ("a",)
    with pytest.raises(SettingError, match="list of strings"):
        flags.checked(setting, tuple[str, ...], [1])
