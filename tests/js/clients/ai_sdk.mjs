// The AI SDK's adapter for LangGraph deployments, as useChat calls it: messages in, chunks for the page out.

import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { LangSmithDeploymentTransport } from "@ai-sdk/langchain";
import { readUIMessageStream } from "ai";

import { randomUUID, url } from "./server.mjs";

const user = (text) => ({ id: randomUUID(), role: "user", parts: [{ type: "text", text }] });

async function send(graphId, messages) {
  const transport = new LangSmithDeploymentTransport({ url, apiKey: null, graphId });
  const stream = await transport.sendMessages({
    trigger: "submit-message",
    chatId: randomUUID(),
    messageId: undefined,
    abortSignal: undefined,
    messages,
  });
  const [counted, read] = stream.tee();
  const chunks = [];
  for await (const chunk of counted) chunks.push(chunk);
  let message;
  for await (message of readUIMessageStream({ stream: read }));
  return { chunks, message };
}

const texts = (message) => message.parts.filter(({ type }) => type === "text").map(({ text }) => text);

describe("LangSmithDeploymentTransport", { concurrency: true }, () => {
  it("shows an answer once, token by token", async () => {
    const { chunks, message } = await send("chat", [user("one two three")]);
    assert.deepEqual(texts(message), ["Answer 1 to: one two three"]);
    const deltas = chunks.filter(({ type }) => type === "text-delta").map(({ delta }) => delta);
    assert.deepEqual(deltas, ["Answer", " 1", " to:", " one", " two", " three"]);
    assert.equal(chunks.at(-1).type, "finish");
    assert.ok(!chunks.some(({ type }) => type === "error"));
  });

  it("sends the conversation so far", async () => {
    const first = [user("one")];
    const { message } = await send("chat", first);
    const second = await send("chat", [...first, { ...message, id: randomUUID() }, user("two")]);
    assert.deepEqual(texts(second.message), ["Answer 2 to: two"]);
  });

  it("shows the call of a tool with its result", async () => {
    const { chunks, message } = await send("weather", [user("weather in Oslo")]);
    const [call, ...more] = message.parts.filter(({ toolCallId }) => toolCallId !== undefined);
    assert.deepEqual(more, []);
    assert.deepEqual([call.toolName ?? call.type, call.input, call.state], ["get_weather", { city: "Oslo" }, "output-available"]);
    assert.match(JSON.stringify(call.output), /sunny in Oslo/);
    assert.deepEqual(texts(message), ["It is sunny in Oslo."]);
    for (const once of ["tool-input-start", "tool-output-available"])
      assert.equal(chunks.filter(({ type }) => type === once).length, 1, once);
  });
});
