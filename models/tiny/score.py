"""Measures a trained model in the box: held-out stories, held-out questions, its sibling.

Losses are of the text alone, in units that do not depend on the tokenizer: nats and bits a byte,
over the same bytes for every model. Questions are asked through Quire, greedily; an answer is right
if it is, letter by letter, one of those that its template allows.

Does not train. Always holds: nothing it measures on was dealt in training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import Counter
from pathlib import Path

import corpus
import torch
from model import Llama, load_model, sum_of_losses
from questions import Questions
from tokenizers import Tokenizer
from topics import find_nouns

from quire import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA_FOLDER = Path(os.environ.get("QUIRE_DATA", ROOT.parent / "shared" / "data"))
SCORED_BYTES = 900  # of each story, so that every model's context holds it
STORY_REQUESTS = ["a dog", "a cat", "a robot", "a boy named Tom", "Lily and a frog", "a kite"]


def story_losses(model: Llama, folder: Path, stories: list[str]) -> dict[str, float]:
    """Loss of the starts of the stories, a byte of text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_nats, num_bytes, num_tokens = 0.0, 0, 0
    for story in stories:
        text = story.encode()[:SCORED_BYTES].decode(errors="ignore")
        ids = tokenizer.encode(text).ids
        num_nats += sum_of_losses(model, ids)
        num_bytes += len(text.encode())
        num_tokens += len(ids) - 1
    return {
        "nats_per_token": round(num_nats / num_tokens, 4),
        "nats_per_byte": round(num_nats / num_bytes, 4),
        "bits_per_byte": round(num_nats / num_bytes / math.log(2), 4),
    }


def answers_to(folder: Path, says: list[str], sampling: SamplingParams | None) -> list[str]:
    """What the model in this folder answers, through Quire."""
    with LLM(folder) as llm:
        conversations = [[{"role": "user", "content": text}] for text in says]
        return [a.text.strip() for a in llm.chat(conversations, sampling, progress=False)]


def question_scores(folder: Path, questions: Questions) -> tuple[dict[str, str], list[str]]:
    """Right answers by kind, and the wrong ones in words."""
    asked = questions.held_out()
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    answers = answers_to(folder, [one.says for one in asked], sampling)
    total, right, wrong = Counter[str](), Counter[str](), list[str]()
    for question, answer in zip(asked, answers, strict=True):
        total[question.kind] += 1
        if answer in question.answers:
            right[question.kind] += 1
        else:
            wrong.append(f"{question.says} -> {answer}")
    return {kind: f"{right[kind]}/{total[kind]}" for kind in total}, wrong


@torch.no_grad()
def agreement(big: Llama, small: Llama, rows: list[list[int]]) -> dict[str, float]:
    """How often both choose the same next token, and would accept each other's draws.

    acceptance: the mean of sum(min(p, q)), the share of drafts kept at temperature 1.
    """
    same, accepted, num_tokens = 0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row[:512]])
        p, q = big(ids).softmax(dim=-1), small(ids).softmax(dim=-1)
        same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        accepted += float(torch.minimum(p, q).sum())
        num_tokens += ids.numel()
    return {
        "top_1": round(same / num_tokens, 4),
        "acceptance": round(accepted / num_tokens, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the toy model in the box.")
    parser.add_argument("--model", type=Path, default=ROOT / "quire" / "models" / "box")
    parser.add_argument("--draft", type=Path, default=ROOT / "quire" / "models" / "box_draft")
    parser.add_argument("--data", type=Path, default=DATA_FOLDER, help="the data folder")
    parser.add_argument("--show", type=int, default=20, help="so many wrong answers")
    args = parser.parse_args()

    texts = corpus.read_texts(args.data / "text")
    questions = Questions(HERE, sorted(find_nouns(texts.stories)))
    big = load_model(args.model)
    report: dict[str, object] = {
        "box": story_losses(big, args.model, texts.held_out),
        "stories260K": story_losses(
            load_model(args.data / "stories260K"), args.data / "stories260K", texts.held_out
        ),
    }
    if args.draft.exists():
        small = load_model(args.draft)
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        rng = random.Random(7)
        told = [tokenizer.encode(story).ids for story in texts.held_out]
        talk = [
            tokenizer.encode(f"<|user|>{q.says}<|end|><|assistant|>{q.answers[0]}<|end|>").ids
            for q in rng.sample(questions.held_out(), k=200)
        ]
        report["draft"] = story_losses(small, args.draft, texts.held_out)
        report["draft on stories"] = agreement(big, small, told)
        report["draft on questions"] = agreement(big, small, talk)
    scores, wrong = question_scores(args.model, questions)
    report["held-out questions"] = scores
    print(json.dumps(report, indent=1))
    print("\n".join(wrong[: args.show]))
    says = [f"Tell me a story about {topic}." for topic in STORY_REQUESTS]
    for request, story in zip(says, answers_to(args.model, says, None), strict=True):
        print(f"\n**{request}**\n{story}")


if __name__ == "__main__":
    main()
