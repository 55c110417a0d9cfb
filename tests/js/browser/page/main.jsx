// A chat page, as somebody would write it with the hook that the address names:
//
//   ?hook=current|classic|controller  &api=URL  &graph=NAME  [&transport=websocket]  [&thread=ID]
//
// The thread's id is put into the address, so that a reload comes back to it.

import { StrictMode, useCallback, useState } from "react";
import { createRoot } from "react-dom/client";
import { ClassicChat } from "./classic.jsx";
import { ControllerChat } from "./controller.jsx";
import { CurrentChat } from "./current.jsx";

const CHATS = { current: CurrentChat, classic: ClassicChat, controller: ControllerChat };
const address = new URLSearchParams(window.location.search);

function Page() {
  const [threadId, setThreadId] = useState(address.get("thread"));
  const remember = useCallback((id) => {
    address.set("thread", id);
    window.history.replaceState(null, "", `?${address}`);
    setThreadId(id);
  }, []);
  const Chat = CHATS[address.get("hook")];
  return (
    <Chat
      apiUrl={address.get("api")}
      assistantId={address.get("graph")}
      transport={address.get("transport") ?? undefined}
      threadId={threadId}
      onThreadId={remember}
    />
  );
}

createRoot(document.getElementById("root")).render(
  <StrictMode>
    <Page />
  </StrictMode>,
);
