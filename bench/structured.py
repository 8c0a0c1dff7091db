"""Measure structured output: schemas that compile, microseconds per mask, valid answers.

compile: each schema of the external sample, compiled from scratch, its first mask included. masks:
the mask before each token of the sample's valid instances. Both for several vocabularies; the large
ones are external data. answers: by the built-in model for random bounded schemas; each is checked
by `jsonschema`, and one that is cut off counts as failed. jump_ahead: steps and milliseconds per
answer with and without forced tokens in one step; token ids must be equal. Refuses to report if
answers fail or ids differ. Run:
python -m bench.structured [--part box|llama3|qwen|answers|jump_ahead ...]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from bench.data import outside
from bench.structured_schemas import random_schema
from quire.base.errors import InvalidParameter
from quire.base.grammar import json_schema
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.engine.assembly import features
from quire.engine.library.llm import LLM
from quire.models.model_folder import box_path
from quire.obs.timing import percentiles
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import MatcherError, only_id
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer

SAMPLES = ("Github_easy", "Glaiveai2K", "Handwritten", "Synthesized")
VOCABULARIES = ("box", "llama3", "qwen")
PARTS = (*VOCABULARIES, "answers", "jump_ahead")
GOALS = {"compile_p50_ms": 10.0, "mask_p50_us": 50.0, "mask_p99_us": 1000.0, "compiled": 0.95}
PROMPTS = ("Tom is a boy.", "Anna has a red ball.", "Hello", "The bear was big and")
MAX_TOKENS = 400


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--max-masks", type=int, default=60_000, help="of one vocabulary")
    parser.add_argument("--max-schemas", type=int, default=10_000, help="of one vocabulary")
    parser.add_argument("--out", type=Path, default=Path("bench/results/structured.json"))
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    result |= {"bench": "structured", "machine": machine_card(), "goals": GOALS}
    for part in args.part:
        if part == "answers":
            result[part] = measure_answers(args.answers)
        elif part == "jump_ahead":
            result[part] = measure_jumps()
        else:
            every = {"max_masks": args.max_masks, "max_schemas": args.max_schemas}
            result.setdefault("vocabularies", {})[part] = measure_masks(part, **every)
        print(part, json.dumps(result.get(part) or result["vocabularies"][part], indent=1))
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def vocabulary_of(name: str) -> tuple[Tokenizer, Vocabulary]:
    """Return a tokenizer and its tokens as bytes."""
    path = box_path() if name == "box" else outside(f"tokenizers/{name}")
    tokenizer = Tokenizer.load(path)
    return tokenizer, Vocabulary(
        token_bytes=[tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=(tokenizer.eos_id or 1,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def each_case() -> Iterator[dict[str, Any]]:
    """Yield the sample's schemas with their instances, in shuffled order."""
    cases = [
        json.loads(line)
        for sample in SAMPLES
        for line in outside(f"schemas/maskbench-{sample}.jsonl").read_text().splitlines()
    ]
    random.Random("structured").shuffle(cases)
    yield from cases


def measure_masks(name: str, *, max_masks: int, max_schemas: int) -> dict[str, Any]:
    """Return milliseconds per schema and microseconds per mask over one vocabulary."""
    tokenizer, vocabulary = vocabulary_of(name)
    began = time.perf_counter()
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_kept=4)
    compiler.matcher(json_schema({"type": "null"}))
    load_ms = (time.perf_counter() - began) * 1e3
    compile_ms: list[float] = []
    mask_us: list[float] = []
    refused: Counter[str] = Counter()
    num_certain = 0
    for _, case in zip(range(max_schemas), each_case(), strict=False):
        grammar = json_schema(case["schema"])
        began = time.perf_counter()
        try:
            compiler.matcher(grammar)
        except InvalidParameter as error:
            refused[reason_of(str(error))] += 1
            continue
        compile_ms.append((time.perf_counter() - began) * 1e3)
        for test in case["tests"]:
            if not test["valid"] or len(mask_us) >= max_masks:
                continue
            matcher = compiler.matcher(grammar)
            ids = tokenizer.encode(
                json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False
            )
            try:
                for token_id in ids:
                    began = time.perf_counter()
                    mask = matcher.mask()
                    mask_us.append((time.perf_counter() - began) * 1e6)
                    num_certain += only_id(mask) is not None
                    matcher.take([token_id])
            except MatcherError:  # properties in another order: earlier masks count
                continue
    return {
        "tokens": len(vocabulary.token_bytes),
        "schemas": len(compile_ms) + refused.total(),
        "compiled": len(compile_ms) / (len(compile_ms) + refused.total()),
        "refused": dict(refused.most_common()),
        "load_ms": load_ms,
        "compile_ms": spread(compile_ms),
        "masks": len(mask_us),
        "mask_us": spread(mask_us),
        "certain_tokens": num_certain / len(mask_us),
    }


