"""Receives webhooks and checks their signatures: `python examples/webhook_receiver.py whsec_... [PORT]`

Start Holdfast with the same secret, and allowed to call this machine:

    HOLDFAST_WEBHOOK_SECRETS=whsec_... HOLDFAST_WEBHOOK_ALLOW_PRIVATE=true make run

and give a run `"webhook": "http://127.0.0.1:8765/"`.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

PORT = 8765


class Receiver(BaseHTTPRequestHandler):
    secret: Webhook
    # A real one keeps these where they survive a restart.
    seen: set[str] = set()  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = self.secret.verify(body, dict(self.headers.items()))
        except WebhookVerificationError as error:
            self.send_error(400, str(error))
            return
        # It may come more than once, each time with the same id.
        if self.headers["webhook-id"] not in self.seen:
            self.seen.add(self.headers["webhook-id"])
            print(f"run {event['run_id']} of thread {event['thread_id']}: {event['status']}", flush=True)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing but what came."""


if __name__ == "__main__":
    Receiver.secret = Webhook(sys.argv[1])
    server = HTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else PORT), Receiver)
    print(f"Receiving at http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
