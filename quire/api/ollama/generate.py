"""POST /api/generate: continue a prompt in the form of Ollama's API, whole or streamed.

A prompt is the message of a user, rendered by the model's template, with `system` before it; with
`raw`, or if the model has no template, it is used as it is, and with `suffix` the gap between both
is filled in. `context` is the ids of an earlier answer, which the prompt continues; each answer has
one, except with `raw`, as in Ollama. What does not fit the context is cut out of the middle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.api.generation.conversation import parsing_of
from quire.api.generation.fields import flag
from quire.api.generation.generate import GenerationJob, GenerationRequest
from quire.api.generation.request_context import checked_ids
from quire.api.ollama.chat import conversation_of
from quire.api.ollama.prompt_cut import PromptCut
from quire.api.ollama.prompted import loading_job, prompted_job, read_sampling
from quire.api.ollama.request import check_plain_fields
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.text.infill import infill_prompt


async def read_generate(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    given = request.given
    check_plain_fields(request)
    _check_unserved(given)
    prompt, suffix, system = (_text(given, name) for name in ("prompt", "suffix", "system"))
    context = given.get("context", [])
    if not isinstance(context, list):
        raise InvalidParameter(
            f"context is {show(context)}; the context of an earlier answer is allowed, a list of "
            "token ids",
            param="context",
        )
    is_raw = flag(given, "raw")
    for name, value in (("system", system), ("context", context)):
        if value and (is_raw or suffix):
            beside = "suffix" if suffix else "raw"
            raise InvalidParameter(
                f"{name} and {beside} are both given; {beside} uses the prompt as it is: leave one "
                "out",
                param=name,
            )
    sampling = read_sampling(request)
    cut = None
    # A cut could remove the marks around a gap: such a prompt has to fit.
    if flag(given, "truncate", default=True) and not suffix:
        cut = PromptCut.of(request, sampling)
        context = cut.ids(context, "context")
    before = checked_ids(request.engine, context, param="context") if context else []
    if not prompt and not suffix:
        return loading_job(request, sampling, is_chat=False)
    if suffix:
        text = _with_gap(request, prompt, suffix)
    elif is_raw or (request.engine.template is None and not system):
        text = prompt
    else:
        return await _rendered(request, prompt, system, sampling, before, cut)
    if given.get("think") not in (None, False):  # no template opens the reasoning
        request.context.ignore("think")
    return await prompted_job(
        request,
        text,
        sampling,
        None,
        param="prompt",
        is_chat=False,
        add_special_tokens=True,
        before=before,
        cut=cut,
        returns_context=not is_raw,
    )


async def _rendered(
    request: GenerationRequest,
    prompt: str,
    system: str,
    sampling: SamplingParams,
    before: Sequence[int],
    cut: PromptCut | None,
) -> GenerationJob:
    """Return the job of a prompt that the template renders."""
    said = [{"role": "system", "content": system}] if system else []
    conversation = await conversation_of(request, [*said, {"role": "user", "content": prompt}])
    sampling, parser = parsing_of(
        request.context, None, conversation, sampling, includes_reasoning=True
    )
    return await prompted_job(
        request,
        conversation.text,
        sampling,
        parser,
        param="prompt",
        is_chat=False,
        before=before,
        cut=cut,
        returns_context=True,
    )


def _with_gap(request: GenerationRequest, prefix: str, suffix: str) -> str:
    text = infill_prompt(request.engine.tokenizer, prefix, suffix)
    if text is None:
        raise InvalidParameter(
            f"suffix is {show(suffix)}, and the model's vocabulary has no tokens for infilling "
            "(such as <|fim_prefix|>); leave it out",
            param="suffix",
        )
    return text


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise InvalidParameter(f"{name} is {show(value)}; a text is allowed", param=name)
    return value


def _check_unserved(given: Mapping[str, Any]) -> None:
    """Refuse fields that the server does not serve, unless they ask for nothing."""
    if (template := given.get("template", "")) != "":
        raise InvalidParameter(
            f"template is {show(template)}; templates in Go's language are not run here: render "
            "the prompt in the client and send it with raw: true, or start the server with "
            "--chat-template",
            param="template",
        )
    if (images := given.get("images", [])) != []:
        raise InvalidParameter(
            f"images is {show(images)}; the model reads text only: leave it out", param="images"
        )
