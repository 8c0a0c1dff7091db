"""`quire profile MODEL`: print the time of each operation, and what the machine would allow.

Parses arguments and prints; quire/bench/profile.py measures, and is imported when the command runs.
"""

from __future__ import annotations

import argparse

from quire.cli.options import add_engine_arguments, engine_settings

_NOT_HERE = frozenset(
    {"chat_template", "served_model_name", "pipeline_parallel_size", "data_parallel_size"}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the measured steps, then the engine's."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument(
        "--depth",
        type=int,
        default=512,
        metavar="NUM",
        help="tokens in the cache before a decoding row, limited by the context (default 512)",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=16,
        metavar="NUM",
        help="decoding rows of the batch, and rows of the mixed step (default 16)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="NUM",
        help="seconds of measurement for each step (default 3)",
    )
    add_engine_arguments(parser, skip=_NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and pass on errors of the measurement."""
    from quire.bench.profile import measure_profile, profile_text
    from quire.obs.report import show

    outcome = measure_profile(
        arguments.model,
        engine_settings(arguments),
        depth=arguments.depth,
        sequences=arguments.sequences,
        seconds=arguments.seconds,
    )
    show(outcome, profile_text(outcome), as_json=arguments.json)
    return 0
