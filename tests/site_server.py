"""Serves a built site as its host does, over HTTP and compressed; a tab of a browser that looks at it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: What a host compresses: text. Figures and fonts are compressed already.
COMPRESSED = (".html", ".css", ".js", ".json", ".svg", ".txt")
#: How long a visitor may keep what was sent, in seconds.
FRESH = 600


@lru_cache(maxsize=256)
def _compressed(path: Path, _changed: int) -> bytes:
    return gzip.compress(path.read_bytes(), 6)


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", f"max-age={FRESH}")
        super().end_headers()

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if path.suffix not in COMPRESSED or not path.is_file():
            return super().send_head()
        body = _compressed(path, path.stat().st_mtime_ns)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free port of this machine; gives the address, without a slash at its end."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Visit:
    """A tab that keeps what went wrong in it, and what it was sent."""

    def __init__(self, chromium: Any, home: str, **options: Any) -> None:
        self.tab = chromium.new_page(**options)
        self.home, self.wrong, self.sent = home, [], 0
        self.tab.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("requestfailed", lambda request: self.wrong.append(f"failed: {request.url}"))
        self.tab.on("response", lambda r: self.wrong.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        self.tab.on("request", self._local)
        self.tab.on("requestfinished", self._count)

    def _local(self, request: Any) -> None:
        if not request.url.startswith((self.home, "about:", "data:", "blob:")):
            self.wrong.append(f"elsewhere: {request.url}")

    def _count(self, request: Any) -> None:
        if request.url.startswith(self.home):
            sizes = request.sizes()
            self.sent += sizes["responseBodySize"] + sizes["responseHeadersSize"]

    def go(self, place: str) -> None:
        self.wrong.clear()
        self.sent = 0
        self.tab.goto(f"{self.home}/{place}", wait_until="load")
        self.tab.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise.then(() => true) : true")
