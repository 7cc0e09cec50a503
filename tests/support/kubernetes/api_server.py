"""A small API server over real HTTP: lists, watches with history, pages, compaction, and failures on demand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

Object = dict[str, Any]


class FakeApiServer:
    """Holds objects by plural name (`pods`, `inferencepools.GROUP`); every change is one more resource version."""

    def __init__(self) -> None:
        self.installed = {"pods"}
        """Kinds that exist; all others are answered 404."""
        self.page_size = 1000
        self.answers: dict[str, int] = {}
        """Plural name -> status to answer instead; "" is for all."""
        self.lists: list[str] = []
        """The kinds listed, in order."""
        self.watched_from: list[tuple[str, str]] = []
        """(kind, resource version) of each watch."""
        self.watching = 0
        """Watches that are open."""
        self.authorizations: list[str] = []
        """The Authorization header of each list, in order."""
        self.tokens: dict[str, str] = {}
        """Token -> user."""
        self.rights: set[tuple[str, str]] = set()
        """(user, nonResourceURL) that may be got."""
        self.reviews: list[str] = []
        """Kinds of reviews asked for, in order."""
        self.host = ""
        self._objects: dict[str, dict[str, Object]] = {}
        self._history: list[tuple[int, str, str, Object]] = []
        self._compacted = 0
        self._version = 100
        self._recorded = asyncio.Condition()
        self._drops = 0
        self._breaks = False

    async def put(self, kind: str, name: str, content: Object, *, namespace: str = "ns") -> None:
        """Create or replace an object; `content` may bring metadata of its own."""
        self.installed.add(kind)
        self._version += 1
        metadata = {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"}
        metadata |= content.get("metadata", {}) | {"resourceVersion": str(self._version)}
        body = {**content, "metadata": metadata}
        objects = self._objects.setdefault(kind, {})
        await self._record("MODIFIED" if name in objects else "ADDED", kind, body)
        objects[name] = body

    async def delete(self, kind: str, name: str) -> None:
        self._version += 1
        body = self._objects[kind].pop(name)
        body["metadata"]["resourceVersion"] = str(self._version)
        await self._record("DELETED", kind, body)

    async def bookmark(self, kind: str) -> None:
        self._version += 1
        await self._record("BOOKMARK", kind, {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}})

    async def raw(self, kind: str, line: str) -> None:
        """Send any line to those who watch now; a surrogate of 0xDC80 to 0xDCFF is a byte that is no text."""
        self._version += 1
        await self._record(line, kind, {})

    def compact(self) -> None:
        """Forget history: watches from an older version get 410."""
        self._compacted = self._version
        self._history.clear()

    async def drop(self, *, broken: bool = False) -> None:
        """End all watches, as a server does or as a broken connection."""
        self._breaks = broken
        self._drops += 1
        async with self._recorded:
            self._recorded.notify_all()

    async def _record(self, event: str, kind: str, body: Object) -> None:
        self._history.append((self._version, event, kind, json.loads(json.dumps(body))))
        async with self._recorded:
            self._recorded.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        group, plural = request.match_info.get("group", ""), request.match_info["plural"]
        kind = f"{plural}.{group}" if group else plural
        status = self.answers.get(kind) or self.answers.get("")
        if status is None and kind not in self.installed:
            status = 404
        if status is not None:
            return web.json_response({"kind": "Status", "message": f"{kind}: no", "code": status}, status=status)
        wanted = dict(each.split("=", 1) for each in request.query.get("labelSelector", "").split(",") if each)
        if request.query.get("watch") in ("true", "True"):
            self.watching += 1
            try:
                return await self._watch(request, kind, wanted)
            finally:
                self.watching -= 1
        self.lists.append(kind)
        self.authorizations.append(request.headers.get("Authorization", ""))
        found = [each for each in self._objects.get(kind, {}).values() if _matches(each, wanted)]
        start = int(request.query.get("continue", "0"))
        more = str(start + self.page_size) if len(found) > start + self.page_size else ""
        meta = {"resourceVersion": str(self._version), "continue": more}
        return web.json_response({"metadata": meta, "items": found[start : start + self.page_size]})

    async def _review(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["plural"]
        self.reviews.append(kind)
        if status := self.answers.get(kind) or self.answers.get(""):
            return web.json_response({"kind": "Status", "message": f"{kind}: no", "code": status}, status=status)
        asked = (await request.json())["spec"]
        if kind == "tokenreviews":
            user = self.tokens.get(asked["token"])
            known = {"authenticated": True, "user": {"username": user, "groups": ["g"], "extra": {"k": ["v"]}}}
            return web.json_response({"status": known if user else {"error": "no"}}, status=201)
        what = asked["nonResourceAttributes"]
        assert (asked["groups"], asked["extra"], what["verb"]) == (["g"], {"k": ["v"]}, "get")
        return web.json_response({"status": {"allowed": (asked["user"], what["path"]) in self.rights}}, status=201)

    async def _watch(self, request: web.Request, kind: str, wanted: dict[str, str]) -> web.StreamResponse:
        version, drops = int(request.query["resourceVersion"]), self._drops
        self.watched_from.append((kind, str(version)))
        response = web.StreamResponse()
        await response.prepare(request)
        if version < self._compacted:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        while self._drops == drops:
            for at, event, of, body in list(self._history):
                if at > version and of == kind:
                    version = at
                    line = json.dumps({"type": event, "object": body}) if event.isupper() else event
                    if event == "BOOKMARK" or not body or _matches(body, wanted):
                        await response.write(line.encode("utf-8", "surrogateescape") + b"\n")
            async with self._recorded:
                if self._drops == drops and not any(at > version and of == kind for at, _, of, _ in self._history):
                    await self._recorded.wait()
        if self._breaks and request.transport is not None:
            request.transport.abort()
        return response

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/{plural}", self._answer)
        app.router.add_post("/apis/{group}/v1/{plural}", self._review)
        app.router.add_get("/apis/{group}/{version}/namespaces/{namespace}/{plural}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await self.drop()
            await runner.cleanup()


def _matches(each: Object, wanted: dict[str, str]) -> bool:
    return wanted.items() <= (each["metadata"].get("labels") or {}).items()


def kubeconfig(host: str, folder: Path) -> Path:
    """Credentials that name this server."""
    config = {
        "clusters": [{"name": "c", "cluster": {"server": host}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    return folder / "kubeconfig"


def use(host: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this server the one our credentials name."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(host, folder)))


def pod(ip: str, *, ready: bool = True, **metadata: Any) -> Object:
    return {
        "metadata": {"labels": {"app": "x"}, **metadata},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}], "phase": "Running"},
    }


def pool(*ports: int, selector: dict[str, str] | None = None) -> Object:
    spec = {"selector": {"matchLabels": selector or {"app": "x"}}, "targetPorts": [{"number": each} for each in ports]}
    return {"spec": spec}
