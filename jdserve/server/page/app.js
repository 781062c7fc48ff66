// The loop: asks for the state every second while the page is seen, and hands it to the pictures.
import { drawPlan } from "/page/plan.js";
import { drawHistogram } from "/page/histogram.js";
import { startChat } from "/page/chat.js";
import { ask, KeyNeeded, setKey } from "/page/ask.js";

const EVERY_MS = 1000;
const KEPT = 60; // looks, so that the oldest is a minute old
const $ = (id) => document.getElementById(id);
const looks = [];
let timer = 0;

function fact(name, value, mood = "") {
  const box = document.createElement("div");
  const dt = document.createElement("dt");
  const dd = document.createElement("dd");
  dt.textContent = name;
  dd.textContent = value;
  dd.className = mood;
  box.append(dt, dd);
  return box;
}

function rate(now, before, of) {
  const seconds = before ? now.at - before.at : 0;
  return seconds > 0 ? Math.max(of(now) - of(before), 0) / seconds : 0;
}

const sum = (state, name) => state.instances.reduce((total, one) => total + one.stats[name], 0);

function drawFacts(now, before) {
  const facts = [];
  if (now.slo) {
    const share = now.attained ? now.attained.both : null;
    const mood = share === null ? "" : share >= now.slo.attainment ? "good" : "bad";
    const target = Math.round(now.slo.attainment * 100);
    facts.push(fact(`attained of ${target}%`, share === null ? "–" : `${(share * 100).toFixed(1)}%`, mood));
  }
  facts.push(fact("tokens/s", rate(now, before, (s) => s.tokens).toFixed(1)));
  facts.push(fact("in batches", String(sum(now, "running"))));
  facts.push(fact("waiting", String(sum(now, "waiting"))));
  if (now.links.length) {
    facts.push(fact("KV parked", String(sum(now, "parked"))));
    facts.push(fact("KV moved, MB/s", (rate(now, before, (s) => s.transfers.bytes) / 1e6).toFixed(1)));
  }
  $("facts").replaceChildren(...facts);
}

function drawLatencies() {
  const now = looks.at(-1);
  const base = $("span").value === "minute" && looks.length > 1 ? looks[0] : null;
  for (const name of ["ttft", "tpot"]) {
    const counts = now[name].map((bucket, i) => bucket.count - (base ? base[name][i].count : 0));
    drawHistogram($(name), now[name], counts, now.slo ? now.slo[`${name}_s`] : null);
  }
}

function status(text, mood) {
  $("status").textContent = text;
  $("status").className = `pill ${mood}`;
}

async function look() {
  clearTimeout(timer);
  try {
    const now = await (await ask("/state")).json();
    const before = looks.at(-1);
    if (before && now.at < before.at) looks.length = 0; // another server
    looks.push(now);
    if (looks.length > KEPT) looks.shift();
    $("key-form").hidden = true;
    $("model").textContent = `${now.model} · ${now.version}`;
    document.title = `jdserve · ${now.model}`;
    status(now.draining ? "draining" : now.ready ? "ready" : "not ready", now.ready && !now.draining ? "good" : "bad");
    drawFacts(now, before);
    drawPlan(now, before);
    drawLatencies();
  } catch (error) {
    if (error instanceof KeyNeeded) {
      $("key-form").hidden = false;
      status("needs a key", "bad");
      return; // until there is one
    }
    status("no answer", "bad");
  }
  if (!document.hidden) timer = setTimeout(look, EVERY_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  look();
});
$("span").addEventListener("change", () => looks.length && drawLatencies());
document.addEventListener("visibilitychange", () => !document.hidden && look());
window.addEventListener("resize", () => looks.length && drawPlan(looks.at(-1), null));
startChat(() => looks.at(-1)?.model);
look();
