"""Quire and llama.cpp, each with and without speculation, on the same prompts in turn.

llama.cpp is its server (bench/peers): a draft model by -md, prompt lookup by --spec-type with its
own lengths and with those of Quire, and by its map of n-grams, which also drafts texts that repeat
a few tokens, as those of random weights do (its n-gram cache and ngram-mod keep earlier answers);
the comparison is with the fastest of them, or none, in each round. A build without these options
refuses them, and the cell says so. All answer greedily, each with the tokens of its own arithmetic:
how many are those of the other engine is part of the result. A ratio is that of the sums over all
rounds. Its interval takes these as independent, although they repeat few prompts: it says little of
others. Always holds: each prompt counts as often; Quire's tokens are the same with drafts and
without; llama.cpp's time is the shorter one of what it says of itself (first token to last, without
HTTP) and what its client saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.checkpoints import cache_folder
from bench.peers.child import Peer, PeerFailed
from bench.peers.convert import Unavailable, converted
from bench.peers.places import is_installed
from bench.speculation.cells import Cell
from bench.speculation.engines import (
    MAX_DRAFTS,
    model_path,
    proposer_settings,
    question_tasks,
)
from bench.speculation.intervals import ratio_interval
from bench.speculation.texts import repeated_passages
from quire.bench.machine import machine_card
from quire.speculative.suffix import MIN_MATCH

LIMIT_S = 300.0
# Rounds that do not count at first, and that do: as a step of 0.6B takes 40 ms, few.
WARM_UP_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 2, 6, 42
PRECISION = "f32", "bf16"  # of small models, and of shapes
SHAPE_VOCABULARY = 100_000
NUM_PROMPTS = 3


def measure_llama(cell: Cell, has_time: Callable[[], bool]) -> dict[str, Any]:
    """Return seconds of all four sides in each round; {"refused": why} where llama.cpp is not
    installed or does not speculate so."""
    if not is_installed("llama.cpp"):
        return {"refused": "llama.cpp is not installed; run: bench/peers/setup llama.cpp export"}
    sides: dict[str, Peer] = {}
    try:
        return _rounds(cell, has_time, sides)
    except (PeerFailed, Unavailable) as error:
        return {"refused": str(error)}
    finally:
        for side in sides.values():
            side.close()


def _rounds(cell: Cell, has_time: Callable[[], bool], sides: dict[str, Peer]) -> dict[str, Any]:
    num_tokens = cell.num_tokens
    is_small = cell.model == "stories260K"
    precision = PRECISION[not is_small]
    threads = int(str(machine_card()["cores"]))
    checkpoint = Path(model_path(cell.model))
    settings = _settings(cell, precision)
    for name, (engine, more) in settings.items():
        model = str(converted(engine, checkpoint, precision))
        log = cache_folder() / f"speculation-{name.replace(' ', '-')}.log"
        sides[name] = Peer(engine, threads, log)
        sides[name].load(model, more, limit_s=LIMIT_S)
    prompts = _prompts(cell, num_tokens)
    rounds: list[dict[str, float]] = []
    drafted = {name: [0, 0] for name in sides}  # and how many of these were accepted
    equal = dict.fromkeys(sides, 0)  # tokens as those of Quire, up to the first other one
    names = list(sides)
    for number in range(-WARM_UP_ROUNDS, MAX_ROUNDS):
        if number >= MIN_ROUNDS and not number % len(prompts) and not has_time():
            break
        prompt = prompts[number % len(prompts)]
        asked = {"do": "run", "requests": [{"prompt_ids": prompt, "output_tokens": num_tokens}]}
        answers: dict[str, dict[str, Any]] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            [answers[name]] = sides[name].ask(asked, limit_s=LIMIT_S)["answers"]
        if answers["quire"]["token_ids"] != answers["quire plain"]["token_ids"]:
            raise SystemExit("speculation changed the tokens of an answer; nothing is reported")
        if number < 0:
            continue
        rounds.append({name: _seconds(answer) for name, answer in answers.items()})
        for name, answer in answers.items():
            drafted[name][0] += answer.get("drafted", 0)
            drafted[name][1] += answer.get("accepted", 0)
            equal[name] += num_equal(answer["token_ids"], answers["quire"]["token_ids"])
    theirs = [name for name, (engine, _) in settings.items() if engine == "llama.cpp"]
    over = ratio_interval(
        [min(one[name] for name in theirs) for one in rounds], [one["quire"] for one in rounds]
    )
    sums_s = {name: sum(one[name] for one in rounds) for name in names}
    num_all = len(rounds) * num_tokens
    return {
        "rounds": len(rounds),
        "speedups": {
            name: round(sums_s[f"{engine} plain"] / sums_s[name], 3)
            for name, (engine, _) in settings.items()
            if not name.endswith("plain")
        },
        "tokens_per_s": {
            name: round(len(rounds) * (num_tokens - 1) / seconds, 1)
            for name, seconds in sums_s.items()
        },
        "over_llama": round(over.value, 3),
        "speedup_interval": over.shown(),
        "half_width": round(over.half_width, 4),
        "tokens": num_all,
        "drafted": {name: num for name, (num, _) in drafted.items() if num},
        "acceptance": {
            name: round(accepted / num, 4) for name, (num, accepted) in drafted.items() if num
        },
        "equal_tokens": {name: round(same / num_all, 4) for name, same in equal.items()},
    }


def _prompts(cell: Cell, num_tokens: int) -> list[list[int]]:
    """Return questions for a model that writes text, and else passages."""
    if cell.model == "stories260K":
        return [list(task.prompt) for task in question_tasks(cell)[:NUM_PROMPTS]]
    prompts, _ = repeated_passages(NUM_PROMPTS, num_tokens, SHAPE_VOCABULARY)
    return prompts


def _seconds(answer: dict[str, Any]) -> float:
    """Return how long the tokens after the first took."""
    seen_s = answer["last_s"] - answer["first_s"]
    return round(min(seen_s, answer.get("generation_s", seen_s)), 6)


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens are the same up to the first that is another one."""
    pairs = enumerate(zip(tokens, others, strict=False))
    least = min(len(tokens), len(others))
    return next((place for place, (one, other) in pairs if one != other), least)


