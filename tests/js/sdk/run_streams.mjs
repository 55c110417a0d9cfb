import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { breakable } from "./connections.mjs";
import { UNKNOWN, client, collect, connect, ended, named, newest, ranIn, refused, said, until, url } from "./sdk.mjs";

const STEPS = ["s1", "s2", "s3"];

async function fresh() {
  return (await client.threads.create()).thread_id;
}

async function streamed(graph, payload) {
  return collect(client.runs.stream(await fresh(), graph, payload));
}

const names = (events) => [...new Set(events.map(({ event }) => event))];

describe("streams of runs", { concurrency: true }, () => {
  it("begin with who they are, and show values", async () => {
    const threadId = await fresh();
    let noticed;
    const events = await collect(
      client.runs.stream(threadId, "slow", { input: { seconds: 0 }, onRunCreated: (run) => (noticed = run) }),
    );
    assert.equal(noticed.thread_id, threadId);
    assert.deepEqual(events[0].data, { run_id: noticed.run_id, attempt: 1 });
    assert.deepEqual(events.map(({ event }) => event), ["metadata", "values", "values", "values", "values"]);
    assert.deepEqual(named(events, "values").map(({ done }) => done.length), [0, 1, 2, 3]);
    // The run has ended before its stream does.
    assert.equal((await client.runs.get(threadId, noticed.run_id)).status, "success");
  });

  it("show nothing while nothing happens", async () => {
    const events = await streamed("slow", { input: { seconds: 0.5 }, streamMode: "updates" });
    assert.deepEqual(events.map(({ event }) => event), ["metadata", "updates", "updates", "updates"]);
  });

  it("show updates", async () => {
    const events = await streamed("slow", { input: {}, streamMode: "updates", feedbackKeys: ["liked"] });
    assert.deepEqual(named(events, "updates"), STEPS.map((name) => ({ [name]: { done: [name] } })));
  });

  it("show tokens as they come", async () => {
    const events = await streamed("llm", { input: said("hello"), streamMode: "messages-tuple" });
    const chunks = named(events, "messages");
    assert.ok(chunks.length > 3);
    assert.equal(chunks.map(([chunk]) => chunk.content).join(""), "You said: hello. Tell me more about that.");
    assert.equal(new Set(chunks.map(([chunk]) => chunk.id)).size, 1);
    for (const [chunk, metadata] of chunks) {
      assert.equal(chunk.type, "AIMessageChunk");
      assert.equal(metadata.langgraph_node, "call_model");
    }
  });

  it("show messages as far as they have come", async () => {
    const events = await streamed("llm", { input: said("hello"), streamMode: "messages" });
    const [announced] = named(events, "messages/metadata");
    const partial = named(events, "messages/partial").map(([message]) => message);
    assert.deepEqual(Object.keys(announced), [partial[0].id]);
    assert.equal(partial.at(-1).content, "You said: hello. Tell me more about that.");
    partial.slice(1).forEach(({ content }, index) => assert.ok(content.startsWith(partial[index].content)));
  });

  it("show what a graph writes", async () => {
    const events = await streamed("tools", { input: said("Oslo"), streamMode: ["custom"] });
    assert.deepEqual(
      named(events, "custom").map(({ payload }) => payload),
      [50, 100].map((percent) => ({ city: "Oslo", percent })),
    );
  });

  it("show tasks, checkpoints and what debugging needs", async () => {
    const events = await streamed("slow", { input: {}, streamMode: ["tasks", "checkpoints", "debug"] });
    assert.deepEqual(names(events).sort(), ["checkpoints", "debug", "metadata", "tasks"]);
    const tasks = named(events, "tasks");
    assert.deepEqual(tasks.filter((task) => "input" in task).map(({ name }) => name), STEPS);
    assert.deepEqual(tasks.filter((task) => "result" in task).map(({ name }) => name), STEPS);
    const checkpoints = named(events, "checkpoints");
    assert.deepEqual(checkpoints.at(-1).values, { done: STEPS });
    assert.deepEqual(checkpoints.map(({ metadata }) => metadata.step), [-1, 0, 1, 2, 3]);
    assert.deepEqual(new Set(named(events, "debug").map(({ type }) => type)), new Set(["checkpoint", "task", "task_result"]));
  });

  it("show LangChain's events", async () => {
    const events = named(await streamed("llm", { input: said("hello"), streamMode: ["events", "values"] }), "events");
    const kinds = new Set(events.map(({ event }) => event));
    for (const kind of ["on_chain_start", "on_chat_model_stream", "on_chain_end"]) assert.ok(kinds.has(kind), kind);
  });

  it("show subgraphs when asked to", async () => {
    const payload = { input: { topic: "tides" }, streamMode: ["values", "updates"] };
    assert.deepEqual(names(await streamed("sub", payload)).sort(), ["metadata", "updates", "values"]);
    const events = await streamed("sub", { ...payload, streamSubgraphs: true });
    const inner = names(events).filter((name) => name.includes("|"));
    assert.deepEqual(inner.map((name) => name.replace(/:.*/, "")).sort(), ["updates|child", "values|child"]);
    for (const name of inner) assert.match(name, /^(values|updates)\|child:[0-9a-f-]{36}$/);
  });

  it("tell of errors, and end", async () => {
    const events = await streamed("boom", { input: {} });
    assert.deepEqual(events.at(-1).event, "error");
    assert.deepEqual(events.at(-1).data, { error: "ValueError", message: "boom" });
  });

  it("need no thread", async () => {
    let noticed;
    const payload = { input: { seconds: 0.3 }, onRunCreated: (run) => (noticed = run) };
    const stream = client.runs.stream(null, "slow", payload);
    const { value: first } = await stream.next();
    assert.equal(first.data.run_id, noticed.run_id);
    const [events, joined] = await Promise.all([
      collect(stream),
      collect(client.runs.joinStream(null, noticed.run_id, { lastEventId: "-1" })),
    ]);
    assert.deepEqual(events.at(-1).data.done, STEPS);
    assert.deepEqual(joined, [first, ...events]);
  });

  it("are joined, from the beginning or from an event on", async () => {
    const threadId = await fresh();
    const run = await client.runs.create(threadId, "slow", {
      input: { seconds: 0.2 },
      streamMode: ["values", "updates"],
      streamResumable: true,
    });
    const whole = await collect(client.runs.joinStream(threadId, run.run_id));
    assert.deepEqual(names(whole), ["metadata", "values", "updates"]);
    const ids = whole.map(({ id }) => Number(id));
    ids.slice(1).forEach((id, index) => assert.ok(id > ids[index], `${ids}`));
    const rejoined = (options) => collect(client.runs.joinStream(threadId, run.run_id, options));
    assert.deepEqual(await rejoined({ lastEventId: "-1" }), whole);
    assert.deepEqual(await rejoined({ lastEventId: whole[2].id }), whole.slice(3));
    assert.deepEqual(names(await rejoined({ lastEventId: "-1", streamMode: "updates" })), ["updates"]);
    assert.deepEqual(names(await rejoined({ lastEventId: "-1", streamMode: ["updates", "values"] })), ["values", "updates"]);
    await refused(collect(client.runs.joinStream(threadId, UNKNOWN)), 404);
  });

  it("outlive the connection of who watches", async () => {
    const proxy = await breakable(url);
    try {
      const threadId = await fresh();
      const remote = connect({ apiUrl: proxy.url });
      const events = [];
      // Much is left of the run when the connection is cut, also for a client that is slow.
      for await (const event of remote.runs.stream(threadId, "slow", { input: { seconds: 2 }, streamMode: ["values", "updates"] })) {
        events.push(event);
        if (events.length === 3) proxy.cut();
      }
      assert.ok(proxy.opened > 1);
      const [run] = await client.runs.list(threadId);
      assert.deepEqual(events, await collect(client.runs.joinStream(threadId, run.run_id, { lastEventId: "-1" })));
      assert.deepEqual(events.at(-1).data, { seconds: 2, done: STEPS });
    } finally {
      proxy.close();
    }
  });

  it("leave the run alone when nobody watches, or end it", async () => {
    const left = async (payload) => {
      const threadId = await fresh();
      let noticed;
      const watching = new AbortController();
      const stream = client.runs.stream(threadId, "slow", {
        ...payload,
        signal: watching.signal,
        onRunCreated: (run) => (noticed = run),
      });
      await stream.next();
      watching.abort();
      await stream.next().catch(() => undefined);
      return (await ended(threadId, noticed.run_id)).status;
    };
    assert.equal(await left({ input: { seconds: 0.2 }, onDisconnect: "continue" }), "success");
    assert.equal(await left({ input: { seconds: 60 }, onDisconnect: "cancel" }), "interrupted");
  });

  it("end the run when told to while joined", async () => {
    const threadId = await fresh();
    const run = await client.runs.create(threadId, "slow", { input: { seconds: 60 } });
    const watching = new AbortController();
    const stream = client.runs.joinStream(threadId, run.run_id, { signal: watching.signal, cancelOnDisconnect: true });
    await stream.next();
    watching.abort();
    await stream.next().catch(() => undefined);
    assert.equal((await ended(threadId, run.run_id)).status, "interrupted");
  });
});

