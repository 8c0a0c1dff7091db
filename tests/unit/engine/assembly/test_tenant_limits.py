"""Tenant limits: shares become blocks of this cache; impossible limits fail startup."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.errors import InvalidParameter, SettingError
from quire.base.scheduling_params import SchedulingParams
from quire.engine.assembly.tenant_limits import read_limits
from quire.scheduler.tenants.tenant_usage import TenantLimits
from tests.tiny_models import write_tiny_llama

FILE = """
[tenants.a]
keys = ["k"]
weight = 3
kv_floor_share = 0.29
kv_ceiling_share = 0.5
max_running = 2
max_queued = 7
[tenants.b]
kv_ceiling_share = 0.001
"""


def written(folder: Path, text: str) -> str:
    file = folder / "tenants.toml"
    file.write_text(text)
    return str(file)


def test_shares_become_whole_blocks_of_this_cache(tmp_path: Path) -> None:
    limits, weights = read_limits(written(tmp_path, FILE), num_blocks=100)
    assert limits == (
        TenantLimits(name="", shown="default"),
        TenantLimits(
            name="a", shown="a", floor_blocks=29, ceiling_blocks=50, max_running=2, max_queued=7
        ),
        TenantLimits(name="b", shown="b", ceiling_blocks=1),
    )
    assert weights == {"": 1.0, "a": 3.0, "b": 1.0}


def test_without_a_file_no_tenant_is_limited() -> None:
    assert read_limits(None, num_blocks=100) == ((), {})


def test_a_floor_in_blocks_above_a_ceiling_in_shares_is_rejected(tmp_path: Path) -> None:
    text = "[tenants.a]\nkv_floor_blocks = 51\nkv_ceiling_share = 0.5"
    with pytest.raises(SettingError, match="a has a floor of 51 KV blocks and a ceiling of 50"):
        read_limits(written(tmp_path, text), num_blocks=100)


def test_library_users_name_their_tenant_and_unknown_ones_are_rejected(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    tenants = written(tmp_path, "[tenants.a]\nmax_running = 1")
    sampling = SamplingParams(max_tokens=2)
    with LLM(model, tenants=tenants) as llm:
        answers = llm.generate(
            ["x", "y"], sampling, terms=[SchedulingParams(tenant="a"), SchedulingParams(tenant="a")]
        )
        assert len(answers) == 2
        with pytest.raises(InvalidParameter, match="tenant 'c' is not one of the 2"):
            llm.generate("x", sampling, terms=SchedulingParams(tenant="c"))

    async def streamed() -> int:
        async with AsyncLLM(model, tenants=tenants) as llm:
            terms = SchedulingParams(tenant="a", deadline_ms=1e9)
            deltas = [delta async for delta in llm.generate("x", sampling, terms=terms)]
            return deltas[-1].num_output_tokens

    assert asyncio.run(streamed()) == 2
