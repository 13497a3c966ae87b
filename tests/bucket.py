"""A stand-in for Google Cloud Storage: objects in memory, seen by both clients that demyrl uses.

tensorstore, which writes arrays, talks to it over HTTP on this machine; etils, which does the rest,
through a file system of fsspec. As in a bucket, there are no folders, only names with slashes.
"""

import contextlib
import io
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec

from demyrl import storage

VARIABLES = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "TENSORSTORE_GCS_HTTP_VERSION": "1"}


class Objects(dict):
    """Content by name, `bucket/a/b`; `generations` counts the writes of each name."""

    def __init__(self):
        super().__init__()
        self.generations: dict[str, int] = {}

    def __setitem__(self, name: str, content: bytes) -> None:
        self.generations[name] = self.generations.get(name, 0) + 1
        super().__setitem__(name, bytes(content))


class _Requests(BaseHTTPRequestHandler):
    """The four requests of the JSON interface that tensorstore makes."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        name, query = self._asked()
        if name.endswith("/"):
            self._list(name, query)
        elif name in self.server.objects:
            self._content(name)
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        bucket, query = self._asked()
        name = bucket + query["name"]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        wanted = query.get("ifGenerationMatch")
        if wanted not in (None, self._generation(name)):
            return self._answer(412, {})
        self.server.objects[name] = body
        self._answer(200, self._about(name))

    def do_DELETE(self) -> None:
        name, _ = self._asked()
        self._answer(204 if self.server.objects.pop(name, None) is not None else 404, None)

    def _asked(self) -> tuple[str, dict[str, str]]:
        """`bucket/name` of the object, with an empty name for the bucket, and the query."""
        parts = urllib.parse.urlsplit(self.path)
        words = parts.path.partition("/b/")[2].split("/")
        name = urllib.parse.unquote("/".join(words[2:]))
        return f"{words[0]}/{name}", dict(urllib.parse.parse_qsl(parts.query))

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        names = [n for n in self.server.objects if n.startswith(bucket + query.get("prefix", ""))]
        self._answer(200, {"items": [self._about(name) for name in sorted(names)]})

    def _content(self, name: str) -> None:
        content, status = self.server.objects[name], 200
        total, start = len(content), 0
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, status = int(first or total - int(last)), 206
            content = content[start : int(last) + 1 if first and last else None]
        self.send_response(status)
        if status == 206:
            where = f"bytes {start}-{start + len(content) - 1}/{total}"
            self.send_header("Content-Range", where)
        self.send_header("x-goog-generation", self._generation(name))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _about(self, name: str) -> dict[str, str]:
        size = str(len(self.server.objects[name]))
        own = name.partition("/")[2]
        return {"name": own, "size": size, "generation": self._generation(name)}

    def _generation(self, name: str) -> str:
        here = name in self.server.objects
        return str(self.server.objects.generations[name] if here else 0)

    def _answer(self, status: int, content: dict | None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class BucketFiles(fsspec.AbstractFileSystem):
    """The same objects for fsspec, in place of gcsfs."""

    protocol = ("gs", "gcs")
    cachable = False
    objects: Objects

    def ls(self, path: str, detail: bool = True, **_: object) -> list:
        path = self._strip_protocol(path)
        found = {}
        for name, content in self.objects.items():
            if name == path:
                found[name] = {"name": name, "size": len(content), "type": "file"}
            elif name.startswith(f"{path}/"):
                child, _, below = name[len(path) + 1 :].partition("/")
                size, kind = (0, "directory") if below else (len(content), "file")
                full = f"{path}/{child}"
                found[full] = {"name": full, "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def mkdir(self, path: str, *_: object, **__: object) -> None:
        pass

    makedirs = mkdir

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        found = [n for n in self.objects if n == path or (recursive and n.startswith(f"{path}/"))]
        if not found:
            raise FileNotFoundError(path)
        for name in found:
            del self.objects[name]

    def _open(self, path: str, mode: str = "rb", **_: object) -> io.BytesIO:
        if mode == "rb":
            if path not in self.objects:
                raise FileNotFoundError(path)
            return io.BytesIO(self.objects[path])
        assert mode == "wb", f"{path} is opened with {mode}, which a bucket cannot do"
        return _Written(self.objects, path)


class _Written(io.BytesIO):
    """What is written appears as an object when the file is closed."""

    def __init__(self, objects: Objects, name: str):
        super().__init__()
        self._objects, self._name = objects, name

    def close(self) -> None:
        if not self.closed:
            self._objects[self._name] = self.getvalue()
        super().close()


@contextlib.contextmanager
def buckets(monkeypatch) -> Iterator[Objects]:
    """Lets every gs:// path of the block be one of the objects it gets."""
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Requests)
    server.objects, server.daemon_threads = objects, True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(BucketFiles, "objects", objects, raising=False)
    monkeypatch.setitem(storage.CLIENTS, "gs://", "fsspec")
    for name in BucketFiles.protocol:
        fsspec.register_implementation(name, BucketFiles, clobber=True)
    try:
        yield objects
    finally:
        server.shutdown()
        server.server_close()
