"""Exchanges between two GPUs by NCCL: bytes, captured calls, times, memory, the loss of a rank.

Two processes have a GPU each and make the same calls: this one, and one that it starts from this
file. With one GPU the section is skipped. In a dry run Gloo moves the bytes of CPU tensors, and
nothing is captured.

    python -m bench.gpu.ranks FILE [--dry-run-on-cpu]    # the second process
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.stage import Stage
from quire.base.errors import DeviceLost
from quire.execute.gpu.exchange import exchange_first
from quire.execute.gpu.graphs import CudaCapture
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.gpu.process_group import ProcessGroupExchange

DEGREE = 2
# Bytes of one rank: a decoded row of a small model, to a large chunk of a prompt.
SIZES, DRY_SIZES = (2 << 10, 32 << 10, 512 << 10, 8 << 20, 64 << 20), (2 << 10, 32 << 10)
CALLS = 20  # for a time; both ranks make as many
TIMEOUT_S = 60.0
ABORT_AFTER_S = 1.0


def ranks(stage: Stage) -> None:
    """Report what exchanges give, take and cost. Raises SystemExit for a wrong byte."""
    if not stage.is_dry and torch.cuda.device_count() < DEGREE:
        stage.report("skipped", "one GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, "-m", "bench.gpu.ranks", meeting]
        command += ["--dry-run-on-cpu"] if stage.is_dry else []
        other = subprocess.Popen(command)
        try:
            exchange = _exchanged(meeting, 0, stage.report, is_dry=stage.is_dry)
            other.wait(TIMEOUT_S)
            stage.report("lost", _lost(exchange, is_dry=stage.is_dry))
        finally:
            other.kill()
            other.wait()


def _exchanged(
    meeting: str, rank: int, report: Callable[[str, Any], None], *, is_dry: bool
) -> ProcessGroupExchange:
    """Make all calls of one rank but the last; return its end."""
    device = torch.device("cpu") if is_dry else torch.device("cuda", rank)
    if not is_dry:
        torch.cuda.set_device(device)
    free = _free_bytes(device)
    exchange = ProcessGroupExchange(
        "gloo" if is_dry else "nccl",
        rendezvous_file=meeting,
        rank=rank,
        degree=DEGREE,
        timeout_s=TIMEOUT_S,
    )
    exchange.connect()
    exchange_first(exchange, device)
    _settle(device)
    taken = {"first": free - _free_bytes(device), "counted": NCCL_BYTES}
    report("bytes_taken", taken)
    for size in DRY_SIZES if is_dry else SIZES:
        report(f"{size} bytes", _of_size(exchange, size, device))
    torch.cuda.empty_cache()
    report("bytes_taken", taken | {"all": free - _free_bytes(device)})
    return exchange


def _of_size(exchange: ProcessGroupExchange, size: int, device: torch.device) -> dict[str, Any]:
    """Return the times of a gather of `size` bytes of each rank. Raises SystemExit."""
    own = _values(exchange.rank, size, device)
    every = torch.zeros(DEGREE, size, dtype=torch.uint8, device=device)
    parts = [_values(rank, size, device) for rank in range(DEGREE)]
    exchange.all_gather(own, every)
    _check("a gather", every, torch.stack(parts))
    halves = own.view(DEGREE, -1)
    received = torch.zeros_like(halves)
    exchange.all_to_all(halves, received)
    wanted = torch.stack([part.view(DEGREE, -1)[exchange.rank] for part in parts])
    _check("an all-to-all", received, wanted)
    sent = own.clone()
    exchange.broadcast(sent)
    _check("a broadcast", sent, parts[0])

    def gather() -> None:
        exchange.all_gather(own, every)

    found: dict[str, Any] = {"seconds": _seconds(gather, device)}
    if exchange.is_captured:
        replay = CudaCapture(device)(gather)
        own.add_(1)  # what a replay reads is there when it begins
        replay()
        _check("a captured gather", every, torch.stack([part + 1 for part in parts]))
        found["seconds_replayed"] = _seconds(replay, device)
    return found


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the mean time of a call that all ranks make as often."""
    call()
    _settle(device)
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    _settle(device)
    return (time.perf_counter() - began) / CALLS


def _lost(exchange: ProcessGroupExchange, *, is_dry: bool) -> dict[str, Any]:
    """Gather without the other rank, which is gone; return how and how soon that ends."""
    device = torch.device("cpu") if is_dry else torch.device("cuda", exchange.rank)
    own = _values(exchange.rank, 1024, device)
    began = time.perf_counter()
    timer = threading.Timer(ABORT_AFTER_S, exchange.abort)
    timer.start()
    how = "ended in silence"
    try:
        exchange.all_gather(own, own.new_empty(DEGREE, 1024))
        _settle(device)
    except (DeviceLost, RuntimeError) as error:
        how = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    timer.join()
    return {"how": how, "seconds": seconds, "aborted_after_s": ABORT_AFTER_S}


def _values(rank: int, size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) * 7 + 3 * rank).to(torch.uint8)


def _check(what: str, found: Tensor, wanted: Tensor) -> None:
    if not torch.equal(found, wanted):
        raise SystemExit(f"{what} between two ranks has other bytes than were sent")


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _free_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def main() -> None:
    """Be the second rank; end without leaving the group, as one that is lost."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("meeting")
    parser.add_argument("--dry-run-on-cpu", action="store_true")
    asked = parser.parse_args()
    _exchanged(asked.meeting, 1, lambda what, value: None, is_dry=asked.dry_run_on_cpu)
    time.sleep(ABORT_AFTER_S)  # the other rank may still read from this one's memory
    os._exit(0)


if __name__ == "__main__":
    main()
