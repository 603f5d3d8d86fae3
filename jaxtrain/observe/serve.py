"""A report over HTTP, made anew as its runs go on: to this machine only."""

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from jaxtrain.errors import UserError

HOST = "127.0.0.1"


def report_server(port: int, stamp: Callable[[], str], page: Callable[[], str]) -> ThreadingHTTPServer:
    """A server on `port`, 0 for any free one, not yet serving.

    It answers with `page()`, which is made again where `stamp()` is another than before. Raises `UserError` for a port
    that cannot be had.
    """
    try:
        return _Server(port, stamp, page)
    except (OSError, OverflowError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"port {port} cannot be served ({said}): choose another, --serve 0 for any") from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, stamp: Callable[[], str], page: Callable[[], str]) -> None:
        super().__init__((HOST, port), _Handler)
        self._stamp, self._page, self._lock = stamp, page, Lock()
        self._made: tuple[str, bytes] | None = None

    def answer(self) -> tuple[str, bytes]:
        """The page, and the stamp it was made at."""
        with self._lock:
            stamp = self._stamp()
            if self._made is None or self._made[0] != stamp:
                self._made = stamp, self._page().encode()
            return self._made


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        # A name that another site had resolved to this machine would let that site read the page.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send_page()

    def _send_page(self) -> None:
        try:
            stamp, page = self.server.answer()
        except UserError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        tag = f'"{stamp}"'
        fresh = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if fresh else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        if not fresh:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if not fresh:
            self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""
