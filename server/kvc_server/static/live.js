// Live: what the server's metrics say now.

import { call } from "./server.js";
import { $, bytes, list, number, seconds } from "./words.js";

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

export async function drawLive() {
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
