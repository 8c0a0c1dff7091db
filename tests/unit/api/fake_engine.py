"""A scripted engine with EngineClient's interface, and an ASGI client of the app.

The engine sends the tokens of its script to every stream, one in each delta; nothing is computed.
It records the requests and the streams that were closed early.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from quire.api.app import build_app
from quire.api.server_state import ServerState
from quire.base.cache_usage import CacheReport, CacheUsage
from quire.base.engine_snapshot import (
    BlockOwner,
    BlockUse,
    EngineSnapshot,
    RequestSnapshot,
    StepPrices,
    TierSnapshot,
)
from quire.base.engine_stats import EngineStats
from quire.base.errors import QuireError, WorkerError
from quire.base.log import Log
from quire.base.rare_records import POOL_SCALE, PooledSums
from quire.base.records import FinishReason, RequestTimes
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.base.timeline import TimelineReport
from quire.config.server_config import ServerConfig
from quire.config.tenants import Tenant
from quire.engine.client.request_builder import make_requests
from quire.engine.model_card import Health, ModelCard
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.output.token_text import TokenText
from quire.engine.process.messages import TimelinesReported
from quire.models.pooling_files import PoolingSpec
from quire.obs.metrics import Metrics
from quire.text.chat_template import ChatTemplate
from quire.text.template_work import Limits
from tests.unit.api.said import Reply, check_said

CARD = ModelCard(
    name="fake",
    path="/nowhere",
    max_model_len=64,
    vocab_size=256,
    eos_ids=(0,),
    fingerprint="fp_fake",
    generation_defaults={},
    dtype="f32",
    recipe="script",
    num_blocks=16,
    block_size=16,
    block_bytes=2048,
    max_num_seqs=8,
    created_s=1_700_000_000,
    pooling=PoolingSpec(pooling="last", normalizes=True, size=4, dimensions=(2,)),
)
TIMES = RequestTimes(arrival_ms=0.0, first_scheduled_ms=1.0, first_token_ms=2.0, last_token_ms=10.0)


SNAPSHOT = EngineSnapshot(
    steps_total=40,
    steps_in_flight=1,
    slots_total=8,
    running_total=1,
    waiting_total=0,
    held_total=0,
    running=(
        RequestSnapshot(
            request=3,
            tenant="",
            age_ms=12.5,
            prompt_tokens=20,
            known_tokens=24,
            computed_tokens=23,
            cached_tokens=16,
            max_tokens=64,
            blocks=2,
            preemptions=0,
        ),
    ),
    waiting=(),
    block_size=16,
    blocks_total=9,
    blocks_per_cell=1,
    owners=(
        BlockOwner(use=BlockUse.FREE, blocks=7),
        BlockOwner(use=BlockUse.RUNNING, blocks=2, request=3),
    ),
    run_lengths=np.array([2, 7], np.int32),
    run_owners=np.array([1, 0], np.int32),
    tiers=(TierSnapshot(tier="disk", blocks_total=9, blocks_used=1, fetching=0, failed=False),),
    limits={"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 96},
    step_prices=StepPrices(
        steps_timed=40, fixed_ms=2.0, token_ms=0.1, score_ms=0.1, position_ms=0.0, read_ms=0.001
    ),
)


class ByteTokenizer:
    """One id per byte; a begin-of-text token only if given. marks: special tokens."""

    def __init__(self, bos: int | None = None, marks: tuple[str, ...] = ()) -> None:
        self.bos_id = bos
        self.special_tokens: dict[str, str] = {}
        self.marks = {mark: 200 + at for at, mark in enumerate(marks)}
        self.special_ids = frozenset((() if bos is None else (bos,)) + tuple(self.marks.values()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        before = [self.bos_id] if add_special_tokens and self.bos_id is not None else []
        return [*before, *text.encode()]

    def min_num_tokens(self, text: str) -> int:
        return len(text.encode(errors="surrogatepass"))

    def token_id(self, token: str) -> int | None:
        return self.marks.get(token)

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [id_ for id_ in token_ids if id_ != self.bos_id or not skip_special_tokens]
        return bytes(kept).decode(errors="replace")


# `role:content;` for each message, then its other fields.
PLAIN_TEMPLATE = (
    "{% for document in documents or [] %}({{ document.text }}){% endfor %}"
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{{ '>' if add_generation_prompt and mood is defined }}{{ mood }}"
)
CHAT_TEMPLATES = {
    "default": PLAIN_TEMPLATE,
    "loud": "{% for message in messages %}{{ message.content | upper }}!{% endfor %}",
    "broken": "{% for %}",
    "endless": "{% for i in range(999999) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call of generate."""

    prompt_ids: list[int]
    sampling: SamplingParams
    request_id: str
    cache_salt: str
    terms: SchedulingParams = DEFAULT_SCHEDULING
    text_rules: TextRules = PLAIN_TEXT


