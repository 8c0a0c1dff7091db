"""TorchExecutor: runs a program with PyTorch and Triton, on a GPU, or on CPU tensors to be tested.

Runs the steps over the executor's buffers (device_buffers.py, kv_pool.py). On a GPU operations are
kernels (kernel_ops.py), on CPU tensors plain PyTorch (ops.py); steps up to some size are replayed
from captured graphs (graphs.py). Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.base.errors import CapacityError, WorkerError
from quire.config.memory import mib
from quire.execute.batch_check import check_batch, check_range, num_ids
from quire.execute.executor import StepLimits
from quire.execute.gpu.block_port import BlockPort
from quire.execute.gpu.device import device_errors, first_line
from quire.execute.gpu.device_buffers import attention_steps, rope_angles, step_arena, step_sizes
from quire.execute.gpu.exchange import ALONE, RankEnds
from quire.execute.gpu.graphs import Capture, Graphs
from quire.execute.gpu.host_choice import choose_on_host, score_on_host
from quire.execute.gpu.kv_pool import KvPool
from quire.execute.gpu.last_tokens import LastTokens
from quire.execute.gpu.load import Loaded
from quire.execute.gpu.offload import LayerStream, parts_of
from quire.execute.gpu.offload_plan import NO_OFFLOAD, OffloadPlan
from quire.execute.gpu.ops import bind_plain, products_of
from quire.execute.gpu.place import Call, GatherBuffers, Place, no_loads
from quire.execute.gpu.step_buffers import Counts, StepBuffers
from quire.execute.gpu.step_sizes import Size, Sizes, max_mixed
from quire.execute.gpu.stream import Stream, stream_of
from quire.program.batch import ForwardBatch
from quire.program.forms import IdSource
from quire.program.ops import Embed, Feed
from quire.program.program import Program
from quire.program.tensors import Rows
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

Bytes = NDArray[np.uint8]
Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

SEGMENTS = ("trunk", "head", "pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How steps are launched.

    kernels: whether Triton kernels compute them, in its interpreter if the device is the CPU; None:
    on a GPU only. capture: how steps are captured, to be replayed; None: each is launched kernel by
    kernel. stream: in place of the device's own, for tests. offload: layers with matrices in host
    memory, where `load` has kept them; their steps are not captured. ends: what a rank exchanges
    with other ranks through.
    """

    kernels: bool | None = None
    capture: Capture | None = None
    stream: Stream | None = None
    offload: OffloadPlan = NO_OFFLOAD
    ends: RankEnds = ALONE


DEFAULT_LAUNCH = LaunchOptions()


