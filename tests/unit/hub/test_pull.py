"""Pull from a fake hub: which files are requested, resumption, verification, and every refusal."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import time
from pathlib import Path
from threading import Event, Thread

import pytest
from huggingface_hub import constants, hf_hub_download

from quire.base.errors import CapacityError, ConfigError, ModelError
from quire.config.machine import MachineMemory
from quire.hub import cache, download, remote
from quire.hub import pull as pull_module
from quire.hub.files import RemoteFile
from quire.hub.fit import fit_of_directory, fit_of_gguf
from quire.hub.names import required_name
from quire.hub.pull import pull
from quire.models.head_kind import heads_in
from tests.draft_heads import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from tests.fake_hub import TOKEN, FakeHub
from tests.unit.cli.command import quire_main

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
SMALL = ["tokenizer_config.json", "tokenizer.json"]
LARGE = [*SMALL, "model.safetensors"]

UNUSED = [
    *("README.md", "pytorch_model.bin", "model.onnx", "onnx/model.onnx", "original/a.pth"),
    *("original/model-00001-of-00003.safetensors", "consolidated.safetensors", "vocab.json"),
    *("merges.txt", "tokenizer.model", "a-Q4_0.gguf", "modeling_own.py", "tf_model.h5"),
]


class Shown:
    """Records what a user is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.received = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def begin(self, file: str, done_bytes: int, total_bytes: int) -> None:
        self.lines.append(file)

    def advance(self, num_bytes: int) -> None:
        self.received += num_bytes

    def end(self) -> None: ...


def pulled(text: str, revision: str | None = None) -> tuple[Path, Shown]:
    """Pull and return the path, and what was shown."""
    shown = Shown()
    name = required_name(text, revision)
    return pull(name, report=shown.line, progress=shown), shown


def refused(text: str, kind: type[Exception] = ModelError) -> str:
    """Return the error of a pull."""
    with pytest.raises(kind) as caught:
        pulled(text)
    return str(caught.value)


def partial_of(content: bytes) -> Path:
    """Return where a pull of acme/tiny keeps what it received of a large file."""
    digest = hashlib.sha256(content).hexdigest()
    return cache.repo_dir("acme/tiny") / "blobs" / f"{digest}.incomplete"


def ranges_of(hub: FakeHub, file: str) -> list[str | None]:
    """Return the ranges that were requested of a file."""
    return [kept for kind, path, kept in hub.requests if kind == "GET" and path.endswith(file)]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return a directory's files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_the_files_that_are_read_are_requested(hub: FakeHub, sharded: Path) -> None:
    junk = dict.fromkeys(UNUSED, b"junk")
    commit = hub.add("acme/tiny", files_of(sharded) | junk)
    path, shown = pulled("acme/tiny")
    first = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    assert hub.fetched() == [*first, *SMALL, *SHARDS]
    assert files_of(path) == files_of(sharded)
    assert (path.parents[1] / "refs" / "main").read_text() == commit
    assert cache.required_local(required_name("acme/tiny")) == path
    sizes = sum((sharded / name).stat().st_size for name in (*SMALL, *SHARDS))
    assert shown.received == sizes
    assert [line.split()[0] for line in shown.lines[:4]] == [
        "model", "download", "disk", "memory",
    ]  # fmt: skip
    assert "in 5 of 8 files" in shown.lines[1]
    assert "it fits" in shown.lines[3]


def test_the_files_of_an_embedding_model_are_pulled(hub: FakeHub, tiny: Path) -> None:
    own = {
        "modules.json": b"[]",
        "config_sentence_transformers.json": b"{}",
        "sentence_bert_config.json": b"{}",
        "1_Pooling/config.json": b"{}",
    }
    junk = {"2_Dense/model.safetensors": b"junk", "1_Pooling/other.json": b"junk"}
    hub.add("acme/embedder", files_of(tiny) | own | junk)
    path, _ = pulled("acme/embedder")
    assert {name: (path / name).read_bytes() for name in own} == own
    assert not any((path / name).exists() for name in junk)


