"""Plan a model on a device: memory, context, concurrency and predicted speed, without weights.

The sizes are those the engine computes at its start (quire/engine/assembly/sizing.py and
quire/config/memory.py); the speeds come from the program's cost model over the device's rates, so
they are upper bounds where the rates are peaks (hardware.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.base.errors import CapacityError, ModelError, SettingError
from quire.config.executor_config import ExecutorConfig
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig, ModelConfig
from quire.config.machine import MachineMemory, machine_memory
from quire.config.memory import MemoryNeeds, MemoryPlan, mib, num_blocks_of, plan_memory
from quire.engine.assembly.model_files import model_folder
from quire.engine.assembly.precision import weights_if_there
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.proposers import sized_proposer
from quire.engine.assembly.sizing import memory_needs, step_limits
from quire.execute.executor import HEAD_ROWS, ExecutorMemory, StepLimits
from quire.execute.gpu.limits import FULL_STEP_TOKENS as GPU_STEP_TOKENS
from quire.execute.gpu.limits import GPU_RESERVE_BYTES, NCCL_BYTES
from quire.execute.gpu.support import unsupported
from quire.execute.layout import lay_out
from quire.execute.native import NativeExecutor
from quire.execute.native_limits import full_step_tokens
from quire.execute.rope_table import rope_bytes
from quire.models.registry import open_model
from quire.program.cost import Cost, StepShape
from quire.program.declarations import Weight
from quire.program.forms import IdSource
from quire.program.ops import Embed
from quire.program.program import Program
from quire.sim.cost import roofline_ms
from quire.sim.hardware import THIS, Device
from quire.sim.links import Links, links_of
from quire.sim.ranks import by_stage, exchanges_of, largest_memory, shared_memory_of, shares_of
from quire.sim.step_costs import StepCosts
from quire.weights.binding import bind

PARALLEL_DEGREES = (2, 4, 8, 16, 32)


ONE_RANK = ExecutorConfig()


@dataclass(frozen=True, slots=True)
class DeviceSizing:
    """An ExecutorSizing (quire/execute/executor.py) for a device that need not be here.

    On a GPU the scratch of single kernels is not counted: it belongs to the reserve. settings: with
    several ranks, each is on a device of its own, or all on this machine. divide: gives shares.
    """

    device: Device
    settings: ExecutorConfig = ONE_RANK
    divide: Callable[[Program, ExecutorConfig], tuple[Program, ...]] = shares_of

    def memory_for(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        """See ExecutorSizing."""
        if self.settings.num_ranks == 1:
            return self._memory_of(program, limits)
        if self.device.name == THIS:
            return shared_memory_of(program, self.settings, limits)
        shares = self.divide(program, self.settings)
        return largest_memory([self._memory_of(share, limits) for share in shares])

    def _memory_of(self, program: Program, limits: StepLimits) -> ExecutorMemory:
        if not self.device.is_gpu:
            return NativeExecutor.memory_for(program, limits)
        return ExecutorMemory(
            weights_bytes=program.weight_bytes,
            step_bytes=lay_out(program, limits).arena_bytes + rope_bytes(program),
            token_bytes=sum(cache.token_bytes for cache in program.caches),
            exchange_bytes=NCCL_BYTES if exchanges_of(program) else 0,
        )

    def head_rows(self, max_sequences: int) -> int:
        """See ExecutorSizing."""
        return max(HEAD_ROWS, max_sequences) if self.device.is_gpu else HEAD_ROWS

    def full_step_tokens(self) -> int:
        """See ExecutorSizing."""
        if self.device.is_gpu:
            return GPU_STEP_TOKENS
        return full_step_tokens(self.device.isa)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A model with its settings on a device, or on one for each rank. shares: the ranks' programs,
    by rank. plan: None where it does not fit; see problem."""

    config: EngineConfig
    program: Program
    shares: tuple[Program, ...]
    needs: MemoryNeeds
    step_tokens: int
    plan: MemoryPlan | None
    problem: str

    @property
    def stages(self) -> tuple[tuple[Program, ...], ...]:
        """The shares of each stage, in the order in which a step passes them."""
        return by_stage(self.shares, self.config.executor)

    @property
    def max_context(self) -> int:
        """The longest request, 0 where not even the weights fit."""
        return 0 if self.plan is None else self.plan.max_model_len

    def requests_at_once(self, num_tokens: int) -> int:
        """Return how many requests of so many tokens the cache and the batch hold at once."""
        if self.plan is None:
            return 0
        blocks = num_blocks_of(num_tokens, self.needs.block_size)
        return min(self.plan.num_blocks // blocks, self.needs.max_num_seqs)


class Planner:
    """Sizes one model on one device, with the settings given and with changes to them.

    settings: of an engine, by field name. memory_bytes: instead of the device's. links: between
    devices, or the usual ones. Raises ModelError where the model cannot be read, and SettingError
    where the memory is not known.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        device: Device,
        *,
        memory_bytes: int | None = None,
        links: Links | None = None,
    ) -> None:
        self.device, self._settings = device, dict(settings)
        self.memory = device_memory(device, memory_bytes)
        config = engine_config(self._settings)
        folder = model_folder(config.model)
        self.spec = open_model(folder)
        self._checkpoint = weights_if_there(folder)
        self._sizing = DeviceSizing(device)
        self.links = links or links_of(device)
        # What must fit: None where it was not asked for.
        self.context: int | None = config.model.max_model_len
        self.concurrency: int | None = self._settings.get("max_num_seqs")
        self._sized = dict[tuple[EngineConfig, object], SizedModel]()
        self._programs = dict[tuple[ModelConfig, str], Program]()
        # By the id of a program, which they keep alive.
        self._costs = dict[int, StepCosts]()
        self._shares = dict[tuple[int, ExecutorConfig], tuple[Program, tuple[Program, ...]]]()

    def size(self, **changes: Any) -> SizedModel:
        """Size the model with changed settings; a value of None leaves the setting out.

        Raises SettingError or ModelError where an engine would, other than for lack of memory.
        """
        merged = {**self._settings, **changes}
        config = engine_config({name: value for name, value in merged.items() if value is not None})
        key = (config, merged.get("max_num_seqs"))
        if key not in self._sized:
            self._sized[key] = self._size(config, merged.get("max_num_seqs"))
        return self._sized[key]

    def _size(self, config: EngineConfig, concurrency: int | None) -> SizedModel:
        program = self._program(config)
        shares = self._divide(program, config.executor)
        sizing = replace(self._sizing, settings=config.executor, divide=self._divide)
        limits = step_limits(config, sizing)
        # What drafts is whole beside ranks too; first layers are counted over all of them.
        proposer = sized_proposer(config, self.spec, program, self._checkpoint, self._sizing)
        needs = memory_needs(
            config,
            proposer.tap(program),
            sizing,
            limits,
            model_max_len=self.spec.max_positions,
            device_is_own=self.memory.is_own,
            draft=proposer.needs,
        )
        plan, problem = fitted(needs, self.memory, concurrency=concurrency)
        return SizedModel(
            config=config,
            program=program,
            shares=shares,
            needs=needs,
            step_tokens=limits.max_tokens,
            plan=plan,
            problem=problem,
        )

    def _program(self, config: EngineConfig) -> Program:
        """Return the program that settings ask for; raises ModelError where it cannot run here."""
        key = (config.model, config.cache.kv_cache_dtype)
        if key not in self._programs:
            program = engine_program(config, self.spec, self._checkpoint)
            self._check(program)
            self._programs[key] = program
        return self._programs[key]

    def _divide(self, program: Program, settings: ExecutorConfig) -> tuple[Program, ...]:
        """See shares_of; a plan asks for few programs many times."""
        key = (id(program), settings)
        if key not in self._shares:
            self._shares[key] = program, shares_of(program, settings)
        return self._shares[key][1]

    def stage_times_s(self, sized: SizedModel, counts: list[int], starts: list[int]) -> list[float]:
        """Return the least seconds of a step in each stage: of its largest rank, with what it
        exchanges and receives. Without stages there is one."""
        if len(sized.shares) == 1:
            return [self.step_s(sized.program, counts, starts)]
        ranks = len(sized.shares) if self.device.name == THIS else 1  # they share its rates
        links, times_s = self.links, list[float]()
        for stage in sized.stages:
            share = max(map(self.costs_of, stage), key=lambda one: one.weight_bytes)
            cost = share.step_cost(StepShape(counts, starts))
            received_s = cost.comm_bytes / links.node_gb_per_s / 1e9
            waited_us = links.exchange_us * share.exchanges
            waited_us += links.message_us * (len(times_s) > 0)
            times_s.append(ranks * self._cost_s(share, cost) + received_s + 1e-6 * waited_us)
        return times_s

    def step_s(self, program: Program, counts: list[int], starts: list[int]) -> float:
        """Return the least seconds of a step with these rows."""
        costs = self.costs_of(program)
        return self._cost_s(costs, costs.step_cost(StepShape(counts, starts)))

    def costs_of(self, program: Program) -> StepCosts:
        """Return the costs of steps of a program."""
        if id(program) not in self._costs:
            self._costs[id(program)] = StepCosts(program)
        return self._costs[id(program)]

    def _cost_s(self, costs: StepCosts, cost: Cost) -> float:
        device = self.device
        ms = roofline_ms(
            cost,
            gb_per_s=device.gb_per_s,
            product_gflop_per_s=device.gflop_per_s(costs.product_precision),
            attention_gflop_per_s=device.gflop_per_s(str(costs.program.caches[0].dtype)),
        )
        return ms / 1e3

    def prefill_s(self, sized: SizedModel, num_tokens: int) -> float:
        """Return the least seconds to compute a prompt alone, in steps of the largest size, which
        follow each other through the stages."""
        slowest_s, last = 0.0, [0.0]
        for start in range(0, num_tokens, sized.step_tokens):
            count = min(sized.step_tokens, num_tokens - start)
            last = self.stage_times_s(sized, [count], [start])
            slowest_s += max(last)
        return slowest_s + sum(last) - max(last)

    def decode_tokens_per_s(self, sized: SizedModel, num_tokens: int, requests: int = 1) -> float:
        """Return the most tokens per second of so many requests, all at a depth of num_tokens,
        divided over as many steps in flight as stages."""
        groups = min(len(sized.stages), requests)
        rows = -(-requests // groups)
        times_s = self.stage_times_s(sized, [1] * rows, [num_tokens - 1] * rows)
        return requests / max(groups * max(times_s), sum(times_s))

    def parallel_degree(self, sized: SizedModel) -> tuple[int, MemoryNeeds] | None:
        """Return the fewest equal devices that the model fits on when its tensors are split.

        Also the needs of each. None where not even the largest of PARALLEL_DEGREES is enough.
        """
        for degree in PARALLEL_DEGREES:
            needs = sharded_needs(sized, degree)
            needs = replace(needs, exchange_bytes=NCCL_BYTES if self.device.is_gpu else 0)
            if not fitted(needs, self.memory, concurrency=self.concurrency)[1]:
                return degree, needs
        return None

    def _check(self, program: Program) -> None:
        """Raise ModelError where the device's executor cannot compute the program."""
        if not self.device.is_gpu:
            NativeExecutor.check_program(program)
            return
        problems = unsupported(program, self.device.about, is_gpu=True, has_fp8=self.device.has_fp8)
        if problems:
            raise ModelError(
                f"{program.name}: the torch executor cannot hold this model:"
                + "".join(f"\n  - {problem}" for problem in problems)
            )


def check_model(settings: Mapping[str, Any]) -> None:
    """Raise QuireError where the model or a setting is wrong, or weights that are there are others
    than the configuration says; measures nothing."""
    config = engine_config(settings)
    folder = model_folder(config.model)
    checkpoint = weights_if_there(folder)
    program = engine_program(config, open_model(folder), checkpoint)
    if checkpoint is not None:
        bind(program, checkpoint)


def device_memory(device: Device, memory_bytes: int | None) -> MachineMemory:
    """Return what an engine may take of a device's memory. Raises SettingError if not known."""
    if device.name == THIS and memory_bytes is None:
        return machine_memory()
    total = device.memory_bytes if memory_bytes is None else memory_bytes
    if total is None:
        raise SettingError(
            f"{device.name} ({device.about}) has no memory size of its own; give --memory, as in "
            "--memory 256GiB"
        )
    given = device.about if memory_bytes is None else "--memory"
    remedy = "plan for a larger device" if memory_bytes is None else "raise --memory"
    if not device.is_gpu:
        return MachineMemory(available_bytes=total, limit=given, remedy=remedy)
    return MachineMemory(
        available_bytes=max(total - GPU_RESERVE_BYTES, 0),
        limit=f"{given}, without {mib(GPU_RESERVE_BYTES)} for libraries and graphs",
        remedy=remedy,
        is_own=True,
    )


def fitted(
    needs: MemoryNeeds, memory: MachineMemory, *, concurrency: int | None
) -> tuple[MemoryPlan | None, str]:
    """Return the engine's memory plan, and what does not fit ("" where all does).

    Where both concurrency and max_model_len are given, so many requests must fit at once.
    """
    try:
        plan = plan_memory(needs, memory)
    except CapacityError as error:
        return None, str(error)
    if concurrency is None or needs.max_model_len is None:
        return plan, ""
    blocks = num_blocks_of(needs.max_model_len, needs.block_size)
    if concurrency * blocks <= plan.num_blocks:
        return plan, ""
    return plan, (
        f"{concurrency} requests of {needs.max_model_len} tokens need {concurrency * blocks} KV "
        f"blocks ({mib(concurrency * blocks * needs.block_size * needs.token_bytes)}); there are "
        f"{plan.num_blocks} ({mib(plan.kv_bytes)}), enough for {plan.num_blocks // blocks}; lower "
        "--max-num-seqs or --max-model-len, or plan for more memory"
    )


def sharded_needs(sized: SizedModel, degree: int) -> MemoryNeeds:
    """Return the needs of each of `degree` devices: sharded weights, the embedding and KV heads are
    divided. A head that is also the embedding is a share of both.

    Vectors, tables of positions or of integers and the step's buffers are counted in full on each.
    """
    trunk, caches = sized.program.segments["trunk"], sized.program.caches
    embeds = {op.weight for op in trunk if isinstance(op, Embed) and op.ids is IdSource.TOKENS}

    def bytes_here(weight: Weight) -> int:
        share = -(-weight.num_bytes // degree)
        if weight.name not in embeds:
            return share if weight.shard else weight.num_bytes
        return (weight.num_bytes if weight.scheme else share) + (share if weight.shard else 0)

    weights = sized.program.weights.values()
    saved = sum(weight.num_bytes - bytes_here(weight) for weight in weights)
    return replace(
        sized.needs,
        weights_bytes=sized.needs.weights_bytes - saved,
        token_bytes=sum(
            cache.token_bytes * -(-cache.kv_heads // degree) // cache.kv_heads for cache in caches
        ),
    )
