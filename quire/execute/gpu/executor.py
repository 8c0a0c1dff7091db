"""TorchExecutor: runs a program with PyTorch and Triton, on a GPU, or on CPU tensors to be tested.

Owns the device's weights, buffers, the step's numbers and the KV pool. On a GPU operations are
kernels (kernel_ops.py), on CPU tensors plain PyTorch (ops.py); steps of one token a sequence are
replayed from captured graphs (graphs.py). Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import CapacityError, ModelError, SettingError, WorkerError
from quire.config.machine import MachineMemory
from quire.execute.batch_check import check_batch, check_range
from quire.execute.executor import HEAD_ROWS, ExecutorMemory, Progress
from quire.execute.gpu.device import device_errors
from quire.execute.gpu.graphs import Capture, CudaCapture, Graphs
from quire.execute.gpu.host_choice import choose_on_host, score_on_host
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.last_tokens import LastTokens
from quire.execute.gpu.load import TORCH_TYPES, IntWeight, Loaded, Pack, load
from quire.execute.gpu.memory import check_left, device_memory
from quire.execute.gpu.ops import Call, Place, bind_plain
from quire.execute.gpu.step_buffers import Counts, StepBuffers
from quire.execute.gpu.stream import Stream, stream_of
from quire.execute.layout import lay_out
from quire.execute.rope_table import CHUNK_POSITIONS, RopeTable, rope_bytes
from quire.program.batch import ForwardBatch
from quire.program.ops import FP8_CACHE, OpKind, RopeSpec, Rows
from quire.program.program import Program
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint
from quire.weights.pack_cache import PackCache

if TYPE_CHECKING:
    from quire.execute.gpu.attention_steps import AttentionSteps

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

FORMS = ("silu", "gelu", "gelu_tanh", "relu")
SEGMENTS = ("trunk", "head")
# Blocks of the smallest size cover a request's positions; a step's tables have so many columns.
SMALLEST_BLOCK = 16
FULL_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TorchExecutorClass:
    """An ExecutorClass (see quire/execute/executor.py) for a device, in a mode.

    exact: products whose bits a row has whatever rows are beside it. has_fp8: its kernels know it.
    """

    device: torch.device
    exact: bool = True
    has_fp8: bool = True

    def check_program(self, program: Program) -> None:
        """Raise ModelError listing what cannot be held, before anything is loaded."""
        problems = []
        if len(program.caches) != 1:
            problems.append(f"it has {len(program.caches)} KV caches; one is held")
        forms = {
            op.attrs["form"]
            for ops in program.segments.values()
            for op in ops
            if op.kind is OpKind.ACTIVATION
        }
        problems += [
            f"its activation is {form!r}; {', '.join(FORMS)} are known"
            for form in sorted(forms - set(FORMS))
        ]
        if self.device.type != "cpu" and any(_is_gathered_in_groups(program)):
            problems.append(
                "its embedding is also the head and kept in 4 bits or in blocks, which rows are "
                "not gathered from on a GPU (--head-precision int8, fp8 or none)"
            )
        if not self.has_fp8 and _uses_fp8(program):
            problems.append(
                f"its weights, or keys and values, are kept in fp8, which {self.device} cannot "
                "compute with: compute capability 8.9 and newer can (Ada, Hopper); --quantization "
                "int8 and --kv-cache-dtype int8 take as much memory"
            )
        if problems:
            raise ModelError(
                f"{program.name}: the torch executor cannot hold this model "
                "(--executor reference can):" + "".join(f"\n  - {problem}" for problem in problems)
            )

    def memory_for(self, program: Program, max_rows: Mapping[Rows, int]) -> ExecutorMemory:
        """Weights and cache as the program says; buffers share one arena."""
        return ExecutorMemory(
            weights_bytes=self._weight_bytes(program),
            step_bytes=lay_out(program, max_rows).arena_bytes
            + rope_bytes(program)
            + StepBuffers.num_bytes(**_step_sizes(program, max_rows))
            + self._kernel_bytes(program, max_rows),
            token_bytes=sum(cache.token_bytes for cache in program.caches),
        )

    def _weight_bytes(self, program: Program) -> int:
        """As the program says; plain PyTorch holds integers of 4 bits in a byte each."""
        if self.device.type != "cpu":
            return program.weight_bytes
        return sum(
            weight.num_bytes
            if weight.ints is None
            else weight.rows * (weight.columns + 4 * weight.ints.num_groups(weight.columns))
            for weight in program.weights.values()
        )

    def _kernel_bytes(self, program: Program, max_rows: Mapping[Rows, int]) -> int:
        if self.device.type == "cpu":
            return 0
        from quire.execute.gpu.attention_steps import partial_bytes
        from quire.execute.gpu.kernel_ops import Scratch

        partials = partial_bytes(program, max_rows, exact=self.exact)
        return partials + Scratch.num_bytes(program, max_rows)

    def head_rows(self, max_sequences: int) -> int:
        """On a GPU all sequences' at once: their step and its head are one graph."""
        return HEAD_ROWS if self.device.type == "cpu" else max(HEAD_ROWS, max_sequences)

    def available_memory(self) -> MachineMemory:
        """See ExecutorClass."""
        return device_memory(self.device)

    def plans_in_flight(self) -> int:
        """See ExecutorClass: a GPU is told the next step while it computes one."""
        return 1 if self.device.type == "cpu" else 2

    def full_step_tokens(self) -> int:
        """See ExecutorClass."""
        return 128 if self.device.type == "cpu" else FULL_STEP_TOKENS

    def __call__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        *,
        max_tokens: int,
        max_samples: int,
        max_sequences: int,
        num_threads: int = 1,
        progress: Progress | None = None,
        pack_cache: PackCache | None = None,
    ) -> TorchExecutor:
        if pack_cache is not None:
            raise SettingError(
                "pack_cache: the torch executor packs nothing; leave it out, or take the native "
                "executor"
            )
        self.check_program(program)
        if self.device.type == "cpu":
            torch.set_num_threads(num_threads)
        try:
            pack = _pack(runs_kernels=self.device.type != "cpu")
            binding = bind(program, checkpoint)
            weights = load(program, binding, self.device, progress, pack=pack)
            return TorchExecutor(
                program,
                weights,
                device=self.device,
                exact=self.exact,
                max_rows={
                    Rows.TOKENS: max_tokens,
                    Rows.SAMPLES: max_samples,
                    Rows.SEQUENCES: max_sequences,
                },
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{program.name}: {program.weight_bytes} bytes of weights and a step of "
                f"{max_tokens} tokens do not fit into the memory of {self.device}; lower "
                "--max-num-batched-tokens or take a smaller model"
            ) from error