def test_a_second_pull_requests_no_file(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    path, _ = pulled("acme/tiny")
    hub.requests.clear()
    assert pulled("acme/tiny")[0] == path
    assert [path for _, path, _ in hub.requests] == ["/api/models/acme/tiny/revision/main"]


def test_a_new_commit_fetches_what_changed_only(hub: FakeHub, sharded: Path) -> None:
    files = files_of(sharded)
    hub.add("acme/tiny", files)
    old, _ = pulled("acme/tiny")
    changed = json.loads(files["generation_config.json"]) | {"temperature": 0.5}
    hub.add("acme/tiny", files | {"generation_config.json": json.dumps(changed).encode()})
    hub.requests.clear()
    new, shown = pulled("acme/tiny")
    assert hub.fetched() == ["generation_config.json"]
    assert shown.received == 0
    assert new != old
    assert cache.required_local(required_name("acme/tiny")) == new


def test_a_cut_connection_is_resumed_where_it_broke(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before it resumes
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # it keeps whole chunks
    hub.add("acme/tiny", tiny)
    hub.cut["model.safetensors"] = [100_000]
    path, shown = pulled("acme/tiny")
    assert ranges_of(hub, "model.safetensors") == [None, "bytes=100000-"]
    assert files_of(path) == files_of(tiny)
    assert shown.received == sum((tiny / n).stat().st_size for n in (*SMALL, "model.safetensors"))


def test_a_partial_file_is_resumed_by_the_next_pull(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    content = (tiny / "model.safetensors").read_bytes()
    partial = partial_of(content)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content[:100_000])  # as a killed pull leaves it
    path, shown = pulled("acme/tiny")
    assert ranges_of(hub, "model.safetensors") == ["bytes=100000-"]
    assert files_of(path) == files_of(tiny)
    assert shown.received == sum(len(files_of(tiny)[name]) for name in LARGE) - 100_000
    assert not partial.exists()
    # Other programs find the files where they expect them.
    assert sorted(blob.name for blob in partial.parent.iterdir()) == sorted(
        os.path.basename(os.readlink(file)) for file in path.iterdir()
    )
    assert Path(hf_hub_download("acme/tiny", "config.json")).parent == path


def test_a_partial_file_of_other_bytes_is_removed_then_fetched_anew(
    hub: FakeHub, tiny: Path
) -> None:
    hub.add("acme/tiny", tiny)
    partial = partial_of((tiny / "model.safetensors").read_bytes())
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 100_000)
    assert "model.safetensors was received with the digest" in refused("acme/tiny")
    assert not partial.exists()
    partial.write_bytes(b"x" * 10_000_000)  # more than the file has
    assert files_of(pulled("acme/tiny")[0]) == files_of(tiny)


def test_a_hub_without_ranges_sends_the_file_again(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    content = (tiny / "model.safetensors").read_bytes()
    partial = partial_of(content)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content[:100_000])
    hub.has_ranges = False
    path, shown = pulled("acme/tiny")
    assert files_of(path) == files_of(tiny)
    assert shown.received == sum(len(files_of(tiny)[name]) for name in LARGE) - 100_000


@pytest.mark.parametrize("has_links", [True, False])
def test_a_second_pull_waits_for_the_first_and_leaves_its_file_alone(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    hub.add("acme/tiny", tiny)
    verified: list[RemoteFile] = []
    digest = download._digest

    def count(path: Path, file: RemoteFile) -> str:
        verified.append(file)
        return digest(path, file)

    def refuse(path: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(download, "_digest", count)
    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    others: list[tuple[Path, Shown]] = []
    second = Thread(target=lambda: others.append(pulled("acme/tiny")))
    is_waiting = Event()
    report = Shown.line

    def line(shown: Shown, text: str) -> None:
        report(shown, text)
        if text.startswith("waiting"):
            is_waiting.set()

    def start(path: str) -> None:
        if path == "model.safetensors" and not second.ident:
            second.start()
            assert is_waiting.wait(30)

    monkeypatch.setattr(Shown, "line", line)
    hub.before_get = start
    path, _ = pulled("acme/tiny")
    second.join()
    [(same, shown)] = others
    assert same == path
    assert "waiting   another process downloads model.safetensors" in shown.lines
    assert len(hub.fetched()) == len(set(hub.fetched())) == len(files_of(tiny))
    assert len(verified) == len(files_of(tiny))
    assert files_of(path) == files_of(tiny)


def test_a_disk_that_becomes_full_keeps_what_was_received(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    content = (tiny / "model.safetensors").read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(path: str) -> None:
        limit = 150_000 if path == "model.safetensors" else old[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))

    hub.before_get = fill
    try:
        told = refused("acme/tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "cannot be written (File too large); make room, or set HF_HOME" in told
    assert partial_of(content).read_bytes() == content[:150_000]
    hub.before_get = lambda path: None
    hub.requests.clear()
    assert files_of(pulled("acme/tiny")[0]) == files_of(tiny)
    assert ranges_of(hub, "model.safetensors") == ["bytes=150000-"]


def test_a_file_too_large_for_plain_http_is_left_to_the_hubs_own_protocol(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    monkeypatch.setattr(remote, "MAX_HTTP_BYTES", 50_000)
    partial = partial_of((tiny / "model.safetensors").read_bytes())
    left = partial.with_name(f"{partial.name}.d") / "old"  # as a killed pull leaves it
    left.mkdir(parents=True)
    path, _ = pulled("acme/tiny")
    assert hub.fetched("HEAD") == ["model.safetensors"]  # a request of hf_hub_download
    assert files_of(path) == files_of(tiny)
    assert not left.parent.exists()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (500, "HTTP 500 (a fault of the hub); repeat the command later"),
        (429, "HTTP 429: too many requests; wait some minutes, or sign in"),
        (302, "redirects that never end; check HF_ENDPOINT and HTTPS_PROXY"),
    ],
)
def test_a_hub_that_fails_in_the_middle_keeps_what_was_received(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.add("acme/tiny", tiny)
    hub.cut["model.safetensors"] = [100_000]

    def fail(path: str) -> None:
        hub.status = status if path == "model.safetensors" else None

    hub.before_get = fail
    told = refused("acme/tiny")
    assert said in told
    assert partial_of((tiny / "model.safetensors").read_bytes()).stat().st_size == 100_000


def test_a_pull_that_failed_goes_on_with_the_next_shard(hub: FakeHub, sharded: Path) -> None:
    hub.add("acme/tiny", sharded)

    def lock(path: str) -> None:
        hub.repositories["acme/tiny"].gated |= path == SHARDS[0]

    hub.before_get = lock
    assert "is gated" in refused("acme/tiny")
    assert cache.find(required_name("acme/tiny")) is None  # no revision points to half a model
    hub.repositories["acme/tiny"].gated, hub.before_get = False, lambda path: None
    hub.requests.clear()
    path, _ = pulled("acme/tiny")
    assert hub.fetched() == SHARDS[1:]
    assert files_of(path) == files_of(sharded)


def test_all_files_are_of_one_commit_while_the_repository_changes(
    hub: FakeHub, sharded: Path
) -> None:
    files = files_of(sharded)
    first = hub.add("acme/tiny", files)

    def push(path: str) -> None:
        if path == SHARDS[0]:
            hub.add("acme/tiny", {name: b"new" + content for name, content in files.items()})

    hub.before_get = push
    path, _ = pulled("acme/tiny")
    assert path.name == first
    assert files_of(path) == files


def test_other_bytes_than_listed_are_removed(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    content = bytearray((tiny / "model.safetensors").read_bytes())
    content[-1] ^= 1
    hub.sent["model.safetensors"] = bytes(content)
    assert "model.safetensors was received with the digest" in refused("acme/tiny")
    assert cache.find(required_name("acme/tiny")) is None
    hub.sent.clear()
    hub.sent["tokenizer.json"] = b"{}" + (tiny / "tokenizer.json").read_bytes()[2:]
    hub.requests.clear()
    path, _ = pulled("acme/tiny")  # the tokenizer was complete before
    assert hub.fetched() == ["model.safetensors"]
    assert files_of(path) == files_of(tiny)


def test_small_files_are_verified_too(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    hub.sent["config.json"] = (tiny / "config.json").read_bytes()[:-1] + b" "
    assert "config.json was received with the digest" in refused("acme/tiny")


def test_a_shorter_file_than_listed_is_refused(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    hub.sent["model.safetensors"] = b"short"
    told = refused("acme/tiny")
    assert "should be of size" in told
    assert "repeat the command" in told


def test_a_transfer_that_ended_early_without_an_error_is_resumed(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    content = (tiny / "model.safetensors").read_bytes()
    hub.sent["model.safetensors"] = content[:100_000]
    assert "what was received is kept" in refused("acme/tiny")
    assert partial_of(content).read_bytes() == content[:100_000]
    hub.sent.clear()
    hub.requests.clear()
    assert files_of(pulled("acme/tiny")[0]) == files_of(tiny)
    assert ranges_of(hub, "model.safetensors") == ["bytes=100000-"]


def test_a_damaged_blob_is_fetched_again(hub: FakeHub, tiny: Path) -> None:
    hub.add("acme/tiny", tiny)
    path, _ = pulled("acme/tiny")
    (path / "model.safetensors").resolve().write_bytes(b"cut")
    hub.requests.clear()
    pulled("acme/tiny")
    assert hub.fetched() == ["model.safetensors"]
    assert files_of(path) == files_of(tiny)


@pytest.mark.parametrize(
    "path", ["../evil.json", "a/../../evil", "/etc/passwd", "a\\b", "a//b", "a\x1b[2Jb"]
)
def test_paths_that_leave_the_directory_are_refused(hub: FakeHub, tiny: Path, path: str) -> None:
    hub.add("acme/tiny", files_of(tiny) | {path: b"x"})
    assert "nothing was downloaded" in refused("acme/tiny")
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("../../model.safetensors", "a plain name ending in .safetensors"),
        ("model-{}.safetensors", "names 5000 shards, of which 5000 are not in the repository"),
    ],
)
def test_an_index_of_impossible_shards_is_refused(
    hub: FakeHub, sharded: Path, shard: str, said: str
) -> None:
    weight_map = {f"tensor.{number}": shard.format(number) for number in range(5000)}
    index = json.dumps({"weight_map": weight_map}).encode()
    hub.add("acme/tiny", files_of(sharded) | {"model.safetensors.index.json": index})
    told = refused("acme/tiny")
    assert said in told
    assert len(told) < 5000
    assert not set(SHARDS) & set(hub.fetched())


@pytest.mark.parametrize("change", [{"size": -1}, {"size": None}, {"blobId": "../../x"}])
def test_a_listing_without_sizes_or_digests_is_refused(
    hub: FakeHub, tiny: Path, change: dict[str, object]
) -> None:
    hub.add("acme/tiny", tiny)
    hub.listed = lambda files: [file if "lfs" in file else file | change for file in files]
    assert "a size and a digest" in refused("acme/tiny")


def test_a_huge_index_is_refused_by_its_size(hub: FakeHub, sharded: Path) -> None:
    hub.add("acme/tiny", sharded)
    hub.listed = lambda files: [
        file | {"size": 10**9} if file["rfilename"].endswith("index.json") else file
        for file in files
    ]
    assert "model.safetensors.index.json has 954 MiB; at most" in refused("acme/tiny")
    assert hub.fetched() == []


def test_a_full_disk_is_refused_with_both_numbers(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    monkeypatch.setattr(pull_module, "free_bytes", lambda path: 20_000)
    told = refused("acme/tiny", CapacityError)
    left = sum((tiny / name).stat().st_size for name in (*SMALL, "model.safetensors"))
    assert f"({left} bytes) are to be downloaded" in told
    assert "(20000 bytes) free" in told
    assert "HF_HOME" in told
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_reported(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    hub.add("acme/tiny", tiny)

    def fails(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(remote, "http_get", fails)
    told = refused("acme/tiny")
    assert f"cannot be written ({os.strerror(number)}); make room, or set HF_HOME" in told


def test_an_unsupported_architecture_is_refused_before_its_weights(
    hub: FakeHub, tiny: Path
) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {
        "architectures": ["MambaForCausalLM"]
    }
    hub.add("acme/tiny", files_of(tiny) | {"config.json": json.dumps(config).encode()})
    assert "MambaForCausalLM" in refused("acme/tiny")
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "pickles only (pytorch_model.bin)"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "it is an adapter"),
        ({"model_index.json": b"{}"}, "makes images"),
        ({}, "the repository is empty"),
        ({"README.md": b"x"}, "but README.md"),
    ],
)
def test_a_repository_without_a_model_is_refused(
    hub: FakeHub, files: dict[str, bytes], said: str
) -> None:
    hub.add("acme/other", files)
    assert said in refused("acme/other")


GGUFS = {
    "tiny-Q4_K_M.gguf": b"4" * 40_000,
    "tiny-Q8_0.gguf": b"8" * 80_000,
    "tiny-F16-00001-of-00002.gguf": b"a" * 90_000,
    "tiny-F16-00002-of-00002.gguf": b"b" * 90_000,
    "mmproj-tiny-F16.gguf": b"c" * 90_000,
    "README.md": b"x",
}


def test_several_gguf_files_are_listed_with_sizes(hub: FakeHub) -> None:
    hub.add("acme/tiny-GGUF", GGUFS)
    told = refused("acme/tiny-GGUF")
    assert told.splitlines()[1:] == [
        "    39.1 KiB  acme/tiny-GGUF:tiny-Q4_K_M.gguf",
        "    78.1 KiB  acme/tiny-GGUF:tiny-Q8_0.gguf",
        "     176 KiB  acme/tiny-GGUF:tiny-F16-00001-of-00002.gguf",
    ]
    assert hub.fetched() == []
    assert "there is no GGUF file Q2_K" in refused("acme/tiny-GGUF:Q2_K")


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("F16", ["tiny-F16-00001-of-00002.gguf", "tiny-F16-00002-of-00002.gguf"]),
    ],
)
def test_one_gguf_model_is_fetched_by_file_or_quantization(
    hub: FakeHub, file: str, wanted: list[str]
) -> None:
    hub.add("acme/tiny-GGUF", GGUFS)
    path, _ = pulled(f"acme/tiny-GGUF:{file}")
    assert hub.fetched() == wanted
    assert path.name == wanted[0]
    assert cache.find(required_name(f"acme/tiny-GGUF:{file}")) == path
    assert cache.find(required_name("acme/tiny-GGUF")) == path  # the only one in the cache


def test_a_split_model_without_a_part_is_refused(hub: FakeHub) -> None:
    hub.add("acme/x", {"a-00001-of-00002.gguf": b"x"})
    assert "a-00002-of-00002.gguf is not in the repository" in refused("acme/x")


def test_a_revision_is_found_by_its_name_afterwards(hub: FakeHub, tiny: Path) -> None:
    commit = hub.add("acme/tiny", tiny, ref="v1.0")
    hub.add("acme/tiny", {"README.md": b"x"})
    path, _ = pulled("acme/tiny", revision="v1.0")
    assert path.name == commit
    assert cache.find(required_name("acme/tiny@v1.0")) == path
    assert cache.find(required_name(f"acme/tiny@{commit}")) == path
    assert cache.find(required_name("acme/tiny")) is None
    assert "(there are acme/tiny@v1.0)" in cache.why_not_found(required_name("acme/tiny"))
    assert f"has no revision v2; {hub.url}/acme/tiny/commits" in refused("acme/tiny@v2")


def test_a_gated_model_names_the_licence_page_and_the_token(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    hub.repositories["acme/tiny"].gated = True
    told = refused("acme/tiny")
    assert f"accept its licence at {hub.url}/acme/tiny" in told
    assert "`hf auth login`, or set HF_TOKEN" in told
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the present one may not read it" in refused("acme/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pulled("acme/tiny")[0].is_dir()


def test_a_private_or_missing_model_names_both_reasons_and_near_names(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny-llama", tiny)
    told = refused("acme/tiny-lama")
    assert f"there is no model acme/tiny-lama at {hub.url}, or it is private" in told
    assert "(similar: acme/tiny-llama)" in told
    hub.repositories["acme/tiny-llama"].private = True
    assert "or it is private" in refused("acme/tiny-llama")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pulled("acme/tiny-llama")[0].is_dir()


def test_no_network_and_offline_mode_are_told_apart(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    hub.status = 503
    assert "HTTP 503" in refused("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert "HF_HUB_OFFLINE is set" in refused("acme/tiny")
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the network, HTTPS_PROXY and HF_ENDPOINT" in refused("acme/tiny")


def test_memory_of_a_gguf_file_is_estimated_by_its_type() -> None:
    gib = 2**30
    assert fit_of_gguf("a-Q8_0.gguf", gib).weights_bytes == gib
    assert fit_of_gguf("a-Q4_0.gguf", gib).weights_bytes == gib
    assert fit_of_gguf("a-q4_k_m.gguf", 3 * gib).weights_bytes == 5 * gib


def test_memory_is_compared_with_what_is_available(sharded: Path) -> None:
    fit = fit_of_directory(sharded, 10**9)
    assert fit.architecture == "LlamaForCausalLM"
    assert fit.num_tokens == 512
    assert fit.kv_bytes == 512 * 2 * 2 * 16 * 4  # layers, K and V, one head of 16, f32
    sizes = {"fits": fit.needed_bytes, "needs int8": fit.needed_bytes - 1, "too small": 10**6}
    verdicts = {
        name: fit.text(MachineMemory(available_bytes=size, limit="free memory")).partition(": ")[2]
        for name, size in sizes.items()
    }
    assert verdicts["fits"] == "it fits"
    assert verdicts["needs int8"].startswith("it fits with --quantization int8 only")
    assert verdicts["too small"] == "it does not fit here"


def test_a_cache_on_a_file_system_without_files_is_named(
    hub: FakeHub, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/tiny", tiny)
    monkeypatch.setattr("quire.hub.pull.stores_files", lambda path: False)
    done = quire_main("pull", "acme/tiny")
    assert done.returncode == 2
    assert "is on a file system of size 0, such as /proc, which stores no files; set" in done.stderr


def test_an_endpoint_without_a_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "huggingface.co")
    done = quire_main("pull", "acme/tiny")
    assert 'HF_ENDPOINT is "huggingface.co"; an address with http:// or https://' in done.stderr


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_draft_heads_are_pulled_and_listed(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 60, "vocab_size": 307}
    if kind == "eagle":
        folder = write_eagle(tmp_path / "heads", eagle_tensors(**sizes), vocab_size=307)
    else:
        tensors = medusa_tensors(**sizes, prefix="")
        folder = write_medusa(
            tmp_path / "heads", tensors, file="medusa_lm_head.safetensors", model_type=None
        )
    hub.add("acme/heads", files_of(folder) | {"pytorch_model.bin": b"x", "README.md": b"x"})
    path, shown = pulled("acme/heads")
    assert files_of(path) == files_of(folder)
    assert f"{kind} heads" in shown.lines[0]
    assert "without KV" in shown.lines[3]
    assert cache.required_local(required_name("acme/heads")) == path
    assert heads_in(path) == kind
    assert f"{kind} heads" in quire_main("models").stdout
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="quire pull acme/heads"):
        cache.required_local(required_name("acme/heads"))