describe("the stream of a thread", { concurrency: true }, () => {
  it("shows run after run", async () => {
    const { threadId } = await ranIn("echo", said("before"));
    const watching = new AbortController();
    const events = [];
    const watched = (async () => {
      for await (const event of client.threads.joinStream(threadId, { lastEventId: "-", signal: watching.signal })) {
        events.push(event);
      }
    })().catch((error) => assert.equal(error.name, "AbortError"));
    const shown = (count) => events.filter(({ event, data }) => event === "metadata" && data.status === "run_done").length >= count;
    await until(() => shown(1), "the first run is shown");
    await client.runs.wait(threadId, "echo", { input: said("after") });
    await until(() => shown(2), "the second run is shown");
    watching.abort();
    await watched;
    assert.equal(named(events, "values").at(-1).messages.length, 4);
  });

  it("shows only what is asked for", { skip: !newest && "the same call" }, async () => {
    const { threadId } = await ranIn("echo", said("before"));
    const watching = new AbortController();
    const stream = client.threads.joinStream(threadId, {
      lastEventId: "-",
      streamMode: ["lifecycle"],
      signal: watching.signal,
    });
    const { value } = await stream.next();
    assert.notEqual(value.event, "values");
    watching.abort();
    await stream.next().catch(() => undefined);
  });
});
