"""`quire bench SUBCOMMAND`: measure this engine, or any OpenAI-compatible server.

Parses arguments and prints; quire/bench measures, and is imported only when a subcommand runs.
Standard output holds a table, or with --json one object with the machine's description; progress
goes to the terminal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from quire.cli.options import (
    add_engine_arguments,
    engine_settings,
    positive_float,
    positive_floats,
    positive_int,
)
from quire.cli.server_arguments import add_key_argument

_RANGE = "LOW-HIGH"
_MAX_TOKENS, _VOCAB_SIZE = 4096, 30_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of measurement."""
    subcommands = parser.add_subparsers(
        dest="bench", metavar="SUBCOMMAND", title="what to measure", required=True
    )
    for name, (purpose, add) in _SUBCOMMANDS.items():
        subcommand = subcommands.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        subcommand.set_defaults(parser=subcommand)
        subcommand.add_argument(
            "--json", action="store_true", help="print one JSON object, no table"
        )
        add(subcommand)


def run(arguments: argparse.Namespace) -> int:
    """Run the measurement and pass on its errors."""
    return _RUN[arguments.bench](arguments)


# ---- latency


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "--prompt-tokens", 128, "number of prompt tokens")
    _add_count(parser, "--output-tokens", 128, "number of tokens to generate")
    _add_count(parser, "--repeats", 5, "number of measurements; the median is reported")
    add_engine_arguments(parser, skip=frozenset({"chat_template"}))


def _latency(arguments: argparse.Namespace) -> int:
    from quire.bench.latency import latency_text, measure_latency

    outcome = measure_latency(
        arguments.model,
        engine_settings(arguments),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        repeats=arguments.repeats,
    )
    return _show(arguments, outcome, latency_text)


# ---- throughput


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "--requests", 32, "number of requests, submitted together")
    _add_ranges(parser, "prompt length in tokens", "output length in tokens")
    parser.add_argument(
        *("--max-running", "--max-num-seqs"),
        type=positive_int,
        default=16,
        metavar="NUM",
        help="maximum number of requests in a step (default 16)",
    )
    parser.add_argument(
        "--batching",
        choices=("continuous", "static", "both"),
        default="continuous",
        help="static: fixed batches, each computed until its longest answer is done "
        "(default: continuous)",
    )
    _add_count(parser, "--repeats", 3, "number of measurements; the median is reported")
    add_engine_arguments(parser, skip=frozenset({"chat_template", "max_num_seqs"}))


def _throughput(arguments: argparse.Namespace) -> int:
    from quire.bench.floor import program_of
    from quire.bench.throughput import MODES, measure_throughput, throughput_text
    from quire.bench.workloads import Workload, fit_lengths, mixed_lengths

    settings = engine_settings(arguments)
    context = program_of(arguments.model, settings).max_positions
    prompts, outputs = fit_lengths(context, arguments.prompts, arguments.outputs)
    workload = Workload(
        name="throughput",
        text="many requests at once",
        lengths=mixed_lengths(arguments.requests, prompts, outputs, seed=2920),
        max_running=arguments.max_running,
    )
    outcome = measure_throughput(
        arguments.model,
        settings,
        workload=workload,
        modes=MODES if arguments.batching == "both" else (arguments.batching,),
        repeats=arguments.repeats,
    )
    return _show(arguments, outcome, throughput_text)


# ---- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="an OpenAI-compatible server (default: http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--model", default="", help="the model's name there; default: the first listed"
    )
    add_key_argument(parser, "key for the server")
    parser.add_argument(
        "--rates",
        type=positive_floats("rates"),
        metavar="LIST",
        help="increasing request rates per second, or with --trace replay speeds, as in 0.5,1,2 "
        "(default: 0.5,1,2,4,8; with --trace 1)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=30.0,
        help="duration of arrivals at each rate (default 30)",
    )
    _add_ranges(parser, "prompt length in tokens", "output length in tokens")
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="replay arrivals and lengths of a trace: Azure's CSV or Mooncake's JSON lines",
    )
    _add_count(parser, "--max-requests", 200, "maximum number of requests of the trace")
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="NUM",
        help="skip requests of the trace above this length (default: the server's context, at "
        f"most {_MAX_TOKENS})",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        metavar="NUM",
        help="upper bound of the prompts' random token ids (default: the server's vocabulary, or "
        f"{_VOCAB_SIZE} if the server does not report it)",
    )
    parser.add_argument(
        "--text", action="store_true", help="send prompts as text, not as token ids"
    )
    parser.add_argument(
        *("--no-ignore-eos", "--may-end"),
        dest="may_end",
        action="store_true",
        help="do not send ignore_eos: answers may be shorter than requested",
    )
    parser.add_argument(
        "--ttft-goal",
        type=positive_float,
        default=2.0,
        metavar="S",
        help="TTFT objective in seconds (default 2)",
    )
    parser.add_argument(
        "--tpot-goal",
        type=positive_float,
        default=0.1,
        metavar="S",
        help="TPOT objective in seconds (default 0.1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of arrivals and tokens (default 0)"
    )
    parser.add_argument("--png", default="", metavar="FILE", help="draw the result")


