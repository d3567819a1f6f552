"""A web server on this machine that can be told to misbehave."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


@dataclass
class Site:
    """Files by path, and how they are served."""

    files: dict[str, bytes] = field(default_factory=dict)
    url: str = ""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Bytes of a body after which the next connection for that path breaks; used once."""
    always_cut: dict[str, int] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    """Status codes that the next requests for a path get instead of the file."""
    ranges: bool = True
    etags: bool = True
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and If-Range of every request."""


@pytest.fixture
def site() -> Iterator[Site]:
    here = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            path = self.path
            here.requests.append((path, self.headers["Range"], self.headers["If-Range"]))
            if here.status.get(path):
                self.send_error(here.status[path].pop(0))
                return
            if path not in here.files:
                self.send_error(404)
                return
            body = here.files[path]
            etag = f'"{len(body)}-{sum(body)}"'
            start = 0
            asked = self.headers["Range"]
            if asked and here.ranges and self.headers["If-Range"] in (None, etag):
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            if here.etags:
                self.send_header("ETag", etag)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            stop = here.cut_after.pop(path, here.always_cut.get(path))
            self.wfile.write(body[start:] if stop is None else body[start : start + stop])

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    here.url = f"http://127.0.0.1:{server.server_port}"
    yield here
    server.shutdown()
    server.server_close()
    thread.join()
