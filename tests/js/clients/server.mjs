// The server under test, and what the scripts have in common.

import { randomUUID } from "node:crypto";

import { Client } from "@langchain/langgraph-sdk";

export const url = process.env.HOLDFAST_URL;

/** For looking at what the client under test has caused. Its own retries would hide a server that fails now and then. */
export const client = new Client({ apiUrl: url, apiKey: null, callerOptions: { maxRetries: 0 } });

export const newThread = async () => (await client.threads.create()).thread_id;

export const human = (content) => ({ messages: [{ role: "user", content }] });

/** Type and text of each message of the API; the names of the tools for one that only calls tools. */
export const shown = (messages) =>
  messages.map(({ type, content, tool_calls }) => [type, content || (tool_calls ?? []).map(({ name }) => name).join()]);

export const collect = async (stream) => {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
};

export { randomUUID };
