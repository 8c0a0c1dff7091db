"""Write prompts for the texts that the built-in model's draft heads are trained on, one per line.

    python head_prompts.py > /tmp/prompts.txt

Story requests with many topics and the questions of facts.json. The prompts of bench/speculation.py
are left out: acceptance is measured with them.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
REQUESTS = (
    "Write a story about a {}.", "Tell me a story about a {}.", "What can a {} do?",
    "Write about a {} and a friend.", "Once upon a time there was a {}",
    "Please tell a short story with a {} and a {}.", "One day, a little {}",
)  # fmt: skip
# Without the topics of bench/speculation.py.
TOPICS = (
    "ball", "bear", "bee", "bike", "box", "boy", "bunny", "butterfly", "cake", "car", "castle",
    "cow", "doll", "dragon", "duck", "fairy", "farmer", "fish", "flower", "fox", "garden", "ghost",
    "goat", "hat", "hen", "horse", "house", "kite", "lion", "lizard", "monkey", "monster", "mouse",
    "owl", "park", "pig", "pirate", "princess", "puppy", "queen", "rabbit", "robot", "rose",
    "sheep", "ship", "snail", "snake", "squirrel", "star", "sun", "teddy bear", "tiger", "toy",
    "train", "truck", "turtle", "wizard", "wolf",
)  # fmt: skip


def main() -> None:
    """Print the prompts, stories and questions in turn."""
    count = len(TOPICS)
    stories = [
        request.format(topic, TOPICS[(number + 7) % count])
        for request in REQUESTS
        for number, topic in enumerate(TOPICS)
    ]
    questions = [
        form.format(**dict(zip(fact["gaps"], row.split("|"), strict=False)))
        for fact in json.loads((HERE / "facts.json").read_text())
        for row in fact["rows"]
        for form in fact["says"][:1]
        if "{" + fact["gaps"][0] + "}" in form
    ]
    step = max(len(questions) // len(stories), 1)
    for number, story in enumerate(stories):
        print(story)
        if number % 2 == 0 and number * step < len(questions):
            print(questions[number * step])


if __name__ == "__main__":
    main()
