"""A fake Hugging Face Hub on localhost: the few routes that huggingface_hub uses to list and fetch.

    with FakeHub() as hub:
        hub.add("org/name", folder)
        run with environment hub.environment(home)

GET  /api/models/REPO[/revision/REV]?blobs=true   commit and files with sizes and digests
GET  /api/models?search=TEXT                      names of models
HEAD, GET  /REPO/resolve/REV/PATH                 ETag, X-Repo-Commit, X-Linked-Size, ranges

Faults are set by attributes; `requests` records every request.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_a_token_that_may_read"
LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pth", ".onnx")


class Repository:
    """Files of a repository by commit; `main` is the newest."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.gated = self.private = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit and point `ref` to it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode() + ref.encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        return sha

    def resolved(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class FakeHub:
    """The server, in a thread.

    cut: bytes of a body after which its connection is closed, by path; each cut happens once.
    sent: replaces a file's bytes as they are sent, not as they are listed. listed: changes the
    listing. before_get: called with a file's path before its body is sent. status: of all answers
    if not None; those of a redirection lead back to where they come from. has_ranges: whether
    ranges are honoured.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = defaultdict(Repository)
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str | None] = set()
        self.cut: dict[str, list[int]] = {}
        self.sent: dict[str, bytes] = {}
        self.listed: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda files: files
        self.before_get: Callable[[str], None] = lambda path: None
        self.status: int | None = None
        self.has_ranges = True

    def add(self, repo: str, folder: Path | dict[str, bytes], ref: str = "main") -> str:
        """Add a commit with the files of a directory; return it."""
        if isinstance(folder, Path):
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        else:
            files = folder
        return self.repositories[repo].commit(files, ref)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a user of this hub with an empty home directory."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "",
            "TRANSFORMERS_OFFLINE": "",
            **more,
        }

    def fetched(self, method: str = "GET") -> list[str]:
        """Return the paths of files that were requested, in order."""
        marked = [(kind, path.partition("/resolve/")) for kind, path, _ in self.requests]
        return [rest.partition("/")[2] for kind, (_, has, rest) in marked if has and kind == method]

    def __enter__(self) -> FakeHub:
        connection = type("HubConnection", (_HubConnection,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), connection)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HubConnection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))
        if self.hub.status is not None:
            self._send(self.hub.status, b"the hub is down", {"Location": self.path})
        elif path == "/api/models":
            found = [repo for repo in self.hub.repositories if _is_near(repo, url.query)]
            self._send_json([{"id": repo, "modelId": repo, "tags": []} for repo in found])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._send_listing(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._send(404, b"no such page")

    def _repository(self, repo: str) -> Repository | None:
        """Return it if the request may see it; answers otherwise, as the hub does."""
        found = self.hub.repositories.get(repo)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not has_token):
            self._send(404 if has_token else 401, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        return found

    def _send_listing(self, repo: str, revision: str) -> None:
        found = self._repository(repo)
        if found is None:
            return
        commit = found.resolved(revision)
        if commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files = [_listed(path, content) for path, content in found.commits[commit].items()]
        self._send_json({"id": repo, "sha": commit, "siblings": self.hub.listed(files), "tags": []})

    def _file(self, repo: str, revision: str, path: str) -> None:
        found = self._repository(repo)
        if found is None:
            return
        if found.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        commit = found.resolved(revision)
        if commit is None or path not in found.commits[commit]:
            code = "RevisionNotFound" if commit is None else "EntryNotFound"
            self._send(404, b"", {"X-Error-Code": code})
            return
        content = found.commits[commit][path]
        listed = _listed(path, content)
        digest = listed["lfs"]["sha256"] if "lfs" in listed else listed["blobId"]
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self._send_body(path, self.hub.sent.get(path, content), headers)

    def _send_body(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        if self.command == "GET":
            self.hub.before_get(path)
        status, start = 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.hub.has_ranges:
            status, start = 206, int(asked[1])
            if start >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            content = content[: int(asked[2] or len(content)) + 1]
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.hub.cut.get(path, []) if self.command == "GET" else []
        if cuts:
            self._send(status, content[start:], headers, cut=cuts.pop(0))
        else:
            self._send(status, content[start:], headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def _listed(path: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git}
    if path.endswith(LARGE_SUFFIXES):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
    return entry


def _is_near(repo: str, query: str) -> bool:
    wanted = parse_qs(query).get("search", [""])[0].lower()
    return any(part in repo.lower() for part in re.split(r"[-_.]", wanted) if len(part) > 3)
