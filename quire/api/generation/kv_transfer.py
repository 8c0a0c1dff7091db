"""The field `kv_transfer_params`: a prompt's KV blocks go to another engine, or come from one.

The names are vLLM's, so that orchestrators can drive a pair: a request with do_remote_decode is
answered with one token and the parameters that make another engine fetch the prompt's blocks. Knows
no socket. Always holds: an engine connects to loopback and to the hosts of its configuration only,
whatever a request names; no token depends on the field.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any, TypeVar

from quire.api.generation.choice_streams import Choice, Prompt, PromptState
from quire.api.generation.usage import Usage
from quire.api.http.origins import is_loopback
from quire.api.streaming.event_stream import Writer
from quire.base.errors import InvalidParameter
from quire.base.kv_transfer import KVTransfer, TransferCard
from quire.base.scheduling_params import SchedulingParams
from quire.base.show import show
from quire.engine.model_card import ModelCard
from quire.engine.output.text_delta import TextDelta

Route = TypeVar("Route")

PARAM = "kv_transfer_params"
_FLAGS = ("do_remote_prefill", "do_remote_decode")
_NAMES = (
    *_FLAGS,
    *("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id"),
    *("tp_size", "remote_num_tokens", "remote_blocks_expiry_time", "transfer_id"),
)
_ID_BYTES = 16
_MAX_ID_CHARS = 256
_MAX_DEGREE = 64  # quire/program/shard.py; blocks are the same at every degree


def with_transfer(
    given: Mapping[str, Any], terms: SchedulingParams, route: Route, card: ModelCard
) -> tuple[SchedulingParams, Route]:
    """Return terms and route of a request with the field. Raises InvalidParameter.

    route: a GenerationRoute; its `read` then checks the job too, which may raise InvalidParameter.
    """
    transfer = kv_transfer_of(given, card)
    if transfer is None:
        return terms, route
    generation_route: Any = route
    read = generation_route.read

    async def read_job(request: Any) -> Any:
        job = await read(request)
        if transfer.hand_over and job.respond is not None:
            raise InvalidParameter(
                f"{PARAM}.do_remote_decode is given with background; such an answer has no place "
                "for the parameters of the other engine: leave background out",
                param=PARAM,
            )
        changed = _changed(job.prompts, job.writer, transfer, card, given[PARAM].get("transfer_id"))
        return replace(job, **changed)

    changed_route: Route = replace(generation_route, read=read_job)
    return replace(terms, kv_transfer=transfer), changed_route


def kv_transfer_of(given: Mapping[str, Any], card: ModelCard) -> KVTransfer | None:
    """Return what a request wants transferred; None for nothing. Raises InvalidParameter."""
    value = given[PARAM]
    if not isinstance(value, dict):
        raise _wrong("", value, "an object is allowed")
    fields = {name: one for name, one in value.items() if one is not None}
    for name, one in fields.items():
        if name not in _NAMES:
            raise _wrong(f".{name}", one, f"allowed names are {', '.join(_NAMES)}")
        if name in _FLAGS and not isinstance(one, bool):
            raise _wrong(f".{name}", one, "true or false is allowed")
    degree = fields.get("tp_size", 1)
    if type(degree) is not int or not 1 <= degree <= _MAX_DEGREE:
        raise _wrong(".tp_size", degree, f"a number of ranks from 1 to {_MAX_DEGREE} is allowed")
    fetches, hands_over = (fields.get(name, False) for name in _FLAGS)
    _check_names(fields)
    if not fetches and not hands_over:
        return None
    if fetches and hands_over:
        raise _wrong("", value, "do_remote_prefill or do_remote_decode can be true, not both")
    if card.transfer is None:
        raise _wrong(
            "", value, "this server exchanges no KV blocks; start it with --kv-transfer-key-file"
        )
    if hands_over:
        return _hand_over(value, given, card.transfer)
    return _fetch(fields, value, card.transfer)


def _changed(
    prompts: Sequence[Prompt],
    writer: Writer,
    transfer: KVTransfer,
    card: ModelCard,
    named: str | None,
) -> dict[str, Any]:
    """Return the fields of a job that a transfer changes. Raises InvalidParameter."""
    sampling = prompts[0].sampling
    if len(prompts) != 1 or sampling.num_sequences != 1 or sampling.use_beam_search:
        raise InvalidParameter(
            f"{PARAM} is given with {len(prompts)} prompts and {sampling.num_sequences} choices; "
            "one prompt and one choice are allowed: leave n, best_of and beams out, and send each "
            "prompt by itself",
            param=PARAM,
        )
    if not transfer.hand_over:
        return {}
    if sampling.max_tokens == 0:
        raise InvalidParameter(
            f"{PARAM}.do_remote_decode is given with max_tokens 0; a prompt that is handed over "
            "has one token: set max_tokens to 1",
            param=PARAM,
        )
    one_token = replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1))
    prompt = replace(prompts[0], sampling=one_token)
    offer = _offer(transfer, card, len(prompt.token_ids))
    if named is not None:
        offer["transfer_id"] = named
    return {"prompts": (prompt,), "writer": _HandOverWriter(writer, offer)}


class _HandOverWriter:
    """A Writer that adds the parameters of the other engine's request to an answer."""

    def __init__(self, writer: Writer, offer: dict[str, Any]) -> None:
        self._writer, self._offer = writer, {PARAM: offer}

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """See Writer."""
        return {**self._writer.whole(choices, usage), **self._offer}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """See Writer; chunks with a finish reason have the parameters."""
        for chunk in self._writer.of_delta(prompt, delta):
            ends = any(choice.get("finish_reason") for choice in chunk.get("choices", ()))
            yield {**chunk, **self._offer} if ends else chunk

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """See Writer."""
        return self._writer.of_text(prompt, index, text)

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """See Writer."""
        return self._writer.of_progress(progress)

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """See Writer."""
        return self._writer.so_far(usage)

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """See Writer; of events with a type the last one has the parameters, or its response."""
        last = self._writer.of_usage(usage)
        if last is None or "type" not in last:
            return last
        if "response" in last:
            return {**last, "response": {**last["response"], **self._offer}}
        return {**last, **self._offer}


