"""A judge's endpoint on loopback: OpenAI's chat completions, with replies made up in advance."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "sk-very-secret-0123"


def said(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


YES = (200, said('{"pred": "yes", "score": 4}'), {})


@contextmanager
def endpoint(*replies):
    """Gives ``replies`` in turn, (status, body, headers), and the last one from then on; what came in is in ``requests``."""
    left, requests = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers, json.loads(body)))
            status, text, headers = left.pop(0) if len(left) > 1 else left[0]
            data = text.encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
