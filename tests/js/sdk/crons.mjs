import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { UNKNOWN, client, newest, refused, said, until } from "./sdk.mjs";

const YEARLY = "0 0 1 1 *";

describe("crons", { concurrency: true }, () => {
  it("are created, found, changed and deleted", async () => {
    const { thread_id: threadId } = await client.threads.create();
    const mine = crypto.randomUUID();
    const cron = await client.crons.createForThread(threadId, "echo", {
      schedule: YEARLY,
      input: said("on a thread"),
      metadata: { mine },
      ...(newest ? { timezone: "Europe/Berlin", endTime: "2999-01-01T00:00:00Z" } : {}),
    });
    assert.equal(cron.thread_id, threadId);
    assert.equal(cron.schedule, YEARLY);
    assert.equal(cron.enabled, true);
    assert.deepEqual(cron.payload.input, said("on a thread"));
    if (newest) {
      assert.equal(cron.timezone, "Europe/Berlin");
      assert.match(cron.next_run_date, /-12-31T23:00:00/);
    }
    const stateless = await client.crons.create("echo", {
      schedule: YEARLY,
      input: said("on its own"),
      enabled: false,
      onRunCompleted: "keep",
      metadata: { mine },
    });
    assert.equal(stateless.thread_id, null);
    assert.equal(stateless.enabled, false);
    assert.equal(stateless.on_run_completed, "keep");

    const ids = async (query) => (await client.crons.search(query)).map(({ cron_id: id }) => id);
    assert.deepEqual(await ids({ threadId }), [cron.cron_id]);
    assert.deepEqual(await ids({ threadId, enabled: false }), []);
    assert.ok((await ids({ assistantId: cron.assistant_id, enabled: false, limit: 1000 })).includes(stateless.cron_id));
    assert.equal(await client.crons.count({ threadId }), 1);
    assert.ok((await client.crons.count({ assistantId: cron.assistant_id })) >= 2);
    if (newest) {
      const sorted = { metadata: { mine }, sortBy: "created_at", sortOrder: "asc" };
      assert.deepEqual(await ids(sorted), [cron.cron_id, stateless.cron_id]);
      assert.deepEqual(await ids({ ...sorted, limit: 1, offset: 1 }), [stateless.cron_id]);
      assert.equal(await client.crons.count({ metadata: { mine } }), 2);
    }
    const [picked] = await client.crons.search({ threadId, select: ["cron_id", "schedule"] });
    assert.deepEqual(picked, { cron_id: cron.cron_id, schedule: YEARLY });

    const changed = await client.crons.update(cron.cron_id, { schedule: "30 6 * * *", input: said("earlier"), enabled: false });
    assert.equal(changed.schedule, "30 6 * * *");
    assert.notEqual(changed.next_run_date, cron.next_run_date);
    assert.deepEqual(changed.payload.input, said("earlier"));
    assert.equal((await client.crons.update(cron.cron_id, { endTime: null })).end_time, null);
    await refused(client.crons.update(cron.cron_id, {}), 400);

    await client.crons.delete(cron.cron_id);
    await client.crons.delete(stateless.cron_id);
    assert.deepEqual(await ids({ threadId }), []);
    await refused(client.crons.delete(cron.cron_id), 404);
  });

  it("are refused when they make no sense", async () => {
    await refused(client.crons.create("echo", { schedule: "whenever" }), 422);
    await refused(client.crons.create(UNKNOWN, { schedule: YEARLY }), 404);
    await refused(client.crons.createForThread(UNKNOWN, "echo", { schedule: YEARLY }), 404);
    if (newest) await refused(client.crons.create("echo", { schedule: YEARLY, timezone: "Nowhere/None" }), 422);
  });

  it("fire", async () => {
    const { thread_id: threadId } = await client.threads.create();
    const cron = await client.crons.createForThread(threadId, "echo", { schedule: "* * * * * *", input: said("tick") });
    const [run] = await until(async () => {
      const runs = await client.runs.list(threadId, { status: "success" });
      return runs.length ? runs : null;
    }, "a run of the cron ends");
    await client.crons.delete(cron.cron_id);
    assert.deepEqual(run.kwargs.input, said("tick"));
    assert.equal(run.kwargs.config.configurable.cron_id, cron.cron_id);
  });
});
