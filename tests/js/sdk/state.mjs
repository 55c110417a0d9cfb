import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { UNKNOWN, client, ranIn, refused, running, said } from "./sdk.mjs";

const STEPS = ["s1", "s2", "s3"];

describe("state", { concurrency: true }, () => {
  it("is read at the head and at any checkpoint", async () => {
    const { threadId } = await ranIn("slow", {});
    const state = await client.threads.getState(threadId);
    assert.deepEqual(state.values, { done: STEPS });
    assert.deepEqual(state.next, []);
    assert.equal(state.metadata.step, 3);
    assert.equal(state.metadata.source, "loop");
    assert.equal(state.checkpoint.thread_id, threadId);

    const history = await client.threads.getHistory(threadId, { limit: 10 });
    assert.deepEqual(history.map(({ metadata }) => metadata.step), [3, 2, 1, 0, -1]);
    assert.deepEqual(history[0].checkpoint, state.checkpoint);
    history.slice(0, -1).forEach((one, index) => {
      assert.equal(one.parent_checkpoint.checkpoint_id, history[index + 1].checkpoint.checkpoint_id);
    });
    for (const place of [history[2].checkpoint, history[2].checkpoint.checkpoint_id]) {
      const earlier = await client.threads.getState(threadId, place);
      assert.deepEqual(earlier.values, { done: ["s1"] });
      assert.deepEqual(earlier.next, ["s2"]);
    }
    assert.equal((await client.threads.getState(threadId, UNKNOWN)).created_at, null);
    await refused(client.threads.getState(UNKNOWN), 404);
  });

  it("is empty before the first run", async () => {
    const { thread_id: id } = await client.threads.create();
    const state = await client.threads.getState(id);
    assert.deepEqual([state.values, state.next, state.tasks, state.checkpoint], [{}, [], [], null]);
    assert.deepEqual(await client.threads.getHistory(id), []);
  });

  it("has a history that can be narrowed", async () => {
    const { threadId } = await ranIn("slow", {});
    const [, , third] = await client.threads.getHistory(threadId);
    const before = { configurable: { checkpoint_id: third.checkpoint.checkpoint_id } };
    const steps = async (options) =>
      (await client.threads.getHistory(threadId, options)).map(({ metadata }) => metadata.step);
    assert.deepEqual(await steps({ before }), [0, -1]);
    assert.deepEqual(await steps({ before, limit: 1 }), [0]);
    assert.deepEqual(await steps({ metadata: { source: "input" } }), [-1]);
  });

  it("includes that of subgraphs when asked to", async () => {
    const { threadId } = await ranIn("nested", { question: "deep?" });
    const plain = await client.threads.getState(threadId);
    assert.deepEqual(plain.next, ["child"]);
    const [task] = plain.tasks;
    assert.match(task.checkpoint.checkpoint_ns, /^child:/);
    assert.equal(task.state, null);
    assert.deepEqual(task.interrupts[0].value, { question: "deep?" });
    const whole = await client.threads.getState(threadId, undefined, { subgraphs: true });
    assert.deepEqual(whole.tasks[0].state.next, ["ask"]);
    const inner = await client.threads.getState(threadId, task.checkpoint);
    assert.deepEqual(inner.values, { question: "deep?" });
    const { checkpoint_ns: namespace } = task.checkpoint;
    const history = await client.threads.getHistory(threadId, { checkpoint: { checkpoint_ns: namespace } });
    assert.deepEqual(history[0].checkpoint, inner.checkpoint);
  });

  it("is updated, and branched", async () => {
    const { threadId } = await ranIn("slow", {}, { interruptAfter: ["s1"] });
    const updated = await client.threads.updateState(threadId, { values: { done: ["mine"] }, asNode: "s2" });
    const state = await client.threads.getState(threadId);
    assert.deepEqual(state.values.done, ["s1", "mine"]);
    assert.deepEqual(state.next, ["s3"]);
    assert.equal(updated.checkpoint.checkpoint_id, state.checkpoint.checkpoint_id);
    assert.equal((await client.threads.get(threadId)).status, "interrupted");

    const branch = { checkpoint: state.parent_checkpoint, values: { done: ["other"] }, asNode: "s3" };
    await client.threads.updateState(threadId, branch);
    assert.deepEqual((await client.threads.getState(threadId)).values.done, ["s1", "other"]);
    const { checkpoint_id: checkpointId } = state.parent_checkpoint;
    await client.threads.updateState(threadId, { checkpointId, values: { done: ["third"] }, asNode: "s2" });
    assert.deepEqual((await client.runs.wait(threadId, "slow", { input: null })).done, ["s1", "third", "s3"]);

    await refused(client.threads.updateState(threadId, { values: {}, asNode: "nothing" }), 400);
    const { thread_id: fresh } = await client.threads.create();
    await refused(client.threads.updateState(fresh, { values: {} }), 400);
  });

  it("is not updated while a run is under way", async () => {
    const { thread_id: id } = await client.threads.create();
    const run = await client.runs.create(id, "slow", { input: { seconds: 60 } });
    await running(id, run.run_id);
    await refused(client.threads.updateState(id, { values: { done: ["mine"] } }), 409);
    await refused(client.threads.patchState(id, { mine: true }), 409);
    await client.runs.cancel(id, run.run_id, true);
  });

  it("has metadata that can be patched", async () => {
    const { threadId } = await ranIn("echo", said("hello"));
    const before = await client.threads.getState(threadId);
    assert.equal(await client.threads.patchState(threadId, { reviewed: "yes", run_id: "forged" }), undefined);
    await client.threads.patchState({ configurable: { thread_id: threadId } }, { by: "me" });
    const after = await client.threads.getState(threadId);
    assert.deepEqual(after.metadata, { ...before.metadata, reviewed: "yes", by: "me" });
    assert.deepEqual(after.checkpoint, before.checkpoint);
    assert.equal((await client.threads.getHistory(threadId, { metadata: { reviewed: "yes" } })).length, 1);
    await refused(client.threads.patchState(UNKNOWN, { reviewed: "yes" }), 404);
    const { thread_id: fresh } = await client.threads.create();
    await refused(client.threads.patchState(fresh, { reviewed: "yes" }), 400);
  });
});
