"""Prefill and decode in two engines: the tokens and logprobs of one engine, for every model.

Drawn requests of One Answer run on three engines: one that computes them whole, one that hands
their prompts over, and one that fetches these while it decodes others. Every third case loses its
prefill engine on the way. The same with disk tiers beside the exchange, with engines of one and of
two ranks, and with drafts of the decode engine.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.base.engine_stats import EngineStats
from quire.base.kv_transfer import KVTransfer
from quire.base.rare_records import Speculation
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.config.flags import engine_config
from quire.engine.assembly import drafter
from quire.engine.client.thread_link import EngineThread
from quire.engine.model_card import ModelCard
from quire.engine.process.messages import Failed, FromEngine, Outputs, Ready, Refused, Submit
from quire.program.tensors import DType
from quire.speculative.control import FixedControl
from quire.speculative.rests import NoRests
from quire.transfer.links import nixl
from tests.draft_heads import eagle_tensors, write_eagle
from tests.exact.rig import Model, Stream
from tests.exact.workload import MAX_MODEL_LEN, VOCAB_SIZE, draw_case
from tests.tiny_models import write_tiny_llama

FIRST_CASE = int(os.environ.get("QUIRE_DISAGGREGATION_FIRST", "700"))
NUM_CASES = int(os.environ.get("QUIRE_DISAGGREGATION_CASES", "12"))
GIVE_UP_S = 120.0
MIN_FETCHED_BLOCKS = 60  # of all cases
TIERS = {"kv_tier_path", "kv_tier_host_size"}


class Engine:
    """An engine in a thread, and the streams that it has given."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self._changed = threading.Condition()
        self.streams: dict[str, Stream] = {}
        self.stats = EngineStats()
        self.card: ModelCard | None = None
        self.failed = ""
        config = engine_config(
            {
                "model": str(model.folder),
                "dtype": model.dtype.value,
                "quantization": model.precision,
                "kv_cache_dtype": model.kv_cache_dtype,
                "threads": 1,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 6,
                "kv_touch_ahead": 0,
                "kv_cache_memory": "16MiB",
                **settings,
            }
        )
        self._thread = EngineThread(config, self._take)
        self.wait(lambda: self.card is not None)

    def start(self, requests: Sequence[Request]) -> None:
        """Submit the streams of one request."""
        for request in requests:
            self.streams[request.request_id] = Stream()
        self._thread.send(Submit(requests=tuple(requests)))

    def finish(self, ids: Sequence[str]) -> None:
        """Wait until these streams have ended."""
        self.wait(lambda: all(self.streams[id_].finish_reason is not None for id_ in ids))

    def save_some(self) -> None:
        """Compute further prompts until an output reports that a block was saved to a tier."""
        random, end_s = Random(0), time.monotonic() + GIVE_UP_S
        for number in itertools.count():
            if self.stats.tier_saved_blocks_total:
                return
            assert time.monotonic() < end_s, self.stats
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(MAX_MODEL_LEN // 2)]
            request = Request(
                request_id=f"more {number}",
                group_id=f"more {number}",
                stream=0,
                prompt_ids=np.array(prompt, np.int32),
                sampling=SamplingParams(seed=0, max_tokens=1),
                stop_ids=(),
                max_total_tokens=len(prompt) + 1,
                arrival_ms=0.0,
            )
            self.start((request,))
            self.finish([request.request_id])

    def end(self) -> None:
        """Stop the engine. Raises AssertionError where it hangs."""
        assert self._thread.end()

    def wait(self, condition: Any) -> None:
        """Wait until a condition holds; it is looked at with each output."""
        with self._changed:
            done = self._changed.wait_for(lambda: condition() or self.failed, GIVE_UP_S)
        assert not self.failed, self.failed
        assert done, self.streams

    def _take(self, message: FromEngine) -> None:
        with self._changed:
            if isinstance(message, Ready):
                self.card = message.card
            elif isinstance(message, Failed | Refused):
                self.failed = message.fault.message
            elif isinstance(message, Outputs):
                self.stats = message.stats
                for output in message.outputs or ():
                    self.streams[output.request_id].take(output)
            self._changed.notify_all()


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.end()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text("a key that both sides have")
    path.chmod(0o600)
    return path


def drawn(number: int, num_models: int) -> tuple[int, list[tuple[Request, ...]]]:
    """Return the number of a model, and the requests of a case without what needs a tokenizer."""
    case = draw_case(number, num_models=num_models, vocab_size=VOCAB_SIZE)
    found, random = [], Random(f"prompts {number}")
    for arrival in case.arrivals:
        sampling = arrival.requests[0].sampling
        needs_text = sampling.structured_outputs is not None or sampling.use_beam_search
        if not needs_text and sampling.max_tokens != 0 and sampling.pooling is None:
            found.append(_longer(arrival.requests, random))
    return case.model, found


def _longer(requests: tuple[Request, ...], random: Random) -> tuple[Request, ...]:
    """Return requests with a longer prompt, which has some blocks, and no objectives."""
    room = max(MAX_MODEL_LEN - max(one.max_total_tokens for one in requests), 0)
    more = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(room + 1))]
    return tuple(
        replace(
            one,
            prompt_ids=np.concatenate((np.array(more, np.int32), one.prompt_ids)),
            max_total_tokens=one.max_total_tokens + len(more),
            deadline_ms=None,
            ttft_slo_ms=None,
            tenant="",
            speculation=None,
        )
        for one in requests
    )


