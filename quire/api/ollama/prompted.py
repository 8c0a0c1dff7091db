"""What the two generating routes of Ollama's API share: parameters, ids and the job of a prompt.

Always holds: a text is tokenized as /v1/completions and /v1/chat/completions tokenize it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from quire.api.generation.chat_output import ChatOutputParser
from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.api.generation.fields import sampling_of
from quire.api.generation.generate import GenerationJob, GenerationRequest
from quire.api.generation.request_context import encode
from quire.api.generation.truncation import fitted
from quire.api.ollama.answer_writer import AnswerWriter, loaded_json
from quire.api.ollama.prompt_cut import PromptCut
from quire.api.ollama.request import (
    as_ollama_does,
    num_top_logprobs,
    sampling_fields,
    unloads,
)
from quire.api.streaming.event_stream import Writer
from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.engine.client.request_builder import prompt_too_long
from quire.engine.output.output_stream import PLAIN_TEXT

Read = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]


class LoadedResponse(Response):
    """The answer to a request without a prompt; the engine is not asked."""


def read_sampling(request: GenerationRequest) -> SamplingParams:
    """Return the parameters of `options`, `format` and the log-probabilities."""
    engine = request.engine
    sampling = sampling_of(
        sampling_fields(request.context),
        engine.default_sampling(),
        logprobs=num_top_logprobs(request.given),
        tokenizer=engine.tokenizer,
    )
    return as_ollama_does(sampling)


async def prompted_job(
    request: GenerationRequest,
    text: str,
    sampling: SamplingParams,
    parser: ChatOutputParser | None,
    *,
    param: str,
    is_chat: bool,
    add_special_tokens: bool = False,
    before: Sequence[int] = (),
    cut: PromptCut | None = None,
    returns_context: bool = False,
) -> GenerationJob:
    """Tokenize a prompt and return its job. before: ids that precede those of the text. cut: how
    all are made to fit the context; None: they must.

    param: the field of the text. Without a limit, or with one that the context has no room for, the
    answer may fill the context.
    """
    engine = request.engine
    token_ids = await encode(
        request.context,
        text,
        add_special_tokens=add_special_tokens and not before,
        keep_tokens=None if cut is None else slice(None),
        param=param,
    )
    token_ids = [*before, *token_ids]
    if cut is not None:
        token_ids = [*cut.ids(token_ids, param)]
    max_model_len = engine.card.max_model_len
    if before and len(token_ids) >= max_model_len:
        found = f"{len(token_ids)} tokens with those of context"
        raise ContextTooLong(prompt_too_long(found, max_model_len, min_output=1), param="context")
    if not token_ids:
        raise InvalidParameter(
            f"{param} makes an empty prompt, and this model has no begin-of-text token to use "
            "instead; give some text",
            param=param,
        )
    sampling = request.limited(sampling, len(token_ids), default_tokens=None)
    sampling = fitted(sampling, max_model_len - len(token_ids))
    known = request.given.get("output_ids")  # checked once the job is known
    context = [*token_ids, *(known if isinstance(known, list) else ())]
    writer = AnswerWriter(
        request.envelope,
        parser,
        is_chat=is_chat,
        num_top=sampling.logprobs,
        prompt_ids=context if returns_context else None,
    )
    text_rules = PLAIN_TEXT if parser is None else parser.text_rules(engine.tokenizer)
    prompt = Prompt(token_ids=token_ids, sampling=sampling, text_rules=text_rules)
    return GenerationJob(prompts=[prompt], writer=writer)


def loading_job(
    request: GenerationRequest, sampling: SamplingParams, *, is_chat: bool
) -> GenerationJob:
    """Return the job of a request without a prompt: the model is loaded, and stays so.

    The parameters are checked as those of the shortest prompt.
    """
    room_tokens = request.engine.card.max_model_len - 1
    sampling = fitted(request.limited(sampling, 1, default_tokens=None), room_tokens)
    request.engine.check([0], sampling)
    envelope = request.envelope
    content = loaded_json(
        envelope.model,
        envelope.created_s,
        is_chat=is_chat,
        unloads=unloads(request.given),
    )
    return answered_job(request, content, AnswerWriter(envelope, None, is_chat=is_chat))


def answered_job(request: GenerationRequest, content: Any, writer: Writer) -> GenerationJob:
    """Return the job of a request with this answer, for which nothing is computed. writer: not
    used."""

    def respond(answers: ChoiceStreams) -> Response:
        headers = request.context.headers()
        return LoadedResponse(
            msgspec.json.encode(content), headers=headers, media_type="application/json"
        )

    return GenerationJob(prompts=[], writer=writer, respond=respond)
