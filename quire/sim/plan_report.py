"""The result of `quire plan`: one object for JSON, and its tables.

Always holds: a proposed change was sized like the plan itself, so its numbers are predictions of
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from quire.base.errors import ModelError, SettingError
from quire.config.memory import mib, num_blocks_of
from quire.engine.assembly.model_files import model_name
from quire.models.registry import compute_dtype
from quire.obs.report import table
from quire.program.cost import StepShape
from quire.program.kv_cache import kv_cache_text
from quire.program.quantize import precision_text
from quire.program.row_parallel import TpMode
from quire.program.table import amount
from quire.program.tensors import DType
from quire.quant.scheme import PLAIN
from quire.sim.layouts import LayoutPlanner, layouts_outcome
from quire.sim.offload import cpu_offload, cpu_offload_text, disk_offload, disk_offload_text
from quire.sim.plan import PARALLEL_DEGREES, Planner, SizedModel
from quire.sim.ranks import exchanges_of
from quire.sim.step_costs import product_precision

LENGTHS = (128, 256, 1024, 4096, 8192, 32768, 131072)
MAX_LENGTHS = 6
COMPARED_TOKENS = 1024
MAX_COLUMNS = 100
# Settings that may be changed when the model does not fit, from the smallest loss on.
CHANGES: tuple[Mapping[str, Any], ...] = (
    {"dtype": "bf16"},
    {"kv_cache_dtype": "int8"},
    {"quantization": "int8"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "kv_cache_dtype": "int8"},
)
_FLAGS = {"max_model_len": "--context", "max_num_seqs": "--concurrency"}


def plan_outcome(planner: Planner, *, num_devices: int = 0) -> dict[str, Any]:
    """Size the model and return everything that `quire plan` prints.

    num_devices: to recommend a layout for; 0: none is asked for.
    """
    asked = planner.size()
    fits = not asked.problem
    # Where the asked context is too long: what the device holds without asking for one.
    shown = asked if asked.plan is not None else planner.size(max_model_len=None)
    longest = planner.size(max_model_len=None) if planner.context else shown
    return {
        "model": model_name(asked.config.model),
        "device": _device(planner, asked),
        "settings": _settings(planner, asked),
        "fits": fits,
        "problem": asked.problem,
        "weights_bytes": asked.needs.weights_bytes,
        "step_bytes": asked.needs.step_bytes,
        "step_tokens": asked.step_tokens,
        "kv_bytes_per_token": asked.needs.token_bytes,
        "available_bytes": planner.memory.available_bytes,
        "memory": [
            {"what": line.what, "bytes": line.num_bytes}
            for line in (shown.plan.lines if shown.plan is not None else ())
        ],
        "num_blocks": shown.plan.num_blocks if shown.plan is not None else 0,
        "kv_bytes": shown.plan.kv_bytes if shown.plan is not None else 0,
        "max_context": longest.max_context,
        "model_max_context": planner.spec.max_positions,
        "lengths": [_at_length(planner, shown, length) for length in _lengths(planner, shown)],
        "compared_tokens": _compared_tokens(planner),
        "changes": [] if fits else list(_changes(planner)),
        "disk_offload": None if fits else disk_offload(planner, asked, _compared_tokens(planner)),
        "cpu_offload": None if fits else cpu_offload(planner, asked, _compared_tokens(planner)),
        "tensor_parallel": None if fits or len(asked.shares) > 1 else _parallel(planner, asked),
        "ranks": _ranks(planner, asked) if len(asked.shares) > 1 else None,
        "layouts": _layouts(planner, asked, num_devices) if num_devices else None,
        "notes": list(_notes(planner, shown)),
    }


def plan_text(outcome: Mapping[str, Any]) -> str:
    """Return the tables of an outcome."""
    device, settings = outcome["device"], outcome["settings"]
    parts = [
        f"{outcome['model']} on {device['about']}\n"
        f"{settings['weights']} weights, {settings['dtype']} activations, "
        f"{settings['kv_cache_dtype']} KV cache; {device['gb_per_s']:,.0f} GB/s, "
        f"{device['gflop_per_s'] / 1e3:.3g} TFLOP/s in {device['precision']} ({device['rates']})",
        _verdict(outcome["problem"]),
        _sizes_text(outcome),
    ]
    if outcome["memory"]:
        parts.append(
            table(
                ("Memory", ""), [(line["what"], mib(line["bytes"])) for line in outcome["memory"]]
            )
        )
    if outcome["lengths"]:
        parts.append(_lengths_text(outcome["lengths"]))
    if outcome["changes"]:
        parts.append(_changes_text(outcome["changes"], outcome["compared_tokens"]))
    if outcome["tensor_parallel"] is not None:
        parts.append(_parallel_text(outcome["tensor_parallel"]))
    if outcome["disk_offload"] is not None:
        parts.append(disk_offload_text(outcome["disk_offload"], outcome["compared_tokens"]))
    if outcome["cpu_offload"] is not None:
        parts.append(cpu_offload_text(outcome["cpu_offload"], outcome["compared_tokens"]))
    if outcome["ranks"] is not None:
        parts.append(_ranks_text(outcome["ranks"]))
    if outcome["layouts"] is not None:
        parts.append(_layouts_text(outcome["layouts"]))
    if outcome["notes"]:
        parts.extend(map(_wrapped, outcome["notes"]))
    return "\n\n".join(parts)


def _device(planner: Planner, sized: SizedModel) -> dict[str, Any]:
    device = planner.device
    precision = device.peak_precision(product_precision(sized.program))
    return {
        "name": device.name,
        "about": device.about,
        "gb_per_s": device.gb_per_s,
        "precision": precision,
        "gflop_per_s": device.gflop_per_s(precision),
        "rates": "measured now" if device.is_measured else "the manufacturer's peaks",
    }


def _settings(planner: Planner, sized: SizedModel) -> dict[str, Any]:
    dtype, quantization = _dtype(planner, sized), precision_text(sized.program)
    return {
        "dtype": dtype,
        "quantization": quantization,
        "weights": dtype if quantization == PLAIN else quantization,
        "kv_cache_dtype": kv_cache_text(sized.program),
        "block_size": sized.needs.block_size,
        "max_num_seqs": sized.needs.max_num_seqs,
        "context": planner.context,
        "concurrency": planner.concurrency,
    }


def _lengths(planner: Planner, sized: SizedModel) -> list[int]:
    """Return the lengths of the table: the longest, the asked one, and round ones below."""
    longest = sized.max_context
    lengths = {length for length in (*LENGTHS, planner.context or 0) if 0 < length < longest}
    return [*sorted(lengths)[-MAX_LENGTHS:], longest] if longest else []


def _at_length(planner: Planner, sized: SizedModel, length: int) -> dict[str, Any]:
    """Return what requests of `length` tokens take and get."""
    requests = sized.requests_at_once(length)
    prefill_s = planner.prefill_s(sized, length)
    return {
        "tokens": length,
        "blocks": num_blocks_of(length, sized.needs.block_size),
        "requests": requests,
        "prefill_s": prefill_s,
        "prefill_tokens_per_s": length / prefill_s,
        "decode_tokens_per_s": planner.decode_tokens_per_s(sized, length),
        "total_decode_tokens_per_s": planner.decode_tokens_per_s(sized, length, requests),
    }


def _changes(planner: Planner) -> Iterator[dict[str, Any]]:
    """Yield changes of settings with the numbers that each would give."""
    asked = planner.size()
    for change in CHANGES:
        try:
            sized = planner.size(**change)
        except (SettingError, ModelError):  # such as weights that are quantized already
            continue
        smaller = (
            sized.needs.weights_bytes < asked.needs.weights_bytes,
            sized.needs.token_bytes < asked.needs.token_bytes,
        )
        is_wanted = smaller == (True, True) if len(change) > 1 else any(smaller)
        if is_wanted:
            yield _change(planner, change, sized)
    for demand in _smaller_demands(planner):
        yield _change(planner, demand, planner.size(**demand))


def _smaller_demands(planner: Planner) -> Iterator[dict[str, int]]:
    """Yield the longest context that fits at the asked concurrency, and the reverse."""
    if planner.context is None:
        return
    size = planner.size(max_model_len=None).needs.block_size
    blocks = largest(
        lambda count: not planner.size(max_model_len=count * size).problem,
        num_blocks_of(planner.context, size) - 1,
    )
    if blocks:
        yield {"max_model_len": blocks * size}
    requests = largest(
        lambda count: not planner.size(max_num_seqs=count).problem, (planner.concurrency or 1) - 1
    )
    if requests:
        yield {"max_num_seqs": requests}


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Return the largest number from 1 to `high` that fits, where all smaller ones do; else 0."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _change(planner: Planner, change: Mapping[str, Any], sized: SizedModel) -> dict[str, Any]:
    context = {} if "max_model_len" in change else {"max_model_len": None}
    longest = planner.size(**{**change, **context}).max_context
    at = change.get("max_model_len") or _compared_tokens(planner)
    return {
        "flags": " ".join(
            f"{_FLAGS.get(name, '--' + name.replace('_', '-'))} {value}"
            for name, value in change.items()
        ),
        "settings": dict(change),
        "fits": not sized.problem,
        "weights_bytes": sized.needs.weights_bytes,
        "kv_bytes_per_token": sized.needs.token_bytes,
        "max_context": longest,
        "requests": sized.requests_at_once(at),
        "decode_tokens_per_s": planner.decode_tokens_per_s(sized, at),
    }


def _compared_tokens(planner: Planner) -> int:
    """Return the length of the requests that changes are compared by."""
    return planner.context or min(COMPARED_TOKENS, planner.spec.max_positions)


def _dtype(planner: Planner, sized: SizedModel) -> str:
    return str(compute_dtype(planner.spec, sized.config.model.dtype))


def _parallel(planner: Planner, sized: SizedModel) -> dict[str, Any]:
    found = planner.parallel_degree(sized)
    return {
        "degree": found[0] if found else None,
        "flags": _parallel_flags(planner, found[0]) if found else None,
        "weights_bytes": found[1].weights_bytes if found else None,
        "kv_bytes_per_token": found[1].token_bytes if found else None,
    }


def _parallel_flags(planner: Planner, degree: int) -> str:
    """Return what starts so many ranks, each on a device of its own."""
    executor = "--executor torch " if planner.device.is_gpu else ""
    return f"{executor}--tensor-parallel-size {degree}"


def _ranks(planner: Planner, sized: SizedModel) -> dict[str, Any]:
    """Return what each rank has and receives: of a decoded token, and of a full step."""
    depth = _compared_tokens(planner) - 1
    token, step = StepShape([1], [depth]), StepShape([sized.step_tokens], [0])
    return {
        "tensor_parallel_size": sized.config.executor.tensor_parallel_size,
        "context_parallel_size": sized.config.executor.context_parallel_size,
        "pipeline_parallel_size": sized.config.executor.pipeline_parallel_size,
        "enable_expert_parallel": sized.config.executor.enable_expert_parallel,
        "tp_mode": sized.config.executor.tp_mode,
        "links": planner.links.about,
        "exchanges_per_step": sum(exchanges_of(stage[0]) for stage in sized.stages),
        "step_tokens": sized.step_tokens,
        "of_rank": [
            {
                "weights_bytes": share.weight_bytes,
                "kv_bytes_per_token": sum(cache.token_bytes for cache in share.program.caches),
                "received_bytes_per_token": share.step_cost(token).comm_bytes,
                "received_bytes_per_step": share.step_cost(step).comm_bytes,
            }
            for share in map(planner.costs_of, sized.shares)
        ],
    }


def _layouts(planner: Planner, sized: SizedModel, num_devices: int) -> dict[str, Any]:
    whole = planner.size(
        tensor_parallel_size=None,
        context_parallel_size=None,
        pipeline_parallel_size=None,
        tp_mode=None,
        enable_expert_parallel=None,
        expert_load_file=None,
        num_redundant_experts=None,
    )
    return layouts_outcome(
        LayoutPlanner(
            planner,
            whole,
            planner.links,
            num_devices=num_devices,
            num_tokens=_compared_tokens(planner),
            requests=sized.needs.max_num_seqs,
            mode=TpMode(sized.config.executor.tp_mode),
        )
    )


def _notes(planner: Planner, sized: SizedModel) -> Iterator[str]:
    """Yield lines on what may be unexpected."""
    if sized.plan is not None:
        yield from sized.plan.notes
        draft = sized.needs.draft
        if draft.name == "draft model" and draft.max_model_len < sized.plan.max_model_len:
            yield (
                f"The draft model's context is {draft.max_model_len} tokens: requests have no "
                "drafts beyond it."
            )
    if planner.spec.dtype == "f16" and _dtype(planner, sized) == DType.F32:
        yield (
            "The checkpoint is float16, which is computed in float32; --dtype bfloat16 halves "
            "weights and KV cache."
        )
    if planner.device.is_gpu:
        yield "A GPU needs --executor torch; scratch of single kernels is part of its reserve."
    yield (
        "Speeds are those of the device's rates: the bytes and operations of a step over them. "
        "Prefill: one prompt alone. Decode: at that depth, for one request and for all at once."
    )


def _verdict(problem: str) -> str:
    if not problem:
        return "It fits."
    return _wrapped("It does not fit: " + problem.removeprefix("the model does not fit: "))


def _wrapped(text: str) -> str:
    return fill(text, MAX_COLUMNS, break_long_words=False, break_on_hyphens=False)


def _sizes_text(outcome: Mapping[str, Any]) -> str:
    per_token = outcome["kv_bytes_per_token"]
    rows = [
        ("weights", amount(outcome["weights_bytes"], "B")),
        (f"buffers of a step of {outcome['step_tokens']} tokens", mib(outcome["step_bytes"])),
        ("KV cache per token", f"{per_token:,} B"),
        ("KV blocks", f"{outcome['num_blocks']:,} of {outcome['settings']['block_size']} tokens"),
        (
            "longest context",
            f"{outcome['max_context']:,} of the model's {outcome['model_max_context']:,} tokens",
        ),
    ]
    return table(("Size", ""), rows)


def _lengths_text(lengths: Sequence[Mapping[str, Any]]) -> str:
    headings = ("Tokens", "blocks", "at once", "prefill s", "tok/s", "decode tok/s", "all at once")
    return table(
        headings,
        [
            (
                f"{row['tokens']:,}",
                f"{row['blocks']:,}",
                f"{row['requests']:,}",
                f"{row['prefill_s']:.3g}",
                _rate(row["prefill_tokens_per_s"]),
                _rate(row["decode_tokens_per_s"]),
                _rate(row["total_decode_tokens_per_s"]),
            )
            for row in lengths
        ],
    )


def _changes_text(changes: Sequence[Mapping[str, Any]], num_tokens: int) -> str:
    headings = ("Change", "fits", "weights", "KV per token", "context", "at once", "decode tok/s")
    rows = table(
        headings,
        [
            (
                row["flags"],
                "yes" if row["fits"] else "no",
                amount(row["weights_bytes"], "B"),
                f"{row['kv_bytes_per_token']:,} B",
                f"{row['max_context']:,}",
                f"{row['requests']:,}",
                _rate(row["decode_tokens_per_s"]) if row["fits"] else "-",
            )
            for row in changes
        ],
    )
    about = f"At once, and the speed of one: requests of {num_tokens:,} tokens"
    shorter = any("max_model_len" in row["settings"] for row in changes)
    return f"{rows}\n{about}{', or as many as --context says' if shorter else ''}."


def _parallel_text(parallel: Mapping[str, Any]) -> str:
    if parallel["degree"] is None:
        return f"Not even {PARALLEL_DEGREES[-1]} such devices with tensor parallelism hold it."
    return _wrapped(
        f"As it is, it needs tensor parallelism over {parallel['degree']} such devices: "
        f"{amount(parallel['weights_bytes'], 'B')} of weights and "
        f"{parallel['kv_bytes_per_token']:,} B of KV cache per token on each "
        f"({parallel['flags']}). --devices {parallel['degree']} compares layouts."
    )


def _ranks_text(ranks: Mapping[str, Any]) -> str:
    headings = ("Rank", "weights", "KV per token", "received a token", "a full step")
    rows = [
        (
            str(rank),
            amount(of_rank["weights_bytes"], "B"),
            f"{of_rank['kv_bytes_per_token']:,} B",
            amount(of_rank["received_bytes_per_token"], "B"),
            amount(of_rank["received_bytes_per_step"], "B"),
        )
        for rank, of_rank in enumerate(ranks["of_rank"])
    ]
    about = (
        f"Computed: {ranks['exchanges_per_step']} exchanges a step; a full one has "
        f"{ranks['step_tokens']} tokens. Links: {ranks['links']}."
    )
    return f"{table(headings, rows)}\n{_wrapped(about)}"


def _layouts_text(layouts: Mapping[str, Any]) -> str:
    headings = (
        *("Layout", "replicas", "fits", "weights", "received"),
        *("tok/s of one", "speedup", "all at once", "efficiency"),
    )
    rows = [
        (
            row["layout"],
            str(row["replicas"]),
            "yes" if row["fits"] else "no",
            amount(row["weights_bytes"], "B"),
            amount(row["received_bytes_per_token"], "B"),
            _rate(row["one_request_tokens_per_s"]),
            f"{row['one_request_speedup']:.2g}x",
            _rate(row["all_tokens_per_s"]),
            f"{100 * row['efficiency']:.0f} %",
        )
        for row in layouts["layouts"]
    ]
    about = (
        f"Computed, not measured, for {layouts['devices']} devices: {layouts['links']}, "
        f"{layouts['exchange_us']:g} us assumed for an exchange; {layouts['requests']} requests at "
        f"a depth of {layouts['tokens']:,} tokens. Weights and received bytes (a decoded token) "
        "are those of a rank. Speedup: of one request over one device that held all. "
        "Efficiency: the speedup of all over the devices of a replica."
    )
    if layouts["recommended"] is None:
        advice = "No layout of so many devices holds the model."
    else:
        why = "; ".join(layouts["reasons"])
        advice = f"Recommended: {layouts['recommended']}, since {why}."
    return f"{table(headings, rows)}\n{_wrapped(about)}\n\n{_wrapped(advice)}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
