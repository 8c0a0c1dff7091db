"""The time of a routing decision where the router knows many blocks of many replicas.

Each replica has as many blocks as it may; their hashes are drawn once and copied, since only the
size of the tables matters, and beginnings of the prompts are added to each. A decision hashes the
prompt, chooses by the default policy, notes what was chosen, and learns from its first token.
"""

from __future__ import annotations

import random
import resource
import time
from array import array
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from quire.router.block_hashes import block_hashes
from quire.routing.block_sets import BlockSets
from quire.routing.policy import RouteKey
from quire.routing.prefix_history import PrefixHistory, block_names
from quire.routing.ttft_model import MIN_SAMPLES
from quire.routing.warm_cache import WarmCache

NUM_REPLICAS, NUM_BLOCKS = 100, 1_000_000
PROMPT_TOKENS, BLOCK_SIZE = 8192, 16
NUM_PROMPTS = 64


@dataclass(slots=True, eq=False)
class _Replica:
    number: int
    backlog_tokens: int = 0
    queued_tokens: int = 0
    expected_tokens: int = 0
    loads: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"http://10.0.0.{self.number}:8000"


def decision(rounds: int) -> dict[str, Any]:
    """Return the spread of the time of a decision in microseconds."""
    drawn = random.Random(5)
    prompts = [
        array("i", (drawn.randrange(100_000) for _ in range(PROMPT_TOKENS)))
        for _ in range(NUM_PROMPTS)
    ]
    sets = BlockSets(NUM_BLOCKS + NUM_PROMPTS * PROMPT_TOKENS // BLOCK_SIZE)
    began_s = time.monotonic()
    sets.store(0, (drawn.getrandbits(64) for _ in range(NUM_BLOCKS)), BLOCK_SIZE)
    store_us = (time.monotonic() - began_s) / NUM_BLOCKS * 1e6
    for number in range(1, NUM_REPLICAS):
        sets._of[number] = deepcopy(sets._of[0])
    for number in range(NUM_REPLICAS):
        for prompt in drawn.sample(prompts, 8):
            hashes = block_hashes(prompt, BLOCK_SIZE)
            sets.store(number, hashes[: drawn.randrange(1, len(hashes) + 1)], BLOCK_SIZE)
    replicas = [_Replica(number) for number in range(NUM_REPLICAS)]
    policy = WarmCache(PrefixHistory(65_536), None, sets)
    for one in replicas:  # so that each has a model of its own
        for _ in range(MIN_SAMPLES):
            policy.note_first_token(
                one, drawn.randrange(8192), drawn.randrange(20_000), drawn.random()
            )
    texts = [prompt.tobytes() for prompt in prompts]
    times_us, cpu_us = list[float](), list[float]()
    for _ in range(20 * rounds):
        at = drawn.randrange(NUM_PROMPTS)
        for one in replicas:
            one.backlog_tokens = one.queued_tokens = drawn.randrange(20_000)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        key = RouteKey(
            blocks=block_names("box", texts[at]),
            tokens=PROMPT_TOKENS,
            prompt_tokens=PROMPT_TOKENS,
            hashes=block_hashes(prompts[at], BLOCK_SIZE),
            block_size=BLOCK_SIZE,
        )
        chosen = policy.choose(replicas, key)
        new_tokens = policy.new_tokens(chosen, key)
        policy.sent(chosen, key)
        policy.note_first_token(chosen, new_tokens, chosen.queued_tokens, new_tokens * 1e-4)
        times_us.append((time.perf_counter() - start_s) * 1e6)
        cpu_us.append((time.thread_time() - start_cpu_s) * 1e6)
    times_us.sort()
    cpu_us.sort()
    return {
        "replicas": NUM_REPLICAS,
        "blocks_per_replica": sets.num_blocks(0),
        "prompt_tokens": PROMPT_TOKENS,
        "decisions": len(times_us),
        "p50_us": times_us[len(times_us) // 2],
        "p99_us": times_us[int(0.99 * (len(times_us) - 1))],
        "max_us": times_us[-1],
        "p99_cpu_us": cpu_us[int(0.99 * (len(cpu_us) - 1))],
        "store_us_per_block": store_us,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
