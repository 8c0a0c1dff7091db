"""POST /v1/completions: prompts as text or token ids, continued.

Prompts run at once; choices are numbered prompt by prompt, n to each, as OpenAI numbers them. A
prompt "" is the model's begin-of-text token where it has one, and refused where it has none.
max_tokens is 16 where the request does not say. `echo` puts the prompt's text in front, and with
`logprobs` the log-probabilities of its tokens; max_tokens 0 then asks for nothing else.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.choice_streams import Choice, Prompt, Usage
from quire.api.generation.fields import COMPLETIONS, flag
from quire.api.generation.generate import (
    Envelope,
    GenerationJob,
    GenerationRequest,
    generate,
    usage_json,
)
from quire.api.generation.prompts import checked_ids, encode, most_tokens
from quire.api.generation.request_context import RequestContext
from quire.api.generation.sampling_fields import (
    COMPLETION_TOKENS,
    completion_tokens,
    limited,
    sampling_of,
)
from quire.api.openai.logprobs import (
    check_told,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from quire.api.server_state import Engine, ServerState
from quire.api.streaming.sse import speeds_json
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText
from quire.text.infill import infill_prompt

MAX_CHOICES = 1024


class CompletionsRoute:
    """The route."""

    def __init__(self, serving: ServerState) -> None:
        self._serving = serving

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        return await generate(
            self._serving, request, honoured=COMPLETIONS, prefix="cmpl", read=read_job
        )


async def read_job(asked: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises InvalidParameter and ContextTooLong naming the field."""
    given, engine = asked.given, asked.engine
    num_top = given.get("logprobs")
    echo = flag(given, "echo")
    sampling = _sampling(asked, echo=echo)
    adds_special = flag(given, "add_special_tokens", default=True)
    texts = _filling_in(engine, given, _prompts(given))
    keep_tokens = most_tokens(given, engine, completion_tokens(sampling))
    if len(texts) * sampling.num_sequences > MAX_CHOICES:
        name = "n" if sampling.best_of is None else "best_of"
        raise InvalidParameter(
            f"prompt has {len(texts)} entries and {name} is {sampling.num_sequences}; at most "
            f"{MAX_CHOICES} choices a request are allowed; send fewer prompts",
            param="prompt",
        )
    prompts = []
    tells_ids = flag(given, "return_token_ids")
    num_told, told_a_token = 0, _told_a_token(given, echo=echo) + tells_ids
    for at, text in enumerate(texts):
        if at:
            await asyncio.sleep(0)  # a thousand short prompts are long together: let others go on
        token_ids = await _ids(
            asked.request, text, sampling, add_special_tokens=adds_special, keep_tokens=keep_tokens
        )
        chosen = limited(
            sampling,
            default_tokens=COMPLETION_TOKENS,
            room_tokens=engine.card.max_model_len - len(token_ids),
            cap_tokens=asked.config.max_output_tokens,
        )
        shown = _shown(engine, text, sampling) if echo else ""
        first = _first(engine, token_ids) if echo and num_top is not None else None
        prompts.append(Prompt(token_ids=token_ids, sampling=chosen, echo=shown, first=first))
        num_told += len(token_ids) * sampling.n * told_a_token
        check_told(num_told, param=_told_by(given, echo=echo))
    if len(prompts) > 1:
        await asyncio.to_thread(_refuse_early, engine, prompts)
    writer = CompletionWriter(
        asked.envelope,
        prompts,
        num_top=num_top,
        num_prompt_top=given.get("prompt_logprobs"),
        special_ids=engine.tokenizer.special_ids,
        tells_ids=tells_ids,
        include_usage=asked.include_usage,
    )
    return GenerationJob(prompts=prompts, writer=writer)


