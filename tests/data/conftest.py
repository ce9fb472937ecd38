"""A file server on loopback; and ends that wait for their threads however busy the machine is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeal.data.iterators import reading_thread


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end waits for its thread: in 5 s a thread may not have been heard of, and tests ask whether it is gone."""
    monkeypatch.setattr(reading_thread, "PATIENCE_S", 120.0)


@dataclass
class Served:
    """What the server gives, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None
    chunk_bytes: int = 0
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            body = state.files.get(self.path.lstrip("/"))
            if body is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if start >= len(body) > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if state.chunk_bytes:
                self.send_header("Transfer-Encoding", "chunked")
                starts = range(start, len(body), state.chunk_bytes)
                chunks = [body[first : first + state.chunk_bytes] for first in starts]
                sent = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            else:
                self.send_header("Content-Length", str(len(body) - start))
                sent = body[start:]
            self.end_headers()
            self.wfile.write(sent if state.cut_after is None else sent[: state.cut_after - start])

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.address = f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        server.shutdown()
        thread.join()
