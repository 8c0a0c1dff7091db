"""KVEventsConfig: the value of --kv-events-config, with vLLM's names of the fields.

Events hold prompt tokens, so they are published at loopback addresses unless another is given, and
not for isolated tenants.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any

from quire.base.errors import SettingError
from quire.base.show import show

_ADDRESS = re.compile(r"tcp://(\*|\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_LOOPBACK = re.compile(r"ipc://.+|tcp://(127\.[0-9.]+|localhost|\[::1\]):[0-9]+")
_EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
_MAX_QUEUED = 1_000_000
_MAX_RANK = 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """enable_kv_cache_events: whether events are published. publisher: "zmq". endpoint: where the
    publisher listens. replay_endpoint: where lost batches are asked for; None: nowhere. topic:
    before each batch; None: kv@host:port@model. hwm: batches kept for a slow subscriber.
    buffer_steps: batches kept for replay. max_queue_size: events that wait for the publisher.
    isolated_tenants: also publish blocks of isolated tenants and of requests with a cache_salt.
    data_parallel_rank: in each batch; --data-parallel-size sets that of each engine.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str | None = None
    hwm: int = 100_000
    buffer_steps: int = 10_000
    max_queue_size: int = 100_000
    isolated_tenants: bool = False
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("enable_kv_cache_events", "isolated_tenants"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if self.publisher not in ("zmq", "null"):
            raise _wrong("publisher", self.publisher, '"zmq" or "null" (no events)')
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
        if self.topic is not None and not isinstance(self.topic, str):
            raise _wrong("topic", self.topic, "a text")
        for name in ("hwm", "buffer_steps", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_QUEUED:
                raise _wrong(name, value, f"a whole number from 1 to {_MAX_QUEUED}")
        rank = self.data_parallel_rank
        if type(rank) is not int or not 0 <= rank <= _MAX_RANK:
            raise _wrong("data_parallel_rank", rank, f"a whole number from 0 to {_MAX_RANK}")

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def remote_endpoints(self) -> list[str]:
        """Endpoints that other machines may reach."""
        return [
            endpoint
            for endpoint in (self.endpoint, self.replay_endpoint)
            if endpoint is not None and not _LOOPBACK.fullmatch(endpoint)
        ]


def read_kv_events(text: str) -> KVEventsConfig:
    """Return the configuration of a JSON object. Raises SettingError."""
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"kv_events_config is {show(text)}, which is no JSON ({error}); give an object, as in "
            f"{_EXAMPLE}"
        ) from None
    names = [field.name for field in fields(KVEventsConfig)]
    if not isinstance(given, dict):
        raise SettingError(
            f"kv_events_config is {show(text)}; give a JSON object, as in {_EXAMPLE}"
        )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise SettingError(f"kv_events_config has {show(unknown[0])}; known are {', '.join(names)}")
    return KVEventsConfig(**given)


def _check_endpoint(name: str, value: object) -> None:
    if isinstance(value, str):
        found = _ADDRESS.fullmatch(value)
        if value.startswith("ipc://") and len(value) > len("ipc://"):
            return
        if found is not None and int(found[2]) <= 65535:
            return
    raise _wrong(name, value, 'an address as in "tcp://127.0.0.1:5557" or "ipc:///run/kv-events"')


def _wrong(name: str, value: object, allowed: str) -> SettingError:
    return SettingError(f"kv_events_config: {name} is {show(value)}; {allowed} is allowed")
