"""What a rank's process gets on its standard input, one line of JSON, and what it answers.

Always holds: both sides are of one version of this package, or the start is refused; ranks that
have loaded other weights or compute with other instructions are refused too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.base.errors import ModelError, QuireError, WorkerError
from quire.base.version import installed_version
from quire.comm.links import LinkSizes
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank
from quire.execute.executor import StepLimits
from quire.program.program import NUMERICS_VERSION, Program
from quire.program.serialize import from_plain, to_plain
from quire.ranks.connected_pools import PoolServer, block_ends, block_link_bytes
from quire.ranks.draft_share import DraftShare
from quire.ranks.stages import StageLayout, StageLinks
from quire.weights.checkpoint import Checkpoint
from quire.weights.content import content_sample

_MAX_FAILURE = 4000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """How a rank begins. program: as plain values. cpus: the processors it may run on; empty: any.
    limits: the largest step. log_level, log_form: as rank 0 logs. poison: fill buffers with NaN
    before each run (for tests). stages: of the pipeline; degree is that of all ranks together.
    row_slot_bytes, row_slots: of the links between stages. pool_file: a descriptor of the file
    for all ranks' KV pools; -1 for none. torch: of the torch executor (torch_kind.py). stream: the
    weights that the native executor reads from disk (StreamPlan); None: none.
    draft_programs, draft_limits: of the first layers that may draft, by how many they are; None:
    they do not.
    links_blocks: whether rank 0 asks for blocks over links (connected_pools.py). sample: of the
    tensors of rank 0's checkpoint (content_sample), where stages read different ones; else ""."""

    rank: int
    degree: int
    version: str
    program: dict[str, Any]
    checkpoint: str
    limits: dict[str, int]
    num_threads: int
    isa: str
    cpus: tuple[int, ...]
    pack_cache: str | None
    slot_bytes: int
    message_bytes: int
    timeout_s: float
    log_level: str
    log_form: str
    poison: bool
    stages: int = 1
    row_slot_bytes: int = 0
    row_slots: int = 0
    pool_file: int = -1
    torch: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None
    draft_programs: dict[str, dict[str, Any]] | None = None
    draft_limits: dict[str, int] | None = None
    links_blocks: bool = False
    sample: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """What a rank says of itself once its weights are loaded. All ranks must say the same."""

    version: str
    numerics: int
    recipe: str
    weights_digest: str


def start_line(start: RankStart) -> bytes:
    """Return the line of a start."""
    return json.dumps(asdict(start)).encode() + b"\n"


def read_start(line: bytes) -> RankStart:
    """Read a line made by start_line. Raises WorkerError for another version's."""
    fields: dict[str, Any] = json.loads(line)
    if fields.get("version") != (own := installed_version()):
        raise WorkerError(
            f"rank 0 is of version {fields.get('version')}, this rank of {own}; start all ranks "
            "from one installation"
        )
    fields["cpus"] = tuple(fields["cpus"])
    return RankStart(**fields)


def program_of(start: RankStart) -> Program:
    """Return the rank's program."""
    return from_plain(start.program)


def with_drafts(start: RankStart, share: DraftShare) -> RankStart:
    """Return a start with a share of the first layers that draft."""
    programs = {str(num): to_plain(program) for num, program in share.programs.items()}
    return replace(start, draft_programs=programs, draft_limits=asdict(share.limits))


def drafts_of(start: RankStart) -> DraftShare | None:
    """Return the rank's share of the first layers that draft; None where they do not."""
    if start.draft_programs is None or start.draft_limits is None:
        return None
    programs = {int(num): from_plain(plain) for num, plain in start.draft_programs.items()}
    return DraftShare(programs=programs, limits=StepLimits(**start.draft_limits))


def sizes_of(start: RankStart) -> SegmentSizes:
    """Return the sizes of the rank's segment without its links."""
    return SegmentSizes(slot_bytes=start.slot_bytes, message_bytes=start.message_bytes)


def links_of(start: RankStart, group: SharedMemoryRank) -> StageLinks:
    """Return the links of a rank of a pipeline."""
    return StageLinks(group, _layout_of(start), _rows_of(start), sizes_of(start))


def link_bytes_of(start: RankStart) -> int:
    """Return the bytes of the segment beside what the group of ranks uses."""
    of_blocks = block_link_bytes(start.degree) if start.links_blocks else 0
    return _stage_link_bytes(start) + of_blocks


def pool_server_of(start: RankStart, group: SharedMemoryRank) -> PoolServer | None:
    """Return what answers rank 0's asks for blocks, not started; None where there are none."""
    if not start.links_blocks:
        return None
    used = sizes_of(start).total(start.degree) + _stage_link_bytes(start)
    return PoolServer(group, block_ends(group, used)[0])


def _stage_link_bytes(start: RankStart) -> int:
    if start.stages == 1:
        return 0
    return _layout_of(start).link_bytes(_rows_of(start), sizes_of(start))


def _layout_of(start: RankStart) -> StageLayout:
    return StageLayout(stages=start.stages, tp=start.degree // start.stages)


def _rows_of(start: RankStart) -> LinkSizes:
    return LinkSizes(slot_bytes=start.row_slot_bytes, slots=start.row_slots)


def ready_of(recipe: str, weights_digest: str) -> RankReady:
    """Return what a rank of this process says."""
    return RankReady(
        version=installed_version(),
        numerics=NUMERICS_VERSION,
        recipe=recipe,
        weights_digest=weights_digest,
    )


def check_ready(rank: int, ready: RankReady, own: RankReady) -> None:
    """Raise ModelError where a rank differs from rank 0."""
    differing = [
        f"{name} is {value} there and {asdict(own)[name]} at rank 0"
        for name, value in asdict(ready).items()
        if value != asdict(own)[name]
    ]
    if differing:
        raise ModelError(
            f"rank {rank} has loaded something else than rank 0: {'; '.join(differing)}; the "
            "model's files have changed during the start, or the installation, or a launched rank "
            "was given another model: start all with one model, from one installation"
        )


def check_sample(start: RankStart, checkpoint: Checkpoint) -> None:
    """Raise ModelError where rank 0 has other tensors in its checkpoint; before any is loaded."""
    if start.sample and content_sample(checkpoint) != start.sample:
        raise ModelError(
            f"rank {start.rank} has other weights than rank 0, in {checkpoint.path}: start all "
            "ranks with one model, of which each machine has the same files"
        )


def failure_text(error: BaseException) -> str:
    """Return why a rank fails, in as many characters as a pipe that is read later can hold."""
    text = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_FAILURE]
