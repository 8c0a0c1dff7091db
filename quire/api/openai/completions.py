"""POST /v1/completions: continue prompts given as text or token ids.

Prompts run at once; choices are numbered prompt by prompt, n to each, as OpenAI numbers them. An
empty prompt, or null, is the model's begin-of-text token, and refused if it has none. max_tokens
defaults to 16. `echo` prepends the prompt's text, and with `logprobs` the log-probabilities of its
tokens; with max_tokens 0 the answer is only that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.engine_protocol import Engine
from quire.api.generation.answer_json import (
    check_prompt_numbers,
    prompt_logprobs,
    refuse_streamed_prompt,
    speeds_json,
    usage_json,
)
from quire.api.generation.choice_streams import Choice, Prompt
from quire.api.generation.fields import (
    COMPLETION_TOKENS,
    COMPLETIONS,
    completion_tokens,
    flag,
    sampling_of,
)
from quire.api.generation.generate import (
    ChunkWriter,
    Envelope,
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    StreamOptions,
    generate,
)
from quire.api.generation.request_context import RequestContext, checked_ids, encode
from quire.api.generation.thinking_budget import with_budget_of_text
from quire.api.generation.truncation import kept_tokens
from quire.api.generation.usage import Usage
from quire.api.openai.dialect import OPENAI
from quire.api.openai.logprobs import completion_logprobs, echoed_logprobs, joined
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.base.thinking_budget import FIELD
from quire.engine.client.logprob_numbers import with_all
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText
from quire.text.infill import infill_prompt

MAX_CHOICES = 1024


class CompletionsRoute:
    """The route."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._route = GenerationRoute(
            honoured=COMPLETIONS, id_prefix="cmpl-", read=read_job, dialect=OPENAI
        )

    async def post(self, request: Request) -> Response:
        """Answer one request."""

        async def read(asked: GenerationRequest) -> GenerationJob:
            return await read_job(asked, sent=getattr(request.state, "body", {}))

        return await generate(self._server_state, request, replace(self._route, read=read))


async def read_job(request: GenerationRequest, *, sent: Mapping[str, Any] = {}) -> GenerationJob:
    """Check all fields. Raises InvalidParameter and ContextTooLong naming the field.

    sent: the body where it has other fields than `given`, such as those that are null.
    """
    given, engine = request.given, request.engine
    num_top = given.get("logprobs")
    echo = flag(given, "echo")
    sampling = _sampling(request, echo=echo)
    refuse_streamed_prompt(sampling.prompt_logprobs, stream=flag(given, "stream"))
    adds_special = flag(given, "add_special_tokens", default=True)
    is_null = "prompt" in sent and "prompt" not in given
    texts = _filling_in(engine, given, [""] if is_null else _prompts(given))
    keep_tokens = kept_tokens(given, engine, completion_tokens(sampling))
    if len(texts) * sampling.num_sequences > MAX_CHOICES:
        name = "n" if sampling.best_of is None else "best_of"
        raise InvalidParameter(
            f"prompt has {len(texts)} entries and {name} is {sampling.num_sequences}; at most "
            f"{MAX_CHOICES} choices a request are allowed; send fewer prompts",
            param="prompt",
        )
    prompts = []
    returns_ids = flag(given, "return_token_ids")
    num_numbers = 0
    per_token = _numbers_per_token(given, engine.card.vocab_size, echo=echo) + returns_ids
    for at, text in enumerate(texts):
        if at:
            await asyncio.sleep(
                0
            )  # a thousand short prompts take long together: let other requests continue
        token_ids = await _ids(
            request.context,
            text,
            sampling,
            add_special_tokens=adds_special,
            keep_tokens=keep_tokens,
        )
        chosen = request.limited(sampling, len(token_ids), default_tokens=COMPLETION_TOKENS)
        if FIELD in given:
            chosen = with_budget_of_text(request.context, chosen, text, given[FIELD])
        shown = _shown(engine, text, sampling) if echo else ""
        first = _first(engine, token_ids) if echo and num_top is not None else None
        prompts.append(Prompt(token_ids=token_ids, sampling=chosen, echo=shown, first=first))
        num_numbers += len(token_ids) * sampling.n * per_token
        check_prompt_numbers(num_numbers, param=_numbers_param(given, echo=echo))
    if len(prompts) > 1:
        await asyncio.to_thread(_check_all, engine, prompts)
    writer = CompletionWriter(
        request.envelope,
        prompts,
        num_top=num_top,
        num_prompt_top=given.get("prompt_logprobs"),
        special_ids=engine.tokenizer.special_ids,
        returns_ids=returns_ids,
        names_ids=flag(given, "return_tokens_as_token_ids"),
        options=request.stream_options,
    )
    return GenerationJob(prompts=prompts, writer=writer)


