// `useStream` of @langchain/langgraph-sdk/react: one SSE stream for each run, as Agent Chat UI uses it.

import { useStream } from "@langchain/langgraph-sdk/react";
import { useState } from "react";
import { ChatView, plainMessage, plainValues } from "./view.jsx";

/** The conversations with the same graph, as Agent Chat UI finds them. */
function Threads({ client, graphId, onThreadId }) {
  const [threads, setThreads] = useState([]);
  const search = async () => setThreads(await client.threads.search({ metadata: { graph_id: graphId }, limit: 100 }));
  return (
    <nav>
      <button onClick={search}>Threads</button>
      {threads.map(({ thread_id, values }) => (
        <button key={thread_id} onClick={() => onThreadId(thread_id)}>
          Open {values?.messages ? plainMessage(values.messages[0]).text : thread_id}
        </button>
      ))}
    </nav>
  );
}

/** What Agent Chat UI asks for with every run. */
const RUN = { streamMode: ["values"], streamSubgraphs: true, streamResumable: true };

export function ClassicChat({ apiUrl, assistantId, threadId, onThreadId }) {
  const stream = useStream({
    apiUrl,
    assistantId,
    threadId,
    onThreadId,
    reconnectOnMount: true,
    fetchStateHistory: true,
  });
  const useForkPoint = (message) => stream.getMessagesMetadata(message)?.firstSeenState?.parent_checkpoint;
  const human = (content) => ({ messages: [{ type: "human", content }] });
  const actions = {
    send: (content) => stream.submit(human(content), RUN),
    edit: (content, message, checkpoint) => stream.submit(human(content), { ...RUN, checkpoint }),
    stop: () => stream.stop(),
    respond: (answers) => stream.submit({}, { command: { resume: Object.values(answers)[0] } }),
  };
  return (
    <ChatView
      actions={actions}
      useForkPoint={useForkPoint}
      stream={{
        threadId,
        isLoading: stream.isLoading,
        isThreadLoading: stream.isThreadLoading,
        error: stream.error ? String(stream.error) : null,
        messages: stream.messages.map(plainMessage),
        values: plainValues(stream.values),
        interrupts: stream.interrupts.map(({ id, value }) => ({ id, value })),
        branches: stream.messages.map((message) => stream.getMessagesMetadata(message)?.branchOptions ?? []),
      }}
    >
      {stream.messages.map(
        (message) =>
          message.type === "ai" && (
            <button
              key={message.id}
              onClick={() => stream.submit(undefined, { ...RUN, checkpoint: useForkPoint(message) })}
            >
              Regenerate {plainMessage(message).text}
            </button>
          ),
      )}
      <Threads client={stream.client} graphId={assistantId} onThreadId={onThreadId} />
      {stream.messages.map((message) =>
        stream.getMessagesMetadata(message)?.branchOptions?.map((branch, index) => (
          <button key={branch} onClick={() => stream.setBranch(branch)}>
            Branch {index + 1}
          </button>
        )),
      )}
    </ChatView>
  );
}
