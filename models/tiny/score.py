"""Evaluate a built-in model: held-out stories, questions and tool calls, and its draft model.

Losses are in units that do not depend on the tokenizer: nats and bits per byte, over the same bytes
for every model. Questions are answered greedily through Quire; an answer is right if it equals one
of the answers of its template. The evaluation data is not in the training data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import corpus
import torch
from model import Llama, load_model, sum_of_losses
from questions import Questions
from tokenizers import Tokenizer
from tool_talk import ToolTalk
from topics import find_nouns

from quire import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA_FOLDER = Path(os.environ.get("QUIRE_DATA", ROOT.parent / "shared" / "data"))
SCORED_BYTES = 800  # of each story, so that it fits the context of every model
SAMPLED = [
    "Hello!",
    "What is your name?",
    "What is 8 + 5?",
    "What color is the sky?",
    "Tell me a story about a dog.",
    "Tell me a story about a girl named Mia.",
]


def num_parameters(model: Llama) -> int:
    return sum(weight.numel() for weight in model.parameters())


def megabytes(folder: Path) -> str:
    """Return the size of a directory in millions of bytes."""
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f}"


def story_losses(
    model: Llama, folder: Path, stories: list[str], *, paragraph_break: str = "\n\n"
) -> dict[str, float]:
    """Return the loss of the starts of the stories.

    paragraph_break: the one the model was trained with; it counts as one byte for every model.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_nats, num_bytes, num_tokens = 0.0, 0, 0
    for story in stories:
        text = story.encode()[:SCORED_BYTES].decode(errors="ignore").strip()
        ids = tokenizer.encode(text.replace("\n\n", paragraph_break)).ids
        num_nats += sum_of_losses(model, ids)
        num_bytes += len(text.replace("\n\n", "\n").encode())
        num_tokens += len(ids) - 1
    return {
        "nats_per_token": round(num_nats / num_tokens, 4),
        "nats_per_byte": round(num_nats / num_bytes, 4),
        "bits_per_byte": round(num_nats / num_bytes / math.log(2), 4),
    }


def answers_to(folder: Path, says: list[str], sampling: SamplingParams | None) -> list[str]:
    """Return the answers of the model in this directory, through Quire."""
    with LLM(folder) as llm:
        conversations = [[{"role": "user", "content": text}] for text in says]
        return [a.text.strip() for a in llm.chat(conversations, sampling, progress=False)]


def question_scores(folder: Path, questions: Questions) -> tuple[dict[str, str], list[str]]:
    """Return right answers by kind, and descriptions of the wrong ones."""
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


def tool_scores(folder: Path, talk: ToolTalk) -> tuple[dict[str, str], list[str]]:
    """Return right answers to requests with tools, greedily: the calls, or an answer
    without calls.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=80)
    total, right, wrong = Counter[str](), Counter[str](), list[str]()
    with LLM(folder) as llm:
        for case in talk.held_out():
            asked = [{"role": "user", "content": case.says}]
            [answer] = llm.chat(asked, sampling, tools=case.tools, progress=False)
            message = answer.outputs[0].message
            calls = [(call.name, _loaded(call.arguments)) for call in message.calls]
            total[case.kind] += 1
            if calls == case.calls:
                right[case.kind] += 1
            else:
                wrong.append(f"{case.says} -> {answer.text.strip()}")
    return {kind: f"{right[kind]}/{total[kind]}" for kind in total}, wrong


def _loaded(arguments: str) -> object:
    """Return the arguments as JSON; the text itself if they are invalid."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@torch.no_grad()
def agreement(
    big: Llama, small: Llama, rows: list[list[int]], *, after: int | None = None
) -> dict[str, float]:
    """Return how often both models choose the same next token, and the acceptance rate of drafts.

    after: count only what follows this token, which every row contains once. acceptance: the mean
    of sum(min(p, q)), the share of drafts accepted at temperature 1.
    """
    same, accepted, num_tokens = 0, 0.0, 0
    for row in rows:
        ids = torch.tensor([row[:512]])
        first = 0 if after is None else row.index(after)
        p, q = (model(ids)[:, first:-1].softmax(dim=-1) for model in (big, small))
        same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        accepted += float(torch.minimum(p, q).sum())
        num_tokens += ids.shape[1] - 1 - first
    return {
        "top_1": round(same / num_tokens, 4),
        "acceptance": round(accepted / num_tokens, 4),
    }