class CompletionWriter:
    """`text_completion` objects, whole and in chunks. For one answer."""

    def __init__(
        self,
        envelope: Envelope,
        prompts: Sequence[Prompt],
        *,
        num_top: int | None,
        num_prompt_top: int | None,
        special_ids: Collection[int],
        tells_ids: bool,
        include_usage: bool,
    ) -> None:
        self._tells_ids = tells_ids
        self._special_ids = special_ids
        self._prompts = prompts
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._lists_ids = bool(prompts[0].sampling.logprob_token_ids)
        # By prompt, written once and told with each of its choices.
        self._echoed: dict[int, dict[str, Any]] = {}
        self._scored: dict[int, dict[str, Any]] = {}
        self._include_usage = include_usage
        self._begun: set[tuple[int, int]] = set()
        self._frame: dict[str, Any] = {
            "id": envelope.id,
            "object": "text_completion",
            "created": envelope.created_s,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
        }

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        written = []
        for at, of_prompt in enumerate(choices):
            for index, choice in enumerate(of_prompt):
                self._keep_prompt(at, choice.prompt_logprobs)
                written.append(
                    {
                        "index": self._index(at, index),
                        "text": self._prompts[at].echo + choice.text,
                        "logprobs": self._logprobs(at, choice.logprobs, begins=True),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                        "seed": choice.seed,
                        **self._scored.get(at, {}),
                        **self._ids(at, choice.token_ids, begins=True),
                    }
                )
        return {
            **self._frame,
            "choices": written,
            "usage": usage_json(usage),
            **speeds_json(usage),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """One chunk; the first of a choice begins with the echo and tells of the prompt."""
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
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason, "seed": delta.seed}
        yield self._chunk([choice])

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """The chunk of more text of a choice that has begun; None where others tell more."""
        if self._num_top is not None or self._tells_ids:
            return None
        place = self._index(prompt, index)
        return self._chunk(
            [{"index": place, "text": text, "logprobs": None, "finish_reason": None}]
        )

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, with usage and timings where they were asked for."""
        told = {**self._included(usage), **speeds_json(usage)}
        return {**self._frame, "choices": [], **told} if told else None

    def frame(self) -> dict[str, Any]:
        """Return the fields that every chunk has, without its choices."""
        return self._frame

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts so far."""
        return usage_json(usage)

    def _included(self, usage: Usage) -> dict[str, Any]:
        return {"usage": self.usage(usage)} if self._include_usage else {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _index(self, prompt: int, index: int) -> int:
        return prompt * self._prompts[0].sampling.n + index

    def _ids(self, at: int, token_ids: Sequence[int], *, begins: bool) -> dict[str, Any]:
        """The ids of an answer's tokens, and first those of its prompt, where they are told."""
        if not self._tells_ids:
            return {}
        prompt = {"prompt_token_ids": self._prompts[at].token_ids} if begins else {}
        return {**prompt, "token_ids": token_ids}

    def _keep_prompt(self, at: int, tokens: Sequence[TokenText | None]) -> None:
        """Write what is told of prompt `at`, when it is first known."""
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
            )
        if self._num_prompt_top is not None:
            self._scored[at] = {"prompt_logprobs": prompt_logprobs(tokens, self._num_prompt_top)}

    def _logprobs(
        self, at: int, tokens: Sequence[TokenText], *, begins: bool
    ) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        written = completion_logprobs(
            tokens,
            echo_chars=len(self._prompts[at].echo),
            num_top=self._num_top,
            lists_ids=self._lists_ids,
        )
        return joined(self._echoed[at], written) if begins and at in self._echoed else written


def _sampling(asked: GenerationRequest, *, echo: bool) -> SamplingParams:
    """The parameters; an echo with log-probabilities needs those of the prompt too."""
    given, num_top = dict(asked.given), asked.given.get("logprobs")
    if echo and num_top is not None:
        given.setdefault("prompt_logprobs", num_top)
    sampling = sampling_of(given, asked.engine.default_sampling(), logprobs=num_top)
    if not echo or sampling.logprobs is None or sampling.prompt_logprobs is None:
        return sampling
    return replace(sampling, prompt_logprobs=max(sampling.logprobs, sampling.prompt_logprobs))


def _told_a_token(given: Mapping[str, Any], *, echo: bool) -> int:
    """How many log-probabilities a choice tells of each token of its prompt."""
    asked = (given.get("prompt_logprobs"), given.get("logprobs") if echo else None)
    return sum(1 + num_top for num_top in asked if num_top is not None)


def _told_by(given: Mapping[str, Any], *, echo: bool) -> str:
    """The field that most of what is told of prompts comes from."""
    if given.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    return "logprobs" if echo and given.get("logprobs") is not None else "return_token_ids"


def _first(engine: Engine, token_ids: Sequence[int]) -> TokenText:
    """The first token of a prompt, which nothing precedes."""
    token_id = token_ids[0]
    return TokenText(
        token_id=token_id,
        text=engine.tokenizer.token_text(token_id),
        raw=engine.tokenizer.token_bytes(token_id),
        logprob=math.nan,
    )


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    """The prompts, each a text or a list of ids (not yet checked)."""
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
    """The prompts, put together with `suffix` where that is given."""
    suffix = given.get("suffix", "")
    if not isinstance(suffix, str):
        raise InvalidParameter(f"suffix is {show(suffix)}; a text is allowed", param="suffix")
    if not suffix:
        return prompts
    if given.get("echo"):
        raise InvalidParameter(
            "suffix and echo are both given; an answer that is filled in does not follow its "
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
            f"suffix is {show(suffix)}, and the model's vocabulary has no tokens for filling in "
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
    keep_tokens: int | None,
) -> list[int]:
    least_output = int(sampling.max_tokens != 0)
    if not isinstance(prompt, str):
        return checked_ids(
            request.engine, prompt, least_output=least_output, keep_tokens=keep_tokens
        )
    token_ids = await encode(
        request,
        prompt,
        add_special_tokens=add_special_tokens,
        least_output=least_output,
        keep_tokens=keep_tokens,
    )
    if not token_ids:
        why = (
            "this model has no begin-of-text token to stand for it"
            if add_special_tokens
            else "add_special_tokens is false, so that no begin-of-text token stands for it"
        )
        raise InvalidParameter(f"the prompt is empty, and {why}; give some text", param="prompt")
    return token_ids


def _shown(engine: Engine, prompt: Any, sampling: SamplingParams) -> str:
    """The text of a prompt, for `echo`."""
    if isinstance(prompt, str):
        return prompt
    return engine.tokenizer.decode(prompt, skip_special_tokens=sampling.skip_special_tokens)


def _refuse_early(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """What one prompt would be refused for, before another has begun to be answered."""
    for prompt in prompts:
        engine.check(prompt.token_ids, prompt.sampling)
