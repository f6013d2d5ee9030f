// The gateway's page: its tabs, and how it begins.

import { beginCompare } from "./compare.js";
import { writeDocument } from "./document.js";
import { beginKept } from "./kept.js";
import { drawLive } from "./live.js";
import { connect, known } from "./server.js";
import { $ } from "./words.js";

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

$("document").value = writeDocument();
$("question").value = "what is the code for red falcon ?";
beginCompare();
beginKept();
for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => show(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", moveInTabs);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  known.key = $("key").value.trim();
  connect();
});
setInterval(drawLive, 2000);
connect();
