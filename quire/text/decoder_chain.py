"""Compile the `decoder` of a tokenizer.json to a piece of text per token, and rules for joining.

A decoder is a chain of steps. The chains of language models become one piece per id (text, or bytes
if a token may hold part of a character) and rules for joining pieces; any other chain is rejected
by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.base.errors import TokenizerError
from quire.text.detokenizer import DecoderChain, JoinRules, Piece, byte_level_piece

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WORD_PIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_SUPPORTED = (
    "ByteLevel or WordPiece alone, or a sequence of Replace, Metaspace or Strip, then at most one "
    "ByteFallback, one Fuse, and one Strip at the start"
)


def compile_decoder(decoder_json: bytes | None) -> DecoderChain:
    """Return the chain of a decoder. Raises TokenizerError for one that cannot be streamed."""
    if decoder_json is None:  # the library joins bare tokens with spaces
        return DecoderChain(
            rules=JoinRules(), first=lambda token: token, later=lambda token: " " + token
        )
    decoder = json.loads(decoder_json)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        to_bytes = byte_level_piece()
        return DecoderChain(rules=JoinRules(byte_level=True), first=to_bytes, later=to_bytes)
    if [step["type"] for step in steps] == ["WordPiece"]:
        first, later = _word_piece(steps[0])
        return DecoderChain(rules=JoinRules(), first=first, later=later)
    return _compile_text_chain(steps)


def _compile_text_chain(steps: list[dict[str, Any]]) -> DecoderChain:
    rewrites: list[tuple[Callable[[str], str], Callable[[str], str]]] = []
    strip = ("", 0)
    byte_fallback = fused = False
    for step in steps:
        match step["type"]:
            case "Replace" if not (byte_fallback or fused):
                rewrites.append(_same_everywhere(_replace(step)))
            case "Metaspace" if not (byte_fallback or fused):
                rewrites.append(_metaspace(step))
            case "Strip" if not (byte_fallback or fused):
                rewrites.append(_same_everywhere(_strip(step)))
            case "ByteFallback" if not (byte_fallback or fused):
                byte_fallback = True
            case "Fuse" if not fused:
                fused = True
            case "Strip" if fused and strip[1] == 0 and step["stop"] == 0:
                strip = (step["content"], step["start"])
            case kind:
                raise TokenizerError(
                    f"its decoder has a step {kind} that cannot be streamed at that place; "
                    f"supported: {_SUPPORTED}. Re-export the tokenizer with such a decoder"
                )

    def piece(token: str, place: int) -> Piece:
        if byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for rewrite in rewrites:
            token = rewrite[place](token)
        return token

    return DecoderChain(
        rules=JoinRules(strip=strip),
        first=lambda token: piece(token, 0),
        later=lambda token: piece(token, 1),
    )


def _same_everywhere(
    rewrite: Callable[[str], str],
) -> tuple[Callable[[str], str], Callable[[str], str]]:
    return rewrite, rewrite


def _replace(step: dict[str, Any]) -> Callable[[str], str]:
    pattern, content = step["pattern"], step["content"]
    if "String" not in pattern:
        raise TokenizerError(
            "its decoder has a Replace with a regular expression; only a plain "
            "String pattern is supported"
        )
    return lambda token: token.replace(pattern["String"], content)


def _strip(step: dict[str, Any]) -> Callable[[str], str]:
    content, start, stop = step["content"], step["start"], step["stop"]

    def rewrite(token: str) -> str:
        low = 0
        while low < min(start, len(token)) and token[low] == content:
            low += 1
        high = len(token)
        while high > low and len(token) - high < stop and token[high - 1] == content:
            high -= 1
        return token[low:high]

    return rewrite


def _word_piece(step: dict[str, Any]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Strip the prefix of continuation tokens, add a space before others; clean up each token."""
    prefix, cleans = step["prefix"], step["cleanup"]

    def clean(token: str) -> str:
        for found, becomes in _WORD_PIECE_CLEANUP if cleans else ():
            token = token.replace(found, becomes)
        return token

    def later(token: str) -> str:
        return clean(token[len(prefix) :] if token.startswith(prefix) else " " + token)

    return clean, later


def _metaspace(step: dict[str, Any]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    mark = step["replacement"]
    at_start = " " if step.get("prepend_scheme", "always") == "never" else ""
    return (lambda token: token.replace(mark, at_start)), (lambda token: token.replace(mark, " "))