def _serve(arguments: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from quire.bench.http_load import Target
    from quire.bench.plots import plot_serving
    from quire.bench.serve import (
        Load,
        measure_serving,
        resolve_model,
        serving_text,
        trace_of,
    )
    from quire.bench.workloads import fit_lengths, mixed_lengths
    from quire.obs.pictures import check_picture
    from quire.obs.timing import Goals

    if arguments.png:
        check_picture(Path(arguments.png))
    target = Target(
        url=arguments.url,
        model=arguments.model,
        api_key=arguments.api_key,
        as_text=arguments.text,
        exact=not arguments.may_end,
        extra=() if arguments.may_end else (("ignore_eos", True),),
    )
    trace = trace_of(arguments.trace, max_requests=arguments.max_requests)
    served = resolve_model(target)
    prompts, outputs = fit_lengths(served.max_model_len, arguments.prompts, arguments.outputs)
    load = Load(
        rates=arguments.rates or ((1.0,) if arguments.trace else (0.5, 1.0, 2.0, 4.0, 8.0)),
        seconds=arguments.seconds,
        lengths=mixed_lengths(64, prompts, outputs, seed=5),
        vocab_size=arguments.vocab_size or served.vocab_size or _VOCAB_SIZE,
        trace=trace,
        max_tokens=arguments.max_tokens or min(served.max_model_len or _MAX_TOKENS, _MAX_TOKENS),
        seed=arguments.seed,
    )
    goals = Goals(ttft_s=arguments.ttft_goal, tpot_s=arguments.tpot_goal)
    outcome: dict[str, Any] = measure_serving(replace(target, model=served.name), load, goals)
    if arguments.png:
        plot_serving({str(outcome["settings"]["model"]): outcome}, Path(arguments.png))
    return _show(arguments, outcome, serving_text)


# ---- kernels


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, "--parts", "products,attention,small,choice", "operations to measure")
    _add_names(
        parser, "--precisions", "none,int8,int4", "weight precisions of products; none: --dtype"
    )
    _add_numbers(
        parser, "--rows", "1,4,16,64,256,2048", "row counts of products and small operations"
    )
    _add_numbers(parser, "--depths", "512,4096", "tokens in the cache before attention's rows")
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=0.2,
        metavar="NUM",
        help="seconds of measurement for each operation (default 0.2)",
    )
    given = {"dtype", "kv_cache_dtype", "num_threads", "max_model_len"}
    add_engine_arguments(parser, only=frozenset(given))


def _kernels(arguments: argparse.Namespace) -> int:
    from quire.bench.kernels import KernelOptions, kernels_text, measure_kernels

    asked = KernelOptions(
        parts=arguments.parts,
        precisions=arguments.precisions,
        rows=arguments.rows,
        depths=arguments.depths,
        seconds=arguments.seconds,
    )
    outcome = measure_kernels(arguments.model, engine_settings(arguments), asked)
    return _show(arguments, outcome, kernels_text)


# ---- startup


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "serve",
        nargs="*",
        metavar="ARGUMENT",
        help="arguments of `quire serve`: a model's directory, and after -- its flags",
    )
    _add_count(parser, "--starts", 5, "number of measured starts, after one warm-up")


def _startup(arguments: argparse.Namespace) -> int:
    from quire.bench.startup import measure_startup, startup_text

    outcome = measure_startup(arguments.serve, starts=arguments.starts)
    return _show(arguments, outcome, startup_text)


# ---- shared


def _show(
    arguments: argparse.Namespace,
    outcome: dict[str, Any],
    text: Callable[[Mapping[str, Any]], str],
) -> int:
    from quire.obs.report import show

    show(outcome, text(outcome), as_json=arguments.json)
    return 0


def _add_count(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(
        flag, type=positive_int, default=default, metavar="NUM", help=f"{text} (default {default})"
    )


def _add_names(parser: argparse.ArgumentParser, flag: str, default: str, text: str) -> None:
    parser.add_argument(
        flag,
        type=lambda given: tuple(given.split(",")),
        default=tuple(default.split(",")),
        metavar="LIST",
        help=f"{text} (default {default})",
    )


def _add_numbers(parser: argparse.ArgumentParser, flag: str, default: str, text: str) -> None:
    parser.add_argument(
        flag,
        type=_numbers,
        default=_numbers(default),
        metavar="LIST",
        help=f"{text} (default {default})",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(word) for word in text.split(","))


def _add_ranges(parser: argparse.ArgumentParser, prompts: str, outputs: str) -> None:
    """Add both ranges; their defaults are cut to the model's context (workloads.fit_lengths)."""
    for flag, usual, text in (("--prompts", "128-512", prompts), ("--outputs", "32-128", outputs)):
        parser.add_argument(
            flag,
            type=_range,
            metavar=_RANGE,
            help=f"{text} (default {usual}, less if the model's context is shorter)",
        )


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        values = int(low), int(high or low)
    except ValueError:
        values = 0, 0
    if not 1 <= values[0] <= values[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from 1 on, as 128, nor a range of them, as 128-512"
        )
    return values


_SUBCOMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "latency": ("measure TTFT and TPOT of a single request, against the roofline", _add_latency),
    "throughput": ("measure throughput with continuous or static batching", _add_throughput),
    "serve": ("measure a server under increasing load: percentiles and goodput", _add_serve),
    "kernels": ("measure each operation of a model against the machine's limits", _add_kernels),
    "startup": ("measure the time from a server's start to its first token", _add_startup),
}
_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "latency": _latency,
    "throughput": _throughput,
    "serve": _serve,
    "kernels": _kernels,
    "startup": _startup,
}
