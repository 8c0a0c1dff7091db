"""POST /completion and /infill: continue a prompt, or fill a gap, in the form of llama.cpp's API.

A prompt is a text, token ids, or a list of both, of which only a text at its beginning gets the
tokenizer's special tokens. A list without ids is a list of prompts. Always holds: a
text has the ids that /v1/completions gives it, and the same request, with the window of penalties
and the order of samplers, has the same tokens there.
infill.py makes the prompt of /infill; of its texts of other files the first are left out if all do
not fit the context, then texts around the gap are cut.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from quire.api.engine_protocol import Engine
from quire.api.generation.choice_streams import Prompt
from quire.api.generation.continued_answer import CONTINUATION, CONTINUED_STREAMS
from quire.api.generation.fields import flag
from quire.api.generation.generate import GenerationJob, GenerationRequest, GenerationRoute
from quire.api.generation.request_context import checked_ids, encode
from quire.api.generation.text_bounds import TOO_LONG
from quire.api.generation.truncation import answer_room, fitted
from quire.api.llama_cpp.answer_writer import AnswerWriter
from quire.api.llama_cpp.dialect import LLAMA_CPP
from quire.api.llama_cpp.fields import LLAMA_COMPLETION, LLAMA_INFILL
from quire.api.llama_cpp.infill import NUM_MARKS, InfillTexts
from quire.api.llama_cpp.line_limits import NO_LIMITS, line_limits, streams_of
from quire.api.llama_cpp.request import Returned, as_named_here, read_sampling
from quire.api.llama_cpp.several_answers import SeveralAnswers
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.engine.output.output_stream import PLAIN_TEXT, TextRules

# Texts and runs of ids of one prompt.
MAX_PARTS = 1024
# Of one request.
MAX_ANSWERS = 1024
_FORMS = (
    "a text, a list of token ids, a list of texts and ids that make one prompt, or a list of such "
    "prompts are allowed"
)


async def read_completion(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    sampling, returned = read_sampling(request)
    adds_special = flag(request.given, "add_special_tokens", default=True)
    prompts = _prompts(request.given.get("prompt"))
    return await _job(request, prompts, sampling, returned, adds_special=adds_special)


async def read_infill(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    sampling, returned = read_sampling(request)
    texts = InfillTexts(request.given)
    first = await _first_file(request, texts, sampling)
    text = texts.prompt(request.engine.tokenizer, first)
    try:
        return await _job(request, [[text]], sampling, returned, adds_special=True)
    except TOO_LONG:  # without other texts too
        text = await _shortened(request, texts, first, sampling)
    return await _job(request, [[text]], sampling, returned, adds_special=True)


COMPLETION, INFILL = (
    GenerationRoute(
        honoured=honoured,
        id_prefix=id_prefix,
        read=read,
        dialect=LLAMA_CPP,
        implied=frozenset({"timings"}),  # they are in each answer
        as_named_here=as_named_here,
    )
    for honoured, id_prefix, read in (
        (LLAMA_COMPLETION, "cmpl-", read_completion),
        (LLAMA_INFILL, "fill-", read_infill),
    )
)


async def _first_file(
    request: GenerationRequest, texts: InfillTexts, sampling: SamplingParams
) -> int:
    """Return the first of the texts of other files with which the prompt fits the context."""
    room = answer_room(sampling.max_tokens, request.engine.card.max_model_len)
    low, high = 0, len(texts.files)
    while low < high:
        middle = (low + high) // 2 if low else 0  # usually all fit
        if await _fits(request, texts, middle, room):
            high = middle
        else:
            low = middle + 1
    if low:
        request.context.ignore(f"input_extra[:{low}]")
    return low


async def _shortened(
    request: GenerationRequest, texts: InfillTexts, first_file: int, sampling: SamplingParams
) -> str:
    """Return the prompt with the texts around the gap cut so that it fits the context.

    A cut text may have more tokens than were kept of it, and the tokens between the texts depend on
    the vocabulary: what does not fit yet is cut by twice as many more.
    """
    max_model_len, tokenizer = request.engine.card.max_model_len, request.engine.tokenizer
    room = answer_room(sampling.max_tokens, max_model_len)
    max_tokens, num_spare = max_model_len - room, NUM_MARKS
    while True:
        num_tokens = max(max_tokens - num_spare, 0)
        left_out = await request.context.run_in_thread(texts.shorten, tokenizer, num_tokens)
        if not num_tokens or await _fits(request, texts, first_file, room):
            request.context.ignore(*left_out)
            return texts.prompt(tokenizer, first_file)
        num_spare *= 2


async def _fits(request: GenerationRequest, texts: InfillTexts, first_file: int, room: int) -> bool:
    """Return whether a prompt leaves `room` tokens to the answer."""
    text = texts.prompt(request.engine.tokenizer, first_file)
    try:
        await encode(request.context, text, add_special_tokens=True, min_output=room)
    except TOO_LONG:
        return False
    return True


async def _job(
    request: GenerationRequest,
    prompts: list[list[Any]],
    sampling: SamplingParams,
    returned: Returned,
    *,
    adds_special: bool,
) -> GenerationJob:
    """Return the job of prompts. Each answer has its prompt's text: as it was sent, or decoded."""
    limits, num_each = line_limits(request.given), sampling.n
    if limits != NO_LIMITS and not CONTINUATION.isdisjoint(request.given):
        raise InvalidParameter(
            "output_ids is given with t_max_predict_ms or n_indent, which count the lines and the "
            "time of the whole answer: leave them out",
            param="output_ids",
        )
    rules = PLAIN_TEXT if limits == NO_LIMITS else TextRules(counts_chars=True)
    if len(prompts) * num_each > MAX_ANSWERS:
        raise InvalidParameter(
            f"prompt has {len(prompts)} prompts and n_cmpl is {num_each}; at most {MAX_ANSWERS} "
            "answers a request are allowed: send fewer prompts",
            param="prompt",
        )
    if len(prompts) * num_each > 1 and (known := CONTINUED_STREAMS & request.given.keys()):
        raise InvalidParameter(
            f"{min(known)} is given with {len(prompts) * num_each} answers; a stream of one answer "
            "can be continued: leave it out, or send one prompt and n_cmpl 1",
            param=min(known),
        )
    # A line ends one answer and not the others: where it may, each is a request of its own.
    num_together = num_each if limits == NO_LIMITS else 1
    found: list[Prompt] = []
    writers: list[AnswerWriter] = []
    for at, parts in enumerate(prompts):
        if at:
            await asyncio.sleep(0)  # many short prompts take long together
        token_ids = await _ids(request, parts, sampling, adds_special=adds_special)
        room_tokens = request.engine.card.max_model_len - len(token_ids)
        chosen = replace(sampling, n=num_together)
        chosen = request.limited(chosen, len(token_ids), default_tokens=None)
        chosen = fitted(chosen, room_tokens)
        text = await _text(request, parts, token_ids)
        prompt = Prompt(token_ids=token_ids, sampling=chosen, text_rules=rules)
        found += [prompt] * (num_each // num_together)
        writers += [
            AnswerWriter(
                request.envelope, text, chosen, returned, room_tokens=room_tokens, index=index
            )
            for index in range(len(writers), len(writers) + num_each)
        ]
    if len(writers) == 1:
        return GenerationJob(prompts=found, writer=writers[0], streams=streams_of(limits))
    await asyncio.to_thread(_check_all, request.engine, found)
    several = SeveralAnswers(writers, num_together)
    return GenerationJob(prompts=found, writer=several, streams=several.streams_of(limits))


def _check_all(engine: Engine, prompts: list[Prompt]) -> None:
    """Check every prompt before the first one begins to be answered."""
    for prompt in prompts:
        engine.check(prompt.token_ids, prompt.sampling)


async def _text(request: GenerationRequest, parts: list[Any], token_ids: list[int]) -> str:
    """Return the text of a prompt."""
    text = parts[0]
    if len(parts) == 1 and isinstance(text, str):
        return text
    decode = request.engine.tokenizer.decode
    return await request.context.run_in_thread(decode, token_ids, skip_special_tokens=False)


def _prompts(prompt: Any) -> list[list[Any]]:
    """Return the prompts of a request, each as its texts and ids."""
    if prompt is None:
        raise InvalidParameter(f"prompt is missing; {_FORMS}", param="prompt")
    if isinstance(prompt, str):
        return [[prompt]]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidParameter(f"prompt is {show(prompt)}; {_FORMS}", param="prompt")
    if not all(isinstance(part, str | list) for part in prompt):
        return [_parts(prompt)]
    if len(prompt) > MAX_ANSWERS:
        raise InvalidParameter(
            f"prompt is a list of {len(prompt)} prompts; at most {MAX_ANSWERS} answers a request "
            "are allowed: send fewer prompts",
            param="prompt",
        )
    if [] in prompt:
        raise InvalidParameter(
            f"prompt holds an empty list at {prompt.index([])}; {_FORMS}", param="prompt"
        )
    return [[one] if isinstance(one, str) else _parts(one) for one in prompt]


def _parts(prompt: list[Any]) -> list[Any]:
    """Return the texts and ids of one prompt; ids that follow each other are one list."""
    parts: list[Any] = []
    for part in prompt:
        if isinstance(part, str):
            parts.append(part)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(part)
        else:
            parts.append([part])
    if len(parts) > MAX_PARTS:
        raise InvalidParameter(
            f"prompt has {len(parts)} texts and runs of ids; at most {MAX_PARTS} are allowed: join "
            "texts that follow each other",
            param="prompt",
        )
    return parts


async def _ids(
    request: GenerationRequest, parts: list[Any], sampling: SamplingParams, *, adds_special: bool
) -> list[int]:
    """Return the ids of a prompt. Raises InvalidParameter and ContextTooLong."""
    min_output = int(sampling.max_tokens != 0)
    ids: list[Any] = []
    for at, part in enumerate(parts):
        if at:
            await asyncio.sleep(0)  # many short texts take long together
        if isinstance(part, str):
            ids += await encode(
                request.context,
                part,
                add_special_tokens=adds_special and at == 0,
                min_output=min_output,
            )
        else:
            ids += part
    if not ids:
        raise InvalidParameter(
            "the prompt is empty, and no begin-of-text token is used instead; give some text",
            param="prompt",
        )
    return checked_ids(request.engine, ids, min_output=min_output)
