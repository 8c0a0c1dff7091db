"""Wrong words on the command line, each answered with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each_case
from tests.unit.cli.command import quire_main


@each_case(
    ("words", "said"),
    [
        ("replay", "required: FILE (a recording that `quire record URL FILE` wrote)"),
        ("doctor --url http://x", "--url; URL is given without a flag: quire doctor URL\n"),
        ("bench serve --url http://x", "URL is given without a flag: quire bench serve URL\n"),
        ("bench serve --host x --port 1", "URL is given without a flag: quire bench serve URL\n"),
        ("why --request-id x", "REQUEST_ID is given without a flag: quire why REQUEST_ID\n"),
        ("why x --id x", "REQUEST_ID is given without a flag: quire why REQUEST_ID; "),
        ("completion bash --shell x", "SHELL is given without a flag: quire completion SHELL\n"),
        ("doctor --model x", "quire doctor takes no model; leave it out; quire plan MODEL predic"),
        ("record http://x y --model x", "quire record takes no model; leave it out\n"),
        ("env --model x", "the model is given without a flag: quire env MODEL\n"),
        ("bench latency --input-len 5", "use --prompt-tokens (number of prompt tokens (default"),
        ("bench latency --output-len 5", "use --output-tokens (number of tokens to generate"),
        ("bench throughput --input-len 5", "use --prompts (prompt length in tokens"),
        ("bench throughput --num-prompts 9", "use --requests (number of requests, submitted"),
        ("bench serve --request-rate 3", "use --rates (increasing request rates per second"),
        ("bench serve --num-prompts 3", "use --max-requests (maximum number of requests of the"),
        ("serve --num-speculative-tokens 3", "number of draft tokens is --max-draft-tokens\n"),
        ("serve --speculative_config x", "speculative_config; speculative decoding is set by --s"),
        ("serve --speculative_config.method=ngram", "; speculative decoding is set by --speculate"),
        ("serve -sc x", "-sc; speculative decoding is set by --speculate off, ngram, draft, self"),
        ("serve --spec-draft-n-max 3", "the maximum number of draft tokens is --max-draft-tokens"),
        ("serve --spec-draft-threads 3", "a draft model is computed as the model is; leave it out"),
        ("serve --spec-ngram-mod-n-match 3", "; prompt lookup is --speculate ngram, with at most"),
        ("serve --spec-of-tomorrow 3", "of-tomorrow; speculative decoding is set by --speculate"),
        ("serve --speculative-history-tokens 3", "; did you mean --speculate-history-tokens?\n"),
        ("serve --threads-draft 3", "a draft model is computed as the model is; leave it out"),
        ("serve --draft-quantization int8", "a draft model is computed as the model is; leave it"),
        ("serve --speculative-tokens 3", "the maximum number of draft tokens is --max-draft-tok"),
        ("serve --spec-config x", "; speculative decoding is set by --speculate off, ngram, "),
        ("serve --speculate draft-mtp,ngram-mod", "that predict further tokens (MTP) are not read"),
        ("serve --speculate qwen3_next_mtp", "that predict further tokens (MTP) are not read"),
        ("serve --speculate 0", "eagle); write off\n"),
        ("serve --max_num_seqs 3", "--max_num_seqs; flags are spelled with dashes: --max-num-seqs"),
        ("serve --max_num_seq 3", "--max_num_seq; did you mean --max-num-seqs?\n"),
        ("serve --gpu_memory_utilization 0.9", "the KV cache's size is --kv-cache-memory, as in"),
        ("chat --draft_device GPU", "a draft model is computed as the model is; leave it out\n"),
        ("chat --kv_tier_path x", "--kv_tier_path; --kv-tier-path is a flag of quire serve\n"),
        ("bench serve --num_prompts 3", "use --max-requests (maximum number of requests of the"),
        ("serve --of-no-engine 3", "unknown arguments: --of-no-engine; there is no such flag\n"),
        ("record rec.json http://127.0.0.1:1", "first: quire record http://127.0.0.1:1 rec.json\n"),
        ("record http://a http://b", "FILE is 'http://b', an address; URL comes first"),
        ("models list", "(choose from rm); quire models without an action lists them\n"),
        ("models remove x", "(choose from rm); quire models rm NAME removes a model\n"),
        ("config list", ", check); quire config show\n"),
        ("bench serving", ", startup); quire bench serve URL\n"),
        ("complete --port 1 -p x", "--port is a flag of quire serve\n"),
        ("serve --dtype half", "or as bf16 with half the memory: --dtype bf16\n"),
        ("serve --quantization awq", "a format of quantized checkpoints that is not read"),
        ("serve --kv-cache-dtype fp8_e4m3", "keys and values is --kv-cache-dtype fp8, on GPUs; on"),
        ("serve --tool-call-parser qwen3_xml", "write qwen3_coder, or leave --tool-call-parser ou"),
        ("serve --tool-call-parser hermse", "harmony, json; did you mean hermes?\n"),
        ("serve --reasoning-parser deepseek_r1", "write think, or leave --reasoning-parser out: i"),
        ("serve --speculate draft-eagle3", ", eagle); write eagle\n"),
        ("serve --speculate NGRAM-mod", ", eagle); write ngram\n"),
        ("serve --speculate draft-model", ", eagle); write draft\n"),
        ("serve --speculate draft-mtp", "(MTP) are not read; --speculate ngram needs no files, an"),
        ("plan --speculate suffix", "with --speculate ngram and --speculate-history-tokens\n"),
        ("serve --speculate 3", "; their maximum number is --max-draft-tokens\n"),
        ("serve --speculate ngrm", ", eagle); did you mean ngram?\n"),
        ("serve --quantization q4_k_m", "which bring their own: quire serve ORG/NAME:Q4_K_M;"),
        ("serve --quantization IQ2_XXS", "which bring their own: quire serve ORG/NAME:IQ2_XXS;"),
        ("serve --kv-cache-memory 0.9", "'0.9' is no whole number of bytes; it is a size, not a"),
        ("plan --memory 1MB", "'1MB' is 1000000 bytes, which hold no model; give more, as in 80"),
        ("plan --memory 24", "'24' is 24 bytes, which hold no model; write a unit, as in 24GiB"),
        ("simulate --policy fcfs,lifo", "--policy has 'lifo'; allowed: fcfs, priority, sjf, fair"),
        ("simulate --scheduling-policy lifo", "--policy has 'lifo'; allowed: fcfs, priority, sjf"),
        ("complete llama3.2:1b -p x", "names of this form are Ollama's; take the model from the"),
        ("complete hf.co/a/b:Q4_0 -p x", "`quire pull a/b:Q4_0`, then `quire serve a/b:Q4_0`"),
        ("complete https://huggingface.co/a/b -p x", "`quire pull a/b`, then `quire serve a/b`"),
        ("pull hf.co/a/b:Q4_K_M", "did you mean a/b:Q4_K_M?\n"),
        ("complete --kv-cache-memory 1KiB -p x", "40960; raise it or lower --block-size\n"),
        ("complete --cpu-offload-gb 1 -p x", "saved; take --executor torch, or --disk-offload-gb"),
        ("complete -p a\udcff", "--prompt is not UTF-8: its byte 1 is 0xff; convert it"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = quire_main(*words.split())
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("QUIRE_PARALLEL_DIMENSIONS", "quire config show --env lists all variables\n"),
        ("QUIRE_MAX_NUM_SEQ", "did you mean QUIRE_MAX_NUM_SEQS?\n"),
        ("QUIRE_MODL", "did you mean QUIRE_MODEL?\n"),
    ],
)
def test_only_a_close_variable_is_suggested(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "2")
    assert said in quire_main("serve", "--port", "70000").stderr


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_standard_input_that_is_not_utf_8_is_named_with_the_byte(command: str) -> None:
    given = "é".encode() + b"\xff\n"
    done = quire_main(command, "--max-tokens", "1", given=given)
    assert done.returncode == 2
    assert f"quire {command}: standard input is not UTF-8: its byte 2 is 0xff" in done.stderr
    assert "/reset" not in done.stderr