class FakeEngine:
    """See the module docstring. `pause` is awaited before each delta except the first."""

    def __init__(self, *script: str, card: ModelCard = CARD) -> None:
        self.card = card
        self.tokenizer: Any = ByteTokenizer()
        self.template: ChatTemplate | None = ChatTemplate(
            CHAT_TEMPLATES, variables={}, limits=Limits(num_rounds=20_000)
        )
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.dead = asyncio.Event()
        self.script = script or ("Hel", "lo")
        self.defaults = SamplingParams()
        self.asked: list[Asked] = []
        self.closed_early: list[str] = []
        self.num_deltas = 0
        self.fails_with: Exception | None = None
        self.fails_after = 0
        self.last_reason = FinishReason.STOP
        self.row_error = "row 3 is NaN"
        self.pause: Callable[[], Any] | None = None
        self.cache = CacheReport(
            prefix_caching=True,
            block_size=16,
            blocks_total=9,
            blocks_used=2,
            blocks_once=3,
            blocks_again=1,
            blocks_again_most=7,
            blocks_plain=3,
            blocks_findable=5,
            ghosts=4,
            ghosts_most=36,
            queried_tokens_total=0,
            hit_tokens_total=0,
        )
        self.cache_use: CacheUsage | None = None
        self.num_prefixes_asked: list[int] = []
        self.num_flushes = 0
        self.snapshot = SNAPSHOT
        self.num_snapshots = 0
        self.reports: tuple[TimelineReport, ...] = ()
        self.kept_steps = 512
        self.kept_ms = 90_000.0
        self.timelines_asked: list[str] = []

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport:
        self.num_prefixes_asked.append(num_prefixes)
        return self.cache

    async def engine_snapshot(self) -> EngineSnapshot:
        self.num_snapshots += 1
        return self.snapshot

    async def timelines(self, request_id: str) -> TimelinesReported:
        self.timelines_asked.append(request_id)
        return TimelinesReported(
            ask_id=1,
            reports=self.reports if request_id != "?" else (),
            kept_steps=self.kept_steps,
            kept_ms=self.kept_ms,
        )

    async def flush_cache(self) -> int:
        self.num_flushes += 1
        return self.cache.blocks_findable

    def default_sampling(self) -> SamplingParams:
        return self.defaults

    def health(self) -> Health:
        dead = self.dead.is_set()
        return Health(
            ok=not dead,
            state="dead" if dead else "ready",
            reason="it was killed" if dead else "",
            pending=len(self.asked),
            steps_total=1,
        )

    def refusal(self) -> QuireError | None:
        return WorkerError("the engine is gone: it was killed") if self.dead.is_set() else None

    def num_waiting(self, request_id: str) -> int:
        return 0

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        make_requests(self.card, prompt_ids, sampling, request_id="", arrival_ms=0.0)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        first_stream: int = 0,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        text_rules: TextRules = PLAIN_TEXT,
        output_ids: Sequence[int] = (),
    ) -> AsyncGenerator[TextDelta, None]:
        self.asked.append(
            Asked(
                prompt_ids=list(prompt_ids),
                sampling=sampling,
                request_id=request_id,
                cache_salt=cache_salt,
                terms=terms,
                text_rules=text_rules,
            )
        )
        if sampling.pooling is not None:
            yield self._pooled(prompt_ids, first_stream)
            return
        complete = False
        try:
            for at, text in enumerate(self.script):
                self._step(sampling.n, sampling.n if at else len(prompt_ids))
                if self.fails_with is not None and at == self.fails_after:
                    raise self.fails_with
                if at and self.pause is not None:
                    await self.pause()
                for index in range(sampling.n):
                    self.num_deltas += 1
                    delta = self._delta(at, text, first_stream + index, len(prompt_ids), sampling)
                    if text_rules.counts_chars:
                        delta = structs.replace(delta, token_chars=(len(text),))
                    if at == index == 0 and sampling.prompt_logprobs is not None:
                        delta = structs.replace(delta, prompt_logprobs=self._scored(prompt_ids))
                    yield delta
            complete = True
        finally:
            if not complete:
                self.closed_early.append(request_id)

    def _scored(self, prompt_ids: Sequence[int]) -> list[TokenText | None]:
        """Return rank 3 and logprob -at at position `at`; one alternative, which is impossible."""
        other = TokenText(token_id=99, text="c", raw=b"c", logprob=float("-inf"), rank=1)
        return [
            None,
            *(
                TokenText(
                    token_id=token_id,
                    text=chr(token_id),
                    raw=bytes([token_id]),
                    logprob=-float(at),
                    rank=3,
                    top=(other, other),
                    start_chars=at,
                )
                for at, token_id in enumerate(prompt_ids[1:], start=1)
            ),
        ]

    def _pooled(self, prompt_ids: Sequence[int], index: int) -> TextDelta:
        """Return the only delta of a prompt that is pooled: sum of its ids, its length, 1, 0."""
        row = np.array([[sum(prompt_ids), len(prompt_ids), 1, 0]], np.int64) * int(POOL_SCALE)
        counted = np.ones(1, np.int32)
        return TextDelta(
            index=index,
            text="",
            token_ids=(),
            logprobs=(),
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
            num_prompt_tokens=len(prompt_ids),
            cached_tokens=0,
            num_output_tokens=0,
            times=TIMES,
            seed=0,
            error=None,
            pooled=PooledSums(rows=np.zeros(1, np.int32), counts=counted, sums=row),
        )

    def _step(self, rows: int, tokens: int) -> None:
        steps = self.stats.steps_total + 1
        self.stats = EngineStats(steps_total=steps, step_rows=rows, step_tokens=tokens)
        if self.on_stats is not None:
            self.on_stats(self.stats)

    def _delta(
        self, at: int, text: str, index: int, num_prompt_tokens: int, sampling: SamplingParams
    ) -> TextDelta:
        last = at == len(self.script) - 1
        start_chars = len("".join(self.script[:at]))
        token = TokenText(
            token_id=at,
            text=text,
            raw=text.encode(),
            logprob=-0.5,
            start_chars=start_chars,
            listed=tuple(
                TokenText(token_id=id_, text=chr(id_), raw=bytes([id_]), logprob=-float(id_))
                for id_ in sampling.logprob_token_ids
            ),
        )
        other = TokenText(token_id=99, text="no", raw=b"n\xff", logprob=float("-inf"))
        return TextDelta(
            index=index,
            text=text,
            token_ids=(at,),
            logprobs=(replace(token, top=(replace(token, listed=()), other)),)
            if sampling.logprobs is not None
            else (),
            finish_reason=self.last_reason if last else None,
            stop_reason="END" if last else None,
            num_prompt_tokens=num_prompt_tokens,
            cached_tokens=2,
            num_output_tokens=at + 1,
            times=TIMES,
            seed=7 if sampling.seed is None else sampling.seed,
            cache_use=self.cache_use,
            error=self.row_error if last and self.last_reason is FinishReason.ERROR else None,
        )


