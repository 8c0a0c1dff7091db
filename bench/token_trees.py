"""Whether trees of drafts would gain over chains: tokens per step and speed, by computation.

    python -m bench.token_trees

A branch of a tree matters only if all tokens before it are those of the answer. So the rank that
the draft model gives each token of an answer, after the true tokens before it, says exactly how far
a chain (always the first token) and any tree of ranks would have come from each position. Ranks are
those of the logits at temperature 0, else of logit/T plus the noise that the model samples with.
For each number of drafts, the tree with the highest expectation is built node by node, fitted to
the even answers and judged on the odd ones. Speeds follow from the time of a step with n drafts,
1 + n * --draft-share, and of a pass of the draft model, --pass-share, in times of a plain step. The
first default of the former is that of Qwen3-0.6B's shapes at batch 1 on a CPU (bench/speculation),
the second is a guess of a device that waits for memory. The masks of a tree are free here. Counts
only, and takes no times.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.speculation.texts import questions
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.engine.library.llm import LLM
from quire.models.model_folder import draft_box_path
from quire.sampling.noise import gumbel
from quire.train.teacher import Teacher

Path_ = tuple[int, ...]  # a node: the rank at each depth from the root
Ranks = NDArray[np.int64]
PROMPT_CHARACTERS = 160
MAX_DRAFTS, MAX_DEPTH, MAX_RANK = 16, 8, 4
SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--answers", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--temperature", nargs="+", type=float, default=(0.0, 0.6, 1.0))
    parser.add_argument("--draft-share", nargs="+", type=float, default=(0.083, 0.02))
    parser.add_argument("--pass-share", nargs="+", type=float, default=(0.0, 0.1, 0.3))
    parser.add_argument("--out", type=Path, default=Path("bench/results/token_trees.json"))
    args = parser.parse_args()
    prompts = [text[:PROMPT_CHARACTERS] for text in questions(args.answers)]
    cells = []
    for temperature in args.temperature:
        ranks = ranks_of(prompts, temperature, args.tokens)
        cell = {"temperature": temperature} | compared(ranks, args.draft_share, args.pass_share)
        print(json.dumps(cell), flush=True)
        cells.append(cell)
    result = {"bench": "token_trees", "machine": machine_card()}
    args.out.write_text(json.dumps(result | {"cells": cells}, indent=1) + "\n")


def ranks_of(prompts: list[str], temperature: float, num_tokens: int) -> list[Ranks]:
    """Return the rank of each token of each answer in the draft model's order."""
    sampling = SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=SEED
    )
    with LLM(max_num_seqs=16) as llm:
        answers = llm.generate(prompts, sampling, progress=False)
    draft = Teacher(draft_box_path(), max_tokens=512, num_threads=1)
    found = []
    for one in answers:
        prompt, answer = one.prompt_token_ids, one.outputs[0].token_ids
        logits = draft.lesson([*prompt, *answer]).logits
        ranks = []
        for place, token in enumerate(answer):
            position = len(prompt) + place
            scores = logits[position - 1].astype(np.float64)
            if temperature:
                ids = np.arange(len(scores))
                noise = gumbel(SEED, 0, position, token_ids=ids)
                scores = scores / temperature + noise
            ranks.append(int(np.count_nonzero(scores > scores[token])))
        found.append(np.array(ranks))
    draft.close()
    return found


def compared(
    ranks: list[Ranks], draft_shares: Sequence[float], pass_shares: Sequence[float]
) -> dict[str, object]:
    """Return acceptance by rank, and the best speeds of chains and of trees."""
    nodes = fitted_tree(ranks[::2])
    judged = ranks[1::2]
    reached = frequencies(judged)
    every = np.concatenate(judged)
    chain_tokens, tree_tokens = [1.0], [1.0]
    for num in range(1, MAX_DRAFTS + 1):
        chain = [(0,) * (depth + 1) for depth in range(num)]
        chain_tokens.append(1.0 + sum(reached.get(node, 0.0) for node in chain))
        tree_tokens.append(1.0 + sum(reached.get(node, 0.0) for node in nodes[:num]))
    speeds = {}
    for draft_share, share in product(draft_shares, pass_shares):
        chains = [
            tokens / (1 + num * (draft_share + share)) for num, tokens in enumerate(chain_tokens)
        ]
        trees = [
            tokens
            / (1 + num * draft_share + share * max((len(node) for node in nodes[:num]), default=0))
            for num, tokens in enumerate(tree_tokens)
        ]
        speeds[f"draft {draft_share:g}, pass {share:g}"] = {
            "chain": round(max(chains), 3),
            "chain_drafts": int(np.argmax(chains)),
            "tree": round(max(trees), 3),
            "tree_drafts": int(np.argmax(trees)),
            "gain": round(max(trees) / max(chains) - 1.0, 4),
        }
    return {
        "first": round(float(np.mean(every == 0)), 4),
        "second": round(float(np.mean(every == 1)), 4),
        "third": round(float(np.mean(every == 2)), 4),
        "chain_tokens": [round(one, 3) for one in chain_tokens],
        "tree_tokens": [round(one, 3) for one in tree_tokens],
        "speeds": speeds,
    }


def frequencies(ranks: list[Ranks]) -> dict[Path_, float]:
    """Return how often the tokens after a position follow each path of ranks."""
    counts: Counter[Path_] = Counter()
    num = 0
    for answer in ranks:
        for start in range(len(answer) - MAX_DEPTH):
            num += 1
            path: list[int] = []
            for rank in answer[start : start + MAX_DEPTH].tolist():
                if rank >= MAX_RANK:
                    break
                path.append(rank)
                counts[tuple(path)] += 1
    return {path: count / num for path, count in counts.items()}


def fitted_tree(ranks: list[Ranks]) -> list[Path_]:
    """Return nodes by falling frequency: the first n are the best tree of n drafts, since no node
    is more frequent than its parent."""
    reached = frequencies(ranks)
    return sorted(reached, key=lambda path: (-reached[path], len(path), path))[:MAX_DRAFTS]


if __name__ == "__main__":
    main()
