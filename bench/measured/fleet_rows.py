"""Table lines on several engines, replicas and devices, from bench/results/.

Reads the results and knows no page. Always holds: a missed goal is shown like any other; a part
that was not measured has no line.
"""

from __future__ import annotations

from typing import Any

_CASCADES = {
    "by_min_mean_logprob": "by the judge",
    "by_max_prompt_tokens": "by a rule of length, as for streams",
    "by_hard_above": "by a classifier, as for streams",
    "by_hard_above_judged": "by the classifier and the judge",
}


def router_rows(result: dict[str, Any]) -> list[str]:
    """Return the router's own cost, its decisions, hedging, hits by policy, and the cascade."""
    rows = []
    if cost := result.get("cost"):
        what, each = "per request; per streamed token", [cost["us_per_request"]]
        if (lone_us := cost.get("us_per_lone_request")) is not None:
            what = "per request of eight at a time; of one at a time; per streamed token"
            each.append(lone_us)
        goals = ["600 us"] * len(each)
        shown = "; ".join(f"{one:.0f} us" for one in [*each, cost["us_per_token"]])
        rows += [
            f"| `quire route`, processor time {what} | {shown} | {'; '.join([*goals, '60 us'])} |"
        ]
    if decision := result.get("decision"):
        rows += [
            f"| choice among {decision['replicas']} replicas with "
            f"{decision['blocks_per_replica']:,} known blocks each, prompt of "
            f"{decision['prompt_tokens']:,} tokens: p50, p99 | {decision['p50_us']:.0f} us, "
            f"{decision['p99_us']:.0f} us | p99 1,000 us |"
        ]
    if hedging := result.get("hedging"):
        off, on = hedging["off"], hedging["on"]
        rows += [
            f"| first token with one slow replica of {hedging['replicas']} "
            f"({100 * hedging['slow_share']:.0f} % of its requests), p95 and p99 without hedging; "
            f"with it; extra prompts | {off['p95_ms']:.0f} ms, {off['p99_ms']:.0f} ms; "
            f"{on['p95_ms']:.0f} ms, {on['p99_ms']:.0f} ms; "
            f"{100 * on['extra_prompt_share']:.1f} % | 3 % |"
        ]
    if prefixes := result.get("prefixes"):
        for name, one in prefixes.items():
            if isinstance(one, dict):
                goal = "95 %" if name.startswith("warm-cache") else ""
                ttft_ms = one.get("ttft_mean_ms")
                rows += [
                    f"| shared prefixes over {prefixes['replicas']} simulated replicas, {name}: "
                    f"hits of an oracle's{'' if ttft_ms is None else '; mean time to first token'} "
                    f"| {100 * one['of_oracle']:.1f} %"
                    f"{'' if ttft_ms is None else f'; {ttft_ms:.0f} ms'} | {goal} |"
                ]
    if backlog := result.get("backlog"):
        rows += _backlog_rows(backlog)
    if cascade := result.get("cascade"):
        rows += _cascade_rows(cascade)
    return rows


def _backlog_rows(result: dict[str, Any]) -> list[str]:
    rows = []
    for load, found in result["loads"].items():
        for name, one in found["ways"].items():
            goal = "95 %" if name == "warm-cache, measured" else ""
            rows += [
                f"| the same in virtual time, {load}, {name}: hits of an oracle's; time to first "
                f"token, mean and p95 | {100 * one['of_oracle']:.1f} %; "
                f"{one['ttft_mean_ms']:.0f} ms, {one['ttft_p95_ms']:.0f} ms | {goal} |"
            ]
    return rows


def _cascade_rows(result: dict[str, Any]) -> list[str]:
    models, rows = result["models"], []
    for name, saved in result["saved_at_equal_score"].items():
        shown = "none" if saved is None else f"{100 * saved:.1f} %"
        rows += [
            f"| cascade from {models['small']} to {models['large']} {_CASCADES[name]}: tokens of "
            f"the large model saved at an equal score, {result['tasks']} tasks | {shown} | |"
        ]
    return rows


def fleet_rows(result: dict[str, Any]) -> list[str]:
    """Return wrong answers and silences while replicas die, beside another gateway, by run."""
    return [row for run in result["runs"].values() for row in _fleet_run_rows(run)]


