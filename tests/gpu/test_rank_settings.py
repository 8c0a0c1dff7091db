"""Settings of ranks on GPUs: devices and transports, what is refused by name, and NCCL's memory.

Nothing is computed and no GPU is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import SettingError
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.gpu.offload_plan import OffloadSize
from quire.execute.gpu.process_group import ProcessGroupExchange
from quire.ranks.torch_kind import ranks_like

pytestmark = pytest.mark.gpu


def test_what_ranks_of_gpus_need_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    card = TorchExecutorClass(torch.device("cuda", 1))
    asked: Callable[..., Any] = ranks_like
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SettingError, match=r"from cuda:1 on there are 2 GPUs: take fewer ranks"):
        asked(card, num_ranks=4, of_stage=4, num_here=4, asked="tensor_parallel_size is 4")
    several = {"num_ranks": 4, "num_here": 2, "asked": ""}
    assert asked(card, of_stage=2, **several).settings.transport == "nccl", "within each machine"
    assert asked(card, of_stage=4, **several).settings.transport == "host"
    ranks = asked(card, num_ranks=2, of_stage=2, num_here=2, asked="")
    assert ranks.offload is None
    saving = replace(card, offload=OffloadSize(saved_bytes=1))
    found = [asked(saving, of_stage=degree, **several).offload for degree in (2, 1)]
    assert [(one.num_ranks, one.exchange_bytes) for one in found] == [(2, NCCL_BYTES), (2, 0)]
    assert not ranks.shares_memory
    assert ranks.plans_in_flight() == 2
    first, second = (ranks.start_fields(rank)["torch"] for rank in range(2))
    assert (first["device"], second["device"]) == ("cuda:1", "cuda:2")
    assert first["transport"] == "nccl"
    assert second["transport"] == "nccl"


def test_nccl_keeps_to_the_memory_that_is_counted_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Group:
        class Options:
            pass

        def __init__(self, *_: object) -> None:
            seen.append(os.environ["NCCL_NVLS_ENABLE"])

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    for asked in (True, False):
        if not asked:
            monkeypatch.delenv("NCCL_NVLS_ENABLE")
        meeting = str(tmp_path / str(asked))
        ProcessGroupExchange(
            "nccl", rendezvous_file=meeting, rank=0, degree=1, timeout_s=5.0
        ).connect()
    assert seen == ["2", "0"]
