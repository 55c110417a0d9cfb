import assert from "node:assert/strict";
import { it } from "node:test";

import { breakable } from "./connections.mjs";
import { collect, connect, url } from "./sdk.mjs";

it("watches a run to its end although the web process stops in good order", async () => {
  const proxy = await breakable(url);
  try {
    const client = connect({ apiUrl: proxy.url });
    const { thread_id: threadId } = await client.threads.create();
    // Much is left of the run when the third event comes, also to a client that is slow.
    const payload = { input: { seconds: 2 }, streamMode: ["values", "updates"] };
    const events = [];
    for await (const event of client.runs.stream(threadId, "slow", payload)) {
      events.push(event);
      if (events.length === 3) process.kill(Number(process.env.WEB_PROCESS), "SIGTERM");
    }
    assert.deepEqual(events.at(-1).data, { seconds: 2, done: ["s1", "s2", "s3"] });
    const [run] = await client.runs.list(threadId);
    assert.deepEqual(events, await collect(client.runs.joinStream(threadId, run.run_id, { lastEventId: "-1" })));
  } finally {
    proxy.close();
  }
});