class CompletionWriter(ChunkWriter):
    """Write one answer as a `text_completion` object, or as chunks."""

    def __init__(
        self,
        envelope: Envelope,
        prompts: Sequence[Prompt],
        *,
        num_top: int | None,
        num_prompt_top: int | None,
        special_ids: Collection[int],
        returns_ids: bool,
        names_ids: bool = False,
        options: StreamOptions,
    ) -> None:
        super().__init__(envelope.frame("text_completion"), options)
        self._returns_ids, self._names_ids = returns_ids, names_ids
        self._special_ids = special_ids
        self._prompts = prompts
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._lists_ids = bool(prompts[0].sampling.logprob_token_ids)
        # By prompt, written once and added to each of its choices.
        self._echoed: dict[int, dict[str, Any]] = {}
        self._scored: dict[int, dict[str, Any]] = {}
        self._begun: set[tuple[int, int]] = set()

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        written = []
        for at, of_prompt in enumerate(choices):
            for index, choice in enumerate(of_prompt):
                self._keep_prompt(at, choice.prompt_logprobs)
                written.append(
                    {
                        "index": self._index(at, index),
                        "text": self._prompts[at].echo + choice.text,
                        "logprobs": self._logprobs(at, choice.logprobs, begins=True, whole=True),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        "seed": choice.seed,
                        "prompt_logprobs": None,  # unless requested; clients read it
                        **self._scored.get(at, {}),
                        **self._ids(at, choice.token_ids, begins=True),
                    }
                )
        return {
            **self._frame,
            "choices": written,
            "usage": usage_json(usage),
            **speeds_json(usage),
            "kv_transfer_params": None,  # unless it is offered; clients read it
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield one chunk; the first of a choice has the echo and the fields of the prompt."""
        self._keep_prompt(prompt, delta.prompt_logprobs)
        begins = (prompt, delta.index) not in self._begun
        self._begun.add((prompt, delta.index))
        choice: dict[str, Any] = {
            "index": self._index(prompt, delta.index),
            "text": self._prompts[prompt].echo + delta.text if begins else delta.text,
            "logprobs": self._logprobs(prompt, delta.logprobs, begins=begins),
            "finish_reason": delta.finish_reason,
        }
        if begins:
            choice |= self._scored.get(prompt, {})
        choice |= self._ids(prompt, delta.token_ids, begins=begins)
        if begins and self._returns_ids:
            choice["seed"] = delta.seed
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason, "seed": delta.seed}
        yield self._chunk([choice])

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of more text; None if chunks have more fields."""
        if self._num_top is not None or self._returns_ids:
            return None
        place = self._index(prompt, index)
        return self._chunk(
            [{"index": place, "text": text, "logprobs": None, "finish_reason": None}]
        )

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame, "choices": choices}
        if self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _index(self, prompt: int, index: int) -> int:
        return prompt * self._prompts[0].sampling.n + index

    def _ids(self, at: int, token_ids: Sequence[int], *, begins: bool) -> dict[str, Any]:
        """Return the ids of a chunk, and of the prompt in the first chunk, if requested."""
        if not self._returns_ids:
            return {}
        prompt = {"prompt_token_ids": self._prompts[at].token_ids} if begins else {}
        return {**prompt, "token_ids": token_ids}

    def _keep_prompt(self, at: int, tokens: Sequence[TokenText | None]) -> None:
        """Write the fields of prompt `at` when they are first known."""
        prompt = self._prompts[at]
        if not tokens or at in self._echoed or at in self._scored:
            return
        if prompt.first is not None and self._num_top is not None:
            self._echoed[at] = echoed_logprobs(
                prompt.first,
                tokens,
                echo=prompt.echo,
                num_top=self._num_top,
                special_ids=self._special_ids,
                names_ids=self._names_ids,
                parted=self._num_top == ALL_LOGPROBS,
            )
        if self._num_prompt_top is not None:
            self._scored[at] = {"prompt_logprobs": prompt_logprobs(tokens, self._num_prompt_top)}

    def _logprobs(
        self, at: int, tokens: Sequence[TokenText], *, begins: bool, whole: bool = False
    ) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        written = completion_logprobs(
            tokens,
            echo_chars=len(self._prompts[at].echo),
            num_top=self._num_top,
            lists_ids=self._lists_ids,
            names_ids=self._names_ids,
            parted=whole and self._num_top == ALL_LOGPROBS,
        )
        return joined(self._echoed[at], written) if begins and at in self._echoed else written


