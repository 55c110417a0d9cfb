// The SDK under test, which the environment chooses, and what the scripts have in common.

import assert from "node:assert/strict";

export const version = process.env.SDK_VERSION;
export const url = process.env.HOLDFAST_URL;

// 2.0.0 is older than its number: it has none of what 1.11 and 1.12 brought.
export const newest = version === "1.12.0";

const { Client } = await import(`langgraph-sdk-${version}`);

/** A client that shows each failure at once. Its own retries would hide a server that fails now and then. */
export function connect(options = {}) {
  return new Client({ apiUrl: url, apiKey: null, callerOptions: { maxRetries: 0 }, ...options });
}

export const client = connect();

export const said = (content) => ({ messages: [{ role: "user", content }] });

export const UNKNOWN = "00000000-0000-4000-8000-000000000000";
export const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/;

/** The call is refused, with this status and a body that says why. */
export async function refused(call, status) {
  await assert.rejects(call, (error) => {
    assert.equal(error.status, status, String(error));
    assert.match(error.text ?? error.message, /"detail":"/);
    return true;
  });
}

/** The first answer that is true. */
export async function until(condition, what, seconds = 60) {
  const deadline = Date.now() + seconds * 1000;
  for (;;) {
    const answer = await condition();
    if (answer) return answer;
    assert.ok(Date.now() < deadline, `not within ${seconds} s: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

export async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

export const named = (events, name) => events.filter(({ event }) => event === name).map(({ data }) => data);

export const running = (threadId, runId) =>
  until(async () => (await client.runs.get(threadId, runId)).status === "running", "the run is running");

export const ended = (threadId, runId) =>
  until(async () => {
    const run = await client.runs.get(threadId, runId);
    return ["pending", "running"].includes(run.status) ? null : run;
  }, "the run ends");

/** A thread in which the graph has run. */
export async function ranIn(graph, input, payload = {}) {
  const thread = await client.threads.create();
  const values = await client.runs.wait(thread.thread_id, graph, { input, ...payload });
  return { threadId: thread.thread_id, values };
}