def samples(folder: Path) -> str:
    """Return answers with the default parameters, one sample each, as quotations."""
    with LLM(folder) as llm:
        sampling = replace(llm.default_sampling, seed=1, max_tokens=450)
    told = []
    for says, answer in zip(SAMPLED, answers_to(folder, SAMPLED, sampling), strict=True):
        told.append(f"> **{says}**\n>\n> " + answer.replace("\n\n", "\n>\n> "))
    return "\n\n".join(told)


def write_card(template: str, out: Path, facts: dict[str, object]) -> None:
    """Fill a card; text between @ signs is edited by hand afterwards."""
    (out / "README.md").write_text((HERE / template).read_text().format(**facts))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Measure the toy model in the box."
    )
    parser.add_argument("--model", type=Path, default=ROOT / "quire" / "models" / "box")
    parser.add_argument("--draft", type=Path, default=ROOT / "quire" / "models" / "box_draft")
    parser.add_argument("--data", type=Path, default=DATA_FOLDER, help="the data folder")
    parser.add_argument("--show", type=int, default=40, help="so many wrong answers")
    parser.add_argument("--cards", action="store_true", help="write the cards of both models")
    args = parser.parse_args()

    texts = corpus.read_texts(args.data / "text")
    questions = Questions(HERE, sorted(find_nouns(texts.stories)))
    big, teller = load_model(args.model), args.data / "stories260K"
    box = story_losses(big, args.model, texts.held_out)
    other = story_losses(load_model(teller), teller, texts.held_out, paragraph_break="\n")
    scores, wrong = question_scores(args.model, questions)
    tools, wrong_calls = tool_scores(args.model, ToolTalk(HERE, questions))
    measured = {"box": box, "stories260K": other, "held-out questions": scores, "tools": tools}
    print(json.dumps(measured, indent=1))
    print("\n".join(wrong[: args.show] + wrong_calls[: args.show]))
    said = samples(args.model)
    print(said)
    if args.cards:
        facts: dict[str, object] = {
            "parameters": f"{num_parameters(big):,}",
            "megabytes": megabytes(args.model),
            "box_nats": box["nats_per_byte"],
            "box_bits": box["bits_per_byte"],
            "box_token": box["nats_per_token"],
            "teller_nats": other["nats_per_byte"],
            "teller_bits": other["bits_per_byte"],
            "teller_token": other["nats_per_token"],
            "questions": "\n".join(f"| {kind} | {score} |" for kind, score in scores.items()),
            "tools": "\n".join(f"| {kind} | {score} |" for kind, score in tools.items()),
            "samples": said,
        }
        write_card("card.md", args.model, facts)
    if not args.draft.exists():
        return
    small = load_model(args.draft)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    stories = [tokenizer.encode(story).ids for story in texts.held_out]
    talk = [
        tokenizer.encode(f"<|user|>{q.says}<|end|><|assistant|>{q.answers[0]}<|end|>").ids
        for q in random.Random(7).sample(questions.held_out(), k=200)
    ]
    draft = story_losses(small, args.draft, texts.held_out)
    on_stories = agreement(big, small, stories)
    on_talk = agreement(big, small, talk, after=corpus.token_id(tokenizer, "<|assistant|>"))
    print(json.dumps({"draft": draft, "stories": on_stories, "questions": on_talk}, indent=1))
    if args.cards:
        facts = {
            "parameters": f"{num_parameters(small):,}",
            "times": f"{num_parameters(big) / num_parameters(small):.1f}",
            "megabytes": megabytes(args.draft),
            "nats": draft["nats_per_byte"],
            "bits": draft["bits_per_byte"],
            "box_bits": box["bits_per_byte"],
            "story_same": on_stories["top_1"],
            "story_kept": on_stories["acceptance"],
            "talk_same": on_talk["top_1"],
            "talk_kept": on_talk["acceptance"],
        }
        write_card("card_draft.md", args.draft, facts)


if __name__ == "__main__":
    main()
