"""Errors that users provoked: each names what was found, what is allowed and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire import LLM, SamplingParams
from quire.api.generation.field_forms import one_or_listed
from quire.api.http.request_io import parse
from quire.base.errors import QuireError
from quire.base.grammar import Grammar, GrammarKind
from quire.structured.rejection import rejection
from tests.cases import each_case
from tests.gguf_writer import write_gguf
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import quire_main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with one defect each, and files that are something else."""
    root = tmp_path_factory.mktemp("errors")
    good = write_tiny_llama(root / "good", seed=1)
    for name, content in (("cut-config", b"{"), ("list-config", b"[]")):
        shutil.copytree(good, root / name)
        (root / name / "config.json").write_bytes(content)
    shutil.copytree(good, root / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(good, root / "no-config", ignore=shutil.ignore_patterns("config.json"))
    shutil.copytree(good, root / "link", ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "link/model.safetensors").symlink_to("/nowhere/model")
    shutil.copytree(good, root / "other-vocab")
    config = json.loads((good / "config.json").read_bytes())
    config["vocab_size"] += 1
    (root / "other-vocab/config.json").write_text(json.dumps(config))
    for name, num_layers in (("more-layers", 1), ("fewer-layers", 4)):
        shutil.copytree(good, root / name)
        config["vocab_size"], config["num_hidden_layers"] = 307, num_layers
        (root / name / "config.json").write_text(json.dumps(config))
    shutil.copytree(good, root / "cut-header")
    header = bytearray((good / "model.safetensors").read_bytes())
    header[20] = 0xFF
    (root / "cut-header/model.safetensors").write_bytes(header)
    for name in ("clip", "nomic-bert", "mamba2", "unheard-of"):
        write_gguf(root / f"{name}.gguf", {"general.architecture": name}, {})
    (root / "twice.toml").write_text("port = 1\nport = 2\n")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    return root


@each_case(
    ("words", "said"),
    [
        ("complete cut-config -p x", "the file is damaged: copy or download it again"),
        ("complete list-config -p x", "the file is damaged: copy or download it again"),
        ("complete no-weights -p x", "tokenizer_config.json. Copy the model's weights there"),
        ("complete no-config -p x", "no config.json; there are generation_config.json, "),
        ("complete link -p x", "this is a link to /nowhere/model, which does not exist; restore"),
        ("complete other-vocab -p x", "or one is damaged: take both from one download"),
        (
            "complete more-layers -p x",
            "disagree: 1 problem\n  - there are weights of 2 layers, and "
            "config.json asks for 1 (num_hidden_layers); correct the number if it was changed\n",
        ),
        ("complete fewer-layers -p x", "1 problem\n  - there are weights of 2 layers, and config"),
        ("complete cut-header -p x", "the file is damaged: copy or download it again\n"),
        ("complete clip.gguf -p x", "it is the part of a model that reads images or audio (mmp"),
        ("complete nomic-bert.gguf -p x", ": it is an encoder for embeddings, which writes no te"),
        ("complete mamba2.gguf -p x", "it has state-space or recurrent layers, which are not sup"),
        ("complete unheard-of.gguf -p x", "which is not read from GGUF; these are: llama, qwen2"),
        ("complete file -p x", "this is a file, and no GGUF file; give a directory with config"),
        ("complete good/config.json -p x", "a file of a model; give its directory, good\n"),
        ("complete hf://a/b -p x", "hf://a/b: this is an address; give the model's name: a/b, "),
        ("serve --kv-tier-size 1GiB --port 0", "add --kv-tier-path with its directory"),
        ("serve --kv-tier-fetch never --port 0", "no tier to fetch blocks from; add --kv-tier-p"),
        ("serve --config twice.toml", "write each setting once, as in port = 8000"),
        ("bench throughput --prompts 0", "'0' is not a number of tokens from 1 on, as 128, nor"),
        ("simulate --trace /dev/null", "the trace has no requests; a CSV with TIMESTAMP"),
        ("replay none", "none cannot be read: No such file or directory; `quire record URL"),
        ("complete Hello", "; a prompt is given with --prompt, not without a flag\n"),
        ("serve --insecure=yes --port 0", "--no-insecure: takes no value; leave out =yes\n"),
        ("chat --url http://", "address; write it like http://127.0.0.1:8000\n"),
        ("chat --url http://127.0.0.1:1 --threads 2", "chat: --threads configures an engine in"),
        ("complete -p x --structured-outputs []", "--structured-outputs: is []; an object is a"),
        ("simulate --png none/x.png", "--png none/x.png cannot be written; name a file in a dir"),
        ("simulate --png x.doc", "--png x.doc is no picture; .png, .pdf, .svg are allowed end"),
        ("simulate --profile none", "No such file or directory; `quire profile --json >FILE`"),
        ("pull https://huggingface.co/a/b/tree/main", "; did you mean a/b?"),
        ("SERVE", "there is no subcommand 'SERVE'; did you mean serve?"),
        ("profile --tokens 9", "--tokens; there is no such flag\n"),
        ("complete empty -p x", "no config.json; it is empty; give the directory of a model"),
        ("complete https://huggingface.co/a/b?x=1 -p x", "an address; give the model's name: a/b"),
        (
            "complete ~nobody-of-this-name/x -p x",
            "~nobody-of-this-name/x: no such file or directory",
        ),
        ("complete good -p x --temperature hot", "--temperature: 'hot' is not a number"),
        (
            "complete good -p x --max-tokens=-5",
            "--max-tokens: '-5' is not a whole number of at lea",
        ),
        ("complete good -p x --top-p 3", "complete: --top-p is 3.0; a finite number from 0.0 to"),
        ("complete good -p x --draft-model ./none", "complete: --draft-model none: no such file "),
        ("complete good -p x --draft-model ./empty", "--draft-model empty: there is no config.js"),
        ("complete good -p x --draft-model a/b", "complete: --draft-model a/b is neither a path"),
        (
            "complete good -p x --speculate eagle --draft-model ./none",
            "complete: --draft-model none: no such file or directory; give",
        ),
        (
            "serve --speculative-config {}",
            "--speculate off, ngram, draft, self, medusa or eagle, with --draft-model and --max-dr",
        ),
        ("complete good -p x --seed 1e9", "--seed: '1e9' is not a whole number"),
        ("serve good --pack-cache file --port 0", "name a directory that you may write to"),
        ("serve good --api-key-file none", "none cannot be read (No such file or directory); give"),
        ("serve --api-key k\xf6y --port 0", "give one of printable ASCII characters"),
        ("serve good --tenants none", "give a TOML file with a table [tenants.NAME]"),
        ("serve good --tls-cert none", "cannot be used (none: No such file or directory); give"),
        ("serve --tls-cert file --port 0", "(file has no line -----BEGIN CERTIFICATE-----); give"),
        ("serve --host 999.1.1.1 --port 0", "--host '999.1.1.1' cannot be resolved"),
        ("serve --request-timeout nan", "--request-timeout is nan; a finite number, at least"),
        ("serve --step-budget-ms inf", "--step-budget-ms is inf; a finite number, at least 0,"),
        ("serve --timeline-steps 9000000", "at most 8388608 is allowed (up to 256 bytes each"),
        ("bench serve --seconds 0", "--seconds: '0' is not a number above 0, such as 2 or 0.5"),
        ("pull good", "is a path on this machine, so there is nothing to download"),
        ("models --pack-cache none", "--pack-cache none does not exist; give the directory"),
        ("models --kv-tier-path file", "--kv-tier-path file is not a directory; give"),
        ("simulate --trace none", "cannot be read: No such file or directory; a CSV with"),
        ("chat --url nowhere.invalid", "or check the address, as in http://127.0.0.1:8000"),
    ],
)
def test_a_command_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    done = quire_main(*words.split())
    assert done.returncode in (1, 2)
    assert said in done.stderr


@each_case(
    ("words", "is_hinted"),
    [
        ("complete Hello", True),
        (f"complete {300 * 'a'}", True),
        ("complete no-config", False),
        ("complete good --draft-model ./none", False),
        ("complete org/none", False),
    ],
)
def test_a_prompt_without_a_flag_is_suspected_where_no_model_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, is_hinted: bool
) -> None:
    monkeypatch.chdir(folder)
    done = quire_main(*words.split())
    assert done.returncode in (1, 2)
    assert ("a prompt is given with --prompt" in done.stderr) == is_hinted


