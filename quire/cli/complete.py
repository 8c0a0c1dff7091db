"""`quire complete`: continue one prompt and stream the answer to standard output.

With --json one object is printed at the end: ids, log-probabilities, counts and times. Standard
output holds nothing but the answer, so that it can be piped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, InvalidParameter, WorkerError
from quire.base.user_path import user_path
from quire.cli.options import (
    add_engine_arguments,
    add_sampling_arguments,
    check_utf8,
    engine_settings,
    given_sampling,
    sampling_flags_in_errors,
)
from quire.cli.pull import add_pull_flag, pull_if_asked
from quire.hub.names import hub_name

if TYPE_CHECKING:
    from quire.base.sampling_params import SamplingParams
    from quire.engine.library.async_llm import AsyncLLM
    from quire.engine.output.output_stream import TextDelta
    from quire.engine.output.token_text import TokenText


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    add_engine_arguments(parser, skip=frozenset({"chat_template"}))  # a prompt has none
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the prompt; default: all of standard input"
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before the answer")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with ids, logprobs and times"
    )
    add_pull_flag(parser)
    add_sampling_arguments(parser)
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="NUM",
        help="with --json: log-probabilities of the tokens and of this many alternatives",
    )


def run(arguments: argparse.Namespace) -> int:
    """Complete the prompt."""
    if arguments.logprobs is not None and not arguments.json:
        raise InvalidParameter("--logprobs is shown with --json only; add --json", param="logprobs")
    if arguments.echo and arguments.json:
        raise InvalidParameter("--json always holds the prompt; leave out --echo", param="echo")
    pull_if_asked(arguments)
    prompt = arguments.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise InvalidParameter("no prompt; give one with --prompt, or pipe it in")
        prompt = check_utf8(sys.stdin.read(), "standard input")
    check_utf8(prompt, "--prompt")
    try:
        with sampling_flags_in_errors():
            return asyncio.run(_complete(arguments, prompt))
    except ConfigError as error:
        if arguments.prompt is not None or not arguments.model or _is_model(arguments.model):
            raise
        hint = "a prompt is given with --prompt, not without a flag"
        raise ConfigError(f"{error}; {hint}") from error


def _is_model(text: str) -> bool:
    """Return whether a text is the path of something, or has the form of a model's name."""
    return os.path.exists(user_path(text)) or hub_name(text) is not None


async def _complete(arguments: argparse.Namespace, prompt: str) -> int:
    from quire.engine.library.async_llm import AsyncLLM  # NumPy and the kernels: --help needs none

    begin_s = time.perf_counter()
    async with AsyncLLM(arguments.model, **engine_settings(arguments)) as llm:
        loaded_s = time.perf_counter()
        sampling = llm.client.default_sampling().changed(
            logprobs=arguments.logprobs,
            **given_sampling(arguments),
        )
        prompt_ids = llm.client.tokenizer.encode(prompt)
        answer = _Answer(shown=not arguments.json)
        if arguments.echo:
            sys.stdout.write(prompt)
        await answer.take(llm, prompt_ids, sampling)
        if arguments.json:
            load_ms = (loaded_s - begin_s) * 1000
            report = {"model": llm.client.card.name, "prompt": prompt, "prompt_ids": prompt_ids}
            print(json.dumps(report | answer.report(load_ms), ensure_ascii=False))
    return 0


class _Answer:
    """Collect the answer and its times; write it to standard output as it arrives if `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._deltas: list[TextDelta] = []
        self._first_text_ms = self._end_ms = 0.0

    async def take(self, llm: AsyncLLM, prompt_ids: list[int], sampling: SamplingParams) -> None:
        begin_s = time.perf_counter()
        async with aclosing(llm.generate(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                self._end_ms = (time.perf_counter() - begin_s) * 1000
                self._first_text_ms = self._first_text_ms or self._end_ms
                if delta.error is not None:
                    raise WorkerError(delta.error)
                self._deltas.append(delta)
                if self._shown:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        if self._shown:
            sys.stdout.write("\n")

    def report(self, load_ms: float) -> dict[str, Any]:
        last = self._deltas[-1]
        generating_s = (self._end_ms - self._first_text_ms) / 1000
        num_later = last.num_output_tokens - len(self._deltas[0].token_ids)
        return {
            "text": "".join(delta.text for delta in self._deltas),
            "token_ids": [id_ for delta in self._deltas for id_ in delta.token_ids],
            "logprobs": [_token(token) for delta in self._deltas for token in delta.logprobs],
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "seed": last.seed,
            "usage": {
                "prompt_tokens": last.num_prompt_tokens,
                "cached_tokens": last.cached_tokens,
                "completion_tokens": last.num_output_tokens,
            },
            "timing": {
                "load_ms": round(load_ms, 3),
                "first_text_ms": round(self._first_text_ms, 3),
                "total_ms": round(self._end_ms, 3),
                "tokens_per_s": round(num_later / generating_s, 3) if generating_s > 0 else None,
            },
        }


def _token(token: TokenText) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": token.token_id,
        "text": token.text,
        "bytes": list(token.raw),
        "logprob": token.logprob,
    }
    return entry | {"top": [_token(other) for other in token.top]} if token.top else entry
