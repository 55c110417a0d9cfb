"""Two customers on one server: neither sees the other, and a flood of one does not hold up the other.

Make a key for each, then run it against a server that has the graph `echo`:

    holdfast keys create --tenant acme --name example
    holdfast keys create --tenant zeta --name example
    python tenants.py http://127.0.0.1:8123 hf_… hf_…
"""

from __future__ import annotations

import asyncio
import sys

from langgraph_sdk import get_client
from langgraph_sdk.errors import NotFoundError

FLOOD = 50
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def main(url: str, acme_key: str, zeta_key: str) -> None:
    acme, zeta = get_client(url=url, api_key=acme_key), get_client(url=url, api_key=zeta_key)
    thread = await acme.threads.create(metadata={"about": "prices"})
    print(f"acme has a thread, and sees {len(await acme.threads.search(metadata={'about': 'prices'}))}")
    print(f"zeta sees {len(await zeta.threads.search(metadata={'about': 'prices'}))}")
    try:
        await zeta.threads.get(thread["thread_id"])
    except NotFoundError:
        print("zeta is told that there is no such thread")
    await acme.runs.create_batch([{"assistant_id": "echo", "input": HELLO} for _ in range(FLOOD)])
    answer = await zeta.runs.wait(None, "echo", input=HELLO)
    print(f"acme has queued {FLOOD} runs, and zeta has its answer: {answer['messages'][-1]['content']}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
