// The thread-centric protocol, over the transport that the environment names: client.threads.stream().

import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { WebSocket } from "ws";

import { breakable } from "./connections.mjs";
import { UNKNOWN, client, collect, connect, said, until, url } from "./sdk.mjs";

const transport = process.env.TRANSPORT;
const STEPS = ["s1", "s2", "s3"];
const ALL = ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"];

function options(assistantId) {
  return { assistantId, transport, webSocketFactory: (address) => new WebSocket(address) };
}

/** A thread's stream, closed at the end of the test.
 *
 * What `use` wants to see it asks for before it starts a run, `output` included: over SSE the SDK takes a projection for
 * finished that is opened when the end of the run has already come in by another. */
async function watching(assistantId, use, { threadId = crypto.randomUUID(), more = {}, through = client } = {}) {
  const thread = through.threads.stream(threadId, { ...options(assistantId), ...more });
  try {
    await use(thread);
  } finally {
    await thread.close();
  }
}

const isEnd = ({ method, params }) =>
  method === "lifecycle" && params.namespace.length === 0 && ["completed", "failed", "interrupted"].includes(params.data.event);

/** All events of the thread up to the end of its last run. */
async function replayed(threadId, assistantId, wanted = { channels: ALL }) {
  let seen;
  await watching(
    assistantId,
    async (thread) => {
      seen = [];
      const subscription = await thread.subscribe(wanted);
      for await (const event of subscription) seen.push(event);
    },
    { threadId },
  );
  return seen;
}

const ofMethod = (events, method) => events.filter((event) => event.method === method);

