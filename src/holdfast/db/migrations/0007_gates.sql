-- Human gates: the questions that runs ask, and who answers them. A question is an interrupt as one run asked it: LangGraph
-- may ask again under an id that it has used before. docs/interrupts.md has the life of one.

CREATE TABLE interrupt (
    thread_id      uuid NOT NULL REFERENCES thread ON DELETE CASCADE,
    interrupt_id   text NOT NULL,
    -- The run that asked. Of an answer that came before its question: the run that answers.
    run_id         uuid NOT NULL,
    assistant_id   uuid,
    graph_id       text,
    task_id        text,
    value          jsonb,
    -- {"fields": […]} or {"schema": {…}}, if the question says what an answer must be like.
    form           jsonb,
    -- NULL: the answer was accepted while the run that asks was still under way. It keeps the place for the question.
    asked_at       timestamptz,
    deadline_at    timestamptz,
    -- When something is to be done about it; NULL once it has been done, or when nothing is.
    due_at         timestamptz,
    -- JSON's null is an answer, SQL's is none.
    default_answer jsonb,
    escalation     jsonb,
    escalated_at   timestamptz,
    -- The run that answers. NULL: the question waits.
    answered_by    uuid,
    answered_at    timestamptz,
    defaulted      boolean NOT NULL DEFAULT false,
    -- The last run that ended and left the question waiting, if another one had asked it.
    left_by        uuid,
    -- The run that went on without an answer.
    closed_by      uuid,
    -- When it was over: answered by a run that has ended, or not asked any more.
    settled_at     timestamptz,
    PRIMARY KEY (thread_id, interrupt_id, run_id)
);

CREATE INDEX interrupt_waiting ON interrupt (asked_at)
    WHERE answered_by IS NULL AND settled_at IS NULL AND asked_at IS NOT NULL;
CREATE INDEX interrupt_due ON interrupt (due_at)
    WHERE answered_by IS NULL AND settled_at IS NULL AND due_at IS NOT NULL;
CREATE INDEX interrupt_asked ON interrupt (asked_at DESC);

-- What waits already, as far as it is known. Threads with a run under way are left out: it may be the answer.
INSERT INTO interrupt (thread_id, interrupt_id, run_id, assistant_id, graph_id, task_id, value, asked_at)
SELECT thread.thread_id, asked.item ->> 'id', last.run_id, last.assistant_id, last.graph_id, task.key,
       coalesce(asked.item -> 'value', 'null'), thread.state_updated_at
FROM thread
CROSS JOIN LATERAL jsonb_each(thread.interrupts) AS task
CROSS JOIN LATERAL jsonb_array_elements(CASE WHEN jsonb_typeof(task.value) = 'array' THEN task.value ELSE '[]' END)
    AS asked(item)
CROSS JOIN LATERAL (
    SELECT run_id, assistant_id, graph_id FROM run
    WHERE run.thread_id = thread.thread_id ORDER BY created_at DESC LIMIT 1
) AS last
WHERE thread.interrupts <> '{}'::jsonb AND thread.status <> 'busy' AND thread.hidden_at IS NULL
  AND asked.item ->> 'id' IS NOT NULL
ON CONFLICT DO NOTHING;
