"""Hidden states that draft heads read lie in host memory, and are counted there, once."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import CapacityError
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import mib
from quire.engine.assembly import sized_model as sizing
from quire.engine.assembly.heads import SizedHeads
from quire.engine.assembly.offload import beside_drafts, draft_bytes, offload_size
from quire.engine.assembly.sized_model import SizedModel, sized_model
from quire.execute.native_limits import NativeSizing
from quire.speculative.hidden_states import ring_bytes

GIB = 1 << 30
SETTINGS: dict[str, Any] = {"speculate": "eagle", "max_num_seqs": 4, "max_model_len": 256}
WHAT = "draft heads: hidden states"


def sized(monkeypatch: pytest.MonkeyPatch, *, is_own: bool, host_bytes: int = GIB) -> SizedModel:
    """Return the built-in model with its head, in memory of the host or of a device."""
    memory = MachineMemory(available_bytes=GIB, limit="a test", is_own=is_own)
    monkeypatch.setattr(NativeSizing, "available_memory", staticmethod(lambda: memory))
    host = MachineMemory(available_bytes=host_bytes, limit="the host")
    monkeypatch.setattr(sizing, "machine_memory", lambda: host)
    return sized_model(engine_config(SETTINGS))


def ring_of(model: SizedModel) -> int:
    """Return the bytes of the kept hidden states."""
    assert isinstance(model.proposer, SizedHeads)
    return ring_bytes(model.proposer.ring_rows, model.proposer.ring_width, num_slots=4)


def test_a_cpu_counts_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sized(monkeypatch, is_own=False)
    lines = [(line.what, line.num_bytes) for line in model.memory.lines]
    assert [-num_bytes for what, num_bytes in lines if what == WHAT] == [ring_of(model)]
    assert sum(num_bytes for _, num_bytes in lines[:-1]) == lines[-1][1]
    assert model.memory.notes == ()
    assert model.proposer is not None
    needs = model.proposer.needs
    fixed_bytes = needs.weights_bytes + needs.step_bytes + ring_of(model)
    assert draft_bytes(needs, None, 1, 4, 16) == fixed_bytes


def test_a_device_with_memory_of_its_own_does_not_lose_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_host = sized(monkeypatch, is_own=False)
    on_device = sized(monkeypatch, is_own=True)
    used = [
        {line.what: -line.num_bytes for line in model.memory.lines[1:-1] if "KV" not in line.what}
        for model in (on_host, on_device)
    ]
    assert used[0] == used[1] | {WHAT: ring_of(on_host)}
    (note,) = (note for note in on_device.notes if note.startswith(WHAT))
    assert mib(ring_of(on_device)) in note


def test_a_host_without_room_for_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ring_of(sized(monkeypatch, is_own=True))
    sized(monkeypatch, is_own=True, host_bytes=needed)
    with pytest.raises(CapacityError, match=r"hidden states, and .* are available \(the host\)"):
        sized(monkeypatch, is_own=True, host_bytes=needed - 1)


def test_an_offload_to_the_host_counts_them_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.execute.gpu.offload_plan import OffloadSize

    config = engine_config({"executor": "torch", "cpu_offload_gb": "auto", **SETTINGS})
    size = offload_size(config, is_gpu=True)
    assert size.host_bytes == 0

    class Made:
        """Stands for the class of an executor: what `replace` is given is noted."""

        offload: OffloadSize = size

    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "quire.engine.assembly.offload.replace", lambda _, **changes: given.update(changes)
    )
    model = sized(monkeypatch, is_own=True)
    assert model.proposer is not None
    needs = model.proposer.needs
    beside_drafts(config, Made(), needs)  # type: ignore[arg-type]
    assert given["offload"].host_bytes == ring_of(model)
    own = given["offload"].buffers(64)
    assert own == needs.weights_bytes + needs.step_bytes
