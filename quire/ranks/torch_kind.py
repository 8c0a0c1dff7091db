"""TorchRanks: ranks that compute with PyTorch, on CPU tensors or on a GPU each.

Knows devices and transports; no program. CPU tensors, and ranks of several machines that gather
together, exchange by the group's own transport, through host memory; GPUs of one machine by NCCL
(quire/execute/gpu/process_group.py). Always
holds: the ranks of a group have the same kind of device and the same transport.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.base.errors import SettingError
from quire.comm.shared_memory import TIMEOUT_S, SharedMemoryRank
from quire.config.machine import MachineMemory
from quire.execute.executor import ExecutorMemory, ExecutorOptions, StepLimits
from quire.execute.gpu.device import device_after, device_of, num_cards_from
from quire.execute.gpu.exchange import HostExchange, HostLink, RankEnds, TensorExchange
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.gpu.offload_plan import OffloadSize
from quire.execute.gpu.process_group import ProcessGroupExchange
from quire.program.comm_ops import num_exchanges
from quire.program.program import Program
from quire.ranks.kinds import Together
from quire.ranks.leading import LeadingExecutor
from quire.ranks.stage_lead import LeadingStages
from quire.ranks.stages import StageLinks
from quire.ranks.torch_executor import MirroredTorch, TorchPipeline, TorchRank
from quire.weights.checkpoint import Checkpoint

Transport = Literal["host", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """How the executor of one rank is made. device: "cpu" or "cuda:N". rendezvous_files: a path
    without its group's number, where the transport is torch.distributed (nccl; gloo for tests).
    saved_bytes: of the device, by weights that stay in host memory."""

    device: str
    exact: bool
    has_fp8: bool
    captures: bool
    transport: Transport
    rendezvous_files: str
    timeout_s: float
    saved_bytes: int = 0

    def executor_class(self, executor: type[TorchRank], *, poison: bool) -> TorchExecutorClass:
        """Return the class of one rank's executor."""
        return TorchExecutorClass(
            device_of(self.device),
            exact=self.exact,
            has_fp8=self.has_fp8,
            captures=self.captures,
            offload=OffloadSize(saved_bytes=self.saved_bytes) if self.saved_bytes else None,
            executor=executor,
            poison=poison,
        )

    def made(
        self,
        executor: type[TorchRank],
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        links: StageLinks | None,
        *,
        poison: bool,
    ) -> TorchRank:
        """Load one rank's executor."""
        ends = self._ends(group, links)
        one = replace(self.executor_class(executor, poison=poison), ends=ends)
        rank = one(program, checkpoint, replace(options, beside=None))
        assert isinstance(rank, TorchRank), "as it was asked for"
        rank.attach(group, links)
        return rank

    def remove_rendezvous_files(self) -> None:
        """Remove them, once all ranks have ended."""
        folder, name = os.path.split(self.rendezvous_files)
        for path in Path(folder).glob(f"{name}.*"):
            path.unlink(missing_ok=True)

    def _ends(self, group: SharedMemoryRank, links: StageLinks | None) -> RankEnds:
        source = None if links is None or links.source is None else HostLink(links.source)
        target = None if links is None or links.target is None else HostLink(links.target)
        return RankEnds(exchange=self._exchange(group), source=source, target=target)

    def _exchange(self, group: SharedMemoryRank) -> TensorExchange | None:
        members = group.native.members
        if members == 1:
            return None
        number, rank = divmod(group.rank, members)
        if self.transport == "host":
            return HostExchange(group, rank=rank, degree=members)
        exchange = ProcessGroupExchange(
            self.transport,
            rendezvous_file=f"{self.rendezvous_files}.{number}",
            rank=rank,
            degree=members,
            timeout_s=self.timeout_s,
        )
        group.on_abort(exchange.abort)
        return exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRanks:
    """A RankKind (see kinds.py). settings: of rank 0; others have the GPUs after its own, those of
    another machine the ones that their launcher has numbered (OwnMachine). offload: what weights in
    host memory save of each device; saved_bytes: by rank, once it is decided."""

    settings: TorchSettings
    offload: OffloadSize | None = None
    saved_bytes: tuple[int, ...] = ()

    @property
    def shares_memory(self) -> bool:
        """See RankKind."""
        return self.settings.device == "cpu"

    def check_program(self, program: Program) -> None:
        """See RankKind."""
        self._sizing().check_program(program)

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """See RankKind."""
        memory = self._sizing().memory_for(program, limits)
        gathers = any(map(num_exchanges, program.segments.values()))
        if gathers and self.settings.transport == "nccl":
            return replace(memory, exchange_bytes=NCCL_BYTES)
        return memory

    def memory_of_each(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> Sequence[ExecutorMemory]:
        """See RankKind."""
        return [self.memory_for(own, limits) for own in programs]

    def head_rows(self, max_sequences: int) -> int:
        """See RankKind."""
        return self._sizing().head_rows(max_sequences)

    def full_step_tokens(self) -> int:
        """See RankKind."""
        return self._sizing().full_step_tokens()

    def available_memory(self) -> MachineMemory:
        """See RankKind."""
        return self._sizing().available_memory()

    def plans_in_flight(self) -> int:
        """See RankKind."""
        return self._sizing().plans_in_flight()

    def class_beside(self) -> TorchExecutorClass:
        """See RankKind: on the device of rank 0."""
        settings = self.settings
        return TorchExecutorClass(
            device_of(settings.device),
            exact=settings.exact,
            has_fp8=settings.has_fp8,
            captures=settings.captures,
        )

    def start_fields(self, rank: int) -> dict[str, Any]:
        """See RankKind."""
        device = device_after(self.settings.device, rank)
        saved_bytes = self.saved_bytes[rank] if self.saved_bytes else 0
        return {"torch": asdict(replace(self.settings, device=device, saved_bytes=saved_bytes))}

    def for_programs(
        self, programs: Sequence[Program], limits: StepLimits, together: Together
    ) -> TorchRanks:
        """See RankKind: each rank saves what its own share lacks. If one does, none captures its
        steps: captured rows are padded, and exchanges have equal rows on all ranks."""
        if self.offload is None:
            return self
        sizing = self._sizing()
        saved = tuple(sizing.offloaded(own, limits).saved_bytes for own in programs)
        captures = self.settings.captures and not any(saved)
        settings = replace(self.settings, captures=captures, saved_bytes=saved[0])
        return replace(self, settings=settings, saved_bytes=saved)

    def leading(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        *,
        poison: bool,
    ) -> LeadingExecutor:
        """See RankKind."""
        made = self.settings.made(
            MirroredTorch, program, checkpoint, options, group, None, poison=poison
        )
        assert isinstance(made, MirroredTorch), "as it was asked for"
        return made

    def leading_stages(
        self,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        links: StageLinks,
        layers: tuple[int, ...],
        *,
        poison: bool,
    ) -> LeadingStages:
        """See RankKind."""
        made = self.settings.made(
            TorchPipeline, program, checkpoint, options, links.group, links, poison=poison
        )
        assert isinstance(made, TorchPipeline), "as it was asked for"
        made.lead_stages(links, layers)
        return made

    def remove_files(self) -> None:
        """See RankKind."""
        self.settings.remove_rendezvous_files()

    def _sizing(self) -> TorchExecutorClass:
        made = self.settings.executor_class(TorchRank, poison=False)
        return replace(made, offload=self.offload)


def ranks_like(
    one: TorchExecutorClass, *, num_ranks: int, of_stage: int, num_here: int, asked: str
) -> TorchRanks:
    """Return ranks like an executor of one process. of_stage: how many gather together. num_here:
    on this machine; the others have as many. Raises SettingError, which names what was `asked`."""
    is_gpu = one.device.type != "cpu"
    if is_gpu and (found := num_cards_from(one.device)) < num_here:
        of_all = "" if num_here == num_ranks else f", {num_here} of them on this machine"
        raise SettingError(
            f"{asked}, which are {num_ranks} ranks with a GPU each{of_all}, and from {one.device} "
            f"on there are {found} GPUs: take fewer ranks, or show more GPUs to this process"
        )
    name = f"quire-ranks-{secrets.token_hex(16)}"
    transport: Transport = "nccl" if is_gpu and num_here % of_stage == 0 else "host"
    offload = one.offload
    if offload is not None:
        exchanged = NCCL_BYTES if transport == "nccl" and of_stage > 1 else 0
        offload = replace(offload, exchange_bytes=exchanged, num_ranks=num_here)
    return TorchRanks(
        settings=TorchSettings(
            device=str(one.device),
            exact=one.exact,
            has_fp8=one.has_fp8,
            captures=one.captures,
            transport=transport,
            rendezvous_files=os.path.join(tempfile.gettempdir(), name),
            timeout_s=TIMEOUT_S,
        ),
        offload=offload,
    )


def load_torch_rank(
    fields: Mapping[str, Any],
    program: Program,
    checkpoint: Checkpoint,
    options: ExecutorOptions,
    group: SharedMemoryRank,
    links: StageLinks | None,
    *,
    poison: bool,
    pool_file: int,
) -> TorchRank:
    """Load the executor of a rank above 0, as its start says. pool_file: see TorchRank."""
    settings = TorchSettings(**fields)
    rank = settings.made(TorchRank, program, checkpoint, options, group, links, poison=poison)
    rank.pool_file = pool_file
    return rank
