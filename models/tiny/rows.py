"""Draw rows of tokens for training the built-in models, with shares that change over time.

A row is filled with documents: stories (plain, or requested in a conversation), conversations, or
one window of a book. Turns of the user and the system carry no loss. A document starts with the
begin token; a turn ends with the end token, which also ends a story; the seed alone fixes the
order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from corpus import BEGIN, END, Texts, token_id
from questions import SYSTEMS, Questions, Turn
from tokenizers import Tokenizer
from tool_talk import ToolTalk
from topics import request_for, swap_words

PLAIN_SHARE = 0.2  # of the stories; the rest answer a request
SWAPPED_SHARE = 0.5  # of the sampled stories; real ones are always swapped
TALK_TOKENS = 220  # several conversations are joined to about the length of a story
NOT_LEARNED = -1


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the tokens at one moment; they sum to 1."""

    sampled: float
    real: float
    talk: float
    tools: float
    books: float


# A thousand real stories are soon memorized: a larger share raises the held-out loss.
FIRST = Shares(sampled=0.60, real=0.08, talk=0.16, tools=0.04, books=0.12)
LAST = Shares(sampled=0.46, real=0.06, talk=0.26, tools=0.20, books=0.02)
KINDS = ("sampled", "real", "talk", "tools")


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids, and for each whether it carries loss."""

    ids: list[int]
    learned: list[bool]


class RowDealer:
    """Draw an endless sequence of rows of `row_tokens` ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Texts,
        questions: Questions,
        tool_talk: ToolTalk,
        *,
        nouns: frozenset[str],
        row_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.questions = questions
        self.tool_talk = tool_talk
        self.nouns = nouns
        self.row_tokens = row_tokens
        self.begin, self.end = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
        self.roles = {
            role: token_id(tokenizer, f"<|{role}|>") for role in ("system", "user", "assistant")
        }
        self.books = [self.ids_of(book) for book in texts.books]

    def deal(self, rng: random.Random, progress: float) -> Row:
        """Draw one row for a moment of the run, from 0 to 1."""
        mix = [
            getattr(FIRST, kind) + (getattr(LAST, kind) - getattr(FIRST, kind)) * progress
            for kind in (*KINDS, "books")
        ]
        if rng.random() < mix[-1]:
            return self._book_window(rng)
        row = Row([], [])
        while len(row.ids) < self.row_tokens:
            (kind,) = rng.choices(KINDS, weights=mix[:-1])
            if kind in ("talk", "tools"):
                source = self.questions if kind == "talk" else self.tool_talk
                until = len(row.ids) + TALK_TOKENS
                while len(row.ids) < until:
                    self._add_turns(row, source.conversation(rng))
            elif kind == "real" or not self.texts.sampled:
                self._add_story(row, swap_words(rng.choice(self.texts.stories), rng), rng)
            else:
                story = rng.choice(self.texts.sampled)
                if rng.random() < SWAPPED_SHARE:
                    story = swap_words(story, rng)
                self._add_story(row, story, rng)
        return Row(row.ids[: self.row_tokens], row.learned[: self.row_tokens])

    def story_ids(self, story: str) -> list[int]:
        """Return a plain story as a document."""
        return [self.begin, *self.ids_of(story), self.end]

    def ids_of(self, text: str) -> list[int]:
        """Tokenize text without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _book_window(self, rng: random.Random) -> Row:
        (book,) = rng.choices(self.books, weights=[len(b) for b in self.books])
        start = rng.randrange(len(book) - self.row_tokens)
        ids = [self.begin, *book[start : start + self.row_tokens - 1]]
        return Row(ids, [True] * len(ids))

    def _add_story(self, row: Row, story: str, rng: random.Random) -> None:
        if rng.random() < PLAIN_SHARE:
            ids = self.story_ids(story)
            row.ids.extend(ids)
            row.learned.extend([True] * len(ids))
            return
        turns: list[Turn] = []
        if rng.random() < 0.2:
            turns.append(("system", rng.choice(SYSTEMS)))
        if rng.random() < 0.12:
            turns += self.questions.exchange(rng)
        turns += [("user", request_for(story, self.nouns, rng)), ("assistant", story)]
        if rng.random() < 0.12:
            turns += self.questions.exchange(rng)
        self._add_turns(row, turns)

    def _add_turns(self, row: Row, turns: list[Turn]) -> None:
        row.ids.append(self.begin)
        row.learned.append(False)
        for role, text in turns:
            ids = self.ids_of(text)
            row.ids.extend([self.roles[role], *ids, self.end])
            is_learned = role == "assistant"
            row.learned.extend([False, *([is_learned] * (len(ids) + 1))])