class TorchExecutor:
    """An Executor (see quire/execute/executor.py). max_rows bound a step; poison fills buffers with
    NaN before each run, and kernels says whether they run, in Triton's interpreter where the device
    is the CPU: both for tests. capture: how steps of one token a sequence are captured, on a GPU as
    CUDA graphs where nothing is given. stream: of the device, where a test has its own."""

    name = "torch"

    def __init__(
        self,
        program: Program,
        weights: Loaded,
        *,
        device: torch.device,
        exact: bool,
        max_rows: Mapping[Rows, int],
        poison: bool = False,
        kernels: bool | None = None,
        capture: Capture | None = None,
        stream: Stream | None = None,
    ) -> None:
        self._stream = stream_of(device) if stream is None else stream
        self.recipe = recipe_of(device, exact=exact)
        self.weights_digest, self.coarse_rows = weights.digest, weights.coarse_rows
        self.ops_done = 0
        self._program, self._device, self._poison = program, device, poison
        self._limits = dict(max_rows)
        self._arena, buffers = _buffers(program, max_rows, device)
        runs_kernels = device.type != "cpu" if kernels is None else kernels
        self._attention = (
            _attention_steps(program, max_rows, device, exact) if runs_kernels else None
        )
        self._step = StepBuffers(
            **_step_sizes(program, max_rows),
            device=device,
            others={} if self._attention is None else self._attention.sizes(),
            stream=self._stream,
        )
        self._last = LastTokens(
            max_rows[Rows.SEQUENCES], self._stream, device, by_kernels=runs_kernels
        )
        self._pool: CachePool | None = None
        self._place = Place(
            program=program,
            buffers=buffers,
            weights=weights,
            ropes=[_rope(spec, program.max_positions, device) for spec in program.ropes],
            step=self._step,
            pool=self._the_pool,
            exact=exact,
        )
        bind_segment = self._binder(max_rows)
        self._calls: dict[str, list[Call]] = {
            segment: bind_segment(segment) for segment in SEGMENTS
        }
        self._counts: Counts | None = None
        self._head_of: tuple[ForwardBatch, int] | None = None  # whose logits are there already
        if capture is None and device.type != "cpu":
            capture = CudaCapture(device)
        self._graphs: Graphs | None = None
        if capture is not None:
            self._graphs = Graphs(capture, max_rows[Rows.SEQUENCES])

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the KV pool of zeros."""
        spec = self._program.caches[0]
        if self._graphs is not None:
            self._graphs.clear()
        try:
            self._pool = CachePool.zeros(
                spec.precision,
                layers=spec.layers,
                blocks=num_blocks,
                kv_heads=spec.kv_heads,
                block_size=block_size,
                head_dim=spec.head_dim,
                device=self._device,
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"{num_blocks} cache blocks of {block_size} tokens "
                f"({num_blocks * block_size * spec.token_bytes} bytes) do not fit into the memory "
                f"of {self._device}; lower --kv-cache-memory"
            ) from error
        check_left(self._device)

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        """Nothing: a device's memory is there when it is allocated."""

    def copy_blocks(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Copy whole pool blocks over all layers, in order."""
        parts, pairs = (
            self._pool_parts(),
            list(zip(copy_from.tolist(), copy_to.tolist(), strict=True)),
        )

        def copy() -> None:
            for source, target in pairs:
                for part in parts:
                    part[:, target] = part[:, source]

        with device_errors("copies of blocks"):
            self._stream.do(copy)

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block over all layers, as export_block gives them."""
        return self._the_pool().block_bytes

    def export_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a pool block's raw bytes over all layers, values before scales, to out."""
        self._stream.mark().wait()
        first = 0
        for part in self._pool_parts():
            raw = part[:, block].contiguous().view(torch.uint8).reshape(-1)
            torch.from_numpy(out[first : first + len(raw)]).copy_(raw)
            first += len(raw)

    def import_block(self, block: int, raw: NDArray[np.uint8]) -> None:
        """Make a pool block what export_block gave."""
        self._stream.mark().wait()
        first = 0
        for part in self._pool_parts():
            of_block = part[:, block]
            given = torch.from_numpy(np.array(raw[first : first + of_block.nbytes]))
            of_block.copy_(given.view(part.dtype).reshape(of_block.shape))
            first += of_block.nbytes

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """Compute the trunk segment for all token rows of the batch."""
        self._check(batch)
        if self._poison:
            self._stream.do(self._fill_with_nan)
        self._head_of = None
        with device_errors("a step"):
            if self._graphs is not None and len(batch.token_ids) == len(batch.seq_starts) - 1:
                self._counts = self._replayed(self._graphs, batch, head_rows)
            else:
                self._counts = self._load(batch)
                self._run("trunk", self._counts)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Any:
        """Logits of batch.sample_rows[first:first+count]: an array on the CPU; on another
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

    def output(self, name: str) -> Float32s:
        """The rows of a named output of the trunk, copied."""
        assert self._counts is not None, "nothing has run"
        self._stream.mark().wait()
        values: Float32s = (
            self._place.of(self._program.outputs[name], self._counts).float().cpu().numpy().copy()
        )
        return values

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

        with device_errors("token choice"):
            return choose(logits.float().contiguous(), batch, choose_on_host, self._stream)

    def sample_later(
        self, logits: Any, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        """See LateExecutor."""
        check_range("slots", slots, 0, len(self._last))
        if isinstance(logits, np.ndarray):
            return self._sample_plain_later(logits, batch, slots)
        from quire.execute.gpu.choice import choose_later
        from quire.execute.gpu.kernels.wishes import rows_for_the_host

        if rows_for_the_host(batch).any():
            raise ValueError("some of these rows are chosen on the host: sample does it")
        with device_errors("token choice"):
            chosen = choose_later(
                logits.float().contiguous(),
                batch,
                self._stream,
                keep=lambda token_ids: self._last.keep(slots, token_ids),
            )

        def wait() -> TokenChoice:
            with device_errors("a step"):
                return chosen.wait()

        return wait

    def mark(self) -> Callable[[], None]:
        """See LateExecutor."""
        mark = self._stream.mark()

        def wait() -> None:
            with device_errors("a step"):
                mark.wait()

        return wait

    def score(self, logits: Any, batch: ScoreBatch) -> Scores:
        """How likely known tokens are, by the rows of `logits` (which are only read)."""
        if isinstance(logits, np.ndarray):
            self._stream.mark().wait()
            return score_on_host(logits, batch)
        from quire.execute.gpu.choice import score

        with device_errors("scores"):
            return score(logits.float(), batch, self._stream)

    def close(self) -> None:
        """Let go of weights, buffers and cache; further calls are errors."""
        self._calls, self._pool, self._counts = {}, None, None
        del self._place, self._arena, self._step, self._last

    # ---- private

    def _binder(self, max_rows: Mapping[Rows, int]) -> Callable[[str], list[Call]]:
        if self._attention is None:
            return lambda segment: bind_plain(segment, self._place)
        from quire.execute.gpu.kernel_ops import KernelOps, Scratch

        scratch = Scratch.of(self._program, max_rows, self._device)
        return KernelOps(self._place, self._attention, scratch).bind_segment

    def _load(self, batch: ForwardBatch, *, num_rows: int = 0) -> Counts:
        if self._attention is None:
            return self._step.load(batch, num_rows=num_rows)
        plan = self._attention.plan(batch, num_rows=num_rows)
        counts = self._step.load(batch, num_rows=num_rows, others=plan)
        self._attention.mirror(self._step.others)
        return counts

    def _replayed(self, graphs: Graphs, batch: ForwardBatch, head_rows: int) -> Counts:
        """A step of one token a sequence; with its head where every row samples, once."""
        rows = len(batch.token_ids)
        size = graphs.size_for(rows)
        has_head = (
            head_rows == rows == len(batch.sample_rows) and size <= self._limits[Rows.SAMPLES]
        )
        counts = self._load(batch, num_rows=size).of_samples(size if has_head else 0)

        def body() -> None:
            self._launch("trunk", counts)
            if has_head:
                self._launch("head", counts)

        self._stream.do(lambda: graphs.run((size, has_head), body))
        if has_head:
            self._head_of = batch, rows
        return counts

    def _run(self, segment: str, counts: Counts) -> None:
        """Have a segment computed."""
        self._stream.do(lambda: self._launch(segment, counts))

    def _launch(self, segment: str, counts: Counts) -> None:
        if segment == "trunk":
            self._last.take(self._step.token_ids, self._step.late_slots, counts.tokens)
        for call in self._calls[segment]:
            call(counts)
            self.ops_done += 1

    def _fill_with_nan(self) -> None:
        for buffer in self._place.buffers:
            buffer.fill_(torch.nan)

    def _sample_plain_later(
        self, logits: Float32s, batch: SampleBatch, slots: Int32s
    ) -> Callable[[], TokenChoice]:
        """On CPU tensors: the device is this thread, sooner or later."""
        found: list[TokenChoice] = []

        def choose() -> None:
            found.append(choose_on_host(logits, batch))
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

    def _the_pool(self) -> CachePool:
        if self._pool is None:
            raise WorkerError("the cache has not been allocated, or the executor is closed")
        return self._pool

    def _pool_parts(self) -> Sequence[Tensor]:
        pool = self._the_pool()
        return [pool.values] if pool.scales is None else [pool.values, pool.scales]

    def _check(self, batch: ForwardBatch) -> None:
        pool = self._the_pool()
        self._check_fits(Rows.TOKENS, len(batch.token_ids))
        self._check_fits(Rows.SEQUENCES, len(batch.seq_starts) - 1)
        check_batch(
            batch,
            vocab_size=self._program.vocab_size,
            num_blocks=pool.num_blocks,
            block_size=int(pool.values.shape[-2]),
            num_slots=len(self._last),
        )
        check_range("rope_positions", batch.rope_positions, 0, self._program.max_positions)

    def _check_fits(self, rows: Rows, count: int) -> None:
        if not self._calls:
            raise WorkerError("this executor is closed; nothing can be run with it")
        if count > self._limits[rows]:
            raise ValueError(f"a step of {count} {rows}; at most {self._limits[rows]} are allowed")


def _attention_steps(
    program: Program, max_rows: Mapping[Rows, int], device: torch.device, exact: bool
) -> AttentionSteps:
    from quire.execute.gpu.attention_steps import AttentionSteps, num_programs

    steps = AttentionSteps(program, max_rows=max_rows, exact=exact, programs=num_programs(device))
    steps.allocate(device)
    return steps


def _pack(*, runs_kernels: bool) -> Pack:
    """Integer weights as those who compute take them."""
    if not runs_kernels:
        return IntWeight.of
    from quire.execute.gpu.kernel_ops import pack_ints

    return pack_ints


def recipe_of(device: torch.device, *, exact: bool) -> str:
    """What bits depend on beside the program: the device's kind, its libraries, the mode."""
    mode = "exact" if exact else "fast"
    if device.type == "cpu":
        return f"torch-cpu-{torch.__version__}-{mode}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"torch-{device.type}-sm{major}{minor}-{torch.__version__}-{mode}"


def _is_gathered_in_groups(program: Program) -> Iterator[bool]:
    for ops in program.segments.values():
        for op in ops:
            if op.kind is OpKind.EMBED:
                scheme = program.weights[op.attrs["weight"]].quantized
                yield scheme is not None and scheme.group != 0


def _uses_fp8(program: Program) -> bool:
    schemes = [weight.quantized for weight in program.weights.values()]
    return any(scheme is not None and scheme.is_float for scheme in schemes) or any(
        cache.scheme == FP8_CACHE for cache in program.caches
    )


def _step_sizes(program: Program, max_rows: Mapping[Rows, int]) -> dict[str, int]:
    return {
        "max_tokens": max(max_rows[Rows.TOKENS], max_rows[Rows.SAMPLES]),
        "max_sequences": max_rows[Rows.SEQUENCES],
        "max_columns": -(-program.max_positions // SMALLEST_BLOCK) + 1,
    }


def _buffers(
    program: Program, max_rows: Mapping[Rows, int], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One arena, and each buffer's place in it as [max rows, width]."""
    layout = lay_out(program, max_rows)
    arena = torch.zeros(max(layout.arena_bytes, 1), dtype=torch.uint8, device=device)
    buffers = []
    for buffer, place in zip(program.buffers, layout.places, strict=True):
        raw = arena[place.offset_bytes : place.offset_bytes + place.num_bytes]
        rows = raw.view(TORCH_TYPES[buffer.dtype]).view(place.max_rows, place.stride)
        buffers.append(rows[:, : buffer.width])
    return arena, buffers


def _rope(spec: RopeSpec, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions; in whole chunks, as the table grows."""
    table = RopeTable(spec)
    table.reserve(-(-max_positions // CHUNK_POSITIONS) * CHUNK_POSITIONS)
    cos, sin = (np.ascontiguousarray(part[:max_positions]) for part in (table.cos, table.sin))
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
