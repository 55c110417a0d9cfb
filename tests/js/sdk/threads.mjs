import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { UNKNOWN, UUID, client, newest, ranIn, refused, said, url } from "./sdk.mjs";

describe("threads", { concurrency: true }, () => {
  it("creates and gets", async () => {
    const created = await client.threads.create();
    assert.match(created.thread_id, UUID);
    assert.equal(created.status, "idle");
    assert.deepEqual(created.metadata, {});
    assert.deepEqual(created.interrupts, {});
    assert.deepEqual(await client.threads.get(created.thread_id), created);
    await refused(client.threads.get(UNKNOWN), 404);
  });

  it("creates with an id and metadata, once", async () => {
    const given = { threadId: crypto.randomUUID(), metadata: { owner: "me" }, graphId: "echo" };
    const created = await client.threads.create(given);
    assert.equal(created.thread_id, given.threadId);
    assert.deepEqual(created.metadata, { owner: "me", graph_id: "echo" });
    await refused(client.threads.create(given), 409);
    const existing = await client.threads.create({ ...given, metadata: { owner: "you" }, ifExists: "do_nothing" });
    assert.deepEqual(existing.metadata, created.metadata);
  });

  it("creates with a history", async () => {
    const { thread_id: id } = await client.threads.create({
      graphId: "slow",
      supersteps: [
        { updates: [{ values: { seconds: 0 }, asNode: "__input__" }] },
        { updates: [{ values: { done: ["s1"] }, asNode: "s1" }] },
        { updates: [{ command: { update: { done: ["s2"] } }, asNode: "s2" }] },
      ],
    });
    const state = await client.threads.getState(id);
    assert.deepEqual(state.values.done, ["s1", "s2"]);
    assert.deepEqual(state.next, ["s3"]);
    assert.equal((await client.threads.getHistory(id)).length, 3);
    assert.deepEqual((await client.runs.wait(id, "slow", { input: null })).done, ["s1", "s2", "s3"]);
  });

  it("gives threads a time to live", async () => {
    // 2.0.0 cannot ask for it.
    const kept = async (id) => {
      if (newest) return (await client.threads.get(id, { include: ["ttl"] })).ttl;
      return (await (await fetch(`${url}/threads/${id}?include=ttl`)).json()).ttl;
    };
    const { thread_id: short } = await client.threads.create({ ttl: 0.5 });
    const { thread_id: long } = await client.threads.create({ ttl: { ttl: 60, strategy: "keep_latest" } });
    assert.deepEqual(await kept(short).then(({ strategy, ttl_minutes: minutes }) => [strategy, minutes]), ["delete", 0.5]);
    assert.equal((await kept(long)).strategy, "keep_latest");
    await client.threads.update(long, { ttl: 90 });
    const { ttl_minutes: minutes, expires_at: expiry } = await kept(long);
    assert.equal(minutes, 90);
    assert.ok(Date.parse(expiry) > Date.now() + 80 * 60_000);
  });

  it("searches and counts", async () => {
    const metadata = { shelf: crypto.randomUUID() };
    const ids = [];
    for (const place of [1, 2, 3]) {
      const thread = await client.threads.create({ metadata: { ...metadata, place } });
      ids.push(thread.thread_id);
    }
    await client.runs.wait(ids[0], "echo", { input: said("found") });
    await client.runs.wait(ids[1], "ask", { input: { question: "well?" } });

    const found = async (query) => (await client.threads.search({ metadata, ...query })).map((one) => one.thread_id);
    assert.deepEqual(await found({ sortBy: "created_at", sortOrder: "asc" }), ids);
    assert.deepEqual(await found({ sortBy: "created_at", limit: 1, offset: 1 }), [ids[1]]);
    assert.deepEqual(await found({ status: "interrupted" }), [ids[1]]);
    assert.deepEqual(await found({ values: { question: "well?" } }), [ids[1]]);
    assert.deepEqual(await found({ metadata: { ...metadata, place: 3 } }), [ids[2]]);
    assert.deepEqual(await found({ ids: [ids[2], UNKNOWN] }), [ids[2]]);
    const [picked] = await client.threads.search({ ids: [ids[1]], select: ["thread_id", "interrupts"] });
    assert.deepEqual(Object.keys(picked).sort(), ["interrupts", "thread_id"]);
    assert.deepEqual(Object.values(picked.interrupts)[0][0].value, { question: "well?" });
    if (newest) {
      const [one] = await client.threads.search({ ids: [ids[0]], extract: { last: "values.messages[-1].content" } });
      assert.deepEqual(one.extracted, { last: "found" });
    }

    assert.equal(await client.threads.count({ metadata }), 3);
    assert.equal(await client.threads.count({ metadata, status: "idle" }), 2);
    assert.equal(await client.threads.count({ metadata, values: { question: "well?" } }), 1);
  });

  it("copies, with the history", async () => {
    const { threadId } = await ranIn("echo", said("again"));
    const copy = await client.threads.copy(threadId);
    assert.notEqual(copy.thread_id, threadId);
    const [theirs, ours] = [await client.threads.getHistory(copy.thread_id), await client.threads.getHistory(threadId)];
    assert.deepEqual(theirs.map(({ values }) => values), ours.map(({ values }) => values));
    await client.runs.wait(copy.thread_id, "echo", { input: said("more") });
    assert.equal((await client.threads.getState(threadId)).values.messages.length, 2);
    assert.equal((await client.threads.getState(copy.thread_id)).values.messages.length, 4);
  });

  it("updates metadata", async () => {
    const { thread_id: id } = await client.threads.create({ metadata: { kept: 1, changed: 1 } });
    const updated = await client.threads.update(id, { metadata: { changed: 2, added: 2 } });
    assert.deepEqual(updated.metadata, { kept: 1, changed: 2, added: 2 });
    if (newest) assert.equal(await client.threads.update(id, { metadata: { added: 3 }, returnMinimal: true }), undefined);
    const expected = { kept: 1, changed: 2, added: newest ? 3 : 2 };
    assert.deepEqual((await client.threads.get(id)).metadata, expected);
    await refused(client.threads.update(UNKNOWN, { metadata: {} }), 404);
  });

  it("deletes", async () => {
    const { threadId } = await ranIn("echo", said("bye"));
    await client.threads.delete(threadId);
    await refused(client.threads.get(threadId), 404);
    await refused(client.threads.getState(threadId), 404);
    await refused(client.threads.delete(threadId), 404);
  });

  it("prunes", { skip: !newest && "no such call" }, async () => {
    const [gone, thinned] = [await ranIn("echo", said("a")), await ranIn("echo", said("b"))];
    assert.deepEqual(await client.threads.prune([gone.threadId, UNKNOWN]), { pruned_count: 1 });
    await refused(client.threads.get(gone.threadId), 404);
    assert.deepEqual(await client.threads.prune([thinned.threadId], { strategy: "keep_latest" }), { pruned_count: 1 });
    assert.equal((await client.threads.getHistory(thinned.threadId)).length, 1);
    assert.equal((await client.threads.getState(thinned.threadId)).values.messages.length, 2);
  });
});