def hand_over(request: Request, transfer_id: str) -> Request:
    """Return the request of a prefill engine."""
    return replace(
        request,
        request_id=f"p {request.request_id}",
        group_id=f"p {request.group_id}",
        sampling=replace(request.sampling, max_tokens=1, min_tokens=0, prompt_logprobs=None),
        max_total_tokens=len(request.prompt_ids) + 1,
        transfer=KVTransfer(transfer_id=transfer_id, hand_over=True),
    )


def nixl_is_installed() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in nixl.PACKAGES)


Settings = dict[str, Any]


def test_two_engines_give_the_answers_of_one(models: list[Model], key: Path) -> None:
    numbers = range(FIRST_CASE, FIRST_CASE + NUM_CASES)
    seen = compare_pairs(numbers, models, key, {}, {})
    if NUM_CASES >= 12:
        assert seen["fetched"] >= MIN_FETCHED_BLOCKS, seen
        assert seen["unreachable"] + seen["cut"], seen


@pytest.mark.parametrize("with_tiers", ["prefill", "decode", "both"])
def test_disk_tiers_beside_the_exchange_change_no_answer(
    models: list[Model], key: Path, tmp_path: Path, with_tiers: str
) -> None:
    """Pools are small, so that blocks go to the tier and come back in the middle of a prompt."""

    def tier(role: str) -> Settings:
        if with_tiers not in (role, "both"):
            return {}
        settings = {"kv_tier_path": str(tmp_path / role), "kv_tier_size": "4MiB"}
        return {**settings, "kv_tier_fetch": "always"}

    # The last case loses no engine, so that one is there to save blocks.
    numbers = range(FIRST_CASE + 201, FIRST_CASE + 201 + max(NUM_CASES // 3, 1))
    seen = compare_pairs(numbers, models[3:4], key, tier("prefill"), tier("decode"))
    if NUM_CASES >= 12:
        assert seen["fetched"], seen
        assert seen["saved"], seen


@pytest.mark.parametrize(
    "layouts",
    [
        ("tensor", ""),
        ("", "pipeline"),
        ("pipeline", "tensor"),
    ],
    ids=lambda layouts: " to ".join(layout or "one" for layout in layouts),
)
def test_ranks_of_either_side_change_no_answer(
    key: Path, tmp_path: Path, layouts: tuple[str, str]
) -> None:
    """Blocks are the same bytes in every layout: heads divided over ranks, or the same at both, or
    layers divided over stages."""
    divided = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shared = {"num_attention_heads": 4, "num_key_value_heads": 1}
    llama = write_tiny_llama(tmp_path / "divided", seed=25, hidden_size=68, **divided)
    other = write_tiny_llama(tmp_path / "shared", seed=26, dtype="bf16", **shared)
    models = [Model(llama, DType.F32, "none", "int8"), Model(other, DType.BF16)]
    ranks = [
        {f"{layout}_parallel_size": 2, "threads": 2} if layout else {"threads": 1}
        for layout in layouts
    ]
    numbers = range(FIRST_CASE + 300, FIRST_CASE + 300 + max(NUM_CASES // 4, 1))
    seen = compare_pairs(numbers, models, key, *ranks)
    if NUM_CASES >= 12:
        assert seen["fetched"], seen
        assert not seen["refused"], seen


@pytest.mark.skipif(not nixl_is_installed(), reason="NIXL is not installed")
def test_blocks_through_nixl_change_no_answer(models: list[Model], key: Path) -> None:
    backend = {"kv_transfer_backend": "nixl"}
    numbers = range(FIRST_CASE + 400, FIRST_CASE + 400 + max(NUM_CASES // 4, 1))
    seen = compare_pairs(numbers, models[3:4], key, backend, backend)
    if NUM_CASES >= 12:
        assert seen["fetched"], seen
        assert not seen["refused"], seen


@pytest.mark.parametrize("proposer", ["ngram", "draft", "self", "eagle"])
def test_drafts_of_the_decode_engine_change_no_answer(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """Its prompts come from elsewhere, so that a draft model computes them itself, first layers
    read the blocks that came, and a head begins where hidden states do."""
    monkeypatch.setattr(drafter, "AdaptiveControl", lambda *_: FixedControl(3, NoRests()))
    llama = write_tiny_llama(tmp_path / "model", seed=27, num_hidden_layers=3)
    model = Model(llama, DType.F32)
    hidden = {"hidden_size": model.program.outputs["hidden"].width, "vocab_size": VOCAB_SIZE}
    head = write_eagle(tmp_path / "head", eagle_tensors(**hidden), **hidden)
    own: dict[str, Settings] = {
        "draft": {"draft_model": str(llama)},
        "self": {"self_draft_layers": 2},
        "eagle": {"draft_model": str(head)},
    }
    settings = {"speculate": proposer, **own.get(proposer, {})}
    numbers = range(FIRST_CASE + 500, FIRST_CASE + 500 + max(NUM_CASES // 3, 3))
    seen = compare_pairs(numbers, [model], key, {}, settings)
    assert seen["fetched"], seen
    assert seen["drafted"], seen
    if proposer == "draft":
        assert seen["accepted"] > 0.9 * seen["drafted"], seen


def compare_pairs(
    numbers: Sequence[int],
    models: Sequence[Model],
    key: Path,
    of_prefill: Settings,
    of_decode: Settings,
    of_all: Settings | None = None,
) -> Counter[str]:
    """Compare the cases on pairs with one engine each; return what happened. of_all: settings that
    the one engine has too. Requests speculate at the decode engine, if that does."""
    lines: list[str] = []
    seen: Counter[str] = Counter()
    by_model: dict[int, list[int]] = {}
    for number in numbers:
        by_model.setdefault(drawn(number, len(models))[0], []).append(number)
    for at, cases in by_model.items():
        shared = {"kv_transfer_key_file": str(key), "kv_transfer_size": "4MiB", **(of_all or {})}
        whole = Engine(models[at], **(of_all or {}))
        assert whole.card is not None
        # Ranks may have the same heads, in as much memory each.
        blocks = 36 * of_decode.get("tensor_parallel_size", 1)
        memory = blocks * whole.card.block_bytes
        few = {"kv_cache_memory": memory, "max_num_batched_tokens": 40}
        handing = {"role": "prefill", **shared, "max_num_batched_tokens": 48, **of_prefill}
        if of_prefill.keys() & TIERS:
            handing["kv_cache_memory"] = few["kv_cache_memory"]
        prefill = Engine(models[at], **handing)
        decode = Engine(models[at], **{"role": "decode", **shared, **few, **of_decode})
        with running(whole, prefill, decode):
            for number in cases:
                is_lost = number % 3 == 0
                lines += _compare(number, len(models), whole, prefill, decode, is_lost=is_lost)
                if is_lost:
                    seen["saved"] += prefill.stats.tier_saved_blocks_total
                    prefill = Engine(models[at], **handing)
            for engine, settings in ((prefill, of_prefill), (decode, of_decode)):
                if settings.keys() & TIERS:
                    engine.save_some()
                seen["saved"] += engine.stats.tier_saved_blocks_total
            prefill.end()
            transfer = decode.stats.transfer
            assert transfer is not None
            seen["fetched"] += transfer.received_blocks_total
            seen["transfers"] += transfer.transfers_total
            seen["drafted"] += sum(decode.stats.draft_tokens_total)
            seen["accepted"] += sum(decode.stats.accepted_draft_tokens_total)
            seen.update(dict(transfer.failures_total))
    assert not lines, "\n".join(lines[:5])
    return seen


def _compare(
    number: int,
    num_models: int,
    whole: Engine,
    prefill: Engine,
    decode: Engine,
    *,
    is_lost: bool,
) -> list[str]:
    """Run one case on the pair and on one engine; return the streams that differ."""
    random, requests = Random(number), drawn(number, num_models)[1]
    card, card_of_decode = prefill.card, decode.card
    assert card is not None
    assert card_of_decode is not None
    assert card.transfer is not None
    fetched = []
    for streams in requests:
        transfer_id = random.randbytes(16).hex()
        first = hand_over(streams[0], transfer_id)
        prefill.start((first,))
        if random.random() < 0.7:  # else it is fetched while it is computed
            prefill.finish([first.request_id])
        source = KVTransfer(
            transfer_id=transfer_id,
            hand_over=False,
            host=card.transfer.host,
            port=card.transfer.port,
            engine_id=card.transfer.engine_id,
        )
        drafts = Speculation(max_drafts=8) if card_of_decode.speculates else None
        fetched.append(tuple(replace(one, transfer=source, speculation=drafts) for one in streams))
    for at, streams in enumerate(fetched):
        whole.start([replace(one, transfer=None, speculation=None) for one in streams])
        decode.start(streams)
        if is_lost and at == len(fetched) // 2:
            prefill.end()
    ids = [one.request_id for streams in fetched for one in streams]
    whole.finish(ids)
    decode.finish(ids)
    return [
        f"case {number}, {id_}: {decode.streams[id_]}, wanted {whole.streams[id_]}"
        for id_ in ids
        if (decode.streams[id_].tokens, decode.streams[id_].finish_reason)
        != (whole.streams[id_].tokens, whole.streams[id_].finish_reason)
        or repr(decode.streams[id_].scores) != repr(whole.streams[id_].scores)
    ]
