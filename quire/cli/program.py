"""`quire program MODEL`: print the program of a model, with bytes and operations of a step.

Reads configuration files only; weights need not exist. Imports are not lazy, since nothing here
needs more than NumPy.
"""

from __future__ import annotations

import argparse
import sys

from quire.base.errors import InvalidParameter
from quire.config.groups import DTYPE_NAMES
from quire.engine.assembly.precision import weights_if_there, with_precision
from quire.hub.cache import local_model
from quire.models.model_folder import box_path
from quire.models.registry import build_program, compute_dtype, open_model
from quire.program.cost import StepShape
from quire.program.degrees import MAX_DEGREE
from quire.program.expert_parallel import SPLIT_EXPERTS, even_placement
from quire.program.first_layers import first_layers, num_layers
from quire.program.kv_cache import KV_CACHE_DTYPES, with_kv_cache_dtype
from quire.program.quantize import AUTO
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.split import check_stages, split, split_first_layers
from quire.program.table import format_program
from quire.program.taps import with_taps
from quire.program.tensors import DType
from quire.quant.scheme import scheme_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory with config.json, a GGUF file, or ORG/NAME of a model in the Hugging Face "
        "cache (default: the built-in model)",
    )
    parser.add_argument(
        "--tokens", type=int, default=1, help="token rows of each sequence (default 1)"
    )
    parser.add_argument(
        "--depth", type=int, default=0, help="positions already in the cache (default 0)"
    )
    parser.add_argument(
        "--sequences", type=int, default=1, help="sequences in the step (default 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", *map(str, DType), *DTYPE_NAMES],
        default="auto",
        help="dtype of activations and weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[*KV_CACHE_DTYPES, *DTYPE_NAMES],
        default=AUTO,
        help="dtype of keys and values (default: as --dtype)",
    )
    parser.add_argument(
        "--quantization",
        choices=(AUTO, *scheme_names()),
        default=AUTO,
        help="precision of the weights of products (default: that of a quantized GGUF file or an "
        "fp8 checkpoint, else none)",
    )
    parser.add_argument(
        "--head-precision", default="auto", help="precision of the output head (default auto)"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="RULE",
        help="PATTERN=PRECISION for weights by name; may be given repeatedly",
    )
    parser.add_argument(
        "--taps",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="keep the stream after these layers, as EAGLE-3 heads read it (layers count from 0)",
    )
    parser.add_argument(
        "--self-draft-layers",
        type=int,
        metavar="NUM",
        help="print the first layers with the head, which propose tokens with --speculate self",
    )
    _add_parallelism(parser)
    parser.add_argument(
        "--all-layers", action="store_true", help="print every layer, not the first of its kind"
    )


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    """Add what selects a rank's or a stage's share."""
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="print the share of one of N ranks, with the bytes it receives (default 1)",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="N ranks divide the positions of the KV cache instead of its heads; together with "
        "--tensor-parallel-size there are as many ranks as both multiplied (default 1)",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="with --tensor-parallel-size: whole experts are distributed over the ranks",
    )
    parser.add_argument(
        "--tp-mode",
        choices=list(map(str, TpMode)),
        default="exact",
        help="with --tensor-parallel-size: fast splits half of the products by inputs",
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="which rank's share, from 0 (default 0)"
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="print each of N stages, with the bytes it receives (default 1)",
    )
    parser.add_argument(
        "--stage", type=int, metavar="STAGE", help="print this stage only, from 0 (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError, SettingError or InvalidParameter."""
    path = box_path() if args.model is None else local_model(args.model)
    spec = open_model(path)
    limit = spec.max_positions
    for name, value, low in (("tokens", args.tokens, 1), ("sequences", args.sequences, 1)):
        _check(name, value, low, limit if name == "tokens" else 1_000_000)
    _check("depth", args.depth, 0, limit - args.tokens)
    dtype = DTYPE_NAMES.get(args.dtype, args.dtype)
    program = build_program(spec, dtype=compute_dtype(spec, dtype), max_positions=limit)
    program = with_precision(
        program,
        args.quantization,
        weights_if_there(path),
        head=args.head_precision,
        keep=args.keep,
        static=spec.static_activations,
    )
    kv_cache_dtype = DTYPE_NAMES.get(args.kv_cache_dtype, args.kv_cache_dtype)
    program = with_kv_cache_dtype(program, kv_cache_dtype)
    whole, drafting = program, args.self_draft_layers
    if drafting is not None:
        _check("self-draft-layers", drafting, 1, num_layers(program))
        if args.taps:
            raise InvalidParameter(
                "--taps and --self-draft-layers are given, and no head reads hidden states of a "
                "pass of the first layers; leave one of them out",
                param="taps",
            )
        program = first_layers(program, drafting)
    if args.taps:
        try:
            program = with_taps(program, args.taps)
        except ValueError as error:
            raise InvalidParameter(f"--taps: {error}", param="taps") from error
    _check("context-parallel-size", args.context_parallel_size, 1, MAX_DEGREE)
    context, mode = args.context_parallel_size, TpMode(args.tp_mode)
    degree, placement = args.tensor_parallel_size * context, SPLIT_EXPERTS
    if mode is TpMode.FAST and degree < 2:
        raise InvalidParameter(
            "--tp-mode fast splits products over the ranks of --tensor-parallel-size; give at "
            "least 2",
            param="tp-mode",
        )
    if args.enable_expert_parallel:
        if degree < 2:
            raise InvalidParameter(
                "--enable-expert-parallel distributes experts over the ranks of "
                "--tensor-parallel-size; give at least 2",
                param="enable-expert-parallel",
            )
        placement = even_placement(program, degree)
    check_stages(whole, args.pipeline_parallel_size)
    if drafting is None:
        stages = split(program, args.pipeline_parallel_size)
    else:
        stages = split_first_layers(whole, drafting, args.pipeline_parallel_size)
    if args.stage is not None:
        _check("stage", args.stage, 0, len(stages) - 1)
        stages = stages[args.stage : args.stage + 1]
    step = StepShape([args.tokens] * args.sequences, [args.depth] * args.sequences)
    tables = [
        format_program(
            shard(
                stage,
                degree=degree,
                rank=args.rank,
                placement=placement,
                mode=mode,
                context=context,
            ),
            step,
            all_layers=args.all_layers,
        )
        for stage in stages
    ]
    sys.stdout.write("\n".join(tables))
    return 0


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidParameter(
            f"--{name} is {value}; {low} to {high} is allowed for this model", param=name
        )
