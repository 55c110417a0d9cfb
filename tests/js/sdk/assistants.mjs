import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { UNKNOWN, client, ranIn, refused, said } from "./sdk.mjs";

const ECHO = "046b5dc7-2108-582c-9c6c-31d556d138f0";

describe("assistants", { concurrency: true }, () => {
  it("has one of its own for each graph", async () => {
    const found = await client.assistants.search({ graphId: "echo", metadata: { created_by: "system" } });
    assert.deepEqual(found.map((one) => one.assistant_id), [ECHO]);
    const assistant = await client.assistants.get(ECHO);
    assert.equal(assistant.graph_id, "echo");
    assert.equal(assistant.version, 1);
    assert.deepEqual(assistant, found[0]);
    await refused(client.assistants.get(UNKNOWN), 404);
  });

  it("creates", async () => {
    const given = {
      graphId: "echo",
      assistantId: crypto.randomUUID(),
      name: "One of mine",
      description: "Says it back",
      metadata: { mine: "created" },
      config: { tags: ["tagged"], recursion_limit: 7, configurable: { tone: "dry" } },
    };
    const created = await client.assistants.create(given);
    assert.equal(created.assistant_id, given.assistantId);
    assert.equal(created.name, given.name);
    assert.equal(created.description, given.description);
    assert.deepEqual(created.metadata, given.metadata);
    assert.deepEqual(created.config, given.config);
    assert.deepEqual(created.context, { tone: "dry" });
    await refused(client.assistants.create(given), 409);
    const existing = await client.assistants.create({ ...given, name: "Another", ifExists: "do_nothing" });
    assert.deepEqual(existing, created);
    await refused(client.assistants.create({ graphId: "nothing" }), 404);
    await refused(client.assistants.create({ ...given, assistantId: undefined, context: { tone: "wet" } }), 400);
  });

  it("searches, page by page, and counts", async () => {
    const metadata = { shelf: crypto.randomUUID() };
    for (const name of ["Charlie", "Alpha", "Bravo"]) await client.assistants.create({ graphId: "ask", name, metadata });
    const sorted = { metadata, sortBy: "name", sortOrder: "asc" };
    const names = (found) => found.map(({ name }) => name);
    assert.deepEqual(names(await client.assistants.search(sorted)), ["Alpha", "Bravo", "Charlie"]);
    assert.deepEqual(names(await client.assistants.search({ ...sorted, name: "RAV" })), ["Bravo"]);
    assert.deepEqual(await client.assistants.search({ ...sorted, graphId: "echo" }), []);
    const [picked] = await client.assistants.search({ ...sorted, select: ["name", "graph_id"] });
    assert.deepEqual(picked, { name: "Alpha", graph_id: "ask" });

    const first = await client.assistants.search({ ...sorted, limit: 2, includePagination: true });
    assert.deepEqual(names(first.assistants), ["Alpha", "Bravo"]);
    assert.equal(first.next, "2");
    const last = await client.assistants.search({
      ...sorted,
      limit: 2,
      offset: Number(first.next),
      includePagination: true,
    });
    assert.deepEqual(names(last.assistants), ["Charlie"]);
    assert.equal(last.next, null);

    assert.equal(await client.assistants.count({ metadata }), 3);
    assert.equal(await client.assistants.count({ metadata, name: "alpha" }), 1);
    assert.equal(await client.assistants.count({ metadata, graphId: "echo" }), 0);
  });

  it("keeps versions and goes back to one", async () => {
    const { assistant_id: id } = await client.assistants.create({
      graphId: "echo",
      name: "First",
      context: { tone: "dry" },
      metadata: { kept: 1 },
    });
    const second = await client.assistants.update(id, {
      name: "Second",
      description: "Changed",
      context: { tone: "wet" },
      metadata: { added: 2 },
    });
    assert.equal(second.version, 2);
    assert.deepEqual(second.metadata, { kept: 1, added: 2 });
    const versions = await client.assistants.getVersions(id);
    assert.deepEqual(versions.map(({ version, name }) => [version, name]), [[2, "Second"], [1, "First"]]);
    assert.deepEqual((await client.assistants.getVersions(id, { limit: 1, offset: 1 })).map(({ version }) => version), [1]);
    assert.equal((await client.assistants.getVersions(id, { metadata: { added: 2 } })).length, 1);
    const back = await client.assistants.setLatest(id, 1);
    assert.equal(back.version, 1);
    assert.equal(back.name, "First");
    assert.deepEqual(back.context, { tone: "dry" });
    assert.deepEqual(await client.assistants.get(id), back);
    await refused(client.assistants.setLatest(id, 9), 404);
    assert.equal((await client.assistants.update(id, { name: "Third" })).version, 3);
  });

  it("deletes, with its threads when asked to", async () => {
    const make = async () => (await client.assistants.create({ graphId: "echo" })).assistant_id;
    const [alone, whole] = [await make(), await make()];
    const kept = await ranIn(alone, said("stays"));
    const gone = await ranIn(whole, said("goes"));
    await client.assistants.delete(alone);
    await client.assistants.delete(whole, { deleteThreads: true });
    await refused(client.assistants.get(alone), 404);
    await refused(client.assistants.delete(alone), 404);
    assert.equal((await client.threads.get(kept.threadId)).status, "idle");
    await refused(client.threads.get(gone.threadId), 404);
  });

  it("draws its graph, with what is inside when asked to", async () => {
    const plain = await client.assistants.getGraph("sub");
    assert.deepEqual(plain.nodes.map(({ id }) => id), ["__start__", "child", "write", "__end__"]);
    assert.ok(plain.edges.some(({ source, target }) => source === "child" && target === "write"));
    for (const xray of [true, 1]) {
      const inside = await client.assistants.getGraph("sub", { xray });
      assert.ok(inside.nodes.some(({ id }) => id === "child:look"), JSON.stringify(inside.nodes));
    }
  });

  it("describes its schemas and its subgraphs", async () => {
    const [{ assistant_id: id }] = await client.assistants.search({ graphId: "sub" });
    const schemas = await client.assistants.getSchemas(id);
    assert.equal(schemas.graph_id, "sub");
    assert.deepEqual(Object.keys(schemas.input_schema.properties).sort(), ["notes", "text", "topic"]);
    for (const kind of ["output_schema", "state_schema", "config_schema", "context_schema"]) assert.ok(kind in schemas);

    const subgraphs = await client.assistants.getSubgraphs(id);
    assert.deepEqual(Object.keys(subgraphs), ["child"]);
    assert.deepEqual(Object.keys(subgraphs.child.output_schema.properties), ["notes"]);
    assert.deepEqual(await client.assistants.getSubgraphs(id, { namespace: "child", recurse: true }), subgraphs);
    assert.deepEqual(await client.assistants.getSubgraphs(id, { namespace: "nothing" }), {});
  });
});