def _fleet_run_rows(result: dict[str, Any]) -> list[str]:
    silences = result["silences_s"]["with_faults"]
    num_faults = sum(kind["count"] for kind in result["faults"].values())
    rows = [
        f"| {result['streams']:,} streams over {result['replicas']} replicas that are killed, "
        f"stopped and drained for {result['seconds'] / 60:.0f} minutes ({num_faults} faults)"
        f"{_at_nice('router', result['router'])}: wrong, lost or repeated of "
        f"{result['done']['answers']:,} answers; resumed streams "
        f"| {result['num_wrong']}; {result['router']['resumed_streams']:,} | 0 |",
        f"| longest silence of a stream in that: p99, maximum | {silences['p99']:.1f} s, "
        f"{silences['max']:.1f} s | |",
        "| refused with 503 before a token in that, and sent again by the client "
        f"| {result['done']['refused']:,} | |",
    ]
    if (found := result.get("interruptions", {}).get("all")) is not None:
        usual = result["silences_s"]["without_faults"]
        rows += [
            "| streams that went on within 3 s of their last event when their replica failed; mean "
            f"interruption | {100 * found['share_within_3_s']:.2f} %; {found['mean_s']:.1f} s "
            "| 100 % |",
            "| longest silence of a stream of as many without faults, on the same two cores: "
            f"median, p99 | {usual['p50']:.1f} s, {usual['p99']:.1f} s | |",
        ]
    if floor := result.get("floor_s"):
        rows.append(
            f"| what the machine can do: {floor['streams']:,} new streams that begin at once, sent "
            "directly to replicas that already serve as many streams as in that run, without a "
            "failure: first event within 3 s; median, p99 "
            f"| {100 * floor['share_within_3_s']:.0f} %; {floor['p50']:.1f} s, "
            f"{floor['p99']:.1f} s | |"
        )
    for name, other in result.get("beside", {}).items():
        if "broken" in other:
            when = ", in an earlier run" if "quire" in other else ""
            rows += [
                f"| the same requests and faults behind {name}{_at_nice(name, other)}{when}: "
                f"broken of {other['answers'] + other['broken']:,} answers "
                f"| {other['broken']:,} | |"
            ]
    return rows


def _at_nice(what: str, result: dict[str, Any]) -> str:
    """Return the priority of a gateway where it is not the default: those are not compared."""
    return f", {what} at nice {nice}" if (nice := result.get("nice", 0)) else ""


def shared_store_rows(result: dict[str, Any]) -> list[str]:
    """Return how much sooner a stored prefix gives its first token."""
    return [
        f"| {result['engines']} engines, a shared KV store in a directory: first token of a prefix "
        f"of {result['prompt']:,} tokens on an engine that has none of it; computed "
        f"| {result['median_fetched_s']:.2f} s; {result['median_computed_s']:.1f} s "
        f"({result['times_sooner']:.1f}x) | 4x |"
    ]


def simulated_store_rows(result: dict[str, Any]) -> list[str]:
    """Return hits and first tokens with and without a shared store, simulated.

    Results of `quire simulate --engines --json` have their numbers in "settings", and no roles.
    """
    settings, rows = result.get("settings", {}), []
    num_engines = result.get("engines", settings.get("num_engines"))
    shape = result.get("shape", settings.get("machine"))
    for run in result["runs"]:
        summary, roles = run["summary"], run.get("roles")
        num_requests = run.get("num_requests", settings.get("num_requests"))
        hit_share = run.get("found_share", summary["hit_share"])
        what = f"of both roles, routed by {run['routing']}"
        if roles is not None:
            what = (
                f"{roles['num_prefill']} for prompts and {roles['num_decode']} for answers, "
                f"brought together by the {roles['prefill_by'].replace('-', ' ')}"
            )
        store = "with" if run["store"] else "without"
        rows += [
            f"| simulated ({num_engines} engines, {shape}, {num_requests:,} requests of a trace), "
            f"{what}, {store} a store: hits; time to first token, mean and p99 "
            f"| {100 * hit_share:.0f} %; "
            f"{summary['ttft_mean_s']:.2f} s, {summary['ttft_s']['p99']:.1f} s | |"
        ]
    return rows