def test_a_file_as_the_cache_of_models_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.models.cache_dir", lambda: folder / "file" / "hub")
    assert f"and {folder / 'file'} is a file; give a directory" in quire_main("models").stderr


def test_names_of_vllm_lead_to_what_there_is() -> None:
    with pytest.raises(ImportError, match="use AsyncLLM"):
        _ = quire.AsyncLLMEngine
    with pytest.raises(AttributeError, match="use embed"):
        _ = LLM.__new__(LLM).encode
    with pytest.raises(AttributeError, match="it has generate"):
        _ = LLM.__new__(LLM).generat


@each_case(
    ("words", "said"),
    [
        ("--port 80", "flags come after it: quire serve --port 80"),
        ("--port 80 config show", "flags come after it: quire config --port 80 show"),
        ("-v", "quire --version prints the version"),
        ("--frob", "--frob is not a flag of quire; the first word is a subcommand, one of: serve"),
        ("serve a b", "'b' is one word too many: besides flags, quire serve takes MODEL"),
        ("serve --served-model-name a b c", "give the flag again for 'c': --served-model-name c"),
        ("serve -c 1 -np 2", "; -c: the maximum length of prompt and output together is "),
        ("serve -c 1 -np 2", "; -np: the maximum number of running requests is --max-num-seqs"),
        ("complete -m x", "the model is given without a flag: quire complete MODEL\n"),
        ("chat --model x", "the model is given without a flag: quire chat MODEL\n"),
        ("pull -hf a/b", "by its name: quire pull ORG/NAME, or ORG/NAME:FILE.gguf\n"),
        ("chat --api-server-count 4", "is --api-processes (a flag of quire serve)\n"),
        ("chat --temp 0", "did you mean --temperature?\n"),
        ("complete -n 5", "the maximum number of output tokens is --max-tokens\n"),
        ("complete --prompt-file x", "is piped in: quire complete <FILE\n"),
        ("profile --steps 0", "--steps; there is no such flag\n"),
        ("models rm", "are required: NAME (names as listed; ORG/NAME means all of it)\n"),
        ("bench", "SUBCOMMAND (one of latency, throughput, serve, kernels, startup)\n"),
        ("completion", "SHELL (one of bash, fish, zsh)\n"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(words: str, said: str) -> None:
    done = quire_main(*words.split())
    assert done.returncode in (1, 2)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LLM(5), "model is 5; a string is expected"),  # type: ignore[arg-type]
        (
            lambda: LLM("", a=1, max_num_seq=2),
            "; 'max_num_seq' is not a setting of the engine; did",
        ),
        (lambda: LLM("", port=1), "kv_tier_fetch, kv_tier_host_size, kv_tier_path, kv_tier_size, "),
        (lambda: LLM("", max_num_seqs="x"), "max_num_seqs is 'x'; a whole number is expected"),
        (lambda: SamplingParams(stop=5), "stop is 5; a string or a list is allowed"),  # type: ignore[arg-type]
        (lambda: one_or_listed("stop", 5), "stop is 5; a string or a list of strings is allowed"),
        (lambda: parse(b"{", limit_bytes=99), "send one JSON object in UTF-8"),
        (lambda: parse(b"a=b", limit_bytes=99), "send one JSON object in UTF-8"),
    ],
)
def test_a_call_says_what_is_allowed(call: Callable[[], object], said: str) -> None:
    with pytest.raises(QuireError) as caught:
        call()
    assert said in str(caught.value)


