// What is behind the hook of @langchain/react, in the newer version of @langchain/langgraph-sdk: it can queue messages
// on the server, which the hook itself has no option for yet.

import { Client } from "@langchain/langgraph-sdk";
import { StreamController } from "@langchain/langgraph-sdk/stream";
import { useEffect, useState, useSyncExternalStore } from "react";
import { ChatView, plainMessage, plainValues } from "./view.jsx";

export function ControllerChat({ apiUrl, assistantId, transport, threadId, onThreadId }) {
  const [controller] = useState(
    () =>
      new StreamController({
        client: new Client({ apiUrl }),
        assistantId,
        transport,
        threadId,
        onThreadId,
        queue: "server",
      }),
  );
  useEffect(() => controller.activate(), [controller]);
  const root = useSyncExternalStore(controller.rootStore.subscribe, controller.rootStore.getSnapshot);
  const queue = useSyncExternalStore(controller.queueStore.subscribe, controller.queueStore.getSnapshot);
  const human = (content) => ({ messages: [{ type: "human", content }] });
  const actions = {
    send: (content) => controller.submit(human(content)),
    enqueue: (content) => controller.submit(human(content), { multitaskStrategy: "enqueue" }),
    stop: () => controller.stop(),
  };
  return (
    <ChatView
      actions={actions}
      useForkPoint={() => undefined}
      stream={{
        threadId: root.threadId,
        isLoading: root.isLoading,
        isThreadLoading: root.isThreadLoading,
        error: root.error ? String(root.error) : null,
        messages: root.messages.map(plainMessage),
        values: plainValues(root.values),
        interrupts: root.interrupts.map(({ id, value }) => ({ id, value })),
        queue: queue.map(({ runId, values }) => ({ runId, text: values.messages[0].content })),
      }}
    />
  );
}
