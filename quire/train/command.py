"""The arguments that trainings of draft heads share, and the order of their parts.

Texts come first, then the training, then the head in its published layout. Knows no kind of head.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import SettingError
from quire.base.user_path import user_path
from quire.config.machine import num_compute_threads
from quire.hub.cache import local_model
from quire.models.model_folder import box_path
from quire.models.registry import open_model
from quire.train.loop import LoopSettings
from quire.train.output_files import make_out, writing
from quire.train.precision import Precision, identity
from quire.train.progress import Progress
from quire.train.tensor_file import Array, write_tensors
from quire.train.texts import Text, TextSettings, generated_texts, read_prompts

TEXTS = "texts.jsonl"
_PRECISION = ("quantization", "head_precision", "kv_cache_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training as it was asked for. model: its directory; precision: in which it is computed;
    out: where everything is written."""

    model: Path
    out: Path
    num_threads: int
    max_tokens: int
    precision: Precision
    dtype: str
    loop: LoopSettings
    texts: list[Text]
    progress: Progress


def parser(description: str) -> argparse.ArgumentParser:
    """Return the arguments that all trainings have."""
    made = argparse.ArgumentParser(
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="", help="a directory or ORG/NAME; default: built in")
    made.add_argument(
        "--quantization",
        default="auto",
        help="of the model, as it will be served: int8, int4, none and so on; auto: as its file",
    )
    made.add_argument(
        "--head-precision", default="auto", help="of the model's output head, as it will be served"
    )
    made.add_argument(
        "--kv-cache-dtype", default="auto", help="of the model's KV cache, as it will be served"
    )
    made.add_argument("--prompts", type=Path, required=True, help="a file with one prompt per line")
    made.add_argument(
        "--form",
        choices=("text", "chat", "both"),
        default="text",
        help="chat: prompts are messages of a user; both: in turn",
    )
    made.add_argument("--out", type=Path, required=True, help="directory of head and checkpoints")
    made.add_argument("--tokens", type=positive, default=200_000, help="to generate, of answers")
    made.add_argument("--answer-tokens", type=positive, default=256, help="most of an answer")
    made.add_argument(
        "--temperature", type=float, nargs="+", default=[1.0, 0.6, 0.0], help="of answers, in turn"
    )
    made.add_argument("--max-num-seqs", type=positive, default=64, help="answers at once")
    made.add_argument("--max-tokens", type=positive, default=512, help="of a text, prompt included")
    made.add_argument(
        "--steps", type=positive, default=2_000, help="updates in all, those of a checkpoint too"
    )
    made.add_argument("--batch", type=positive, default=4, help="texts of a step")
    made.add_argument("--lr", type=rate, default=1e-3, help="learning rate after the warm-up")
    made.add_argument(
        "--checkpoint-steps", type=positive, default=200, help="between two checkpoints"
    )
    made.add_argument("--threads", type=positive, help="default: all cores")
    made.add_argument(
        "--dtype", choices=("f32", "f16", "bf16"), default="bf16", help="of the head's file"
    )
    made.add_argument("--seed", type=seed, default=1, help="of texts, first weights and order")
    return made


def model_of(args: argparse.Namespace) -> Path:
    """Return the model's directory. Raises SettingError or ModelError."""
    return local_model(args.model) if args.model else box_path()


def precision_of(args: argparse.Namespace) -> Precision:
    """Return the settings that say how the model is computed, by the engine's names."""
    given: dict[str, str] = {name: getattr(args, name) for name in _PRECISION}
    return {name: value for name, value in given.items() if value != "auto"}


def prepared(args: argparse.Namespace) -> Task:
    """Generate the texts, as far as they are not there. Raises SettingError or ModelError."""
    progress = Progress()
    out = user_path(str(args.out))
    make_out(out)
    model, precision = model_of(args), precision_of(args)
    name = identity(model, precision)
    num_threads = num_compute_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.set_num_threads(num_threads)
    settings = TextSettings(
        num_tokens=args.tokens,
        answer_tokens=args.answer_tokens,
        temperatures=tuple(args.temperature),
        form=args.form,
        seed=args.seed,
        max_num_seqs=args.max_num_seqs,
        threads=args.threads,
        precision=precision,
        vocab_size=open_model(model).vocab_size,
    )
    prompts = read_prompts(user_path(str(args.prompts)))
    texts = generated_texts(str(model), name, prompts, settings, out / TEXTS, progress)
    fitting = [text for text in texts if len(text.ids) - text.num_prompt_tokens > MIN_ANSWER_TOKENS]
    fitting = [text for text in fitting if text.num_prompt_tokens < args.max_tokens]
    if not fitting:
        raise SettingError(
            f"none of {len(texts)} texts has an answer of more than {MIN_ANSWER_TOKENS} tokens "
            f"within --max-tokens {args.max_tokens}; give other prompts"
        )
    loop = LoopSettings(
        steps=args.steps,
        batch=args.batch,
        learning_rate=args.lr,
        warmup_steps=min(100, args.steps // 10 + 1),
        checkpoint_steps=args.checkpoint_steps,
        seed=args.seed,
    )
    return Task(
        model=model,
        out=out,
        num_threads=num_threads,
        max_tokens=args.max_tokens,
        precision=precision,
        dtype=args.dtype,
        loop=loop,
        texts=fitting,
        progress=progress,
    )


def write_head(task: Task, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    """Write a head as servers load it. Raises SettingError."""
    write_tensors(task.out / "model.safetensors", tensors, {"format": "pt"})
    path = task.out / "config.json"
    with writing(path):
        path.write_text(json.dumps(config, indent=2) + "\n")
    task.progress.say(f"wrote {task.out}")


MIN_ANSWER_TOKENS = 8
MAX_SEED = 1 << 62


def positive(text: str) -> int:
    """Return an argument as a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return value


def seed(text: str) -> int:
    """Return an argument as a whole number from 0 on, of which the seeds of texts follow."""
    value = int(text)
    if not 0 <= value < MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 to {MAX_SEED - 1}")
    return value


def rate(text: str) -> float:
    """Return an argument as a finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value
