// The LangGraph agent of AG-UI: what CopilotKit and others are made with.

import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { LangGraphAgent } from "@ag-ui/langgraph";

import { client, randomUUID, shown, url } from "./server.mjs";

const user = (content) => ({ id: randomUUID(), role: "user", content });

const agentFor = (graphId, options = {}) =>
  new LangGraphAgent({ graphId, deploymentUrl: url, langsmithApiKey: "", threadId: randomUUID(), ...options });

/** Everything that the agent says during a run. */
async function run(agent, parameters = {}) {
  const events = [];
  await agent.runAgent({ runId: randomUUID(), ...parameters }, { onEvent: ({ event }) => void events.push(event) });
  return events;
}

const named = (events, type) => events.filter((event) => event.type === type);
const plain = (messages) =>
  messages.map(({ role, content, toolCalls }) => [role, content || (toolCalls ?? []).map((call) => call.function.name).join()]);

/** The messages as the thread has them at the end of a run. The agent itself moves the results of tools to the end. */
const snapshot = (events) => plain(named(events, "MESSAGES_SNAPSHOT").at(-1).messages);

describe("LangGraphAgent", { concurrency: true }, () => {
  it("streams an answer once, token by token", async () => {
    const agent = agentFor("chat");
    agent.addMessage(user("one two"));
    const events = await run(agent);
    assert.equal(events[0].type, "RUN_STARTED");
    assert.equal(events.at(-1).type, "RUN_FINISHED");
    assert.deepEqual(named(events, "RUN_ERROR"), []);
    assert.equal(named(events, "TEXT_MESSAGE_START").length, 1);
    assert.equal(named(events, "TEXT_MESSAGE_END").length, 1);
    assert.deepEqual(named(events, "TEXT_MESSAGE_CONTENT").map(({ delta }) => delta), ["Answer", " 1", " to:", " one", " two"]);
    assert.deepEqual(plain(agent.messages), [["user", "one two"], ["assistant", "Answer 1 to: one two"]]);
  });

  it("goes on in its thread", async () => {
    const agent = agentFor("chat");
    agent.addMessage(user("one"));
    await run(agent);
    agent.addMessage(user("two"));
    await run(agent);
    assert.deepEqual(plain(agent.messages), [
      ["user", "one"],
      ["assistant", "Answer 1 to: one"],
      ["user", "two"],
      ["assistant", "Answer 2 to: two"],
    ]);
    const { values } = await client.threads.getState(agent.threadId);
    assert.deepEqual(shown(values.messages).map(([, text]) => text), plain(agent.messages).map(([, text]) => text));
  });

  it("answers an earlier message again, in a branch", async () => {
    const agent = agentFor("chat");
    agent.addMessage(user("one"));
    await run(agent);
    agent.addMessage(user("two"));
    await run(agent);
    // An answer that the server does not know, in the place of its own: the page has taken that away.
    agent.setMessages([agent.messages[0], { id: randomUUID(), role: "assistant", content: "" }]);
    const events = await run(agent);
    assert.deepEqual(named(events, "RUN_ERROR"), []);
    assert.equal(named(events, "TEXT_MESSAGE_CONTENT").map(({ delta }) => delta).join(""), "Answer 1 to: one");
    const { values } = await client.threads.getState(agent.threadId);
    assert.deepEqual(shown(values.messages), [["human", "one"], ["ai", "Answer 1 to: one"]]);
    const history = await client.threads.getHistory(agent.threadId, { limit: 100 });
    assert.ok(history.some((state) => shown(state.values.messages ?? []).at(-1)?.[1] === "Answer 2 to: two"));
  });

  it("shows the call of a tool with its result", async () => {
    const agent = agentFor("weather");
    agent.addMessage(user("weather in Oslo"));
    const events = await run(agent);
    assert.deepEqual(named(events, "TOOL_CALL_START").map(({ toolCallName }) => toolCallName), ["get_weather"]);
    assert.equal(named(events, "TOOL_CALL_ARGS").map(({ delta }) => delta).join(""), '{"city": "Oslo"}');
    assert.equal(named(events, "TOOL_CALL_END").length, 1);
    assert.deepEqual(named(events, "TOOL_CALL_RESULT").map(({ content }) => content), ["sunny in Oslo"]);
    assert.deepEqual(snapshot(events), [
      ["user", "weather in Oslo"],
      ["assistant", "get_weather"],
      ["tool", "sunny in Oslo"],
      ["assistant", "It is sunny in Oslo."],
    ]);
  });

  it("pauses for approval and resumes", async () => {
    const agent = agentFor("approval", { emitInterruptOutcome: true });
    agent.addMessage(user("hello"));
    const paused = await run(agent);
    const [interrupt] = named(paused, "RUN_FINISHED")[0].outcome.interrupts;
    assert.deepEqual(plain(agent.messages), [["user", "hello"], ["assistant", "send_mail"]]);
    const resume = [{ interruptId: interrupt.id, status: "resolved", payload: { decisions: [{ type: "approve" }] } }];
    const resumed = await run(agent, { resume });
    assert.deepEqual(named(resumed, "RUN_ERROR"), []);
    assert.notEqual(named(resumed, "RUN_FINISHED")[0].outcome?.type, "interrupt");
    assert.deepEqual(named(resumed, "TOOL_CALL_RESULT").map(({ content }) => content), ["sent 'hello' to ann@example.com"]);
    assert.deepEqual(snapshot(resumed), [
      ["user", "hello"],
      ["assistant", "send_mail"],
      ["tool", "sent 'hello' to ann@example.com"],
      ["assistant", "Done: sent 'hello' to ann@example.com"],
    ]);
  });

  it("shows the answers of a supervisor's agents in order", async () => {
    const agent = agentFor("supervisor");
    agent.addMessage(user("weather in Oslo"));
    const events = await run(agent);
    assert.deepEqual(named(events, "RUN_ERROR"), []);
    assert.deepEqual(plain(agent.messages).at(-1), ["assistant", "The expert has answered."]);
    const ids = named(events, "TEXT_MESSAGE_START").map(({ messageId }) => messageId);
    assert.equal(new Set(ids).size, ids.length, "a message has been started twice");
  });

  it("stops a run", async () => {
    const agent = agentFor("counter");
    agent.addMessage(user("count"));
    // With its first event the agent knows the id that the run has on the server.
    let stopped = false;
    await agent.runAgent({ runId: randomUUID() }, {
      onEvent: ({ event }) => {
        if (event.type !== "RAW" || stopped) return;
        stopped = true;
        agent.abortRun();
      },
    });
    const [run] = await client.runs.list(agent.threadId);
    await client.runs.join(agent.threadId, run.run_id);
    assert.equal((await client.runs.get(agent.threadId, run.run_id)).status, "interrupted");
  });
});
