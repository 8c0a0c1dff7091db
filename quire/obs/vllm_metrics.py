"""vLLM's names for metrics of this server, so that its dashboards and autoscalers can be used.

Each is one of ours under another name, computed from a scrape; what vLLM measures and this server
does not has no entry. `model_name` and `engine` are the labels that vLLM's metrics have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

# From our families to theirs. vLLM's name of a counter has no `_total` here, as in a family.
NAMES = {
    "quire_running_requests": "vllm:num_requests_running",
    "quire_waiting_requests": "vllm:num_requests_waiting",
    "quire_prompt_tokens": "vllm:prompt_tokens",
    "quire_generated_tokens": "vllm:generation_tokens",
    "quire_requests": "vllm:request_success",
    "quire_preemptions": "vllm:num_preemptions",
    "quire_prefix_queried_tokens": "vllm:prefix_cache_queries",
    "quire_prefix_hit_tokens": "vllm:prefix_cache_hits",
    "quire_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "quire_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "quire_request_seconds": "vllm:e2e_request_latency_seconds",
    "quire_queue_seconds": "vllm:request_queue_time_seconds",
    "quire_batch_tokens": "vllm:iteration_tokens_total",
}
# Their names of sums of ours, which are divided by proposer and position.
ACCEPTED = "quire_accepted_draft_tokens"
SUMS = {
    "vllm:spec_decode_num_drafts": "quire_draft_rows",
    "vllm:spec_decode_num_draft_tokens": "quire_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": ACCEPTED,
}
# Likewise by position, which counts from 0 there and from 1 here.
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"
USAGE = "vllm:kv_cache_usage_perc"
# Its labels have the capacity of the cache, which endpoint pickers read.
CACHE = "vllm:cache_config_info"
_LABELS = {"finish_reason": "finished_reason"}


class VllmMetrics:
    """Shows metrics of `registry` by vLLM's names. block_size: tokens of a KV block."""

    def __init__(self, registry: CollectorRegistry, model_name: str, block_size: int) -> None:
        self._registry = registry
        self._own = CollectorRegistry()
        self._own.register(self)
        self.model_name = model_name
        self._block_size = block_size

    def text(self) -> bytes:
        """Return them in Prometheus' text format."""
        return generate_latest(self._own)

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        blocks: dict[str, float] = {}
        drafts: dict[str, Metric] = {}
        for family in self._registry.collect():
            name = NAMES.get(family.name)
            if name is not None:
                yield self._renamed(family, name)
            elif family.name in ("quire_kv_blocks", "quire_kv_blocks_used"):
                blocks[family.name] = family.samples[0].value
            elif family.name in SUMS.values():
                drafts[family.name] = family
        total = blocks.get("quire_kv_blocks", 0.0)
        usage = GaugeMetricFamily(
            USAGE, "Share of the KV blocks that live requests use", labels=("model_name", "engine")
        )
        used = blocks.get("quire_kv_blocks_used", 0.0)
        usage.add_metric((self.model_name, "0"), used / total if total else 0.0)
        yield usage
        labels = ("model_name", "engine", "block_size", "num_gpu_blocks")
        cache = GaugeMetricFamily(CACHE, "1, with the KV cache's capacity as labels", labels=labels)
        cache.add_metric((self.model_name, "0", str(self._block_size), str(int(total))), 1.0)
        yield cache
        yield from self._drafts(drafts)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry need not collect to learn the names."""
        return ()

    def _drafts(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        """Yield sums over proposers, of all positions and by position."""
        own = (self.model_name, "0")
        for theirs, name in SUMS.items():
            text = f"Sum over proposers and positions ({name})"
            total = CounterMetricFamily(theirs, text, labels=("model_name", "engine"))
            total.add_metric(own, sum(sample.value for sample in ours[name].samples))
            yield total
        accepted: Counter[int] = Counter()
        for sample in ours[ACCEPTED].samples:
            accepted[int(sample.labels["position"]) - 1] += int(sample.value)
        at = CounterMetricFamily(
            ACCEPTED_AT,
            "Draft tokens accepted, by position from 0 on (quire_accepted_draft_tokens)",
            labels=("model_name", "engine", "position"),
        )
        for position in sorted(accepted):
            at.add_metric((*own, str(position)), accepted[position])
        yield at

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, f"{family.documentation} ({family.name})", family.type)
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            renamed.add_sample(
                name + sample.name.removeprefix(family.name),
                {"model_name": self.model_name, "engine": "0", **labels},
                sample.value,
            )
        return renamed
