"""SchedulingParams: tenant, priority and latency objectives of a request.

Each value is checked when a SchedulingParams is made. Knows no policy: docs/scheduling.md lists
which values each policy reads. Invariant: they change when an answer is given, never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import InvalidParameter
from quire.base.kv_transfer import KVTransfer
from quire.base.parameter_checks import number, whole
from quire.base.rare_records import CachePin
from quire.base.show import show
from quire.base.speculation_params import SpeculationParams

MAX_PRIORITY = 1_000_000
# A year: what is later than this is no deadline.
MAX_TERM_MS = 365 * 24 * 3600 * 1000.0
MAX_TENANT_CHARS = 64
OBJECTIVES = ("deadline_ms", "ttft_slo_ms", "tpot_slo_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParams:
    """Scheduling parameters of one request.

    tenant: its name; "" where there is one tenant only. priority: lower is served
    earlier, where the policy says so. deadline_ms: when the whole answer should be there;
    ttft_slo_ms: its first token; both counted from the request's arrival. tpot_slo_ms: the mean
    time between its tokens after the first. return_cached_tokens_details: report where cached
    tokens were found, and why no more were. report_progress: report each chunk of the prompt that
    is computed. speculation: how draft tokens are made; None: as the server is set. cache_pins:
    prefixes of the prompt to keep, and to report. kv_transfer: blocks of the prompt go to another
    engine, or come from one. background: compute it in what capacity other requests leave.
    waited_ms: that the request waited before this engine got it; its arrival is so much earlier.
    Raises InvalidParameter naming the field.
    """

    tenant: str = ""
    priority: int = 0
    deadline_ms: float | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    return_cached_tokens_details: bool = False
    report_progress: bool = False
    speculation: SpeculationParams | None = None
    cache_pins: tuple[CachePin, ...] = ()
    kv_transfer: KVTransfer | None = None
    background: bool = False
    waited_ms: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_TENANT_CHARS:
            raise InvalidParameter(
                f"tenant is {show(self.tenant)}; a name of at most {MAX_TENANT_CHARS} characters "
                "is allowed",
                param="tenant",
            )
        if not isinstance(self.return_cached_tokens_details, bool):
            raise InvalidParameter(
                f"return_cached_tokens_details is {show(self.return_cached_tokens_details)}; true "
                "or false is allowed",
                param="return_cached_tokens_details",
            )
        priority = whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        object.__setattr__(self, "priority", priority)
        for name in OBJECTIVES:
            value = getattr(self, name)
            if value is not None:
                checked = number(name, value, 0, MAX_TERM_MS, open_low=True)
                object.__setattr__(self, name, checked)


DEFAULT_SCHEDULING = SchedulingParams()
