"""Quire and llama.cpp, each with and without speculation, on the same prompts in turn.

llama.cpp is its server (bench/peers): a draft model by -md, prompt lookup by --spec-type with its
own lengths and with those of Quire; the comparison is with the faster one. A build without these
options refuses them, and the cell says so. Both answer greedily, each with the tokens of its own
arithmetic; Quire's must be the same with drafts and without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.checkpoints import cache_folder
from bench.peers.child import Peer, PeerFailed
from bench.peers.convert import Unavailable, converted
from bench.peers.places import is_installed
from bench.speculation.cells import Cell
from bench.speculation.engines import MAX_DRAFTS, model_path, proposer_settings
from bench.speculation.intervals import median_interval
from bench.speculation.texts import repeated_passages
from quire.bench.machine import machine_card
from quire.speculative.suffix import MIN_MATCH

LIMIT_S = 300.0
MIN_ROUNDS, MAX_ROUNDS = 6, 40
PRECISION = "f32", "bf16"  # of small models, and of shapes
SMALL_VOCABULARY, SHAPE_VOCABULARY = 512, 100_000


def measure_llama(cell: Cell, has_time: Callable[[], bool]) -> dict[str, Any]:
    """Return seconds of all four sides in each round; {"refused": why} where llama.cpp is not
    installed or does not speculate so."""
    if not is_installed("llama.cpp"):
        return {"refused": "llama.cpp is not installed; run: bench/peers/setup llama.cpp"}
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
    vocabulary = SMALL_VOCABULARY if is_small else SHAPE_VOCABULARY
    [prompt], _ = repeated_passages(1, num_tokens, vocabulary)
    asked = {"do": "run", "requests": [{"prompt_ids": prompt, "output_tokens": num_tokens}]}
    rounds: list[dict[str, float]] = []
    answers: dict[str, list[int]] = {}
    names = list(sides)
    for number in range(-1, MAX_ROUNDS):  # the first warms up
        if number >= MIN_ROUNDS and not has_time():
            break
        seconds = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            [answer] = sides[name].ask(asked, limit_s=LIMIT_S)["answers"]
            answers[name] = answer["token_ids"]
            seconds[name] = round(answer["last_s"] - answer["first_s"], 5)
        if number >= 0:
            rounds.append(seconds)
        if answers["quire"] != answers["quire plain"]:
            raise SystemExit("speculation changed the tokens of an answer; nothing is reported")
    over = median_interval(
        [
            min(one[name] for name, (engine, _) in settings.items() if engine == "llama.cpp")
            / one["quire"]
            for one in rounds
        ]
    )
    return {
        "rounds": len(rounds),
        "speedups": {
            name: round(statistics.median(one[f"{engine} plain"] / one[name] for one in rounds), 3)
            for name, (engine, _) in settings.items()
            if not name.endswith("plain")
        },
        "over_llama": round(over.value, 3),
        "speedup_interval": over.shown(),
        "half_width": round(over.half_width, 4),
        "tokens": len(rounds) * num_tokens,
    }


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
        }
    return {
        "quire plain": ("quire", ours),
        "quire": ("quire", {**ours, **proposer_settings(cell), "max_draft_tokens": MAX_DRAFTS}),
        "llama.cpp plain": ("llama.cpp", theirs),
        **{name: ("llama.cpp", {**theirs, **more}) for name, more in drafts.items()},
    }
