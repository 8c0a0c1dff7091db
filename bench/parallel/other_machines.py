"""Steps of other machines, computed from their rates and measured nowhere.

Knows programs and rates; no executor.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from bench.parallel.steps import DEPTH
from quire.base.errors import SettingError
from quire.program.comm_ops import num_exchanges
from quire.program.cost import StepShape
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.split import split


@dataclass(frozen=True)
class Described:
    """A machine by its rates. link_gb_per_s: what a rank receives. exchange_us: of one exchange."""

    name: str
    degree: int
    rank_gb_per_s: float
    link_gb_per_s: float
    exchange_us: float


DESCRIBED = (
    Described("2 sockets of 64 cores", 2, 300.0, 60.0, 3.0),
    Described("8 GPUs (H100, NVLink)", 8, 3000.0, 400.0, 10.0),
)


def computed(program: Program, machine: Described, rows: int) -> dict[str, Any]:
    """Return a decode step by the rates of a machine: computed, not measured."""
    step = StepShape([1] * rows, [DEPTH] * rows)
    shares: dict[TpMode, list[Program]] = {}
    for mode in TpMode:
        with suppress(SettingError):  # groups of integers that the columns of a rank divide
            shares[mode] = [
                shard(program, degree=machine.degree, rank=rank, mode=mode)
                for rank in range(machine.degree)
            ]
    costs = [share.step_cost(step) for share in shares[TpMode.EXACT]]
    own = shares[TpMode.EXACT][0]
    read_ms = max(cost.memory_bytes for cost in costs) / machine.rank_gb_per_s / 1e6
    layers = len(program.layer_starts)
    width = program.outputs["hidden"].width
    head_bytes = own.segment_cost("head", step).comm_bytes
    # A ring all-reduce moves each element twice, less the rank's own share; in bf16.
    share = (machine.degree - 1) / machine.degree
    summed_bytes = round(2 * layers * rows * width * 2 * 2 * share) + head_bytes

    def exchange_ms(number: int, num_bytes: int) -> float:
        return number * machine.exchange_us / 1e3 + num_bytes / machine.link_gb_per_s / 1e6

    def of_mode(mode: TpMode) -> dict[str, Any] | None:
        """Return what the ranks' programs exchange and read in a mode; None where it is refused."""
        if mode not in shares:
            return None
        costs = [share.step_cost(step) for share in shares[mode]]
        exchanges = sum(map(num_exchanges, shares[mode][0].segments.values()))
        received = max(cost.comm_bytes for cost in costs)
        ms = max(cost.memory_bytes for cost in costs) / machine.rank_gb_per_s / 1e6
        ms += exchange_ms(exchanges, received)
        return {
            "bytes": received,
            "bytes_per_token": received / rows,
            "exchanges": exchanges,
            "step_ms": ms,
            "speedup": one_ms / ms,
        }

    # A stage needs a layer: fewer stages than ranks where there are fewer layers.
    num_stages = min(machine.degree, layers)
    group = max(rows // num_stages, 1)
    micro = StepShape([1] * group, [DEPTH] * group)
    stages = [own.step_cost(micro) for own in split(program, num_stages)]
    stage_ms = max(
        cost.memory_bytes / machine.rank_gb_per_s / 1e6 + exchange_ms(1, cost.comm_bytes)
        for cost in stages
    )
    # All rows once: each micro-batch takes the time of the slowest stage; fewer rows than stages
    # leave the others idle.
    round_ms = stage_ms * num_stages
    one_ms = program.step_cost(step).memory_bytes / machine.rank_gb_per_s / 1e6
    sums_ms = read_ms + exchange_ms(2 * layers + 1, summed_bytes)
    return {
        "computed_for": asdict(machine),
        "rows": rows,
        "one_rank_ms": one_ms,
        "exact": of_mode(TpMode.EXACT),
        "fast": of_mode(TpMode.FAST),
        "sums": {"bytes": summed_bytes, "step_ms": sums_ms, "speedup": one_ms / sums_ms},
        "stages": {
            "number": num_stages,
            "bytes": max(cost.comm_bytes for cost in stages),
            "step_ms": round_ms,
            "speedup": one_ms / round_ms,
        },
    }
