import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { UNKNOWN, UUID, client, ended, newest, ranIn, refused, running, said, until } from "./sdk.mjs";

const STEPS = ["s1", "s2", "s3"];
const LONG = { input: { seconds: 60 } };

async function fresh() {
  return (await client.threads.create()).thread_id;
}

async function started(threadId, payload = LONG) {
  const run = await client.runs.create(threadId, "slow", payload);
  await running(threadId, run.run_id);
  // In its first step, and not only claimed: there is something to keep or to undo.
  const metadata = { run_id: run.run_id };
  await until(async () => (await client.threads.getHistory(threadId, { metadata })).length, "the run has a checkpoint");
  return run;
}

describe("runs", { concurrency: true }, () => {
  it("are created, found and joined", async () => {
    const threadId = await fresh();
    let noticed;
    const created = await client.runs.create(threadId, "echo", {
      input: said("hello"),
      metadata: { mine: 1 },
      config: { tags: ["tagged"], configurable: { tone: "dry" } },
      streamMode: ["values", "updates"],
      onRunCreated: (run) => (noticed = run),
    });
    assert.deepEqual(noticed, { run_id: created.run_id, thread_id: threadId });
    assert.match(created.run_id, UUID);
    assert.equal(created.thread_id, threadId);
    assert.equal(created.status, "pending");
    assert.equal(created.multitask_strategy, "enqueue");
    assert.equal(created.metadata.mine, 1);
    assert.deepEqual(created.kwargs.input, said("hello"));
    assert.deepEqual(created.kwargs.stream_mode, ["values", "updates"]);
    assert.equal(created.kwargs.config.configurable.tone, "dry");

    const values = await client.runs.join(threadId, created.run_id);
    assert.deepEqual(values.messages.map(({ content }) => content), ["hello", "hello"]);
    const run = await client.runs.get(threadId, created.run_id);
    assert.equal(run.status, "success");
    assert.deepEqual(await client.runs.list(threadId), [run]);
    const thread = await client.threads.get(threadId);
    assert.equal(thread.metadata.graph_id, "echo");
    assert.equal(thread.metadata.assistant_id, run.assistant_id);
    await refused(client.runs.get(threadId, UNKNOWN), 404);
    await refused(client.runs.join(threadId, UNKNOWN), 404);
    await refused(client.runs.create(UNKNOWN, "echo"), 404);
    await refused(client.runs.create(threadId, UNKNOWN), 404);
  });

  it("are listed by state, page by page", async () => {
    const threadId = await fresh();
    for (let count = 0; count < 3; count += 1) await client.runs.wait(threadId, "echo", { input: said(`${count}`) });
    const boom = await client.runs.create(threadId, "boom", { input: {} });
    await ended(threadId, boom.run_id);
    const inputs = async (options) =>
      (await client.runs.list(threadId, options)).map(({ kwargs }) => kwargs.input.messages?.[0].content);
    assert.deepEqual(await inputs({ status: "success" }), ["2", "1", "0"]);
    assert.deepEqual(await inputs({ status: "success", limit: 1, offset: 1 }), ["1"]);
    assert.deepEqual(await client.runs.list(threadId, { status: "error", select: ["run_id", "status"] }), [
      { run_id: boom.run_id, status: "error" },
    ]);
    await refused(client.runs.list(UNKNOWN), 404);
  });

  it("are waited for", async () => {
    const threadId = await fresh();
    const noticed = [];
    const values = await client.runs.wait(threadId, "slow", { input: {}, onRunCreated: (run) => noticed.push(run) });
    assert.deepEqual(values, { done: STEPS });
    assert.equal(noticed[0].thread_id, threadId);
    assert.equal((await client.runs.get(threadId, noticed[0].run_id)).status, "success");
    await assert.rejects(client.runs.wait(threadId, "boom", { input: {} }), { message: "ValueError: boom" });
    const failed = await client.runs.wait(threadId, "boom", { input: {}, raiseError: false });
    assert.deepEqual(failed, { __error__: { error: "ValueError", message: "boom" } });
    const thread = await client.threads.get(threadId);
    assert.equal(thread.status, "error");
    assert.deepEqual(thread.error, { error: "ValueError", message: "boom" });
  });

  it("need no thread", async () => {
    const noticed = [];
    const note = (run) => noticed.push(run);
    assert.deepEqual(await client.runs.wait(null, "slow", { input: {}, onRunCreated: note }), { done: STEPS });
    await until(async () => (await client.threads.search({ ids: [noticed[0].thread_id] })).length === 0, "it is gone");

    const kept = await client.runs.create(null, "slow", { input: {}, onCompletion: "keep", onRunCreated: note });
    assert.equal(noticed[1].run_id, kept.run_id);
    if (newest) {
      assert.deepEqual(await client.runs.join(kept.thread_id, kept.run_id), { done: STEPS });
      assert.deepEqual((await client.threads.get(kept.thread_id)).values, { done: STEPS });
    }
    await refused(client.runs.wait(null, "ask", { command: { resume: "yes" } }), 400);
  });

  it("are created in batches", async () => {
    const marks = ["a", "b"];
    const runs = await client.runs.createBatch(
      marks.map((mark) => ({ assistantId: "slow", input: LONG.input, metadata: { mark } })),
    );
    assert.deepEqual(runs.map(({ metadata }) => metadata.mark), marks);
    assert.equal(new Set(runs.map(({ thread_id: id }) => id)).size, 2);
    for (const run of runs) await client.runs.cancel(run.thread_id, run.run_id, true);
    await refused(client.runs.createBatch([]), 422);
    await refused(client.runs.createBatch([{ assistantId: "echo" }, { assistantId: "nothing" }]), 422);
  });

  it("are cancelled where they stand", async () => {
    const threadId = await fresh();
    const run = await started(threadId);
    assert.equal(await client.runs.cancel(threadId, run.run_id), undefined);
    assert.equal((await ended(threadId, run.run_id)).status, "interrupted");
    assert.equal((await client.threads.get(threadId)).status, "interrupted");
    await refused(client.runs.cancel(threadId, run.run_id), 404);
    await refused(client.runs.cancel(threadId, UNKNOWN), 404);

    const waited = await started(threadId);
    await client.runs.cancel(threadId, waited.run_id, true);
    assert.equal((await client.runs.get(threadId, waited.run_id)).status, "interrupted");
  });

  it("are rolled back", async () => {
    const { threadId, values } = await ranIn("slow", {});
    const history = await client.threads.getHistory(threadId);
    const run = await started(threadId);
    await client.runs.cancel(threadId, run.run_id, true, "rollback");
    await refused(client.runs.get(threadId, run.run_id), 404);
    assert.deepEqual(await client.threads.getHistory(threadId), history);
    const thread = await client.threads.get(threadId);
    assert.equal(thread.status, "idle");
    assert.deepEqual(thread.values, values);
  });

  it("are deleted, with their checkpoints", async () => {
    const { threadId } = await ranIn("slow", {});
    const history = await client.threads.getHistory(threadId);
    await client.runs.wait(threadId, "slow", { input: {} });
    const [last] = await client.runs.list(threadId);
    await client.runs.delete(threadId, last.run_id);
    await refused(client.runs.get(threadId, last.run_id), 404);
    await refused(client.runs.delete(threadId, last.run_id), 404);
    assert.deepEqual(await client.threads.getHistory(threadId), history);
  });

  it("wait, or refuse, or push aside, or undo, what is running", async () => {
    const after = async (multitaskStrategy) => {
      const threadId = await fresh();
      const first = await started(threadId);
      const next = await client.runs.create(threadId, "slow", { input: { seconds: 0 }, multitaskStrategy });
      return { threadId, first, next };
    };
    const enqueued = await after("enqueue");
    assert.equal((await client.runs.get(enqueued.threadId, enqueued.next.run_id)).status, "pending");
    await client.runs.cancel(enqueued.threadId, enqueued.first.run_id);
    assert.equal((await ended(enqueued.threadId, enqueued.next.run_id)).status, "success");

    await refused(after("reject"), 409);

    const pushed = await after("interrupt");
    assert.equal((await ended(pushed.threadId, pushed.next.run_id)).status, "success");
    assert.equal((await client.runs.get(pushed.threadId, pushed.first.run_id)).status, "interrupted");
    assert.notEqual((await client.threads.getHistory(pushed.threadId, { metadata: { run_id: pushed.first.run_id } })).length, 0);

    const undone = await after("rollback");
    assert.equal((await ended(undone.threadId, undone.next.run_id)).status, "success");
    await refused(client.runs.get(undone.threadId, undone.first.run_id), 404);
    assert.deepEqual(await client.threads.getHistory(undone.threadId, { metadata: { run_id: undone.first.run_id } }), []);
  });

  it("do as the request says", async () => {
    const threadId = crypto.randomUUID();
    await refused(client.runs.wait(threadId, "slow", { input: {} }), 404);
    const run = { input: {}, ifNotExists: "create", durability: "exit", metadata: { mine: 1 } };
    assert.deepEqual(await client.runs.wait(threadId, "slow", run), { done: STEPS });
    assert.equal((await client.threads.getHistory(threadId)).length, 1);
    assert.equal((await client.threads.get(threadId)).metadata.mine, 1);

    const context = await client.runs.create(threadId, "slow", { input: {}, context: { tone: "dry" }, checkpointDuring: false });
    assert.deepEqual(context.kwargs.context, { tone: "dry" });
    assert.equal(context.kwargs.durability, "exit");

    // There is no LangSmith here to tell, and no reason to refuse the run.
    await client.runs.wait(threadId, "slow", { input: {}, _langsmithTracer: { projectName: "mine" } });

    const asked = Date.now();
    const late = await client.runs.create(threadId, "slow", { input: {}, afterSeconds: 1 });
    assert.ok(Date.parse(late.created_at) >= asked + 900, `${late.created_at} is not after ${new Date(asked)}`);
    await client.runs.join(threadId, late.run_id);

    const configured = { context: { tone: "dry" }, config: { configurable: { tone: "wet" } } };
    await refused(client.runs.create(threadId, "echo", { input: said("hi"), ...configured }), 400);
    await refused(client.runs.create(threadId, "echo", { input: said("hi"), streamMode: "nothing" }), 422);
    await refused(client.runs.create(threadId, "echo", { input: said("hi"), webhook: "http://127.0.0.1/hook" }), 422);
    await refused(client.runs.create(threadId, "nothing", { input: said("hi") }), 422);
  });
});

// What cancels by state cancels for everybody, so this comes when the others are through.
describe("sets of runs", () => {
  it("are cancelled at once", { skip: !newest && "no such call" }, async () => {
    const [one, two] = [await fresh(), await fresh()];
    const [first, second] = [await started(one), await client.runs.create(one, "slow", LONG)];
    const third = await started(two);
    await client.runs.cancelMany({ threadId: one, runIds: [second.run_id] });
    assert.equal((await ended(one, second.run_id)).status, "interrupted");
    assert.equal((await client.runs.get(one, first.run_id)).status, "running");
    await client.runs.cancelMany({ status: "running" });
    assert.equal((await ended(one, first.run_id)).status, "interrupted");
    assert.equal((await ended(two, third.run_id)).status, "interrupted");
    // The others have left a run that was cancelled with them.
    await until(async () => (await client.threads.search({ status: "busy" })).length === 0, "nothing is under way");
    await refused(client.runs.cancelMany({ status: "all", action: "rollback" }), 404);
    await refused(client.runs.cancelMany({ threadId: one, runIds: [first.run_id], status: "all" }), 422);
  });
});
