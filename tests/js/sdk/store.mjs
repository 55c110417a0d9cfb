import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { client, refused } from "./sdk.mjs";

const { store } = client;
const shelf = () => ["js", crypto.randomUUID()];

describe("store", { concurrency: true }, () => {
  it("puts, gets and deletes", async () => {
    const place = shelf();
    await store.putItem(place, "one", { colour: "red", nested: { deep: [1, null, "x"] } });
    const item = await store.getItem(place, "one");
    assert.deepEqual(item.namespace, place);
    assert.equal(item.key, "one");
    assert.deepEqual(item.value, { colour: "red", nested: { deep: [1, null, "x"] } });
    assert.ok(Date.parse(item.createdAt) <= Date.parse(item.updatedAt));
    await store.putItem(place, "one", { colour: "blue" }, { ttl: 60, index: false });
    assert.deepEqual((await store.getItem(place, "one", { refreshTtl: true })).value, { colour: "blue" });
    await store.deleteItem(place, "one");
    assert.equal(await store.getItem(place, "one"), null);
    await store.deleteItem(place, "one");
    await refused(store.putItem([], "one", {}), 400);
    await refused(store.putItem([""], "one", {}), 422);
  });

  it("searches", async () => {
    const place = shelf();
    for (const size of [1, 2, 3]) await store.putItem([...place, "sized"], `item${size}`, { size, even: size === 2 });
    const keys = async (options, prefix = place) =>
      (await store.searchItems(prefix, options)).items.map(({ key }) => key).sort();
    assert.deepEqual(await keys(), ["item1", "item2", "item3"]);
    assert.deepEqual(await keys({ filter: { even: true } }), ["item2"]);
    assert.deepEqual(await keys({ filter: { size: { $gte: 2 } } }), ["item2", "item3"]);
    assert.deepEqual(await keys({}, [...place, "nothing"]), []);
    const page = [...(await keys({ limit: 2 })), ...(await keys({ limit: 2, offset: 2, refreshTtl: false }))];
    assert.deepEqual(page.sort(), ["item1", "item2", "item3"]);
    const { items: [item] } = await store.searchItems(place, { filter: { size: 1 } });
    assert.ok(Date.parse(item.createdAt));
    assert.deepEqual(item.namespace, [...place, "sized"]);
  });

  it("lists namespaces", async () => {
    const [root, own] = shelf();
    for (const rest of [["a", "x"], ["a", "y"], ["b", "x"]]) await store.putItem([root, own, ...rest], "k", { v: 1 });
    const list = async (options) =>
      (await store.listNamespaces({ prefix: [root, own], ...options })).namespaces.map((one) => one.slice(2).join(".")).sort();
    assert.deepEqual(await list(), ["a.x", "a.y", "b.x"]);
    assert.deepEqual(await list({ suffix: ["x"] }), ["a.x", "b.x"]);
    assert.deepEqual(await list({ maxDepth: 3 }), ["a", "b"]);
    assert.equal((await list({ limit: 2, offset: 2 })).length, 1);
  });
});
