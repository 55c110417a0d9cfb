"""Orders an item while the payment service is away, finds the order with the dead letters, and retries it.

BG_JOB_MAX_RETRIES=1 holdfast dev --config examples/dead_letters/langgraph.json
python examples/dead_letters/retry_them.py http://127.0.0.1:8123
"""

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

SERVICE = Path(os.environ.get("PAYMENTS_UP", Path(__file__).with_name(".payments-up")))
PATIENCE = 60.0


def ended(client: httpx.Client, run_id: str) -> str:
    """How a run has ended, once it has."""
    deadline = time.monotonic() + PATIENCE
    while True:
        run: dict[str, Any] = client.get(f"/runs/{run_id}").raise_for_status().json()
        if run["status"] not in ("pending", "running"):
            return str(run["status"])
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run_id} is still {run['status']}")
        time.sleep(0.1)


def main(url: str) -> None:
    SERVICE.unlink(missing_ok=True)
    with httpx.Client(base_url=url, timeout=30) as client:
        thread_id = client.post("/threads", json={}).raise_for_status().json()["thread_id"]
        # The client that does not know whether its first try got through sends it again, with the same key.
        key = {"Idempotency-Key": f"order-{uuid.uuid4()}"}
        body = {"assistant_id": "order", "input": {"item": "a kettle"}, "metadata": {"shop": thread_id}}
        first, second = [client.post(f"/threads/{thread_id}/runs", json=body, headers=key) for _ in range(2)]
        print(f"ordered once: {first.json()['run_id'] == second.json()['run_id']}")

        ended(client, first.json()["run_id"])
        [letter] = client.get("/dead-letters", params={"thread_id": thread_id}).raise_for_status().json()
        print(f"given up ({letter['reason']}) after {letter['attempts']} attempts: {letter['error']['message']}")

        SERVICE.touch()
        answer = client.post("/dead-letters/retry", json={"metadata": {"shop": thread_id}, "from": "checkpoint"})
        [retried] = answer.raise_for_status().json()["runs"]
        print(f"retried: {ended(client, retried['retried_by'])}")
        state = client.get(f"/threads/{thread_id}/state").json()
        print(", ".join(state["values"]["done"]))
        again = client.post(f"/dead-letters/{letter['run_id']}/retry")
        print(f"{again.status_code}: {again.json()['detail']}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://127.0.0.1:8123"])
