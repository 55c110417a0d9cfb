// What all the pages show and let the user do; which hook is behind it is none of its business.

import { useEffect, useState } from "react";

window.renders = [];

const text = (content) =>
  typeof content === "string" ? content : content.map((block) => block.text ?? "").join("");

/** What the user sees now, and everything the user has seen, for the test to read. */
function useRecord(shown) {
  useEffect(() => {
    window.shown = shown;
    const last = window.renders.at(-1);
    if (JSON.stringify(last) !== JSON.stringify(shown)) window.renders.push(structuredClone(shown));
  });
}

export function plainMessage(message) {
  return { id: message.id, type: message.type ?? message.getType?.(), text: text(message.content) };
}

export function plainValues(values) {
  const { messages, __interrupt__, ...others } = values ?? {};
  return { ...others, messages: messages?.map(plainMessage) };
}

function Message({ message, useForkPoint, onEdit }) {
  const forkPoint = useForkPoint(message);
  return (
    <li data-type={message.type}>
      <span>{message.text}</span>
      {message.type === "human" && <button onClick={() => onEdit({ message, forkPoint })}>Edit {message.text}</button>}
    </li>
  );
}

/**
 * `stream` is what the hook gives, in plain values. `actions` are what the user can do: send(text), enqueue(text),
 * edit(text, message, forkPoint), fork(text, checkpointId), stop(), respond(answers by interrupt id).
 * `useForkPoint` tells where to fork in order to edit a message.
 */
export function ChatView({ stream, actions, useForkPoint, children }) {
  const [draft, setDraft] = useState("");
  const [edited, setEdited] = useState(null);
  const [checkpoint, setCheckpoint] = useState("");
  const [answers, setAnswers] = useState({});
  useRecord(stream);

  const submit = (event) => {
    event.preventDefault();
    if (edited) actions.edit(draft, edited.message, edited.forkPoint);
    else if (checkpoint) actions.fork(draft, checkpoint);
    else actions.send(draft);
    setDraft("");
    setEdited(null);
    setCheckpoint("");
  };

  return (
    <main aria-busy={stream.isLoading}>
      <ol>
        {stream.messages.map((message) => (
          <Message
            key={message.id}
            message={message}
            useForkPoint={useForkPoint}
            onEdit={(edit) => {
              setEdited(edit);
              setDraft(message.text);
            }}
          />
        ))}
      </ol>
      {stream.error && <p role="alert">{stream.error}</p>}
      <form onSubmit={submit}>
        <input aria-label="Message" value={draft} onChange={(event) => setDraft(event.target.value)} />
        <input aria-label="Checkpoint" value={checkpoint} onChange={(event) => setCheckpoint(event.target.value)} />
        <button>Send</button>
        <button type="button" onClick={() => actions.enqueue(draft)}>
          Queue
        </button>
        <button type="button" onClick={() => actions.stop()}>
          Stop
        </button>
      </form>
      {stream.interrupts.length > 0 && (
        <fieldset>
          {stream.interrupts.map(({ id, value }) => (
            <label key={id}>
              {value.question}
              <input
                value={answers[id] ?? ""}
                onChange={(event) => setAnswers({ ...answers, [id]: event.target.value })}
              />
            </label>
          ))}
          <button
            onClick={() => {
              actions.respond(answers);
              setAnswers({});
            }}
          >
            Respond
          </button>
        </fieldset>
      )}
      {children}
    </main>
  );
}
