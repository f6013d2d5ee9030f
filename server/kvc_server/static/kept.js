// What was kept: of every head, and of every token of the prompt.

import { ask, json, known, messages } from "./server.js";
import { $, number, shade } from "./words.js";

export const looked = { explain: null, bits: null, width: 0, tokens: [], head: null };

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
    const { tokens } = await json("v1/tokenize", { model: known.model, messages: messages() });
    const lists = tokens.map((token) => [token]);
    const texts = await json("v1/detokenize", { model: known.model, tokens: lists, skip_special_tokens: false });
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

export function drawMap() {
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

export function drawTokens() {
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

export function beginKept() {
  $("kept-policy").replaceChildren(new Option(known.policies[0]));
  $("kept-form").addEventListener("submit", look);
  $("map").addEventListener("click", (event) => {
    const cell = event.target.closest("[role=gridcell]");
    if (cell) chooseHead(Number(cell.dataset.head));
  });
  $("map").addEventListener("keydown", moveInMap);
  $("all-heads").addEventListener("click", () => { chooseHead(looked.head); $("tokens").focus(); });
  for (const kind of ["click", "mouseover"]) $("tokens").addEventListener(kind, tellToken);
}
