"""`quire bench VERB`: measure this engine, or any OpenAI-compatible server, on this machine.

Arguments and printing only; quire/bench measures, and is imported when a verb runs. Standard
output holds a table, or with --json one object with the machine card; progress goes to the
terminal.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from quire.cli.options import a_count, a_list_of, add_engine_arguments, engine_settings

_RANGE = "LOW-HIGH"
_MAX_TOKENS, _VOCAB_SIZE = 4096, 30_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A sub-command for each kind of measurement."""
    verbs = parser.add_subparsers(
        dest="bench", metavar="VERB", title="what to measure", required=True
    )
    for name, (purpose, add) in _VERBS.items():
        verb = verbs.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}."
        )
        verb.set_defaults(parser=verb)
        verb.add_argument("--json", action="store_true", help="print one JSON object, no table")
        add(verb)


def run(arguments: argparse.Namespace) -> int:
    """Measure. Raises what the measurement raises."""
    return _RUN[arguments.bench](arguments)


# ---- latency


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "--prompt-tokens", 128, "tokens of the prompt")
    _add_count(parser, "--output-tokens", 128, "tokens to be generated")
    _add_count(parser, "--repeats", 5, "measurements; their median is told")
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
    _add_count(parser, "--requests", 32, "requests handed in at once")
    _add_ranges(parser, "tokens of their prompts", "tokens they generate")
    _add_count(parser, "--max-running", 16, "most of them computed at once")
    parser.add_argument(
        "--batching",
        choices=("continuous", "static", "both"),
        default="continuous",
        help="static: fixed groups, each computed until its longest answer is done "
        "(default: continuous)",
    )
    _add_count(parser, "--repeats", 3, "measurements; their median is told")
    add_engine_arguments(parser, skip=frozenset({"chat_template", "max_num_seqs"}))


def _throughput(arguments: argparse.Namespace) -> int:
    from quire.bench.floor import program_of
    from quire.bench.throughput import MODES, measure_throughput, throughput_text
    from quire.bench.workloads import Workload, fitted, mixed_lengths

    settings = engine_settings(arguments)
    context = program_of(arguments.model, settings).max_positions
    prompts, outputs = fitted(context, arguments.prompts, arguments.outputs)
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
    parser.add_argument("--model", default="", help="its name there; default: the first listed")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY", ""),
        metavar="KEY",
        help="key for the server (default: $OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--rates",
        type=a_list_of("rates"),
        metavar="LIST",
        help="requests a second, or with --trace how many times as fast it is replayed, rising; "
        "as in 0.5,1,2 (default: 0.5,1,2,4,8; with --trace 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long requests arrive (default 30)"
    )
    _add_ranges(parser, "tokens of the prompts", "tokens to be generated")
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="arrivals and lengths of a recorded trace instead: Azure's CSV or Mooncake's JSON "
        "lines",
    )
    _add_count(parser, "--max-requests", 200, "most requests of the trace")
    parser.add_argument(
        "--max-tokens",
        type=a_count,
        metavar="NUM",
        help="longer requests of the trace are left out (default: the server's context, at most "
        f"{_MAX_TOKENS}, and that where it tells none)",
    )
    parser.add_argument(
        "--vocab-size",
        type=a_count,
        metavar="NUM",
        help="token ids of prompts are drawn below this (default: the server's vocabulary, and "
        f"{_VOCAB_SIZE} where it tells none)",
    )
    parser.add_argument(
        "--text", action="store_true", help="send prompts as words, not as token ids"
    )
    parser.add_argument(
        "--may-end",
        action="store_true",
        help="do not send ignore_eos: answers may be shorter than asked for",
    )
    parser.add_argument(
        "--ttft-goal", type=float, default=2.0, help="seconds to the first token (default 2)"
    )
    parser.add_argument(
        "--tpot-goal", type=float, default=0.1, help="seconds for each after it (default 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and tokens (default 0)")
    parser.add_argument("--png", default="", metavar="FILE", help="draw the result")


def _serve(arguments: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from quire.bench.http_load import Target
    from quire.bench.plots import plot_serving
    from quire.bench.serve import (
        Load,
        ask_what_is_served,
        measure_serving,
        serving_text,
        trace_of,
    )
    from quire.bench.workloads import fitted, mixed_lengths
    from quire.obs.pictures import check_plots
    from quire.obs.timing import Goals

    if arguments.png:
        check_plots()
    target = Target(
        url=arguments.url,
        model=arguments.model,
        api_key=arguments.api_key,
        as_text=arguments.text,
        exact=not arguments.may_end,
        extra=() if arguments.may_end else (("ignore_eos", True),),
    )
    trace = trace_of(arguments.trace, max_requests=arguments.max_requests)
    served = ask_what_is_served(target)
    prompts, outputs = fitted(served.max_model_len, arguments.prompts, arguments.outputs)
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
    _add_names(parser, "--parts", "products,attention,small,choice", "what is measured")
    _add_names(parser, "--precisions", "none,int8,int4", "of products; none: --dtype")
    _add_numbers(parser, "--rows", "1,4,16,64,256,2048", "of products and small operations")
    _add_numbers(
        parser, "--depths", "512,4096", "tokens before attention's rows, as far as it goes"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.2,
        metavar="NUM",
        help="how long each is measured (default 0.2)",
    )
    given = {"dtype", "kv_cache_dtype", "num_threads", "max_model_len"}
    add_engine_arguments(parser, only=frozenset(given))


def _kernels(arguments: argparse.Namespace) -> int:
    from quire.bench.kernels import Asked, kernels_text, measure_kernels

    asked = Asked(
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
        help="what follows `quire serve`: a model's folder, and after -- its flags",
    )
    _add_count(parser, "--starts", 5, "starts that count; one more goes before them")


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
        flag, type=a_count, default=default, metavar="NUM", help=f"{text} (default {default})"
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
    return tuple(a_count(word) for word in text.split(","))


def _add_ranges(parser: argparse.ArgumentParser, prompts: str, outputs: str) -> None:
    """Both are 128-512 and 32-128 where the model's context holds that (workloads.fitted)."""
    for flag, usual, text in (("--prompts", "128-512", prompts), ("--outputs", "32-128", outputs)):
        parser.add_argument(
            flag,
            type=_range,
            metavar=_RANGE,
            help=f"{text} (default {usual}, less where the model's context is shorter)",
        )


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        values = int(low), int(high or low)
    except ValueError:
        values = 0, 0
    if not 1 <= values[0] <= values[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range as in 128-512")
    return values


_VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "latency": ("one request alone: first token, time per token, share of the floor", _add_latency),
    "throughput": ("many requests at once, batched continuously or statically", _add_throughput),
    "serve": ("a server under rising load: percentiles, goodput, the knee", _add_serve),
    "kernels": ("each operation of a model by itself, beside the machine's limits", _add_kernels),
    "startup": ("from the start of a server to its first token", _add_startup),
}
_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "latency": _latency,
    "throughput": _throughput,
    "serve": _serve,
    "kernels": _kernels,
    "startup": _startup,
}