def measure_answers(count: int) -> dict[str, Any]:
    """Return answers of the built-in model. Exits if one does not validate or is truncated."""
    rng = random.Random("answers")
    schemas = [random_schema(rng) for _ in range(count)]
    began = time.perf_counter()
    num_tokens = 0
    failed: list[str] = []
    with LLM(max_num_seqs=32) as llm:
        for first in range(0, count, 100):
            some = schemas[first : first + 100]
            sampling = [
                SamplingParams(
                    temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
                    seed=rng.randrange(2**40),
                    max_tokens=MAX_TOKENS,
                    structured_outputs=json_schema(schema),
                )
                for schema in some
            ]
            prompts = [rng.choice(PROMPTS) for _ in some]
            for schema, answer in zip(some, llm.generate(prompts, sampling), strict=True):
                num_tokens += len(answer.token_ids)
                why = failure(schema, answer.text, answer.finish_reason)
                if why:
                    failed.append(f"{why}: {answer.text[:200]} for {json.dumps(schema)}")
    if failed:
        raise SystemExit(f"{len(failed)} of {count} answers failed:\n" + "\n".join(failed[:10]))
    seconds = time.perf_counter() - began
    return {"answers": count, "valid": count, "tokens": num_tokens, "seconds": seconds}


def failure(schema: dict[str, Any], text: str, finish_reason: str) -> str:
    """Return why an answer is invalid; an empty string if it is valid."""
    if finish_reason != "stop":
        return f"it ended by {finish_reason}"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:200]
    return ""


def measure_jumps() -> dict[str, Any]:
    """Measure the same answers with forced tokens in one step, and step by step."""
    rng = random.Random("jumps")
    schemas = [random_schema(rng) for _ in range(40)]
    sampling = [
        SamplingParams(seed=1, max_tokens=MAX_TOKENS, structured_outputs=json_schema(schema))
        for schema in schemas
    ]
    plain, found, ids = features.ModelRunner, {}, []
    for name, jumps in (("jumping", True), ("single_steps", False)):
        runs: list[Any] = []

        def runner(*args: Any, _jumps: bool = jumps, _runs: list[Any] = runs, **more: Any) -> Any:
            more["constraints"] = replace(more["constraints"], jump_ahead=_jumps)
            _runs.append(plain(*args, **more))
            return _runs[0]

        features.ModelRunner = runner  # type: ignore[misc, assignment]
        try:
            with LLM(max_num_seqs=1) as llm:
                llm.generate([PROMPTS[0]] * len(sampling), sampling)  # compiles, and warms up
                steps, submit = [0], runs[0].submit
                runs[0].submit = lambda plan, s=steps, go=submit: (
                    s.__setitem__(0, s[0] + 1),
                    go(plan),
                )[1]
                began = time.perf_counter()
                answers = llm.generate([PROMPTS[0]] * len(sampling), sampling)
                seconds = time.perf_counter() - began
        finally:
            features.ModelRunner = plain  # type: ignore[misc]
        ids.append([answer.token_ids for answer in answers])
        found[name] = {"seconds": seconds, "steps": steps[0], "tokens": sum(map(len, ids[-1]))}
    if ids[0] != ids[1]:
        raise SystemExit("jumping ahead gave other token ids than single steps")
    found["gain"] = found["single_steps"]["seconds"] / found["jumping"]["seconds"]
    return found


def reason_of(message: str) -> str:
    """Return the keywords, or the kind of error, of a rejection."""
    if "not supported: " in message:
        said = message.split("not supported: ")[1].split("; rewrite")[0]
        return " ".join(part.split(" (at")[0] for part in said.split("), "))
    if "the format" in message:
        return "format"
    return " ".join(message.split("cannot be used: ")[-1].split()[:3])


def spread(values: list[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the maximum."""
    return {**percentiles(values, (50, 90, 99)), "most": max(values)}


if __name__ == "__main__":
    main()
