"""Machine: the simulated machine in numbers: step cost, context, bytes per token.

It is either measured (quire/sim/profile.py) or described by bytes and operations per second beside
the program that would run on it. Independent of traces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.memory import mib
from quire.engine.assembly.model_files import model_folder, model_name
from quire.engine.assembly.precision import weights_if_there
from quire.engine.assembly.programs import engine_program
from quire.engine.assembly.scheduler_factory import scheduler_limits
from quire.models.registry import open_model
from quire.program.program import Program
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.limits import SchedulerLimits
from quire.sim.cost import RooflineCost, StepCost
from quire.sim.ranks import PipelineCost, RanksCost, StageCost, by_stage, shares_of

# Default KV cache memory: results must not depend on the free memory of this machine.
DEFAULT_KV_BYTES = 4 * 2**30
# Of ranks on one machine: memory of another socket, and a wait that spins.
DEFAULT_LINK_GB_PER_S, DEFAULT_EXCHANGE_US = 60.0, 3.0
# Bounds of the default step size of a described machine.
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 64, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine to simulate. cost: of its steps. linear: the cost model of a step budget.

    token_bytes: of keys and values. step_tokens: limit of one step unless the config sets it.
    num_layers: layers that its executor can compute separately, 0 if none. stages: the costs of the
    stages of a pipeline, in order; empty where there is one stage.
    """

    name: str
    cost: StepCost
    linear: LinearCost
    token_bytes: int
    max_model_len: int
    step_tokens: int
    num_layers: int = 0
    stages: tuple[StepCost, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def num_blocks(self, config: EngineConfig) -> int:
        """Return the number of KV blocks, at most what all running requests can use."""
        size, asked = config.kv_block_tokens, config.cache.kv_cache_memory_bytes
        blocks = (DEFAULT_KV_BYTES if asked is None else asked) // (size * self.token_bytes)
        if blocks < 1:
            raise SettingError(
                f"kv_cache_memory is {mib(asked or 0)}, less than one block of {size} tokens, "
                f"which takes {mib(size * self.token_bytes)}; raise it or lower block_size"
            )
        longest = config.model.max_model_len or self.max_model_len
        return int(min(blocks, config.scheduler.max_num_seqs * -(-longest // size)))

    def limits(
        self, config: EngineConfig, *, num_blocks: int, max_model_len: int
    ) -> SchedulerLimits:
        """Return the limits of an engine's scheduler on this machine.

        Raises SettingError where the machine has another number of stages than the engine.
        """
        num_stages, asked = len(self.stages) or 1, config.executor.pipeline_parallel_size
        if num_stages != asked:
            raise SettingError(
                f"pipeline_parallel_size is {asked} and the simulated machine has {num_stages} "
                f"stage{'s' * (num_stages > 1)}: describe a machine of as many stages by "
                "--gb-per-s and --gflop-per-s, or leave pipeline_parallel_size out"
            )
        return scheduler_limits(
            config.scheduler,
            num_blocks=num_blocks,
            max_model_len=min(max_model_len, num_blocks * config.kv_block_tokens),
            step_tokens=self.step_tokens_of(config),
            plans_in_flight=num_stages,
            num_layers=self.num_layers,
            is_pipelined=num_stages > 1,
            pin_share=config.cache.cache_pin_share,
        )

    def step_tokens_of(self, config: EngineConfig) -> int:
        """Return the token limit of one step."""
        scheduler = config.scheduler
        return scheduler.max_num_batched_tokens or max(self.step_tokens, 2 * scheduler.max_num_seqs)


def planned_program(config: EngineConfig) -> Program:
    """Return the program of an engine with this config, for its longest context.

    Raises ModelError or SettingError. Loads no weights: a folder needs its config.json only.
    """
    folder = model_folder(config.model)
    return engine_program(config, open_model(folder), weights_if_there(folder))


def ridge_step_tokens(linear: LinearCost) -> int:
    """Return the default tokens of one step: the machine's ridge point, as a power of two.

    At the ridge point the arithmetic of a step takes as long as its fixed time and reading the
    weights together. Smaller steps waste arithmetic, larger ones delay every running request.
    """
    tokens = linear.fixed_ms / linear.token_ms if linear.token_ms > 0 else MAX_STEP_TOKENS
    bounded = min(max(tokens, MIN_STEP_TOKENS), MAX_STEP_TOKENS)
    return int(2 ** math.ceil(math.log2(bounded)))


def described_machine(
    config: EngineConfig,
    *,
    gb_per_s: float,
    gflop_per_s: float,
    fixed_ms: float,
    link_gb_per_s: float = DEFAULT_LINK_GB_PER_S,
    exchange_us: float = DEFAULT_EXCHANGE_US,
    message_gb_per_s: float | None = None,
    message_us: float | None = None,
) -> Machine:
    """Return a machine given by its rates, with the config's model. Loads no weights.

    Ranks of the config share the machine: each has its part of the rates, and receives from the
    others at link_gb_per_s, in exchange_us more for each exchange. A stage of a pipeline receives
    the rows of the stage before at message_gb_per_s, in message_us more; None: as an exchange.

    Raises ModelError or SettingError as an engine would.
    """
    links = LinkRates(
        link_gb_per_s=link_gb_per_s,
        exchange_us=exchange_us,
        message_gb_per_s=link_gb_per_s if message_gb_per_s is None else message_gb_per_s,
        message_us=exchange_us if message_us is None else message_us,
    )
    rates: dict[str, Any] = {
        "gb_per_s": gb_per_s,
        "gflop_per_s": gflop_per_s,
        "fixed_ms": fixed_ms,
    }
    _check_rates(rates | asdict(links))
    about: dict[str, Any] = dict(rates)
    program = planned_program(config)
    shares = shares_of(program, config.executor)
    stages = _stage_costs(config, shares, rates, links)
    cost: RooflineCost | RanksCost | PipelineCost
    if stages:
        cost = PipelineCost(stages)
        about |= {"ranks": len(shares), "stages": len(stages), **asdict(links)}
    elif len(shares) > 1:
        received: dict[str, Any] = {"link_gb_per_s": link_gb_per_s, "exchange_us": exchange_us}
        cost = RanksCost(shares, **rates, **received)
        about |= {"ranks": len(shares), **received}
    else:
        cost = RooflineCost(program, **rates)
    linear = cost.linear()
    by_layers = config.executor.executor != "torch" and not stages
    return Machine(
        name=model_name(config.model),
        cost=cost,
        linear=linear,
        token_bytes=sum(cache.token_bytes for share in shares for cache in share.caches),
        max_model_len=program.max_positions,
        step_tokens=ridge_step_tokens(linear),
        num_layers=len(program.layer_starts) if by_layers else 0,
        stages=stages,
        about=about,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What ranks of a described machine receive: from ranks of their stage, and as rows of the
    stage before."""

    link_gb_per_s: float
    exchange_us: float
    message_gb_per_s: float
    message_us: float


def _check_rates(given: Mapping[str, float]) -> None:
    """Raise SettingError for a rate that is not above 0, and for a negative time."""
    for name, value in given.items():
        if name.endswith("_per_s") and not value > 0:
            raise SettingError(f"{name} is {value}; it must be above 0")
        if not value >= 0:
            raise SettingError(f"{name} is {value}; it must be at least 0")


def _stage_costs(
    config: EngineConfig, shares: Sequence[Program], rates: Mapping[str, Any], links: LinkRates
) -> tuple[StageCost, ...]:
    """Return the cost of each stage; empty where there is one. All ranks share the rates."""
    executor = config.executor
    if executor.pipeline_parallel_size == 1:
        return ()
    return tuple(
        StageCost(
            RanksCost(
                own,
                **rates,
                link_gb_per_s=links.link_gb_per_s,
                exchange_us=links.exchange_us,
                num_ranks=executor.num_ranks,
            ),
            own[0],
            message_gb_per_s=links.message_gb_per_s,
            message_us=links.message_us,
        )
        for own in by_stage(shares, executor)
    )