class TorchExecutor:
    """An Executor (see quire/execute/executor.py). poison: fill buffers with NaN before each run,
    for tests. pool: of another executor, in place of its own."""

    name = "torch"

    def __init__(
        self,
        program: Program,
        weights: Loaded,
        *,
        device: torch.device,
        exact: bool,
        limits: StepLimits,
        launch: LaunchOptions = DEFAULT_LAUNCH,
        poison: bool = False,
        pool: KvPool | None = None,
    ) -> None:
        self._stream = stream_of(device) if launch.stream is None else launch.stream
        self.recipe = recipe_of(device, exact=exact)
        self.weights_digest, self.coarse_rows = weights.digest, weights.coarse_rows
        self._num_done = 0
        self._program, self._device, self._poison = program, device, poison
        self._limits, self._num_ids = limits, num_ids(program)
        self._has_positions = bool(program.ropes) or any(
            isinstance(op, Embed) and op.ids is IdSource.POSITIONS for op in program.operations()
        )
        self._arena, buffers = step_arena(program, limits, device)
        runs_kernels = device.type != "cpu" if launch.kernels is None else launch.kernels
        self._attention = attention_steps(program, limits, device, exact) if runs_kernels else None
        self._step = StepBuffers(
            **step_sizes(program, limits, device),
            device=device,
            others={} if self._attention is None else self._attention.sizes(),
            stream=self._stream,
        )
        self._last = LastTokens(limits.max_sequences, self._stream, device, by_kernels=runs_kernels)
        self._pool = KvPool(program, device, self._stream) if pool is None else pool
        self._port: BlockPort | None = None
        self._unpins: list[Callable[[], None]] = []
        self.layer_stream: LayerStream | None = None
        if launch.offload.layers:
            self.layer_stream = LayerStream(launch.offload, weights, device, self._stream)
            weights = self.layer_stream.weights
        self._place = Place(
            program=program,
            buffers=buffers,
            weights=weights,
            ropes=[rope_angles(spec, program.max_positions, device) for spec in program.ropes],
            step=self._step,
            pool=self._pool.blocks,
            exact=exact,
            ends=launch.ends,
            room=GatherBuffers.of(program, limits, device),
            loads=no_loads(program, device),
        )
        bind_segment = self._binder(limits)
        self._calls: dict[str, list[Call]] = {
            segment: bind_segment(segment) for segment in SEGMENTS
        }
        self._parts = self._trunk_parts()
        self._counts: Counts | None = None
        self._head_of: tuple[ForwardBatch, int] | None = None  # its logits are computed already
        self.sizes = Sizes(limits, mixed=max_mixed(program, len(self._calls["trunk"])))
        capture = launch.capture if launch.ends.is_captured else None
        if any(isinstance(op, Feed) for op in program.operations()):
            capture = None  # features come from the host with each step
        if any(cache.ranks > 1 for cache in program.caches):
            capture = None  # how many parts of attention are exchanged differs from step to step
        self._graphs = None if capture is None else Graphs(capture)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool of zeros."""
        self._allocate(num_blocks, block_size)

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Nothing: a device's memory is there when it is allocated."""

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Copy whole pool blocks over all layers, in order."""
        self._pool.copy(copy_from, copy_to)

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""
        return self._pool.block_bytes

    def export_block(self, block: int, out: Bytes) -> None:
        """Copy a pool block's raw bytes over all layers, values before scales, to out."""
        self.export_blocks(np.array([block], np.int32), [out])()

    def import_block(self, block: int, raw: Bytes) -> None:
        """Make a pool block what export_block gave."""
        self.import_blocks(np.array([block], np.int32), [raw])

    def begin_moving(self, num_blocks: int) -> None:
        """See AsyncExecutor."""
        if self._port is None or self._port.rows < num_blocks:
            self._port = None  # first: there may be no room for both
            self._port = BlockPort(self._pool, self._device, self._stream, rows=num_blocks)

    def host_memory(self, num_bytes: int) -> Bytes:
        """See AsyncExecutor."""
        with self._pinning(num_bytes):
            memory: Bytes = self._stream.host_memory(num_bytes).numpy()
        return memory

    def pin(self, memory: Bytes) -> None:
        """See AsyncExecutor."""
        with self._pinning(memory.nbytes):
            self._unpins.append(self._stream.pin(torch.from_numpy(memory)))

    def export_blocks(self, blocks: Int32s, outs: Sequence[Bytes]) -> Callable[[], None]:
        """See AsyncExecutor."""
        with device_errors("copies of blocks to the host"):
            there = self._moving().take_out(blocks, outs)

        def wait() -> None:
            with device_errors("copies of blocks to the host"):
                there()

        return wait

    def import_blocks(self, blocks: Int32s, raws: Sequence[Bytes]) -> None:
        """See AsyncExecutor."""
        with device_errors("copies of blocks from the host"):
            self._moving().bring_in(blocks, raws)

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Compute the trunk segment for all token rows of the batch."""
        self._check(batch)
        if self._poison:
            self._stream.do(self._fill_with_nan)
        self._head_of = None
        with device_errors("a step"):
            size = None if self._graphs is None else self.sizes.of(batch)
            if self._graphs is not None and size is not None:
                self._counts = self._replayed(self._graphs, size, batch, head_rows)
            else:
                self._counts = self._load(batch)
                self._run("trunk", self._counts)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Any:
        """Return logits of batch.sample_rows[first:first+count]: an array on the CPU; on another
        device a tensor, to be handed to `sample` and `score`. Valid until the next call."""
        self._check_fits(Rows.SAMPLES, count)
        assert self._counts is not None, "the trunk runs before the head"
        counts = self._counts.of_samples(count)
        there, self._head_of = self._head_of, None
        if there is None or there[0] is not batch or (0, there[1]) != (first, count):
            self._run_head(batch.sample_rows[first : first + count], counts)
        logits = self._place.of(self._program.outputs["logits"], counts)
        is_array = self._device.type == "cpu" and self._attention is None
        return logits.numpy() if is_array else logits

    def run_pool(self, batch: ForwardBatch, first: int, count: int) -> Float32s:
        """See PoolingExecutor: an array on the host; waits for the device."""
        self._check_fits(Rows.SAMPLES, count)
        assert self._counts is not None, "the trunk runs before rows are pooled"
        counts = self._counts.of_samples(count)
        with device_errors("pooled rows"), self._stream.here():
            self._step.load_samples(batch.sample_rows[first : first + count])
            self._run("pool", counts)
            self._stream.mark().wait()
            rows = self._place.of(self._program.outputs["pooled"], counts)
            pooled: Float32s = rows.float().cpu().numpy().copy()
        return pooled

    def output(self, name: str, num_rows: int) -> Float32s:
        """See TappedExecutor: an array on the host; waits for the device."""
        assert self._counts is not None, "nothing has run"
        view = self._program.outputs[name]
        with device_errors("hidden states"), self._stream.here():
            self._stream.mark().wait()
            rows = self._place.buffers[view.buffer.index][:num_rows]
            columns = rows[:, view.offset : view.offset + view.width]
            values: Float32s = columns.float().cpu().numpy().copy()
        return values

    @property
    def ops_done(self) -> int:
        """See Executor."""
        return self._num_done

    @property
    def expert_loads(self) -> list[list[int]]:
        """How often rows have chosen each expert, by mixture."""
        return [load.tolist() for load in self._place.loads.values()]

    @property
    def steps_replayed(self) -> int:
        """Of those that ran so far; the others were launched kernel by kernel."""
        return 0 if self._graphs is None else self._graphs.num_replayed

    @property
    def weights(self) -> Loaded:
        """What it computes with, on its device."""
        return self._place.weights

    def sample(self, logits: Any, batch: SampleBatch) -> TokenChoice:
        """Choose a token for each row of `logits`: by kernels where they lie on the device."""
        if isinstance(logits, np.ndarray):
            self._stream.mark().wait()
            return choose_on_host(logits, batch)
        from quire.execute.gpu.choice import choose

        with device_errors("token choice"), self._stream.here():
            return choose(logits.float().contiguous(), batch, choose_on_host, self._stream)

    def sample_later(
        self, logits: Any, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        """See AsyncExecutor."""
        check_range("slots", slots, 0, len(self._last))
        if batch.history is not None and batch.history.late_slots is not None:
            check_range("late_slots", batch.history.late_slots, -1, len(self._last))
        if isinstance(logits, np.ndarray):
            return self._sample_plain_later(logits, batch, slots)
        from quire.execute.gpu.choice import choose_later
        from quire.execute.gpu.kernels.device_params import rows_for_the_host

        if rows_for_the_host(batch).any():
            raise ValueError("some of these rows are chosen on the host: sample does it")
        with device_errors("token choice"), self._stream.here():
            chosen = choose_later(
                logits.float().contiguous(),
                batch,
                self._stream,
                last=self._last.tokens,
                keep=lambda token_ids: self._last.keep(slots, token_ids),
            )

        def wait() -> TokenChoice:
            with device_errors("a step"):
                return chosen.wait()

        return wait

    def mark(self) -> Callable[[], None]:
        """See AsyncExecutor."""
        mark = self._stream.mark(sleeps=True)

        def wait() -> None:
            with device_errors("a step"):
                mark.wait()

        return wait

    def score(self, logits: Any, batch: ScoreBatch) -> Scores:
        """Return how likely known tokens are, by the rows of `logits` (which are only read)."""
        if isinstance(logits, np.ndarray):
            self._stream.mark().wait()
            return score_on_host(logits, batch)
        from quire.execute.gpu.choice import score

        with device_errors("scores"), self._stream.here():
            return score(logits.float(), batch, self._stream)

    def close(self) -> None:
        """Let go of weights, buffers and cache; further calls are errors."""
        for unpin in self._unpins:
            unpin()
        self._unpins = []
        self._pool.free()
        self._port = self._attention = self._graphs = self.layer_stream = None
        self._calls, self._counts, self._head_of = {}, None, None
        self._leave()
        del self._place, self._arena, self._step, self._last

    # ---- private

    def _leave(self) -> None:
        """Leave the other ranks."""
        if (exchange := self._place.ends.exchange) is not None:
            exchange.close()

    def _allocate(self, num_blocks: int, block_size: int, memory: Bytes | None = None) -> None:
        """Make the KV pool; memory: see KvPool."""
        if self._graphs is not None:
            self._graphs.clear()
        self._port = None
        self._pool.allocate(num_blocks, block_size, memory)

    @contextmanager
    def _pinning(self, num_bytes: int) -> Iterator[None]:
        """Raise CapacityError where host memory cannot be pinned."""
        try:
            yield
        except RuntimeError as error:  # out of memory, a limit, a system that pins none
            raise CapacityError(
                f"the system has no {mib(num_bytes)} of memory that it keeps in place for "
                f"{self._device} (pinned memory): {first_line(error)}"
            ) from error

    def _moving(self) -> BlockPort:
        if self._port is None:
            self.begin_moving(1)
        assert self._port is not None
        return self._port

    def _binder(self, limits: StepLimits) -> Callable[[str], list[Call]]:
        if self._attention is None:
            return lambda segment: bind_plain(segment, self._place)
        from quire.execute.gpu.context_steps import ContextSteps
        from quire.execute.gpu.expert_kernels import ExpertScratch
        from quire.execute.gpu.kernel_ops import KernelOps
        from quire.execute.gpu.products import Products, Scratch

        scratch = Scratch.of(self._program, limits, self._device)
        products = Products(self._place, scratch)
        experts = ExpertScratch.of(self._program, limits, self._device)
        context = ContextSteps(self._place, self._stream, exact=self._place.exact)
        ops = KernelOps(self._place, self._attention, products, experts, context)
        return ops.bind_segment

    def _load(self, batch: ForwardBatch, size: Size | None = None) -> Counts:
        if self._attention is None:
            return self._step.load(batch, size=size)
        plan = self._attention.plan(batch, size=size)
        counts = self._step.load(batch, size=size, others=plan)
        self._attention.mirror(self._step.others)
        return counts

    def _replayed(self, graphs: Graphs, size: Size, batch: ForwardBatch, head_rows: int) -> Counts:
        """Return a step as one of a size; with its head where that is one slice: a row a sequence,
        or all rows where sequences sample several, as those with draft tokens do."""
        samples = 0
        if 0 < head_rows == len(batch.sample_rows):
            fitting = (rows for rows in size.sample_rows if rows <= self._limits.max_samples)
            samples = next((rows for rows in fitting if head_rows <= rows), 0)
        counts = self._load(batch, size).of_samples(samples)

        def body() -> None:
            self._launch("trunk", counts)
            if samples:
                self._launch("head", counts)

        is_broadcast = self._place.ends.exchange is not None and bool(len(batch.late_slots))
        key = size, samples, batch.keeps_taps, is_broadcast
        self._stream.do(lambda: graphs.run(key, body))
        if samples:
            self._head_of = batch, head_rows
        return counts

    def _run(self, segment: str, counts: Counts) -> None:
        """Have a segment computed."""
        if segment != "trunk" or self.layer_stream is None:
            self._stream.do(lambda: self._launch(segment, counts))
            return
        self._stream.do(lambda: self._take_last(counts))
        calls = self._calls["trunk"]
        self.layer_stream.run(
            [
                (layer, partial(self._launch_calls, calls[first:end], counts))
                for layer, first, end in self._parts
            ]
        )

    def _launch(self, segment: str, counts: Counts) -> None:
        if segment == "trunk":
            self._take_last(counts)
        self._launch_calls(self._calls[segment], counts)

    def _take_last(self, counts: Counts) -> None:
        self._last.take(self._step.token_ids, self._step.late_slots, counts.tokens)
        exchange = self._place.ends.exchange
        if exchange is not None and len(counts.batch.late_slots):
            # Tokens are chosen by the first rank only.
            exchange.broadcast(self._step.token_ids[: counts.tokens])

    def _launch_calls(self, calls: Sequence[Call], counts: Counts) -> None:
        for call in calls:
            call(counts)
            self._num_done += 1

    def _trunk_parts(self) -> list[tuple[int | None, int, int]]:
        """Return runs of the trunk's calls, with the offloaded layer that each reads, if any."""
        if self.layer_stream is None:
            return []
        if self._attention is None:
            weights = products_of(self._program.segments["trunk"])
        else:
            from quire.execute.gpu.kernel_ops import products_of_launches

            weights = products_of_launches(self._program, "trunk")
        return parts_of(weights, self.layer_stream.layer_of)

    def _fill_with_nan(self) -> None:
        for buffer in self._place.buffers:
            buffer.fill_(torch.nan)

    def _sample_plain_later(
        self, logits: Float32s, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        """On CPU tensors: the device is this thread, sooner or later."""
        found: list[TokenChoice] = []

        def choose() -> None:
            found.append(choose_on_host(logits, batch.completed(self._last.tokens.numpy())))
            self._last.put(slots, found[0].token_ids)

        self._stream.do(choose)
        mark = self._stream.mark()

        def wait() -> TokenChoice:
            mark.wait()
            return found[0]

        return wait

    def _run_head(self, sample_rows: Int32s, counts: Counts) -> None:
        with device_errors("a step's head"):
            self._step.load_samples(sample_rows)
            self._run("head", counts)

    def _check(self, batch: ForwardBatch) -> None:
        has_cache, pool = bool(self._program.caches), self._pool
        self._check_fits(Rows.TOKENS, len(batch.token_ids))
        self._check_fits(Rows.SEQUENCES, len(batch.seq_starts) - 1)
        check_batch(
            batch if has_cache else replace(batch, caches=()),
            vocab_size=self._num_ids,
            num_blocks=pool.num_blocks if has_cache else 1,
            block_size=pool.block_size if has_cache else 1,
            num_slots=len(self._last),
        )
        if self._has_positions:
            check_range("rope_positions", batch.rope_positions, 0, self._program.max_positions)

    def _check_fits(self, rows: Rows, count: int) -> None:
        if not self._calls:
            raise WorkerError("this executor is closed; nothing can be run with it")
        most = self._limits.rows(rows)
        if count > most:
            raise ValueError(f"a step of {count} {rows}; at most {most} are allowed")


def recipe_of(device: torch.device, *, exact: bool) -> str:
    """Return what bits depend on beside the program: the device's kind, its libraries and the
    compiler of its kernels, the mode."""
    mode = "exact" if exact else "fast"
    if device.type != "cuda":  # elementwise: see plain_curves.py
        return f"torch-{device.type}-elementwise-{torch.__version__}-{mode}"
    from triton import __version__ as triton_version

    major, minor = torch.cuda.get_device_capability(device)
    kind = f"torch-{device.type}-sm{major}{minor}-{torch.__version__}"
    return f"{kind}-triton{triton_version}-{mode}"