def disaggregation_rows(result: dict[str, Any]) -> list[str]:
    """Return gaps beside long prompts in one engine and in two, and the rates of links."""
    rows = []
    if serving := result.get("serving"):
        one, two = (serving[name]["tpot_ms"] for name in ("one engine", "two engines"))
        rows += [
            f"| gap between tokens of {result['decoding']} streams beside prompts of "
            f"{serving['prompt']:,} tokens, p99: one engine on two cores; prefill and decode "
            f"engine on one core each | {one['p99']:.0f} ms; {two['p99']:.0f} ms | |"
        ]
    if links := result.get("links"):
        rates = ", ".join(
            f"{name} {links[f'{name}_gb_per_s']:.1f}"
            for name in ("tcp", "shm", "nixl")
            if f"{name}_gb_per_s" in links
        )
        rows += [
            f"| blocks from one engine's memory to another's, GB/s; memcpy "
            f"| {rates}; {links['memcpy_gb_per_s']:.1f} | |"
        ]
    return rows


def ranks_rows(result: dict[str, Any]) -> list[str]:
    """Return steps of ranks over those of one process with as many threads, and the cost of both
    modes of tensor parallelism in time and bytes."""
    kind = f"context {result['context']}" if result.get("context", 1) > 1 else "tensor parallel"
    degree = max(result["degree"], result.get("context", 1))
    goal = "0.9x" if result.get("context", 1) == 1 else ""
    return [
        f"| {degree} ranks of one thread ({kind}, {result['shape']}) over one process of {degree} "
        f"threads, {step['rows']} x {step['tokens']} tokens after {step['depth']:,}: speed; share "
        f"of exchanges | {step['ratio']:.2f}x; {100 * step['share_of_exchanges']:.0f} % "
        f"| {goal} |"
        for step in result.get("steps", ())
    ] + [
        f"| {degree} ranks of one thread ({result['shape']}), --tp-mode fast over exact, "
        f"{step['rows']} x {step['tokens']} tokens: speed; bytes that a rank receives for a token "
        f"in fast, in exact | {step['ratio']:.2f}x; "
        f"{step['fast']['received_bytes_per_token'] / 1e3:.0f} kB, "
        f"{step['exact']['received_bytes_per_token'] / 1e3:.0f} kB | |"
        for step in result.get("modes", ())
    ]


def disk_rows(result: dict[str, Any]) -> list[str]:
    """Return the rates of weights that are read from disk in each step."""
    rows, layouts = list[str](), [("", result)]
    if ranks := result.get("tensor_parallel"):
        layouts.append((f" over {ranks['degree']} ranks", ranks))
    for where, found in layouts:
        one, many = (found["on_disk"][f"{num}_rows"] for num in (1, 16))
        share = found["limit_bytes"] / found["weights_bytes"]
        rows += [
            f"| weights of {result['shape']}{where} under {share:.2f} of their size in memory: "
            "bytes read, over the rate of direct reads | "
            f"{100 * one['share_of_disk']:.0f} % | 85 % |",
            f"| tokens per second there, 16 rows over one | {found['batch_ratio']:.1f}x "
            f"({many['tokens_per_s']:.1f}) | 10x |",
        ]
    return rows


def batch_rows(result: dict[str, Any]) -> list[str]:
    """Return what a batch costs interactive requests."""
    ratios = result["ratios"]
    return [
        "| interactive requests beside a batch over those alone, p99: time to first token; time "
        f"per token | {ratios['ttft_s']:.2f}x; {ratios['tpot_s']:.2f}x | 1.05x |"
    ]


def ray_rows(result: dict[str, Any]) -> list[str]:
    """Return what Ray Serve adds to a streamed token."""
    cpu = result["cpu_us_per_token"]
    return [
        f"| Ray Serve, {result['streams']} streams of the built-in model: wall time added to a "
        "token, over the engine's own port; processor time of HAProxy and router per token "
        f"| {result['added_ms_per_token']:.2f} ms ({result['wall_ratio']:.2f}x); "
        f"{cpu['haproxy']:.0f} us, {cpu['router']:.0f} us | 0.2 ms |"
    ]
