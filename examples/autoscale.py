"""How many workers the fleet should have, by its metrics: what an autoscaler does, small enough to read.

    python autoscale.py http://127.0.0.1:8123 [API key with the scope admin]

It prints a number and why. Enough workers for what runs and what is ready; more while the first ready run has waited
too long; never none. Without an answer from the database it changes nothing: an outage is no reason to scale.
"""

from __future__ import annotations

import math
import sys

import httpx

LEAST, MOST = 1, 50
# Seconds that a run may be ready before there are too few workers.
PATIENCE = 10.0


def main(url: str, key: str | None = None) -> None:
    headers = {"accept": "application/json"} | ({} if key is None else {"x-api-key": key})
    answer = httpx.get(f"{url}/metrics", headers=headers, timeout=10).raise_for_status().json()
    queue, workers = answer["queue"], answer["workers"]
    if queue is None:
        print("The database is away: leave everything as it is.")
        return
    online = workers["online"]
    each = workers["capacity"] / online if online else 10
    wanted = math.ceil((queue["running"] + queue["ready"]) / each)
    if queue["oldest_seconds"] > PATIENCE:
        wanted = max(wanted, online + 1)
    wanted = min(max(wanted, LEAST), MOST)
    print(f"{wanted} workers, for {queue['ready']} ready and {queue['running']} running runs; {online} are online.")


if __name__ == "__main__":
    main(*sys.argv[1:3])
