"use strict";
// The gateway's page: asks this server what its API answers anybody, and draws it. Nothing is stored.

const $ = (id) => document.getElementById(id);
const SHADES = 8;
const TIMED_TOKENS = 64;
const PREFILLED = [[1, "kv-compress"], [8, "kv-compress"], [8, "streaming-llm"], [32, "kv-compress"]];
let key = "";
let model = "default";
let policies = ["kv-compress"];

// ------------------------------------------------------------------------------- the server

async function call(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
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

const json = async (path, body) => (await call(path, body)).json();

function askForKey() {
  $("key-form").hidden = false;
  $("server").textContent = "This server asks for an API key.";
  $("key").focus();
}

async function connect() {
  try {
    const [models, catalogue] = await Promise.all([json("v1/models"), json("v1/kv_policies")]);
    model = models.data[0].id;
    policies = catalogue.policies.map((each) => each.name);
    $("server").textContent = `Serving ${model}`;
    $("key-form").hidden = true;
    for (const select of document.querySelectorAll("select")) fillPolicies(select, select.value);
  } catch (error) {
    if ($("key-form").hidden) $("server").textContent = `No answer yet: ${error.message}`;
  }
}

const messages = () => [{ role: "user", content: `${$("document").value} ${$("question").value}` }];

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
async function ask(knob, limits, onText) {
  const body = {
    model, messages: messages(), temperature: 0, stream: true, kv_compression: knob, ...limits,
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
const speed = async (knob) =>
  (await ask(knob, { max_tokens: TIMED_TOKENS, ignore_eos: true }, () => {})).speed;

// ------------------------------------------------------------------------------------- words

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const seconds = (value) => (value < 1 ? `${number(value * 1000)} ms` : `${number(value, 2)} s`);

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function list(target, rows) {
  target.replaceChildren(...rows.flatMap(([name, value]) => {
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
}

// ------------------------------------------------------------------------------------ Compare

function fillPolicies(select, chosen) {
  select.replaceChildren(...policies.map((name) => new Option(name, name)));
  select.value = policies.includes(chosen) ? chosen : policies[0];
}

function addColumn(rate, policy) {
  const item = $("column").content.cloneNode(true).firstElementChild;
  item.querySelector(".rate").value = rate;
  const select = item.querySelector(".policy");
  select.replaceChildren(new Option(policy, policy));
  if (policies.length > 1) fillPolicies(select, policy);
  item.querySelector(".remove").addEventListener("click", () => {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    (next?.querySelector(".rate") ?? $("add")).focus();
  });
  $("columns").append(item);
  return item;
}

async function answerColumn(column, maxTokens) {
  const card = $("answer").content.cloneNode(true).firstElementChild;
  const [text, said, numbers] = [".text", ".said", ".numbers"].map((each) => card.querySelector(each));
  const rate = Number(column.rate);
  const title = rate === 1 ? "uncompressed" : `${column.policy}, rate ${number(rate, 2)}`;
  card.querySelector("h3").textContent = title;
  text.setAttribute("aria-label", `Answer, ${title}`);
  $("answers").append(card);
  return async () => {
    said.textContent = "asking …";
    try {
      // force: requests of one prompt share its blocks, and would else be left as they are
      const knob = rate === 1 ? { rate: 1 } : { rate, policy: column.policy, force: true };
      const limits = { max_tokens: maxTokens };
      const answer = await ask(knob, limits, (so_far) => { text.textContent = so_far.trimStart(); });
      const report = answer.report;
      said.textContent = report?.skipped ? `Not compressed: ${report.skipped}` : "";
      const pace = await speed(knob);
      const kept = report?.kept_per_head;
      list(numbers, [
        ...(kept ? [
          ["KVs kept per head", `${number(kept.mean)} of ${number(report.prompt_tokens)}`],
          ["fewest, most", `${number(kept.min)}, ${number(kept.max)}`],
          ["memory before", bytes(report.bytes.before)],
          ["memory after", bytes(report.bytes.after + report.bytes.shared)],
        ] : []),
        ["first token", answer.first === null ? "–" : seconds(answer.first)],
        ["tokens per second", pace === null ? "–" : number(pace)],
      ]);
      return true;
    } catch (error) {
      said.textContent = `Failed: ${error.message}`;
      return false;
    }
  };
}

async function compare(event) {
  event.preventDefault();
  const columns = [...$("columns").children].map((item) => ({
    rate: item.querySelector(".rate").value, policy: item.querySelector(".policy").value,
  }));
  $("answers").replaceChildren();
  $("ask").disabled = true;
  $("compare-status").textContent = "Asking …";
  const maxTokens = Number($("max-tokens").value);
  const runs = await Promise.all(columns.map((column) => answerColumn(column, maxTokens)));
  let good = 0;
  if ($("together").checked) {
    good = (await Promise.all(runs.map((run) => run()))).filter(Boolean).length;
  } else {
    for (const run of runs) good += await run();
  }
  $("compare-status").textContent = `${good} of ${runs.length} answered.`;
  $("ask").disabled = false;
}

// ------------------------------------------------------------------------------ What was kept

const looked = { explain: null, bits: null, width: 0, tokens: [], head: null };

async function look(event) {
  event.preventDefault();
  const status = $("kept-status");
  $("look").disabled = true;
  $("kept-result").hidden = true;
  status.textContent = "Asking …";
  try {
    const rate = Number($("kept-rate").value);
    const knob = { rate, policy: $("kept-policy").value, explain: true, force: true };
    const { text, report } = await ask(knob, { max_tokens: Number($("max-tokens").value) }, (so_far) => {
      status.textContent = `Answer: ${so_far}`;
    });
    if (!report?.explain) throw new Error(report?.skipped ?? "the server does not tell what it kept");
    const { tokens } = await json("v1/tokenize", { model, messages: messages() });
    const lists = tokens.map((token) => [token]);
    const texts = await json("v1/detokenize", { model, tokens: lists, skip_special_tokens: false });
    Object.assign(looked, { explain: report.explain, tokens: texts.text, head: null });
    await unpack(report.explain);
    drawMap();
    drawTokens();
    $("kept-result").hidden = false;
    const told = report.explain.skipped ? ` Tokens: ${report.explain.skipped}.` : "";
    const kept = `${number(report.kept_per_head.mean)} of ${number(report.prompt_tokens)} KVs per head`;
    status.textContent = `Answer: ${text.trim()}. Kept ${kept}.${told}`;
  } catch (error) {
    status.textContent = `Not to be seen: ${error.message}`;
  }
  $("look").disabled = false;
}

async function unpack(explain) {
  looked.width = Math.ceil((explain.end - explain.begin) / 8);
  looked.bits = null;
  if (!explain.positions) return;
  const packed = Uint8Array.from(atob(explain.positions), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  looked.bits = new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Whether a head keeps the KV at a position; it keeps all that were not to be chosen among. */
function keeps(head, position) {
  const { begin, end } = looked.explain;
  if (position < begin || position >= end) return true;
  const bit = position - begin;
  return (looked.bits[head * looked.width + (bit >> 3)] >> (bit & 7) & 1) === 1;
}

const shade = (share) => (share > 0 ? Math.max(1, Math.round(share * SHADES)) : 0);

function drawMap() {
  const { layers, heads, kept, begin, end } = looked.explain;
  const most = Math.max(...kept);
  const rows = Array.from({ length: layers }, (_, layer) => {
    const row = document.createElement("div");
    row.setAttribute("role", "row");
    const name = document.createElement("span");
    name.setAttribute("role", "rowheader");
    name.textContent = `layer ${layer}`;
    row.append(name, ...Array.from({ length: heads }, (_, head) => {
      const index = layer * heads + head;
      const cell = document.createElement("div");
      cell.setAttribute("role", "gridcell");
      cell.setAttribute("aria-selected", "false");
      cell.className = `k${shade(kept[index] / most)}`;
      cell.tabIndex = index ? -1 : 0;
      cell.dataset.head = index;
      cell.title = `layer ${layer}, head ${head}: ${number(kept[index])} of ${number(end - begin)}`;
      cell.setAttribute("aria-label", cell.title);
      return cell;
    }));
    return row;
  });
  $("map").replaceChildren(...rows);
}

function chooseHead(head) {
  looked.head = head === looked.head ? null : head;
  for (const cell of $("map").querySelectorAll("[role=gridcell]")) {
    cell.setAttribute("aria-selected", String(Number(cell.dataset.head) === looked.head));
  }
  drawTokens();
}

function moveInMap(event) {
  const step = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -looked.explain?.heads, ArrowDown: looked.explain?.heads,
  }[event.key];
  const cell = event.target.closest("[role=gridcell]");
  if (!cell) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    chooseHead(Number(cell.dataset.head));
  } else if (step) {
    event.preventDefault();
    const to = $("map").querySelector(`[data-head="${Number(cell.dataset.head) + step}"]`);
    if (!to) return;
    [cell.tabIndex, to.tabIndex] = [-1, 0];
    to.focus();
  }
}

function drawTokens() {
  const { layers, heads } = looked.explain;
  const head = looked.head;
  $("all-heads").hidden = head === null;
  $("tokens-heading").textContent = head === null
    ? "The prompt, by how many heads kept each token"
    : `The prompt, and what layer ${Math.floor(head / heads)}, head ${head % heads} kept of it`;
  $("token-status").textContent = "";
  if (!looked.bits) { $("tokens").textContent = ""; return; }
  const all = layers * heads;
  const pieces = document.createDocumentFragment();
  looked.tokens.forEach((text, position) => {
    let count = 0;
    if (head === null) for (let each = 0; each < all; each += 1) count += keeps(each, position);
    else count = keeps(head, position) ? all : 0;
    const piece = document.createElement("span");
    piece.className = `k${shade(count / all)}`;
    piece.dataset.told = head === null
      ? `kept by ${count} of ${all} heads` : (count ? "kept" : "not kept");
    piece.textContent = text;
    pieces.append(piece, "​");
  });
  $("tokens").replaceChildren(pieces);
}

function tellToken(event) {
  const piece = event.target.closest("#tokens span");
  if (piece) $("token-status").textContent = `“${piece.textContent.trim()}”: ${piece.dataset.told}`;
}

// --------------------------------------------------------------------------------------- Live

/** Prometheus' text format: [{name, labels, value}]. */
function samples(text) {
  return text.split("\n").flatMap((line) => {
    const found = line.match(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/);
    if (!found) return [];
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((each) => [each[1], each[2]]));
    return [{ name: found[1], labels, value: Number(found[3]) }];
  });
}

async function drawLive() {
  if ($("live").hidden || document.hidden) return;
  try {
    const found = samples(await (await call("metrics")).text());
    const sum = (name, labels = {}) => found.filter((each) => each.name === name
      && Object.entries(labels).every(([label, value]) => each.labels[label] === value))
      .reduce((total, each) => total + each.value, 0);
    const has = (name) => found.some((each) => each.name === name);
    const before = sum("kvc_kv_bytes_total", { when: "before" });
    const after = sum("kvc_kv_bytes_total", { when: "after" });
    const firsts = sum("kvc_time_to_first_token_seconds_count");
    list($("numbers"), [
      ["worker", sum("kvc_worker_up") ? "serves" : "does not answer"],
      ["requests in flight", number(Math.max(0, sum("kvc_requests_in_flight") - 1))],
      ...(has("sglang:num_running_reqs") ? [["running in the engine", number(sum("sglang:num_running_reqs"))]] : []),
      ...(has("sglang:num_queue_reqs") ? [["waiting in the engine", number(sum("sglang:num_queue_reqs"))]] : []),
      ["KV memory of prompts, before", bytes(before)],
      ["after", bytes(after)],
      ["freed", bytes(before - after)],
      ["served uncompressed, though asked", number(sum("kvc_skipped_total"))],
      ["mean time to first token", firsts ? seconds(sum("kvc_time_to_first_token_seconds_sum") / firsts) : "–"],
      ["worker restarts", number(sum("kvc_worker_restarts_total"))],
    ]);
    drawPool(found.filter((each) => each.name === "kvc_pool_blocks"));
    $("live-status").textContent = "Read every two seconds; counted since the gateway began.";
  } catch (error) {
    $("live-status").textContent = `No numbers: ${error.message}`;
  }
}

function drawPool(kinds) {
  $("pool").hidden = !kinds.length;
  list($("pool-kinds"), kinds.map((each) => [each.labels.kind, number(each.value)]));
  kinds.forEach((each, index) => {
    const bar = $("pool-bar").children[index] ?? $("pool-bar").appendChild(document.createElement("i"));
    bar.className = `k${[8, 6, 3, 0][index % 4]}`;
    bar.style.flexGrow = each.value;
  });
}

// --------------------------------------------------------------------------------------- tabs

function show(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  $("prompt").hidden = tab.id === "tab-live";
  drawLive();
}

function moveInTabs(event) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const now = tabs.indexOf(document.activeElement);
  const to = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const tab = tabs.at(to % tabs.length);
  tab.focus();
  show(tab);
}

// -------------------------------------------------------------------------------------- begin

/** Sentences that any model reads, and the embedded one too, with codes among them; always the same. */
function writeDocument() {
  const words = [
    "the this every our", "old quiet small bright narrow gentle distant busy calm warm dusty proud",
    "river village garden market bridge mountain forest harbor library painter driver neighbor",
    "waits rests moves turns sleeps walks listens shines drifts leans lingers appears",
    "near behind beside under across along around beyond inside through toward upon",
  ].map((each) => each.split(" "));
  const codes = [
    "white otter is mike nine lima", "red falcon is tango seven kilo",
    "green badger is papa two echo", "black heron is golf five oscar",
  ].map((each) => `the code for ${each} .`);
  let state = 7;
  const pick = (from) => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return from[Math.floor((state / 2147483648) * from.length)];
  };
  const sentence = () => [0, 1, 2, 3, 4, 0, 1, 2].map((kind) => pick(words[kind])).join(" ") + " .";
  const lines = Array.from({ length: 80 }, sentence);
  codes.forEach((code, index) => lines.splice(10 + 20 * index, 0, code));
  return lines.join(" ");
}

$("document").value = writeDocument();
$("question").value = "what is the code for red falcon ?";
for (const [rate, policy] of PREFILLED) addColumn(rate, policy);
$("kept-policy").replaceChildren(new Option(policies[0]));
$("add").addEventListener("click", () => addColumn(16, policies[0]).querySelector(".rate").focus());
$("compare-form").addEventListener("submit", compare);
$("kept-form").addEventListener("submit", look);
$("map").addEventListener("click", (event) => {
  const cell = event.target.closest("[role=gridcell]");
  if (cell) chooseHead(Number(cell.dataset.head));
});
$("map").addEventListener("keydown", moveInMap);
$("all-heads").addEventListener("click", () => { chooseHead(looked.head); $("tokens").focus(); });
for (const kind of ["click", "mouseover"]) $("tokens").addEventListener(kind, tellToken);
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => show(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", moveInTabs);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  connect();
});
setInterval(drawLive, 2000);
connect();