def _sampling(request: GenerationRequest, *, echo: bool) -> SamplingParams:
    """Return the parameters; an echo with log-probabilities needs those of the prompt too."""
    given, num_top = dict(request.given), request.given.get("logprobs")
    if echo and num_top is not None:
        given.setdefault("prompt_logprobs", num_top)
    sampling = sampling_of(
        given,
        request.engine.default_sampling(),
        logprobs=num_top,
        tokenizer=request.engine.tokenizer,
    )
    if not echo or sampling.logprobs is None or sampling.prompt_logprobs is None:
        return sampling
    nums_top = sampling.logprobs, sampling.prompt_logprobs
    most = ALL_LOGPROBS if ALL_LOGPROBS in nums_top else max(nums_top)
    return replace(sampling, prompt_logprobs=most)


def _numbers_per_token(given: Mapping[str, Any], vocab_size: int, *, echo: bool) -> int:
    """Return the log-probabilities that a choice has of each prompt token."""
    nums_top = (given.get("prompt_logprobs"), given.get("logprobs") if echo else None)
    return sum(1 + with_all(num_top, vocab_size) for num_top in nums_top if num_top is not None)


def _numbers_param(given: Mapping[str, Any], *, echo: bool) -> str:
    """Return the field that asks for most of the numbers of prompts."""
    if given.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    return "logprobs" if echo and given.get("logprobs") is not None else "return_token_ids"


def _first(engine: Engine, token_ids: Sequence[int]) -> TokenText:
    """Return the first token of a prompt, without a log-probability."""
    token_id = token_ids[0]
    return TokenText(
        token_id=token_id,
        text=engine.tokenizer.token_text(token_id),
        raw=engine.tokenizer.token_bytes(token_id),
        logprob=math.nan,
    )


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    """Return the prompts, each a text or a list of unchecked ids."""
    prompt = given.get("prompt")
    if prompt is None:
        raise InvalidParameter("prompt is missing; give text or token ids", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidParameter(
            f"prompt is {show(prompt)}; a text, a list of texts, a list of token ids, or a list of "
            "such lists is allowed, and none of them empty",
            param="prompt",
        )
    for kind in (str, list):
        if isinstance(prompt[0], kind):
            odd = [entry for entry in prompt if not isinstance(entry, kind)]
            if odd:
                raise InvalidParameter(
                    f"prompt mixes kinds: it begins with {show(prompt[0])} and holds "
                    f"{show(odd[0])}; give only texts, only token ids, or only lists of ids",
                    param="prompt",
                )
            return prompt
    return [prompt]


def _filling_in(engine: Engine, given: Mapping[str, Any], prompts: list[Any]) -> list[Any]:
    """Return the prompts as infill prompts if `suffix` is given."""
    suffix = given.get("suffix", "")
    if not isinstance(suffix, str):
        raise InvalidParameter(f"suffix is {show(suffix)}; a text is allowed", param="suffix")
    if not suffix:
        return prompts
    if given.get("echo"):
        raise InvalidParameter(
            "suffix and echo are both given; an infilled answer does not follow its "
            "prompt: leave one out",
            param="suffix",
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidParameter(
            "suffix is given and the prompt is token ids; give the prompt as text", param="suffix"
        )
    filled = [infill_prompt(engine.tokenizer, prompt, suffix) for prompt in prompts]
    if None in filled:
        raise InvalidParameter(
            f"suffix is {show(suffix)}, and the model's vocabulary has no tokens for infilling "
            "(such as <|fim_prefix|>); leave it out",
            param="suffix",
        )
    return filled


async def _ids(
    request: RequestContext,
    prompt: Any,
    sampling: SamplingParams,
    *,
    add_special_tokens: bool,
    keep_tokens: slice | None,
) -> list[int]:
    min_output = int(sampling.max_tokens != 0)
    if not isinstance(prompt, str):
        return checked_ids(request.engine, prompt, min_output=min_output, keep_tokens=keep_tokens)
    token_ids = await encode(
        request,
        prompt,
        add_special_tokens=add_special_tokens,
        min_output=min_output,
        keep_tokens=keep_tokens,
    )
    if not token_ids:
        why = (
            "this model has no begin-of-text token to use instead"
            if add_special_tokens
            else "add_special_tokens is false, so no begin-of-text token is used instead"
        )
        raise InvalidParameter(f"the prompt is empty, and {why}; give some text", param="prompt")
    return token_ids


def _shown(engine: Engine, prompt: Any, sampling: SamplingParams) -> str:
    """Return the text of a prompt, for `echo`."""
    if isinstance(prompt, str):
        return prompt
    return engine.tokenizer.decode(prompt, skip_special_tokens=sampling.skip_special_tokens)


def _check_all(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Check every prompt before the first one begins to be answered."""
    for prompt in prompts:
        engine.check(prompt.token_ids, prompt.sampling)