describe(`threads over ${transport}`, { concurrency: 4 }, () => {
  it("start runs and show their values", () =>
    watching("slow", async (thread) => {
      const { output } = thread;
      const values = collect(thread.values);
      const { run_id: runId } = await thread.run.start({ input: { seconds: 0.05 }, metadata: { mine: 1 } });
      assert.deepEqual(await output, { seconds: 0.05, done: STEPS });
      assert.deepEqual((await values).map(({ done }) => done.length), [0, 1, 2, 3]);
      const run = await client.runs.get(thread.threadId, runId);
      assert.deepEqual([run.status, run.metadata.mine], ["success", 1]);
      assert.equal((await client.threads.get(thread.threadId)).metadata.graph_id, "slow");
      assert.equal(thread.interrupted, false);
    }));

  it("stream messages", () =>
    watching("llm", async (thread) => {
      const messages = (async () => {
        const seen = [];
        for await (const message of thread.messages) {
          seen.push({ id: message.id, node: message.node, deltas: await collect(message.text), text: await message.text });
        }
        return seen;
      })();
      const { output } = thread;
      await thread.run.start({ input: said("hello") });
      const [message, ...others] = await messages;
      assert.deepEqual(others, []);
      assert.equal(message.text, "You said: hello. Tell me more about that.");
      assert.ok(message.deltas.length > 3);
      assert.equal(message.deltas.join(""), message.text);
      assert.equal(message.node, "call_model");
      const { messages: stored } = await output;
      assert.deepEqual(stored.map((one) => [one.getType(), one.text]), [["human", "hello"], ["ai", message.text]]);
      assert.equal(stored[1].id, message.id);
    }));

  it("go on with the next run", () =>
    watching("echo", async (thread) => {
      const values = await thread.subscribe("values", { namespaces: [[]] });
      const lengths = async () => (await collect(values)).map(({ params }) => params.data.messages.length);
      await thread.run.start({ input: said("one") });
      assert.deepEqual(await lengths(), [1, 2]);
      await thread.run.start({ input: said("two") });
      assert.deepEqual(await lengths(), [3, 4]);
    }));

  it("ask, and take an answer", () =>
    watching("ask", async (thread) => {
      const values = await thread.subscribe("values");
      await thread.run.start({ input: { question: "well?" } });
      await collect(values);
      await until(() => thread.interrupts.length === 1, "it has asked");
      assert.equal(thread.interrupted, true);
      const [{ interruptId, payload, namespace }] = thread.interrupts;
      assert.deepEqual([payload, namespace], [{ question: "well?" }, []]);
      await thread.input.respond({ interrupt_id: interruptId, namespace, response: "yes" });
      assert.deepEqual((await collect(values)).at(-1).params.data, { question: "well?", answer: "yes" });
      await until(() => !thread.interrupted, "it has heard the end");
      assert.deepEqual(thread.interrupts, []);
      assert.deepEqual((await client.threads.getState(thread.threadId)).next, []);
    }));

  it("take input as the answer while they ask", () =>
    watching("ask", async (thread) => {
      const values = await thread.subscribe("values");
      await thread.run.start({ input: { question: "well?" } });
      await collect(values);
      await thread.run.start({ input: "of course" });
      assert.equal((await collect(values)).at(-1).params.data.answer, "of course");
    }));

  it("take several answers at once", () =>
    watching("ask2", async (thread) => {
      const all = await thread.subscribe(["values", "lifecycle"]);
      await thread.submitRun({ input: { topic: "both" } });
      await collect(all);
      await until(() => thread.interrupts.length === 2, "both have asked");
      const responses = thread.interrupts.map(({ interruptId, payload, namespace }) => ({
        interrupt_id: interruptId,
        namespace,
        response: `${payload.asked} answered`,
      }));
      await thread.respondInput({ responses });
      const { answers } = ofMethod(await collect(all), "values").at(-1).params.data;
      assert.deepEqual(answers, { left: "left answered", right: "right answered" });
      assert.equal((await client.runs.list(thread.threadId)).length, 2);
    }));

  it("ask from within subgraphs", () =>
    watching("nested", async (thread) => {
      const values = await thread.subscribe("values", { namespaces: [[]], depth: 0 });
      await thread.run.start({ input: { question: "deep?" } });
      await collect(values);
      await until(() => thread.interrupts.length === 1, "it has asked");
      const [{ interruptId, payload, namespace }] = thread.interrupts;
      assert.deepEqual(payload, { question: "deep?" });
      await thread.input.respond({ interrupt_id: interruptId, namespace, response: "yes" });
      assert.equal((await collect(values)).at(-1).params.data.answer, "yes");
    }));

  it("show tools at work, and what they say meanwhile", () =>
    watching("tools", async (thread) => {
      const { output } = thread;
      const calls = collect(thread.toolCalls);
      const progress = thread.extensions.progress;
      const told = collect(progress);
      const named = await thread.subscribe("custom:progress");
      await thread.run.start({ input: said("Oslo") });
      // The SDK shows a call twice: when it begins and when it has ended.
      const [call, ...others] = await calls;
      assert.ok(others.every(({ callId }) => callId === call.callId));
      assert.deepEqual([call.name, call.callId, call.input], ["weather", "call-Oslo", { city: "Oslo" }]);
      assert.equal(await call.output, "Sunny in Oslo");
      const expected = [50, 100].map((percent) => ({ city: "Oslo", percent }));
      assert.deepEqual(await told, expected);
      assert.deepEqual(await progress, expected.at(-1));
      assert.deepEqual(await collect(named), expected);
      assert.equal((await output).messages.at(-1).text, "It is said: Sunny in Oslo");
    }));

  it("discover subgraphs", () =>
    watching("sub", async (thread) => {
      const { output } = thread;
      const found = (async () => {
        const seen = [];
        for await (const { name, namespace, graphName } of thread.subgraphs) seen.push({ name, namespace, graphName });
        return seen;
      })();
      const inner = await thread.subscribe({ channels: ["values"], namespaces: [["child"]] });
      await thread.run.start({ input: { topic: "tides" } });
      const [child, ...others] = await found;
      assert.deepEqual(others, []);
      assert.deepEqual([child.name, child.graphName], ["child", "child"]);
      const values = await collect(inner);
      assert.deepEqual(values.at(-1).params.namespace, child.namespace);
      assert.deepEqual(values.at(-1).params.data.notes, ["a fact about tides"]);
      assert.equal((await output).text, "a fact about tides");
    }));

  it("say what goes on, on every channel, in order", () =>
    watching("slow", async (thread) => {
      const heard = [];
      thread.onEvent((event) => heard.push(event));
      const all = await thread.subscribe({ channels: ALL });
      const { run_id: runId } = await thread.submitRun({ input: { seconds: 0 } });
      const events = await collect(all);
      const lifecycle = ofMethod(events, "lifecycle").map(({ params }) => params.data.event);
      assert.deepEqual(lifecycle, ["running", "completed"]);
      assert.deepEqual(ofMethod(events, "updates").map(({ params }) => params.node), STEPS);
      assert.deepEqual(
        ofMethod(events, "tasks").filter(({ params }) => "result" in params.data).map(({ params }) => params.data.name),
        STEPS,
      );
      for (const [index, event] of events.entries()) {
        if (index) assert.ok(event.seq > events[index - 1].seq);
        if (event.method !== "checkpoints") continue;
        assert.deepEqual(Object.keys(event.params.data).filter((key) => key !== "parent_id").sort(), ["id", "source", "step"]);
      }
      const [head] = await client.threads.getHistory(thread.threadId);
      assert.equal(ofMethod(events, "checkpoints").at(-1).params.data.id, head.checkpoint.checkpoint_id);
      assert.deepEqual(heard.map(({ event_id: id }) => id).sort(), events.map(({ event_id: id }) => id).sort());
      assert.equal((await client.runs.get(thread.threadId, runId)).status, "success");
    }));

  it("show the same to whoever comes later", async () => {
    let seen;
    const threadId = crypto.randomUUID();
    await watching(
      "sub",
      async (thread) => {
        const all = await thread.subscribe({ channels: ALL });
        await thread.run.start({ input: { topic: "tides" } });
        seen = await collect(all);
      },
      { threadId },
    );
    assert.ok(isEnd(seen.at(-1)));
    assert.deepEqual(await replayed(threadId, "sub"), seen);
    if (transport === "websocket") {
      // Over SSE the SDK does not pass `since` on.
      const middle = seen[Math.floor(seen.length / 2)].seq;
      const later = seen.filter(({ seq }) => seq > middle);
      assert.deepEqual(await replayed(threadId, "sub", { channels: ALL, since: middle }), later);
    }
    const outer = seen.filter(({ params }) => params.namespace.length === 0);
    assert.deepEqual(await replayed(threadId, "sub", { channels: ALL, namespaces: [[]], depth: 0 }), outer);
  });

  it("outlive their connection", async () => {
    const proxy = await breakable(url);
    try {
      const threadId = crypto.randomUUID();
      let seen;
      let reconnected = 0;
      const more = { reconnectDelayMs: () => 20, onReconnect: () => (reconnected += 1) };
      const through = connect({ apiUrl: proxy.url });
      await watching(
        "slow",
        async (thread) => {
          const { output } = thread;
          const all = await thread.subscribe({ channels: ALL });
          // Much is left of the run when the connection is cut, also for a client that is slow.
          await thread.run.start({ input: { seconds: 2 } });
          seen = [];
          for await (const event of all) {
            seen.push(event);
            if (event.method === "updates" && event.params.node === "s1") proxy.cut();
          }
          assert.deepEqual(await output, { seconds: 2, done: STEPS });
        },
        { threadId, more, through },
      );
      assert.ok(reconnected > 0);
      // Each once. The SDK renews its subscriptions one by one, and what comes for the first it shows to all.
      seen.sort((one, other) => one.seq - other.seq);
      assert.deepEqual(seen, await replayed(threadId, "slow"));
    } finally {
      proxy.close();
    }
  });

  it("tell of a failure", () =>
    watching("boom", async (thread) => {
      const lifecycle = await thread.subscribe("lifecycle");
      await thread.run.start({ input: {} });
      const { event, error } = (await collect(lifecycle)).at(-1).params.data;
      assert.deepEqual([event, error], ["failed", "boom"]);
    }));

  it("end when their run is cancelled", () =>
    watching("slow", async (thread) => {
      const lifecycle = await thread.subscribe("lifecycle");
      const { run_id: runId } = await thread.run.start({ input: { seconds: 60 } });
      await until(async () => (await client.runs.get(thread.threadId, runId)).status === "running", "it runs");
      await client.runs.cancel(thread.threadId, runId);
      assert.equal((await collect(lifecycle)).at(-1).params.data.event, "interrupted");
      assert.equal((await client.runs.get(thread.threadId, runId)).status, "interrupted");
    }));

  it("branch off, and push aside what is running", () =>
    watching("slow", async (thread) => {
      const all = await thread.subscribe({ channels: ["lifecycle", "values", "checkpoints"] });
      await thread.run.start({ input: { seconds: 0 } });
      const checkpoints = ofMethod(await collect(all), "checkpoints");
      const forkFrom = checkpoints.find(({ params }) => params.data.step === 1).params.data.id;
      await thread.run.start({ input: null, forkFrom });
      assert.deepEqual(ofMethod(await collect(all), "values").at(-1).params.data.done, STEPS);
      const history = await client.threads.getHistory(thread.threadId, { limit: 100 });
      assert.ok(history.some(({ parent_checkpoint: parent, metadata }) =>
        parent?.checkpoint_id === forkFrom && metadata.source === "fork"));

      const { run_id: first } = await thread.submitRun({ input: { seconds: 60 } });
      await until(async () => (await client.runs.get(thread.threadId, first)).status === "running", "it runs");
      const { run_id: next } = await thread.submitRun({ input: { seconds: 0 }, multitaskStrategy: "interrupt" });
      await client.runs.join(thread.threadId, next);
      assert.equal((await client.runs.get(thread.threadId, first)).status, "interrupted");
    }));

  it("refuse what makes no sense", () => {
    const code = (expected) => (error) => error.code === expected || assert.fail(`${error.code}: ${error.message}`);
    const answer = { interrupt_id: "0".repeat(32), namespace: [], response: "yes" };
    const refusals = async (thread) => {
      await assert.rejects(thread.input.respond(answer), code("no_such_run"));
      const lifecycle = await thread.subscribe("lifecycle");
      await thread.run.start({ input: { question: "well?" } });
      await collect(lifecycle);
      await assert.rejects(thread.input.respond(answer), code("no_such_interrupt"));
      await assert.rejects(thread.state.get({ namespace: [] }), code("unknown_command"));
      await assert.rejects(thread.subscribe(["nothing"]), /nothing/);
      const { tree } = await thread.agent.getTree();
      assert.deepEqual([tree.namespace, tree.status, tree.graph_name], [[], "interrupted", "ask"]);
      await watching(UNKNOWN, (other) => assert.rejects(other.submitRun({ input: {} }), /404/));
    };
    return watching("ask", refusals, { more: { maxReconnectAttempts: 0 } });
  });
});
