"""A server for one file, whose behaviour a test sets, and small entries."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Served:
    """The server's file, its behaviour, and the headers of the requests it received."""

    def __init__(self) -> None:
        self.content = bytes(range(256)) * 40
        self.status = 200
        self.cut: int | None = None  # send only this many bytes of the announced length
        self.silent: threading.Event | None = None  # send nothing before it is set
        self.requests: list[dict[str, str]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/weights.safetensors"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def _handler(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(dict(self.headers))
            if served.status != 200:
                self.send_error(served.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(served.content)))
            self.end_headers()
            if served.silent:
                served.silent.wait(10)
            self.wfile.write(served.content[: served.cut])

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served))
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()
