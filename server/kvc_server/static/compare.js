// Compare: one document and question at several rates and policies, side by side.

import { ask, fillPolicies, known, speed } from "./server.js";
import { $, bytes, list, number, seconds } from "./words.js";

const PREFILLED = [[1, "kv-compress"], [8, "kv-compress"], [8, "streaming-llm"], [32, "kv-compress"]];

function addColumn(rate, policy) {
  const item = $("column").content.cloneNode(true).firstElementChild;
  item.querySelector(".rate").value = rate;
  const select = item.querySelector(".policy");
  select.replaceChildren(new Option(policy, policy));
  if (known.policies.length > 1) fillPolicies(select, policy);
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

export function beginCompare() {
  for (const [rate, policy] of PREFILLED) addColumn(rate, policy);
  $("add").addEventListener("click", () => addColumn(16, known.policies[0]).querySelector(".rate").focus());
  $("compare-form").addEventListener("submit", compare);
}
