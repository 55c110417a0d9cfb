// `useStream` of @langchain/react: the thread-centric protocol, by SSE or WebSocket.

import { useMessageMetadata, useMessages, useStream, useSubmissionQueue } from "@langchain/react";
import { useState } from "react";
import { ChatView, plainMessage, plainValues } from "./view.jsx";

function Subgraph({ stream, subgraph }) {
  const messages = useMessages(stream, subgraph).map(plainMessage);
  return (
    <section aria-label={subgraph.nodeName}>
      {messages.map((message) => (
        <p key={message.id}>{message.text}</p>
      ))}
    </section>
  );
}

export function CurrentChat({ apiUrl, assistantId, transport, threadId, onThreadId }) {
  const [completed, setCompleted] = useState([]);
  const stream = useStream({
    apiUrl,
    assistantId,
    transport,
    threadId,
    onThreadId,
    onCompleted: (run) => setCompleted((earlier) => [...earlier, run.reason]),
  });
  const queue = useSubmissionQueue(stream);
  const useForkPoint = (message) => useMessageMetadata(stream, message.id)?.parentCheckpointId;

  const human = (content, id) => ({ messages: [{ type: "human", content, ...(id && { id }) }] });
  const actions = {
    send: (content) => stream.submit(human(content)),
    enqueue: (content) => stream.submit(human(content), { multitaskStrategy: "enqueue" }),
    edit: (content, { id }, forkFrom) => stream.submit(human(content, id), { forkFrom }),
    fork: (content, checkpointId) => stream.submit(human(content), { forkFrom: checkpointId }),
    stop: () => stream.stop(),
    respond: (answers) => {
      const [[interruptId, answer], ...others] = Object.entries(answers);
      return others.length ? stream.respondAll(answers) : stream.respond(answer, { interruptId });
    },
  };
  return (
    <ChatView
      actions={actions}
      useForkPoint={useForkPoint}
      stream={{
        threadId: stream.threadId,
        isLoading: stream.isLoading,
        isThreadLoading: stream.isThreadLoading,
        error: stream.error ? String(stream.error) : null,
        messages: stream.messages.map(plainMessage),
        values: plainValues(stream.values),
        interrupts: stream.interrupts.map(({ id, value }) => ({ id, value })),
        queue: queue.entries.map(({ values }) => values.messages[0].content),
        toolCalls: stream.toolCalls.map(({ name, input, output, status }) => ({ name, input, output, status })),
        subgraphs: [...stream.subgraphs.values()].map(({ nodeName, status }) => ({ nodeName, status })),
        completed,
      }}
    >
      {[...stream.subgraphs.values()].map((subgraph) => (
        <Subgraph key={subgraph.id} stream={stream} subgraph={subgraph} />
      ))}
    </ChatView>
  );
}
