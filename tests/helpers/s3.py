"""An S3 server on this machine, and a link to it that fails, is slow, and counts."""

import contextlib
import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter

from launch import free_port

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server():
    """Yield the port of moto's server, which runs in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    make_bucket(port)
                    break
                time.sleep(0.1)
            yield port
        finally:
            server.kill()


def make_bucket(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=5).close()


def environment(port):
    """The variables with which s3fs talks to a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


class Link(http.server.ThreadingHTTPServer):
    """Passes requests to a server.

    Args:
        target: the port of the server.

    Attributes:
        decide: called with the method and the key of each request. It returns None to pass it, a
            number to answer it with this status, "before" or "half" to call ``cut`` when nothing or
            half of its body has come, and to drop it then, or "after" to call ``cut`` when the
            server has answered, and the client does not know yet.
        cut: ends the client.
        rate: bytes a second; None for all that is possible.
        lags: whether a list is what it was when it was asked for first.
        seen: method and key of each request that was passed.
        received: by key, the bytes that were downloaded.
    """

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.reset()

    def reset(self):
        self.decide = lambda method, key: None
        self.cut = lambda: None
        self.rate, self.lags, self.lists = None, False, {}
        self.seen, self.received = [], Counter()

    @property
    def port(self):
        return self.server_address[1]

    def handle_error(self, request, client_address):
        """Say nothing of clients that were killed."""

    @classmethod
    @contextlib.contextmanager
    def to(cls, target):
        with cls(target) as link:
            thread = threading.Thread(target=link.serve_forever, daemon=True)
            thread.start()
            try:
                yield link
            finally:
                link.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def _pass(self):
        link, parts = self.server, urllib.parse.urlsplit(self.path)
        key = urllib.parse.unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        decided = link.decide(self.command, key)
        if decided in ("before", "half"):
            self._drop(decided == "half")
        body = self._body()
        if isinstance(decided, int):
            self._answer(decided, [], b"")
            return
        link.seen.append((self.command, key))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP}
        server = http.client.HTTPConnection("127.0.0.1", link.target, timeout=60)
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        data = answer.read()
        server.close()
        if decided == "after":
            link.cut()
        if self.command == "GET" and "list-type" in parts.query and link.lags:
            data = link.lists.setdefault(parts.query, data)
        elif self.command == "GET":
            link.received[key] += len(data)
        self._answer(answer.status, answer.getheaders(), data)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

    def _drop(self, half):
        if half:
            self._read(int(self.headers.get("Content-Length", 0)) // 2)
        self.server.cut()
        raise ConnectionError  # what a client has sent before its end could still be read

    def _body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self._read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self._read(int(self.headers.get("Content-Length", 0)))

    def _read(self, size):
        data = b""
        while len(data) < size:
            step = size - len(data)
            if self.server.rate is not None:
                step = min(step, max(1, self.server.rate // 20))
                time.sleep(step / self.server.rate)
            if not (part := self.rfile.read(step)):
                raise ConnectionError
            data += part
        return data

    def _answer(self, status, headers, data):
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in (*HOP, "content-length"):
                self.send_header(name, value)
        length = {k.lower(): v for k, v in headers}.get("content-length", len(data))
        self.send_header("Content-Length", length if self.command == "HEAD" else len(data))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


HOP = ("connection", "keep-alive", "transfer-encoding", "expect", "content-length")


def has_packages():
    """Return whether what these tests need is installed."""
    from importlib.util import find_spec

    return all(find_spec(name) for name in ("moto", "s3fs", "flask", "flask_cors"))


def pid_of(run):
    return int((run / "pid").read_text())


def kill(run):
    """Kill the process that trains a run, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid_of(run), 9)
