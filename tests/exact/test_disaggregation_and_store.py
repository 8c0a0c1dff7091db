"""Prefill and decode engines that share a KV store: the tokens and logprobs of one engine.

Drawn requests of One Answer run on one engine that computes them whole, and on a pair of which the
prefill engine puts what it computes into a store and hands it over, and the decode engine reads
what is stored and gets the rest over the link. The store is small and its files are changed and
deleted. In each case but one in four something is lost in the middle: the prefill engine, the
decode engine, or the store. At the end nothing is left of a transfer, a fetch or a claim.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest

from quire.base.kv_transfer import KVTransfer
from quire.base.records import Request
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.directory_files import StoreFiles
from tests.exact.rig import Model
from tests.exact.test_disaggregation import (
    Engine,
    drawn,
    hand_over,
    key,
    nixl_is_installed,
    running,
)
from tests.exact.test_kv_store import tamper

__all__ = ["key"]

FIRST_CASE = int(os.environ.get("QUIRE_PAIR_STORE_FIRST", "1300"))
NUM_CASES = int(os.environ.get("QUIRE_PAIR_STORE_CASES", "8"))
NUM_MODELS = 2
STORE_BLOCKS = 80
LOST = ("prefill", "decode", "store", "nothing")
# Of the two engines, for each model.
ROLES = (("prefill", "decode"), ("both", "both"))
MIN_BLOCKS = 20  # of all cases, by each of the two ways


def lose_blocks(path: Path) -> None:
    """Put a file in the place of a store's directory of blocks, which engines may make anew."""
    for number in count():
        lost = path.with_name(f"{path.name} lost {number} {time.monotonic_ns()}")
        with suppress(FileNotFoundError):  # it was lost before, and no block was put since
            (path / "blocks").rename(lost)
        with suppress(IsADirectoryError):
            (path / "blocks").write_text("not a directory any more")
            return


def left_in(path: Path) -> list[Path]:
    """Return claims and half-written files that a store keeps of engines that are gone.

    An engine that cannot reach the store leaves its claims, which the next write removes once they
    are old.
    """

    def unfinished() -> list[Path]:
        return [*(path / "claims").iterdir(), *(path / "partial").iterdir()]

    for file in unfinished():
        then_s = file.stat().st_mtime - 600.0
        os.utime(file, (then_s, then_s))
    store = DirectoryStore(StoreFiles(path), max_bytes=1 << 20)
    assert store.put([bytes(16)], [(memoryview(b"a value"),)]) == [True]
    store.close()
    return unfinished()


class Place(Protocol):
    """A store that can be lost, and used again."""

    def settings(self, block_bytes: int) -> dict[str, Any]:
        """Return what engines need for it."""

    def tamper(self, random: Random) -> None:
        """Change some of its values."""

    def lose(self) -> None:
        """Make it unreadable."""

    def restore(self) -> None:
        """Begin again without its values."""


