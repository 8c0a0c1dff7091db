"""What callers of LLM and AsyncLLM may give: one prompt or several, one setting for all or each.

Knows no model. What a prompt cannot be is an InvalidParameter that says what it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_Kind = TypeVar("_Kind")


# Arguments of other libraries' generate and chat, with what there is here.
_ELSEWHERE: Mapping[str, str] = {
    "use_tqdm": "write progress",
    "priority": "write terms=SchedulingParams(priority=...) (quire.base.scheduling_params)",
    "lora_request": "there are no LoRA adapters: merge the adapter into the model's weights",
    "prompt_token_ids": "a prompt is a text or a list of token ids: give the ids as prompts",
    "chat_template_content_format": "leave it out",
    "tokenization_kwargs": "give token ids for another tokenization",
}


def misplaced(method: str, named: Mapping[str, object]) -> TypeError:
    """Return the error of a method for arguments that it does not have."""
    name, value = next(iter(named.items()))
    if name in SamplingParams.__dataclass_fields__:
        hint = f"it is a field of the second argument: SamplingParams({name}={show(value)})"
    else:
        hint = _ELSEWHERE.get(name, "leave it out")
    return TypeError(f"{method} has no argument {name!r}; {hint}")


def misplaced_sampling(method: str, named: Mapping[str, object]) -> None:
    """Raise TypeError for sampling parameters among the settings of a template."""
    wrong = {
        name: value
        for name, value in named.items()
        if name in _ELSEWHERE or name in SamplingParams.__dataclass_fields__
    }
    if wrong:
        raise misplaced(method, wrong)


def one_each(name: str, kind: type[_Kind], given: object, num_prompts: int) -> Sequence[_Kind]:
    """Return what was given for all prompts or for each, for each."""
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise InvalidParameter(
            f"{name} is {show(given)}; a {kind.__name__} for all prompts or a list of one each is "
            "allowed",
            param=name,
        )
    if len(given) != num_prompts:
        raise InvalidParameter(
            f"{len(given)} {name} for {num_prompts} prompts; give one for all or one each",
            param=name,
        )
    return given


def prompts_of(given: object) -> Sequence[Prompt]:
    """Return one prompt or several, as several."""
    if isinstance(given, str):
        return [given]
    entries = list(listed(given))
    if entries and isinstance(entries[0], Integral):
        return [cast("Sequence[int]", given)]
    return [_prompt(entry) for entry in entries]


def _prompt(given: object) -> Prompt:
    return given if isinstance(given, str) else listed(given)


def listed(given: object) -> Sequence[Any]:
    """Return a list or an array as it is. Raises InvalidParameter for what no prompt can be."""
    is_listed = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not is_listed or isinstance(given, str | bytes | bytearray | Mapping):
        of_vllm = isinstance(given, Mapping) and ("prompt" in given or "prompt_token_ids" in given)
        hint = "; give the text or the ids themselves, without an object" if of_vllm else ""
        raise InvalidParameter(
            f"prompt is {show(given)}; a text, a list of token ids, or a list of these is "
            f"allowed{hint}",
            param="prompt",
        )
    return cast("Sequence[Any]", given)