def _settings(cell: Cell, precision: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return engine and settings of each side."""
    ours = {"dtype": precision, "max_num_seqs": 1, "enable_prefix_caching": False}
    theirs: dict[str, Any] = {"-c": 2048, "-np": 1}
    drafts: dict[str, dict[str, Any]]
    if cell.proposer == "draft":
        draft = Path(str(proposer_settings(cell)["draft_model"]))
        model = str(converted("llama.cpp", draft, precision))
        drafts = {
            "llama.cpp": {"--spec-type": "draft-simple", "-md": model},
            "llama.cpp, drafts as quire": {
                "--spec-type": "draft-simple",
                "-md": model,
                "--spec-draft-n-max": MAX_DRAFTS,
            },
        }
    else:
        drafts = {
            "llama.cpp": {"--spec-type": "ngram-simple"},
            "llama.cpp, drafts as quire": {
                "--spec-type": "ngram-simple",
                "--spec-ngram-simple-size-n": MIN_MATCH,
                "--spec-ngram-simple-size-m": MAX_DRAFTS,
            },
            "llama.cpp, n-gram map": {
                "--spec-type": "ngram-map-k",
                "--spec-ngram-map-k-size-n": MIN_MATCH,
                "--spec-ngram-map-k-size-m": MAX_DRAFTS,
            },
        }
    return {
        "quire plain": ("quire", ours),
        "quire": ("quire", {**ours, **proposer_settings(cell), "max_draft_tokens": MAX_DRAFTS}),
        "llama.cpp plain": ("llama.cpp", theirs),
        **{name: ("llama.cpp", {**theirs, **more}) for name, more in drafts.items()},
    }