class DirectoryPlace:
    """A small store in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def settings(self, block_bytes: int) -> dict[str, Any]:
        """See Place."""
        num_bytes = STORE_BLOCKS * max(block_bytes, 4096)
        return {"kv_store": str(self.path), "kv_store_size": num_bytes}

    def tamper(self, random: Random) -> None:
        """See Place."""
        tamper(self.path, random)

    def lose(self) -> None:
        """See Place."""
        lose_blocks(self.path)

    def restore(self) -> None:
        """See Place."""
        (self.path / "blocks").unlink()


class Pair:
    """Two engines and their store, of which each can be lost and started again.

    roles: of the engine that computes prompts, and of the other.
    """

    def __init__(
        self,
        model: Model,
        place: Place,
        key: Path,
        block_bytes: int,
        roles: tuple[str, str],
        **more: Any,
    ) -> None:
        self._model, self.place = model, place
        self._roles = dict(zip(("prefill", "decode"), roles, strict=True))
        self.settings: dict[str, Any] = {
            "kv_transfer_key_file": str(key),
            "kv_transfer_size": 40 * block_bytes,
            "kv_transfer_timeout": 5.0,
            "kv_store_buffer_size": 40 * block_bytes,
            "kv_store_fetch": "always",
            "kv_store_timeout": 30.0,
            "kv_cache_memory": 36 * block_bytes,
            "max_num_batched_tokens": 40,
            **place.settings(block_bytes),
            **more,
        }
        self.engines = {side: self._started(side) for side in self._roles}
        self.seen: Counter[str] = Counter()

    def lose(self, what: str) -> None:
        """End an engine, or make the store unreadable."""
        if what in self.engines:
            self.end(what)
        elif what == "store":
            self.place.lose()

    def restore(self, what: str) -> None:
        """Begin again with what was lost."""
        if what in self.engines:
            self.engines[what] = self._started(what)
        elif what == "store":
            self.place.restore()

    def end(self, role: str) -> None:
        """End an engine; count what it did."""
        engine = self.engines[role]
        engine.end()
        stored, moved = engine.stats.kv_store, engine.stats.transfer
        if stored is not None and moved is not None:
            self.seen["stored"] += stored.fetched_blocks_total
            self.seen["received"] += moved.received_blocks_total
            self.seen.update(dict(stored.failures_total))

    def _started(self, side: str) -> Engine:
        return Engine(self._model, role=self._roles[side], **self.settings)


def test_a_pair_with_a_store_gives_the_answers_of_one_engine(
    models: list[Model], tmp_path: Path, key: Path
) -> None:
    numbers = range(FIRST_CASE, FIRST_CASE + NUM_CASES)
    seen = compare_with_store(numbers, models[:NUM_MODELS], tmp_path, key)
    if NUM_CASES >= 8:
        assert min(seen["stored"], seen["received"]) >= MIN_BLOCKS, seen


@pytest.mark.skipif(not nixl_is_installed(), reason="NIXL is not installed")
def test_a_pair_with_a_store_and_blocks_through_nixl_gives_the_answers_of_one_engine(
    models: list[Model], tmp_path: Path, key: Path
) -> None:
    numbers = range(FIRST_CASE + 100, FIRST_CASE + 100 + NUM_CASES)
    seen = compare_with_store(numbers, models[1:2], tmp_path, key, kv_transfer_backend="nixl")
    if NUM_CASES >= 8:
        assert min(seen["stored"], seen["received"]) >= MIN_BLOCKS, seen


def compare_with_store(
    numbers: Sequence[int], models: Sequence[Model], root: Path, key: Path, **more: Any
) -> Counter[str]:
    """Compare cases on pairs, each model with a directory of its own; return what happened."""
    seen: Counter[str] = Counter()

    def place_of(at: int) -> DirectoryPlace:
        return DirectoryPlace(root / str(at))

    for at in compare_on_pairs(numbers, models, key, place_of, seen, **more):
        assert not left_in(root / str(at))
    return seen


def compare_on_pairs(
    numbers: Sequence[int],
    models: Sequence[Model],
    key: Path,
    place_of: Callable[[int], Place],
    seen: Counter[str],
    **more: Any,
) -> Iterator[int]:
    """Compare the cases of each model on a pair with one engine; yield its number after them.

    seen: what happened.
    """
    by_model: dict[int, list[int]] = {}
    for number in numbers:
        by_model.setdefault(drawn(number, len(models))[0], []).append(number)
    for at, cases in by_model.items():
        lines: list[str] = []
        whole = Engine(models[at])
        assert whole.card is not None
        pair = Pair(models[at], place_of(at), key, whole.card.block_bytes, ROLES[at], **more)
        with running(whole):
            try:
                for number in cases:
                    lines += _compare(number, len(models), whole, pair)
                    _settle(pair)
            finally:
                pair.end("prefill")
                pair.end("decode")
        assert not lines, "\n".join(lines[:5])
        seen.update(pair.seen)
        yield at


def _compare(number: int, num_models: int, whole: Engine, pair: Pair) -> list[str]:
    """Run one case on the pair and on one engine; return the streams that differ."""
    random, requests = Random(number), drawn(number, num_models)[1]
    if not requests:  # all that were drawn need a tokenizer
        return []
    lost = LOST[number % len(LOST)]
    for streams in requests:
        whole.start(streams)
    fetched = [_handed_over(streams, pair.engines["prefill"], random) for streams in requests]
    pair.place.tamper(random)
    for at, streams in enumerate(fetched):
        pair.engines["decode"].start(streams)
        if at == len(fetched) // 2:
            pair.lose(lost)
            if lost == "decode":
                break
    if lost == "decode":  # another one answers, and finds leases that the first one has used
        pair.restore(lost)
        for streams in fetched:
            pair.engines[lost].start(streams)
    ids = [one.request_id for streams in requests for one in streams]
    decode = pair.engines["decode"]
    whole.finish(ids)
    decode.finish(ids)
    if lost in ("prefill", "store"):
        pair.restore(lost)
    return [
        f"case {number}, {id_}: {decode.streams[id_]}, wanted {whole.streams[id_]}"
        for id_ in ids
        if (decode.streams[id_].tokens, decode.streams[id_].finish_reason)
        != (whole.streams[id_].tokens, whole.streams[id_].finish_reason)
        or repr(decode.streams[id_].scores) != repr(whole.streams[id_].scores)
    ]


def _handed_over(
    streams: Sequence[Request], prefill: Engine, random: Random
) -> tuple[Request, ...]:
    """Have a prompt computed; return the streams that are to be continued elsewhere."""
    transfer_id = random.randbytes(16).hex()
    first = hand_over(streams[0], transfer_id)
    prefill.start((first,))
    if random.random() < 0.7:  # else it is fetched while it is computed
        prefill.finish([first.request_id])
    card = prefill.card
    assert card is not None
    assert card.transfer is not None
    source = KVTransfer(
        transfer_id=transfer_id,
        hand_over=False,
        host=card.transfer.host,
        port=card.transfer.port,
        engine_id=card.transfer.engine_id,
    )
    return tuple(replace(one, transfer=source) for one in streams)


def _settle(pair: Pair) -> None:
    """Wait until nothing is left of a case at either engine."""

    def is_quiet(engine: Engine) -> bool:
        stats = engine.stats
        transfer = stats.transfer
        assert transfer is not None
        return not any((stats.running, stats.waiting, transfer.leases, transfer.fetching))

    for engine in pair.engines.values():
        engine.wait(lambda engine=engine: is_quiet(engine))