class Site:
    """An app on a FakeEngine, called without sockets. Create it inside a running loop."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        tenants: Sequence[Tenant] | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.log = io.StringIO()
        log = Log("test", self.log)
        self.server_state = ServerState(ServerConfig(**settings), Metrics(), log, tenants)
        self.server_state.start(self.engine)
        self.app = build_app(self.server_state)

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        """Post a body. Infinities in `body` are written as 1e999, which JSON reads as infinity."""
        raw = body
        if not isinstance(body, bytes):
            raw = json.dumps(body).replace("Infinity", "1e999").encode()
        return await self.call("POST", path, raw, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.call("GET", path, b"", **options)

    async def call(
        self,
        method: str,
        path: str,
        raw: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        gone: asyncio.Event | None = None,
        on_part: Callable[[bytes], Any] | None = None,
        part_bytes: int = 1 << 30,
        cut_short: bool = False,
        query: bytes = b"",
        client: tuple[str, int] | None = ("127.0.0.1", 1),
    ) -> Reply:
        """Run one exchange. `gone`: when set, the client disconnects. `on_part` is awaited for each
        part.

            cut_short: the client disconnects before the body's end.
        """
        reply = Reply()
        pieces = [raw[at : at + part_bytes] for at in range(0, len(raw), part_bytes)] or [b""]

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {
                    "type": "http.request",
                    "body": piece,
                    "more_body": bool(pieces) or cut_short,
                }
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            reply.parts.append(message.get("body", b""))
            reply.complete = not message.get("more_body", False)
            if on_part is not None:
                await on_part(reply.parts[-1])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": client,
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)  # type: ignore[arg-type]
        if reply.complete:
            check_said(method, path.removeprefix(self.server_state.config.root_path) or "/", reply)
        return reply

    def metric(self, name: str) -> float:
        """The value of a sample, as /metrics shows it; 0 where it is not shown."""
        for line in self.server_state.scrape().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0