def test_a_schema_of_an_unknown_type_names_the_types() -> None:
    text = json.dumps({"properties": {"a": {"type": "blob"}}})
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    said = str(rejection(grammar, "Invalid type: blob"))
    assert 'the schema has the type "blob" (at #/properties/a/type); array, boolean,' in said


def test_a_variable_is_named_with_its_flag_and_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PORT", "eighty")
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0:11434")
    said = quire_main("serve").stderr
    assert "QUIRE_PORT (--port) is 'eighty'; a whole number from 0 to 65535 is expected" in said
    monkeypatch.setenv("QUIRE_PORT", "99999")
    said = quire_main("serve").stderr
    assert "--port (QUIRE_PORT) is 99999; 0 to 65535 is allowed" in said
    monkeypatch.delenv("QUIRE_PORT")
    said = quire_main("config", "show").stderr
    assert said.startswith("quire config: warning: variables of other programs are set and not re")
    assert said.count("OLLAMA_HOST (set QUIRE_HOST and QUIRE_PORT)") == said.count("\n") == 1
    assert not quire_main("config", "show", "--port", "1", "--host", "::1").stderr


def test_a_model_that_is_not_there_is_one_error(folder: Path) -> None:
    with pytest.raises(QuireError, match="no such file or directory") as caught:
        LLM(folder / "none")
    error: BaseException | None = caught.value
    assert error is not None
    assert error.__cause__ is None
    assert error.__suppress_context__