def _hand_over(value: Any, given: Mapping[str, Any], offer: TransferCard) -> KVTransfer:
    if not offer.port:
        raise _wrong(
            ".do_remote_decode", True, "this server's role is decode; ask one of role prefill"
        )
    if "output_ids" in given:
        raise _wrong("", value, "a continued answer is not handed over: leave output_ids out")
    return KVTransfer(transfer_id=secrets.token_hex(_ID_BYTES), hand_over=True)


def _fetch(fields: Mapping[str, Any], value: Any, offer: TransferCard) -> KVTransfer:
    if offer.role == "prefill":
        raise _wrong(
            ".do_remote_prefill", True, "this server's role is prefill; ask one of role decode"
        )
    host, port = fields.get("remote_host"), fields.get("remote_port")
    if not isinstance(host, str) or not _may_connect(host, offer):
        allowed = ", ".join(("loopback", *offer.peer_hosts))
        raise _wrong(
            ".remote_host", host, f"allowed are {allowed}; add hosts with --kv-transfer-peer"
        )
    if type(port) is not int or not 1 <= port <= 65535:
        raise _wrong(".remote_port", port, "a number from 1 to 65535 is allowed")
    transfer_id = fields.get("remote_request_id")
    if not _is_hex(transfer_id, _ID_BYTES):
        raise _wrong(
            ".remote_request_id",
            transfer_id,
            "the one of the prefill engine's answer is needed; pass its kv_transfer_params on",
        )
    engine_id = fields.get("remote_engine_id", "")
    if not isinstance(engine_id, str) or len(engine_id) > _MAX_ID_CHARS:
        raise _wrong(".remote_engine_id", engine_id, "the one of the prefill engine is allowed")
    block_ids = _block_ids(fields.get("remote_block_ids"))
    return KVTransfer(
        transfer_id=str(transfer_id),
        hand_over=False,
        host=host,
        port=port,
        engine_id=engine_id,
        block_ids=block_ids,
    )


def _offer(transfer: KVTransfer, card: ModelCard, num_prompt_tokens: int) -> dict[str, Any]:
    """Return the parameters that make another engine fetch what is handed over."""
    offer = card.transfer
    assert offer is not None, "checked when the request was read"
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_block_ids": list(range(num_prompt_tokens // card.block_size)),
        "remote_host": offer.host,
        "remote_port": offer.port,
        "remote_request_id": transfer.transfer_id,
        "remote_num_tokens": num_prompt_tokens,
    }


def _check_names(fields: Mapping[str, Any]) -> None:
    """Check fields that other engines and orchestrators add; they change nothing here.

    Raises InvalidParameter.
    """
    tokens = fields.get("remote_num_tokens", 0)
    if type(tokens) is not int or tokens < 0:
        raise _wrong(".remote_num_tokens", tokens, "a number of tokens from 0 is allowed")
    expiry = fields.get("remote_blocks_expiry_time", 0)
    if type(expiry) not in (int, float):
        raise _wrong(".remote_blocks_expiry_time", expiry, "a time as a number is allowed")
    named = fields.get("transfer_id", "")
    if not isinstance(named, str) or len(named) > _MAX_ID_CHARS:
        raise _wrong(
            ".transfer_id", named, f"a text of at most {_MAX_ID_CHARS} characters is allowed"
        )


def _block_ids(given: Any) -> tuple[int, ...] | None:
    """Return numbers of blocks; vLLM puts them into one list for each group of layers.

    Raises InvalidParameter.
    """
    if given is None:
        return None
    one_group = given
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):
        one_group = given[0]
    if not isinstance(one_group, list) or not all(type(n) is int and n >= 0 for n in one_group):
        raise _wrong(
            ".remote_block_ids",
            given,
            "a list of block numbers from 0 is allowed, or one such list in a list",
        )
    return tuple(one_group)


def _may_connect(host: str, offer: TransferCard) -> bool:
    """Return whether a host is of the configuration; names are in no network."""
    networks = [ip_network(one) for one in offer.peer_hosts if "/" in one]
    try:
        if any(ip_address(host) in one for one in networks):
            return True
    except ValueError:
        pass  # a name
    return ("/" not in host and host in offer.peer_hosts) or is_loopback(host)


def _is_hex(value: Any, num_bytes: int) -> bool:
    return (
        isinstance(value, str)
        and len(value) == 2 * num_bytes
        and set(value) <= set("0123456789abcdef")
    )


def _wrong(name: str, value: Any, advice: str) -> InvalidParameter:
    return InvalidParameter(f"{PARAM}{name} is {show(value)}; {advice}", param=PARAM)
