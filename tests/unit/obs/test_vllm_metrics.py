"""vLLM's names of metrics: the same numbers as ours, and no others."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.base.engine_stats import EngineStats
from quire.base.records import RequestTimes
from quire.obs.metrics import Metrics
from quire.obs.vllm_metrics import CACHE, NAMES, USAGE


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = {**sample.labels}
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == "box"
                assert labels.pop("engine") == "0"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_each_name_has_the_value_of_ours() -> None:
    metrics = Metrics()
    metrics.show_vllm_names("box", 16)
    stats = EngineStats(running=3, waiting=5, blocks_total=40, blocks_used=10, steps_total=1)
    metrics.see(stats)
    times = RequestTimes(
        arrival_ms=0.0, first_scheduled_ms=10.0, first_token_ms=250.0, last_token_ms=900.0
    )
    metrics.choice(finish_reason="stop", times=times, prompt_tokens=7, output_tokens=4)
    found = samples(metrics)
    assert found["vllm:num_requests_running", ()] == 3
    assert found["vllm:num_requests_waiting", ()] == 5
    assert found[USAGE, ()] == 0.25
    assert found[CACHE, (("block_size", "16"), ("num_gpu_blocks", "40"))] == 1
    assert found["vllm:prompt_tokens_total", ()] == 7
    assert found["vllm:generation_tokens_total", ()] == 4
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 1
    assert found["vllm:time_to_first_token_seconds_count", ()] == 1
    assert found["vllm:time_to_first_token_seconds_sum", ()] == 0.25
    for ours, theirs in NAMES.items():
        own = {
            (
                name.replace(ours, theirs, 1),
                tuple((key.replace("finish_", "finished_"), value) for key, value in labels),
            ): number
            for (name, labels), number in found.items()
            if name.removeprefix(ours) in ("", "_total", "_bucket", "_count", "_sum")
        }
        assert own, ours
        for key, number in own.items():
            assert found[key] == number, key


def test_drafts_are_summed_over_proposers_and_positions_count_from_0() -> None:
    metrics = Metrics()
    metrics.show_vllm_names("box", 16)
    assert samples(metrics)["vllm:spec_decode_num_drafts_total", ()] == 0
    stats = EngineStats(
        proposer="ngram",
        draft_rows_total=7,
        draft_tokens_total=(7, 5),
        accepted_draft_tokens_total=(6, 4),
        prediction_rows_total=3,
        prediction_tokens_total=(3,),
        accepted_prediction_tokens_total=(1,),
    )
    metrics.see(stats)
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total", ()] == 7
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == 12
    assert found["vllm:spec_decode_num_accepted_tokens_total", ()] == 10
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = {labels: value for (name, labels), value in found.items() if name == at}
    assert by_position == {(("position", "0"),): 6, (("position", "1"),): 4}


def test_before_a_step_and_without_the_setting() -> None:
    metrics = Metrics()
    assert b"vllm:" not in metrics.text()
    metrics.show_vllm_names("box", 16)
    assert samples(metrics)[USAGE, ()] == 0.0
