"""Levers: changes of a server's flags, with their values computed from its situation.

Each function returns a lever, or None where it does not apply. Without the engine's limits
(/v1/engine) a lever has no value and no prediction, and its text says in which direction to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.doctor.finding import Lever
from quire.doctor.situation import Situation

_MIB = 2**20
_MAX_SLOTS, _MAX_STEP_TOKENS, _MIN_STEP_TOKENS = 1024, 8192, 16
# KV blocks that the memory of one holds in int8, with scales, by the dtype now.
_INT8_BLOCKS = {"f32": 3.5, "bf16": 1.8}
# Time of reading the weights in int8, at best, by the dtype now.
_INT8_READ = {"f32": 0.25, "bf16": 0.5}


def chosen(*levers: Lever | None) -> tuple[Lever, ...]:
    """Return the levers that apply."""
    return tuple(lever for lever in levers if lever is not None)


def more_slots(situation: Situation, factor: int) -> Lever | None:
    """Let more requests run at once."""
    engine = situation.engine
    if engine is None:
        return Lever(text="raise --max-num-seqs")
    slots = min(engine.slots * factor, _MAX_SLOTS, engine.num_blocks)
    if slots <= engine.slots:
        return None
    return _slots(slots, max(engine.step_tokens, 2 * slots), raises=2 * slots > engine.step_tokens)


def fewer_slots(situation: Situation) -> Lever | None:
    """Let so few requests run at once that a step of them keeps the TPOT goal."""
    engine = situation.engine
    if engine is None:
        return Lever(text="lower --max-num-seqs")
    slots = max(min(int(situation.rows.mean), engine.slots) // 2, 1)
    prices = engine.prices
    if prices is not None and (row_ms := prices.token_ms + prices.score_ms) > 0:
        room_ms = 1e3 * situation.goals.tpot_s - prices.fixed_ms
        slots = min(max(int(room_ms / row_ms), slots), engine.slots - 1)
    return _slots(slots, engine.step_tokens, raises=False) if 0 < slots < engine.slots else None


def _slots(slots: int, step_tokens: int, *, raises: bool) -> Lever:
    text = f"--max-num-seqs {slots}"
    if raises:
        text += f" --max-num-batched-tokens {step_tokens}"
    return Lever(text=text, change={"slots": slots, "step_tokens": step_tokens})


def larger_steps(situation: Situation) -> Lever | None:
    """Let prompts have more tokens in a step."""
    engine = situation.engine
    if engine is None:
        return Lever(text="raise --max-num-batched-tokens")
    tokens = min(2 * engine.step_tokens, _MAX_STEP_TOKENS)
    return None if tokens <= engine.step_tokens else _step_tokens(tokens)


def smaller_steps(situation: Situation) -> Lever | None:
    """Let prompts have fewer tokens in a step."""
    engine = situation.engine
    if engine is None:
        return Lever(text="lower --max-num-batched-tokens")
    tokens = max(engine.step_tokens // 2, engine.slots, _MIN_STEP_TOKENS)
    return None if tokens >= engine.step_tokens else _step_tokens(tokens)


def _step_tokens(tokens: int) -> Lever:
    return Lever(text=f"--max-num-batched-tokens {tokens}", change={"step_tokens": tokens})


def tpot_target(situation: Situation) -> Lever | None:
    """Bound what prefill may add to a step that generates tokens."""
    goal_ms = round(1e3 * situation.goals.tpot_s, 3)
    engine = situation.engine
    if engine is not None and 0 < engine.tpot_target_ms <= goal_ms:
        return None
    return Lever(text=f"--tpot-target-ms {goal_ms:g}", change={"tpot_target_ms": goal_ms})


def one_long_prompt(situation: Situation) -> Lever | None:
    """Let one long prompt be computed at a time."""
    engine = situation.engine
    if engine is not None and engine.max_long_prompts == 1:
        return None
    return Lever(text="--max-long-prompts 1", change={"max_long_prompts": 1})


def more_blocks(situation: Situation) -> Lever:
    """Double the memory of the KV cache."""
    engine = situation.engine
    if engine is None:
        return Lever(text="raise --kv-cache-memory")
    num_bytes = 2 * engine.num_blocks * engine.block_bytes
    text = f"--kv-cache-memory {-(-num_bytes // _MIB)}MiB"
    return Lever(text=text, change={"num_blocks": 2 * engine.num_blocks})


def int8_blocks(situation: Situation) -> Lever | None:
    """Keep more tokens in the same memory."""
    engine, factor = situation.engine, _INT8_BLOCKS.get(situation.model.get("kv_cache_dtype", ""))
    if engine is None or factor is None:
        return None
    blocks = int(engine.num_blocks * factor)
    return Lever(text="--kv-cache-dtype int8 (changes answers)", change={"num_blocks": blocks})


def quantize(situation: Situation) -> Lever | None:
    """Read fewer bytes of weights in each step; the predicted effect is the best case."""
    model = situation.model
    factor = _INT8_READ.get(model.get("dtype", "")) if model.get("quantization") == "none" else None
    if factor is None:
        return None
    text = "--quantization int8 (changes answers; at best)"
    return Lever(text=text, change={"fixed_price": factor})


def overlap(situation: Situation) -> Lever | None:
    """Schedule the next step while the device computes; the predicted effect is the best case."""
    engine = situation.engine
    if engine is not None and engine.plans_in_flight > 1:
        return None
    change = {"price": situation.busy_share, "plans_in_flight": 2}
    return Lever(text="--plans-in-flight 2 (at best)", change=change)


def replica(situation: Situation) -> Lever:
    """Send half of the requests elsewhere."""
    return Lever(text="a second server for half of the requests", change={"load": 0.5})


def texts(levers: Iterable[Lever]) -> str:
    """Return the levers in one sentence."""
    return ", or ".join(lever.text for lever in levers)
