// What the page asks of the gateway: what its API answers anybody. Nothing is stored.

import { $ } from "./words.js";

const TIMED_TOKENS = 64;

/** What the page knows of the server, and of who asks. */
export const known = { key: "", model: "default", policies: ["kv-compress"] };

export async function call(path, body) {
  const headers = known.key ? { authorization: `Bearer ${known.key}` } : {};
  const options = { headers, cache: "no-store" };
  if (body) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey();
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error?.message ?? `the server answered ${answer.status}`);
}

export const json = async (path, body) => (await call(path, body)).json();

function askForKey() {
  $("key-form").hidden = false;
  $("server").textContent = "This server asks for an API key.";
  $("key").focus();
}

export async function connect() {
  try {
    const [models, catalogue] = await Promise.all([json("v1/models"), json("v1/kv_policies")]);
    known.model = models.data[0].id;
    known.policies = catalogue.policies.map((each) => each.name);
    $("server").textContent = `Serving ${known.model}`;
    $("key-form").hidden = true;
    for (const select of document.querySelectorAll("select")) fillPolicies(select, select.value);
  } catch (error) {
    if ($("key-form").hidden) $("server").textContent = `No answer yet: ${error.message}`;
  }
}

export function fillPolicies(select, chosen) {
  select.replaceChildren(...known.policies.map((name) => new Option(name, name)));
  select.value = known.policies.includes(chosen) ? chosen : known.policies[0];
}

export const messages = () => [{ role: "user", content: `${$("document").value} ${$("question").value}` }];

/** The events of a streamed chat completion. */
async function* stream(body) {
  const answer = await call("v1/chat/completions", body);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:") || line.slice(5).trim() === "[DONE]") continue;
      const event = JSON.parse(line.slice(5));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Ask once: text, report, seconds to the first token. `onText` sees it grow. */
export async function ask(knob, limits, onText) {
  const body = {
    model: known.model, messages: messages(), temperature: 0, stream: true, kv_compression: knob, ...limits,
    cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("-"), // everybody pays a prefill
  };
  const said = { text: "", report: null, first: null, speed: null };
  const begin = performance.now();
  let first = 0, last = 0;
  for await (const event of stream(body)) {
    said.report = event.kv_compression ?? said.report;
    const piece = (event.choices ?? []).map((choice) => choice.delta?.content ?? "").join("");
    if (!piece) continue;
    last = performance.now();
    first ||= last;
    said.first = (first - begin) / 1000;
    onText(said.text += piece);
  }
  if (last > first) said.speed = (body.max_tokens - 1) / ((last - first) / 1000);
  return said;
}

/** Tokens per second of decoding, measured over more tokens than an answer may have. */
export const speed = async (knob) =>
  (await ask(knob, { max_tokens: TIMED_TOKENS, ignore_eos: true }, () => {})).speed;
