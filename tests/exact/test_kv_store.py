"""Engines that share a KV store: the tokens and logprobs of one engine, for every model.

Drawn requests of One Answer run on three engines: one that computes them whole, and two that share
a directory which is small, so that blocks are evicted all the time. Between requests files are cut,
changed, exchanged and deleted, and every third case loses an engine on the way.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from quire.base.kv_store import KVStoreStats, StoreFailure
from quire.base.records import Request
from quire.program.declarations import PIECE_POSITIONS
from quire.program.tensors import DType
from tests.exact.rig import Model
from tests.exact.test_disaggregation import Engine, Settings, drawn, running
from tests.exact.workload import MAX_MODEL_LEN, VOCAB_SIZE
from tests.tiny_models import write_tiny_llama

FIRST_CASE = int(os.environ.get("QUIRE_STORE_FIRST", "900"))
NUM_CASES = int(os.environ.get("QUIRE_STORE_CASES", "10"))
MIN_FETCHED_BLOCKS = 60  # of all cases
STORE_BLOCKS = 60
MAX_CASES = 12  # of engines with other layouts, at least, until blocks were fetched
LONG = 1536  # positions of a model for prompts of several pieces
LAYOUTS = [("pipeline", "tensor"), ("context", "context")]


def test_engines_that_share_a_store_give_the_answers_of_one(
    models: list[Model], tmp_path: Path
) -> None:
    seen = compare_sharing(range(FIRST_CASE, FIRST_CASE + NUM_CASES), models, tmp_path, {})
    if NUM_CASES >= 10:
        assert seen["fetched"] >= MIN_FETCHED_BLOCKS, seen
        assert seen[StoreFailure.CORRUPT], seen


def compare_sharing(
    numbers: Sequence[int], models: Sequence[Model], root: Path, of_all: Settings
) -> Counter[str]:
    """Compare the cases on engines that share a store with one engine each; return what happened.
    of_all: settings of all engines."""
    lines: list[str] = []
    seen: Counter[str] = Counter()
    by_model: dict[int, list[int]] = {}
    for number in numbers:
        by_model.setdefault(drawn(number, len(models))[0], []).append(number)
    for at, cases in by_model.items():
        path = root / str(at)
        whole = Engine(models[at], **of_all)
        assert whole.card is not None
        block_bytes = whole.card.block_bytes
        shared = {
            "kv_store": str(path),
            "kv_store_size": STORE_BLOCKS * max(block_bytes, 4096),
            "kv_store_buffer_size": 40 * block_bytes,
            "kv_store_fetch": "always",
            "kv_store_timeout": 30.0,
            "kv_cache_memory": 36 * block_bytes,
            "max_num_batched_tokens": 40,
            **of_all,
        }
        one, other = Engine(models[at], **shared), Engine(models[at], **shared)
        with running(whole, one, other):
            for number in cases:
                lines += _compare(number, drawn(number, len(models))[1], whole, one, other, path)
                if number % 3 == 0:
                    seen.update(_counts(one.stats.kv_store))
                    one.end()
                    one = Engine(models[at], **shared)
            one.end()
            for engine in (one, other):
                seen.update(_counts(engine.stats.kv_store))
    assert not lines, "\n".join(lines[:5])
    return seen


@pytest.mark.parametrize("layouts", LAYOUTS, ids=" and ".join)
def test_engines_of_other_layouts_share_a_store(tmp_path: Path, layouts: tuple[str, str]) -> None:
    """Blocks are the same bytes for ranks, stages and one process; where positions are divided,
    for engines that divide them alike."""
    even = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_tiny_llama(
        tmp_path / "model", seed=45, hidden_size=68, max_position_embeddings=LONG, **even
    )
    model, path = Model(folder, DType.F32, max_model_len=LONG), tmp_path / "store"
    divides = layouts == ("context", "context")
    whole = Engine(model, max_model_len=LONG)
    assert whole.card is not None
    block_bytes = whole.card.block_bytes * (2 * PIECE_POSITIONS // 16 if divides else 1)
    few = 4 if divides else 36
    shared = {
        "kv_store": str(path),
        "kv_store_size": STORE_BLOCKS * max(block_bytes, 4096),
        "kv_store_buffer_size": 8 * block_bytes,
        "kv_store_fetch": "always",
        "kv_store_timeout": 30.0,
        "kv_cache_memory": few * block_bytes,
        "max_num_batched_tokens": 256 if divides else 40,
        "max_model_len": LONG if divides else MAX_MODEL_LEN,
        "threads": 2,
    }
    one, other = (Engine(model, **{**shared, f"{layout}_parallel_size": 2}) for layout in layouts)
    with running(whole, one, other):
        for number in range(FIRST_CASE + 4, FIRST_CASE + 4 + max(NUM_CASES // 10, MAX_CASES)):
            requests = drawn(number, 1)[1]
            if divides:
                requests = [_after_a_long_text(number, streams) for streams in requests]
            lines = _compare(number, requests, whole, one, other, path)
            assert not lines, "\n".join(lines[:5])
            seen: Counter[str] = Counter()
            for engine in (one, other):
                seen.update(_counts(engine.stats.kv_store))
            # On a busy machine the blocks of a case may be stored after they are looked for.
            if seen["fetched"] and number >= FIRST_CASE + 3 + NUM_CASES // 10:
                break
    assert seen["fetched"], seen


def _after_a_long_text(number: int, streams: Sequence[Request]) -> tuple[Request, ...]:
    """Return requests after a text of two blocks of two pieces each, and a little more."""
    draw = np.random.default_rng(number)
    text = draw.integers(2, VOCAB_SIZE, 4 * PIECE_POSITIONS + 9).astype(np.int32)
    return tuple(
        replace(
            one,
            prompt_ids=np.concatenate((text, one.prompt_ids)),
            max_total_tokens=one.max_total_tokens + len(text),
        )
        for one in streams
    )


def _counts(stats: KVStoreStats | None) -> dict[str, int]:
    assert stats is not None
    return {"fetched": stats.fetched_blocks_total, **dict(stats.failures_total)}


def _compare(
    number: int,
    requests: Sequence[Sequence[Request]],
    whole: Engine,
    one: Engine,
    other: Engine,
    path: Path,
) -> list[str]:
    """Run one case on two engines with a store and on one without; return what differs."""
    random = Random(number)
    ids = [request.request_id for streams in requests for request in streams]
    for streams in requests:
        whole.start(streams)
    first = [_renamed(streams) for streams in requests]
    for streams in first:
        one.start(streams)
    if random.random() < 0.7:  # else both begin at once, and one waits for the other
        one.finish([request.request_id for streams in first for request in streams])
        tamper(path, random)
    for streams in requests:
        other.start(streams)
        tamper(path, random)
    other.finish(ids)
    one.finish([request.request_id for streams in first for request in streams])
    whole.finish(ids)
    lines = []
    for id_ in ids:
        wanted = whole.streams[id_]
        for engine, name in ((one, f"1 {id_}"), (other, id_)):
            found = engine.streams[name]
            if (
                found.tokens != wanted.tokens
                or found.finish_reason is not wanted.finish_reason
                or repr(found.scores) != repr(wanted.scores)
            ):
                lines.append(f"case {number}, {name}: {found}, wanted {wanted}")
    return lines


def _renamed(streams: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(
        replace(one, request_id=f"1 {one.request_id}", group_id=f"1 {one.group_id}")
        for one in streams
    )


def tamper(path: Path, random: Random) -> None:
    """Cut, change, exchange or delete some files of a store."""
    files = sorted((path / "blocks").glob("*/*"))
    for file in random.sample(files, len(files) // 6):
        try:
            content = file.read_bytes()
            kind = random.randrange(4)
            if kind == 0:
                file.unlink()
            elif kind == 1:
                file.write_bytes(content[: random.randrange(len(content) + 1)])
            elif kind == 2:
                file.write_bytes(random.choice(files).read_bytes())
            elif content:
                changed = bytearray(content)
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
                file.write_bytes(changed)
        except FileNotFoundError:
            pass  # evicted meanwhile


def test_the_case_draws_prompts_with_blocks(models: list[Model]) -> None:
    lengths = [
        len(streams[0].prompt_ids)
        for number in range(FIRST_CASE, FIRST_CASE + NUM_CASES)
        for streams in drawn(number, len(models))[1]
    ]
    if not lengths:
        pytest.fail("no requests were drawn")
    assert max(lengths) > 64
