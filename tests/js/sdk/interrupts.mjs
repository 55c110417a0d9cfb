import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { client, collect, named, ranIn } from "./sdk.mjs";

const wait = (threadId, graph, payload) => client.runs.wait(threadId, graph, payload);
const asked = (interrupts) => interrupts.map(({ id, value }) => [id, value]);

describe("interrupts", { concurrency: true }, () => {
  it("are shown the same everywhere, and answered", async () => {
    const { thread_id: threadId } = await client.threads.create();
    const events = await collect(
      client.runs.stream(threadId, "ask", { input: { question: "well?" }, streamMode: ["values", "updates"] }),
    );
    const [{ id, value }] = named(events, "values").at(-1).__interrupt__;
    assert.deepEqual(value, { question: "well?" });
    assert.deepEqual(named(events, "updates").flatMap((update) => asked(update.__interrupt__)), [[id, value]]);
    const [run] = await client.runs.list(threadId);
    assert.equal(run.status, "success");
    const thread = await client.threads.get(threadId);
    assert.equal(thread.status, "interrupted");
    const state = await client.threads.getState(threadId);
    assert.deepEqual(Object.keys(thread.interrupts), [state.tasks[0].id]);
    assert.deepEqual(asked(thread.interrupts[state.tasks[0].id]), [[id, value]]);
    assert.deepEqual(asked(state.tasks[0].interrupts), [[id, value]]);
    assert.deepEqual(asked((await client.runs.join(threadId, run.run_id)).__interrupt__), [[id, value]]);

    assert.deepEqual(await wait(threadId, "ask", { command: { resume: "yes" } }), { question: "well?", answer: "yes" });
    const after = await client.threads.get(threadId);
    assert.deepEqual([after.status, after.interrupts], ["idle", {}]);
  });

  it("that are several are answered by their ids", async () => {
    const { threadId, values } = await ranIn("ask2", { topic: "both" });
    const ids = Object.fromEntries(values.__interrupt__.map(({ id, value }) => [value.asked, id]));
    assert.deepEqual(Object.keys(ids).sort(), ["left", "right"]);
    const vague = await wait(threadId, "ask2", { command: { resume: "one for both" }, raiseError: false });
    assert.equal(vague.__error__.error, "RuntimeError");
    const resume = { [ids.left]: 1, [ids.right]: { deep: [2] } };
    const done = await wait(threadId, "ask2", { command: { resume } });
    assert.deepEqual(done.answers, { left: 1, right: { deep: [2] } });
  });

  it("in a subgraph are answered from outside", async () => {
    const { threadId, values } = await ranIn("nested", { question: "deep?" });
    assert.deepEqual(values.__interrupt__[0].value, { question: "deep?" });
    assert.equal((await wait(threadId, "nested", { command: { resume: "yes" } })).answer, "yes");
  });

  it("come before and after nodes", async () => {
    const { threadId } = await ranIn("slow", {}, { interruptBefore: ["s2"] });
    const paused = await client.threads.get(threadId);
    assert.deepEqual([paused.status, paused.interrupts], ["interrupted", {}]);
    assert.deepEqual((await client.threads.getState(threadId)).next, ["s2"]);
    await wait(threadId, "slow", { input: null, interruptAfter: ["s2"] });
    assert.deepEqual((await client.threads.getState(threadId)).next, ["s3"]);
    assert.deepEqual(await wait(threadId, "slow", { input: null }), { done: ["s1", "s2", "s3"] });
    await wait(threadId, "slow", { input: {}, interruptBefore: "*" });
    assert.deepEqual((await client.threads.getState(threadId)).next, ["s1"]);
  });

  it("leave room for commands that update and go elsewhere", async () => {
    const { threadId } = await ranIn("slow", {}, { interruptBefore: ["s2"] });
    await wait(threadId, "slow", { command: { update: { done: ["mine"] }, goto: "s3" } });
    const { values } = await client.threads.getState(threadId);
    assert.ok(values.done.includes("mine"), JSON.stringify(values));
    assert.equal(values.done.at(-1), "s3");
    const sent = { command: { goto: [{ node: "s3", input: { seconds: 0 } }] } };
    assert.equal((await wait(threadId, "slow", sent)).done.at(-1), "s3");
  });

  it("are gone back to", async () => {
    const { threadId } = await ranIn("ask", { question: "well?" });
    const { checkpoint } = await client.threads.getState(threadId);
    assert.equal((await wait(threadId, "ask", { command: { resume: "yes" } })).answer, "yes");
    for (const place of [{ checkpoint }, { checkpointId: checkpoint.checkpoint_id }]) {
      const again = await wait(threadId, "ask", { ...place, input: null });
      assert.deepEqual(again.__interrupt__[0].value, { question: "well?" });
    }
    assert.equal((await wait(threadId, "ask", { command: { resume: "no" } })).answer, "no");
    const history = await client.threads.getHistory(threadId, { limit: 100 });
    assert.deepEqual(new Set(history.map(({ values }) => values.answer)), new Set(["yes", "no", undefined]));
    assert.ok(history.some(({ metadata }) => metadata.source === "fork"));
  });
});
