// RemoteGraph of JavaScript's LangGraph: alone, and as a step of a graph in this process.

import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { Annotation, Command, MemorySaver, MessagesAnnotation, Send, START, StateGraph } from "@langchain/langgraph";
import { RemoteGraph } from "@langchain/langgraph/remote";

import { client, collect, human, newThread, shown, url } from "./server.mjs";

const remote = (graphId) => new RemoteGraph({ graphId, url, apiKey: null });
const on = (threadId) => ({ configurable: { thread_id: threadId } });

/** Waits until the newest run of a thread has ended. */
async function joinNewest(threadId) {
  const [newest] = await client.runs.list(threadId);
  await client.runs.join(threadId, newest.run_id);
}

/** The interrupts with which a call on a thread ends. RemoteGraph throws as soon as it sees a question, a moment before
 * the run has ended: what needs a thread without an unfinished run, such as an update of the state, would be refused. */
async function asked(threadId, call) {
  try {
    await call;
  } catch (error) {
    if (error.interrupts === undefined) throw error;
    await joinNewest(threadId);
    return error.interrupts;
  }
  assert.fail("the call has not been interrupted");
}

describe("RemoteGraph", { concurrency: true }, () => {
  it("invokes a graph", async () => {
    const threadId = await newThread();
    const { messages } = await remote("chat").invoke(human("one"), on(threadId));
    assert.deepEqual(shown(messages), [["human", "one"], ["ai", "Answer 1 to: one"]]);
    const again = await remote("chat").invoke(human("two"), on(threadId));
    assert.deepEqual(shown(again.messages).slice(2), [["human", "two"], ["ai", "Answer 2 to: two"]]);
  });

  it("invokes a graph without a thread", async () => {
    const { messages } = await remote("chat").invoke(human("one"));
    assert.deepEqual(shown(messages), [["human", "one"], ["ai", "Answer 1 to: one"]]);
  });

  it("streams each token once", async () => {
    const chunks = await collect(
      await remote("chat").stream(human("one two three"), { ...on(await newThread()), streamMode: ["messages", "values"] }),
    );
    const tokens = chunks.filter(([mode]) => mode === "messages").map(([, [chunk]]) => chunk);
    assert.equal(tokens.filter(({ type }) => type === "AIMessageChunk").map(({ content }) => content).join(""), "Answer 1 to: one two three");
    assert.deepEqual(shown(chunks.filter(([mode]) => mode === "values").at(-1)[1].messages).at(-1), ["ai", "Answer 1 to: one two three"]);
  });

  it("pauses at an interrupt and resumes with a Command", async () => {
    const threadId = await newThread();
    const [question] = await asked(threadId, remote("ask").invoke({ question: "Deploy?" }, on(threadId)));
    assert.deepEqual(question.value, { question: "Deploy?" });
    const state = await remote("ask").getState(on(threadId));
    assert.deepEqual(state.next, ["question"]);
    assert.deepEqual(state.tasks[0].interrupts.map(({ value }) => value), [{ question: "Deploy?" }]);
    const answered = await remote("ask").invoke(new Command({ resume: "yes" }), on(threadId));
    assert.equal(answered.answer, "yes");
    assert.deepEqual(shown(answered.messages), [["ai", "The answer was yes"]]);
    assert.equal((await client.threads.get(threadId)).status, "idle");
  });

  it("approves a tool of an agent", async () => {
    const threadId = await newThread();
    const [question] = await asked(threadId, remote("approval").invoke(human("hello"), on(threadId)));
    assert.deepEqual(question.value.action_requests[0].args, { to: "ann@example.com", text: "hello" });
    const answered = await remote("approval").invoke(new Command({ resume: { decisions: [{ type: "approve" }] } }), on(threadId));
    assert.deepEqual(shown(answered.messages), [
      ["human", "hello"],
      ["ai", "send_mail"],
      ["tool", "sent 'hello' to ann@example.com"],
      ["ai", "Done: sent 'hello' to ann@example.com"],
    ]);
  });

  it("updates and goes to a node with a Command", async () => {
    const threadId = await newThread();
    await asked(threadId, remote("ask").invoke({ question: "Deploy?" }, on(threadId)));
    await remote("ask").updateState(on(threadId), { answer: "of course" }, "question");
    const moved = await remote("ask").invoke(new Command({ goto: new Send("conclude", { answer: "sent" }) }), on(threadId));
    // The step that was due, and the one that the Send is for, with the input of the Send.
    assert.deepEqual(shown(moved.messages).map(([, text]) => text).sort(), ["The answer was of course", "The answer was sent"]);
  });

  it("reads and updates the state, and goes back in history", async () => {
    const threadId = await newThread();
    await remote("chat").invoke(human("one"), on(threadId));
    const history = await collect(remote("chat").getStateHistory(on(threadId)));
    assert.deepEqual(history.map(({ metadata }) => metadata.step), [1, 0, -1]);
    const then = await remote("chat").getState(history[1].config);
    assert.deepEqual([then.next, then.config.configurable.checkpoint_id], [["model"], history[1].config.configurable.checkpoint_id]);
    const config = await remote("chat").updateState(on(threadId), { messages: [{ role: "ai", content: "mine" }] }, "model");
    const head = await remote("chat").getState(on(threadId));
    assert.equal(head.config.configurable.checkpoint_id, config.configurable.checkpoint_id);
    assert.deepEqual(shown(head.values.messages).at(-1), ["ai", "mine"]);
  });

  it("draws the graph", async () => {
    const drawn = await remote("ask").getGraphAsync();
    assert.deepEqual(Object.keys(drawn.nodes), ["__start__", "question", "conclude", "__end__"]);
  });

  it("is a step of another graph", async () => {
    const parent = new StateGraph(MessagesAnnotation).addNode("remote", remote("chat")).addEdge(START, "remote").compile();
    const { messages } = await parent.invoke(human("one"));
    assert.deepEqual(messages.map((message) => message.content), ["one", "Answer 1 to: one"]);
    const streamed = await collect(await parent.stream(human("two"), { streamMode: "values", subgraphs: true }));
    assert.ok(streamed.some(([namespace]) => namespace.length > 0), "nothing of the remote graph has come through");
  });

  it("asks through the graph that it is a step of", async () => {
    const State = Annotation.Root({ question: Annotation(), answer: Annotation() });
    const parent = new StateGraph(State).addNode("remote", remote("ask")).addEdge(START, "remote");
    const graph = parent.compile({ checkpointer: new MemorySaver() });
    const config = on(await newThread());
    const paused = await graph.invoke({ question: "Deploy?" }, config);
    assert.deepEqual(paused.__interrupt__.map(({ value }) => value), [{ question: "Deploy?" }]);
    assert.deepEqual((await graph.getState(config)).next, ["remote"]);
  });

  it("streams the events of version three, and resumes there", async () => {
    const threadId = await newThread();
    /** The events of a run. On a thread that has ended a run before, the SDK stops at the replayed end of that one if
     * the new run is slow to begin, so the run is joined. `abort` closes a connection that would keep this process. */
    const events = async (input) => {
      const run = await remote("ask").streamEvents(input, { ...on(threadId), version: "v3" });
      const seen = await collect(run);
      await joinNewest(threadId);
      run.abort();
      return seen.map(({ method }) => method);
    };
    assert.ok((await events({ question: "Deploy?" })).includes("input.requested"));
    await events(new Command({ resume: "yes" }));
    assert.equal((await client.threads.getState(threadId)).values.answer, "yes");
  });
});
