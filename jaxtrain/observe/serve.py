"""Serve a report over HTTP to this machine, rendered again as its runs progress."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Semaphore
from typing import Any

from jaxtrain.errors import UserError

HOST = "127.0.0.1"
_SECONDS = 5
"""Time in which a client must send its request."""
_CONNECTIONS = 64
"""Connections that are answered at a time; further ones are closed."""


def report_server(port: int, stamp: Callable[[], str], page: Callable[[], str]) -> ThreadingHTTPServer:
    """Create the server of a page; call its `serve_forever`.

    Args:
      port: TCP port on 127.0.0.1; 0 chooses a free one.
      stamp: Returns the version of what the page shows.
      page: Renders the page as HTML; called again whenever `stamp()` has changed.

    Raises:
      UserError: The port cannot be opened.
    """
    try:
        return _Server(port, stamp, page)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"port {port} cannot be opened ({reason}): choose another, or --serve 0 for any") from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, port: int, stamp: Callable[[], str], page: Callable[[], str]) -> None:
        super().__init__((HOST, port), _Handler)
        self._stamp, self._page, self._lock = stamp, page, Lock()
        self._free = Semaphore(_CONNECTIONS)
        self._rendered: tuple[str, bytes] | None = None

    def answer(self) -> tuple[str, bytes]:
        """Return (stamp, page)."""
        with self._lock:
            stamp = self._stamp()
            if self._rendered is None or self._rendered[0] != stamp:
                self._rendered = stamp, self._page().encode("utf-8", "backslashreplace")
            return self._rendered

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that ends its connection is no error of this program."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS

    def do_GET(self) -> None:
        # Reject DNS rebinding: another site's name resolved to 127.0.0.1 would let that site read the page.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send_page()

    def _send_page(self) -> None:
        try:
            stamp, page = self.server.answer()
        except Exception as error:  # whatever the files contain, the client gets an answer
            explain = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=explain)
            return
        tag = f'"{stamp}"'
        is_current = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_current else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not is_current:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if not is_current:
            self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""
