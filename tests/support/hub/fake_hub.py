"""A small Hugging Face hub on loopback: repositories, LFS objects, commits, downloads.

It speaks what huggingface_hub asks of the real one, and can close a connection in the middle, lose
an answer, or stop in mid-request so that a test can kill the client.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN = "hf_secret_of_the_test"
#: Text up to this size is kept in the commit itself; everything else is an LFS object.
REGULAR_BYTES = 1 << 14


class StoredFile(NamedTuple):
    """A file of a commit."""

    content: bytes
    lfs: bool
    xet: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob(self) -> str:
        data = self.content
        if self.lfs:  # what git keeps is a pointer
            data = f"lfs {self.sha256} {len(self.content)}".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob


@dataclass
class StoredRepository:
    private: bool
    branches: dict[str, list[str]]
    trees: dict[str, dict[str, StoredFile]] = field(default_factory=dict)

    def find(self, revision: str) -> str | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return revision if revision in self.trees else None


class FakeHub:
    """The hub; ``puts`` counts uploads of each LFS object, ``served`` the bytes of each path."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], StoredRepository] = {}
        self.objects: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.commits = 0
        #: Status and message with which writes are refused.
        self.refusal: tuple[int, str] | None = None
        #: Uploads after which the next one is never answered.
        self.stall_after_puts: int | None = None
        #: Half of this file is sent, and no more: "close" the connection then, or "stall".
        self.half: tuple[str, str] | None = None
        #: Seconds in which each file arrives that is no text.
        self.seconds = 0.0
        #: The next commit is made, but its answer is lost.
        self.lose_answer = False
        self.stalled = threading.Event()
        self.page = 50
        #: Folder of the Xet store of a hub that has one; hf_xet writes and reads it.
        self.store: Path | None = None
        self._announced: dict[str, StoredFile] = {}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        settings: dict[str, Any] = {
            "log_level": "critical",
            "lifespan": "off",
            "ws": "none",
            "timeout_graceful_shutdown": 1,
        }
        self._server = uvicorn.Server(uvicorn.Config(self._make_app(), **settings))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    # ------------------------------------------------------------------ for tests

    def files(self, type: str, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a revision."""
        repository = self.repositories[type, name]
        tree = repository.trees[str(repository.find(revision))]
        return {path: file.content for path, file in tree.items() if path != ".gitattributes"}

    def change(self, type: str, name: str, path: str, content: bytes) -> None:
        """Commit a file, as another user does."""
        repository = self.repositories[type, name]
        tree = repository.trees[repository.branches["main"][-1]]
        self._commit(repository, "main", {**tree, path: StoredFile(content, False)})

    def announce(self, folder: Path) -> None:
        """Learn hashes and bytes of files that will come through the Xet store.

        The real hub learns the hashes from the store. Bytes are served by the store alone.
        """
        import hf_xet

        paths = [path for path in folder.rglob("*") if path.is_file()]
        for path, found in zip(paths, hf_xet.hash_files(list(map(str, paths))), strict=True):
            file = StoredFile(path.read_bytes(), True, found.hash)
            self._announced[file.sha256] = file

    def make(self, type: str, name: str, private: bool = False) -> StoredRepository:
        """Make a repository with its first commit."""
        repository = StoredRepository(private, {"main": []})
        self.repositories[type, name] = repository
        self._commit(repository, "main", {".gitattributes": StoredFile(b"*.bin lfs\n", False)})
        return repository

    # ------------------------------------------------------------------ routes

    def _make_app(self) -> Starlette:
        api = "/api/{kind:str}/{owner:str}/{name:str}"
        routes = [
            Route("/api/repos/create", self._create, methods=["POST"]),
            Route("/api/validate-yaml", self._accept, methods=["POST"]),
            Route(api, self._info),
            Route(f"{api}/revision/{{revision:path}}", self._info),
            Route(f"{api}/branch/{{branch:path}}", self._branch, methods=["POST"]),
            Route(f"{api}/tree/{{revision:str}}", self._tree),
            Route(f"{api}/preupload/{{revision:str}}", self._preupload, methods=["POST"]),
            Route(f"{api}/commit/{{revision:str}}", self._receive_commit, methods=["POST"]),
            Route(f"{api}/xet-write-token/{{revision:str}}", self._give_xet_token),
            Route(f"{api}/xet-read-token/{{revision:str}}", self._give_xet_token),
            Route("/lfs/{oid:str}", self._put, methods=["PUT"]),
        ]
        for prefix, kind in (("", "models"), ("/datasets", "datasets")):
            place = f"{prefix}/{{owner:str}}/{{name:str}}"
            routes += [
                Route(
                    f"{place}.git/info/lfs/objects/batch", self._batch, methods=["POST"], name=kind
                ),
                Route(f"{place}/resolve/{{revision:str}}/{{path:path}}", self._resolve, name=kind),
            ]
        return Starlette(routes=routes)

    async def _accept(self, request: Request) -> Response:
        return JSONResponse({"errors": [], "warnings": []})

    async def _create(self, request: Request) -> Response:
        if (refused := self._refuse_write(request)) is not None:
            return refused
        body = await request.json()
        name = (
            f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
        )
        key = (body.get("type", "model"), name)
        if key in self.repositories:
            body = {"error": "You already created this repo", "url": f"{self.url}/{name}"}
            return JSONResponse(body, 409)
        self.make(*key, private=bool(body.get("private") or body.get("visibility") == "private"))
        return JSONResponse({"url": f"{self.url}/{name}"})

    async def _info(self, request: Request) -> Response:
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        return JSONResponse(
            {
                "id": f"{request.path_params['owner']}/{request.path_params['name']}",
                "sha": commit,
                "private": repository.private,
                "tags": [],
                "siblings": [],
            }
        )

    async def _branch(self, request: Request) -> Response:
        if (refused := self._refuse_write(request)) is not None:
            return refused
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        branch = request.path_params["branch"]
        if branch in repository.branches:
            return _error(409, "Reference already exists")
        repository.branches[branch] = [commit]
        return JSONResponse({})

    async def _tree(self, request: Request) -> Response:
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        entries = [_describe(path, file) for path, file in sorted(repository.trees[commit].items())]
        start = int(request.query_params.get("cursor", 0))
        headers = {}
        if start + self.page < len(entries):
            following = request.url.include_query_params(cursor=start + self.page)
            headers["Link"] = f'<{following}>; rel="next"'
        return JSONResponse(entries[start : start + self.page], headers=headers)

    async def _preupload(self, request: Request) -> Response:
        if (refused := self._refuse_write(request)) is not None:
            return refused
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        tree = repository.trees[commit]
        answers = []
        for asked in (await request.json())["files"]:
            sample = base64.b64decode(asked["sample"])
            regular = b"\0" not in sample and asked["size"] < REGULAR_BYTES
            known = tree.get(asked["path"])
            answers.append(
                {
                    "path": asked["path"],
                    "uploadMode": "regular" if regular else "lfs",
                    "shouldIgnore": False,
                    "oid": known.etag if known else None,
                }
            )
        return JSONResponse({"files": answers})

    async def _batch(self, request: Request) -> Response:
        if (refused := self._refuse_write(request)) is not None:
            return refused
        answers: list[dict[str, Any]] = []
        for asked in (await request.json())["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.objects:
                answer["actions"] = {"upload": {"href": f"{self.url}/lfs/{asked['oid']}"}}
            answers.append(answer)
        return JSONResponse({"transfer": "basic", "objects": answers})

    async def _give_xet_token(self, request: Request) -> Response:
        about = {"casUrl": f"local://{self.store}", "accessToken": "xet", "exp": 2**33}
        headers = {
            "X-Xet-Cas-Url": about["casUrl"],
            "X-Xet-Access-Token": about["accessToken"],
            "X-Xet-Token-Expiration": str(about["exp"]),
        }
        return JSONResponse(about, headers=headers)

    async def _put(self, request: Request) -> Response:
        content = await request.body()
        oid = request.path_params["oid"]
        if self.stall_after_puts is not None and self.puts.total() >= self.stall_after_puts:
            self.stalled.set()
            await asyncio.sleep(600)
        assert hashlib.sha256(content).hexdigest() == oid
        self.puts[oid] += 1
        self.objects[oid] = content
        return Response()

    async def _receive_commit(self, request: Request) -> Response:
        if (refused := self._refuse_write(request)) is not None:
            return refused
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        tree = dict(repository.trees[commit])
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit", commit) != commit:
                return _error(412, "A commit has happened since. Please refresh and try again.")
            if item["key"] == "file":
                tree[value["path"]] = StoredFile(base64.b64decode(value["content"]), False)
            if item["key"] == "lfsFile":
                tree[value["path"]] = self._announced.get(value["oid"]) or StoredFile(
                    self.objects[value["oid"]], True
                )
            if item["key"] == "deletedFile":
                del tree[value["path"]]
        made = self._commit(repository, request.path_params["revision"], tree)
        if self.lose_answer:
            self.lose_answer = False
            return StreamingResponse(_break_off(b""), headers={"Content-Length": "100"})
        return JSONResponse(
            {"success": True, "commitOid": made, "commitUrl": f"{self.url}/x/y/commit/{made}"}
        )

    async def _resolve(self, request: Request) -> Response:
        repository, commit, missing = self._find(request)
        if missing is not None:
            return missing
        path = request.path_params["path"]
        file = repository.trees[commit].get(path)
        if file is None:
            return _error(404, "Entry not found", "EntryNotFound")
        headers = {
            "ETag": f'"{file.etag}"',
            "X-Repo-Commit": str(commit),
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(file.content)),
        }
        if file.lfs:
            headers |= {
                "X-Linked-Etag": f'"{file.sha256}"',
                "X-Linked-Size": headers["Content-Length"],
            }
        if file.xet:
            headers["X-Xet-Hash"] = file.xet
            kind = "datasets" if request.url.path.startswith("/datasets/") else "models"
            name = f"{request.path_params['owner']}/{request.path_params['name']}"
            route = f"{self.url}/api/{kind}/{name}/xet-read-token/{commit}"
            headers["X-Xet-Refresh-Route"] = route
        if request.method == "HEAD":
            return Response(headers=headers)
        if file.xet:
            return _error(410, "These bytes are in the Xet store.")
        start = int(request.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        content = file.content[start:]
        headers["Content-Length"] = str(len(content))
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(file.content) - 1}/{len(file.content)}"
        if self.half is not None and self.half[0] == path:
            how = self.half[1]
            self.half = None
            content = content[: len(content) // 2]
            self.served[path] += len(content)
            body = _break_off(content) if how == "close" else self._stall(content)
            return StreamingResponse(body, status, headers)
        self.served[path] += len(content)
        if self.seconds and len(content) > REGULAR_BYTES:
            return StreamingResponse(self._trickle(content), status, headers)
        return Response(content, status, headers)

    async def _trickle(self, content: bytes, parts: int = 20) -> AsyncIterator[bytes]:
        size = -(-len(content) // parts)
        for start in range(0, len(content), size):
            yield content[start : start + size]
            await asyncio.sleep(self.seconds / parts)

    async def _stall(self, content: bytes) -> AsyncIterator[bytes]:
        yield content
        await asyncio.sleep(0.2)  # for the client to write it down
        self.stalled.set()
        await asyncio.sleep(600)

    # ------------------------------------------------------------------ parts

    def _commit(
        self, repository: StoredRepository, branch: str, tree: dict[str, StoredFile]
    ) -> str:
        self.commits += 1
        commit = hashlib.sha1(str(self.commits).encode(), usedforsecurity=False).hexdigest()
        repository.trees[commit] = tree
        repository.branches[branch].append(commit)
        return commit

    def _find(self, request: Request) -> Any:
        """Return repository and commit, or the answer that says what is missing."""
        names = request.path_params
        dataset = names.get("kind") == "datasets" or request.url.path.startswith("/datasets/")
        repository = self.repositories.get(
            ("dataset" if dataset else "model", f"{names['owner']}/{names['name']}")
        )
        allowed = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not allowed):
            return None, None, _error(404, "Repository not found", "RepoNotFound")
        commit = repository.find(names.get("revision", "main"))
        if commit is None:
            return None, None, _error(404, "Invalid rev id", "RevisionNotFound")
        return repository, commit, None

    def _refuse_write(self, request: Request) -> Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "Invalid username or password.")
        return None if self.refusal is None else _error(*self.refusal)


async def _break_off(content: bytes) -> AsyncIterator[bytes]:
    yield content
    raise ConnectionResetError("the test closes the connection here")


def _describe(path: str, file: StoredFile) -> dict[str, Any]:
    about: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(file.content),
        "oid": file.blob,
    }
    if file.lfs:
        about["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}
    return about


def _error(status: int, message: str, code: str = "") -> Response:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return JSONResponse({"error": message}, status, headers)
