// Chromium, driven by commands that come in as lines of JSON: {"method": ..., "page": ..., "arguments": {...}}.
// Each is answered by one line: {"result": ...} or {"error": ...}. The end of the input ends the browser.

import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [executablePath] = process.argv.slice(2);
const PATIENCE = 60_000;

const browser = await chromium.launch({
  executablePath,
  args: [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    // A name that is not of this machine and leads to it, as DNS rebinding has it.
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
  ],
});

const pages = new Map();

// A request that the page itself gave up, by closing a stream or by being reloaded, is no problem.
const givenUp = (request) => request.failure()?.errorText === "net::ERR_ABORTED";

const methods = {
  async open({ url }) {
    const context = await browser.newContext();
    const page = await context.newPage();
    page.setDefaultTimeout(PATIENCE);
    const problems = [];
    page.on("pageerror", (error) => problems.push(`uncaught: ${error.stack}`));
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) problems.push(`console ${message.type()}: ${message.text()}`);
    });
    page.on("requestfailed", (request) => {
      if (!givenUp(request)) problems.push(`${request.method()} ${request.url()}: ${request.failure()?.errorText}`);
    });
    page.on("response", (response) => {
      if (response.status() >= 400) {
        problems.push(`${response.request().method()} ${response.url()}: ${response.status()}`);
      }
    });
    const requests = [];
    page.on("request", (request) => requests.push(`${request.method()} ${new URL(request.url()).pathname}`));
    page.on("websocket", (socket) => {
      requests.push(`WEBSOCKET ${new URL(socket.url()).pathname}`);
      socket.on("framesent", ({ payload }) => requests.push(`sent ${payload.slice(0, 300)}`));
      socket.on("framereceived", ({ payload }) => requests.push(`received ${payload.slice(0, 200)}`));
    });
    const id = pages.size;
    pages.set(id, { page, context, problems, requests });
    await page.goto(url);
    return id;
  },
  async wait({ page }, { condition }) {
    await page.waitForFunction(condition, null, { timeout: PATIENCE });
  },
  async evaluate({ page }, { expression }) {
    return await page.evaluate(expression);
  },
  async fill({ page }, { label, text }) {
    await page.getByLabel(label).fill(text);
  },
  async click({ page }, { name }) {
    await page.getByRole("button", { name, exact: true }).click();
  },
  async reload({ page }) {
    await page.reload();
  },
  async problems({ problems }) {
    return problems;
  },
  async requests({ requests }) {
    return requests;
  },
  async close({ context }) {
    await context.close();
  },
};

console.log(JSON.stringify({ result: browser.version() }));
for await (const line of createInterface({ input: process.stdin })) {
  const { method, page, arguments: given } = JSON.parse(line);
  let answer;
  try {
    const result = method === "open" ? await methods.open(given) : await methods[method](pages.get(page), given);
    answer = { result: result ?? null };
  } catch (error) {
    answer = { error: error.message };
  }
  console.log(JSON.stringify(answer));
}
await browser.close();
