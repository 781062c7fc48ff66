// The plan as a picture: a card per instance, curves for the ways of KV, dots for KV on them.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const DOTS = 3; // most per way and look

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function meter(name, parts, text) {
  const row = element("div", "meter");
  const track = element("div", "track");
  for (const [share, kind] of parts) {
    const fill = element("div", `fill ${kind}`);
    fill.style.width = `${Math.min(share, 1) * 100}%`;
    track.append(fill);
  }
  row.append(element("span", "", name), track, element("b", "", text));
  return row;
}

function devices(one) {
  const root = element("div", "devices");
  one.stages.forEach((stage, index) => {
    if (one.stages.length > 1) root.append(element("span", "", `stage ${index}`));
    for (const place of stage) {
      const box = element("div", "stage");
      box.append(element("span", "", place.host === "localhost" ? "device" : place.host));
      box.append(...place.devices.map((id) => element("span", "device", String(id))));
      root.append(box);
    }
  });
  return root;
}

function card(one) {
  const { stats } = one;
  const root = element("article", `card instance ${one.role} ${one.up ? "" : "down"}`);
  root.dataset.instance = one.name;
  const title = element("h3", "", one.name);
  const degrees = [one.tp > 1 ? `TP ${one.tp}` : "", one.pp > 1 ? `PP ${one.pp}` : ""].filter(Boolean).join(" × ");
  title.append(element("span", "", [one.role, degrees, one.up ? "" : "down"].filter(Boolean).join(" · ")));
  const pages = Math.max(stats.pages_total, 1);
  root.append(
    title,
    devices(one),
    meter("queue", [[stats.waiting / 16, ""]], String(stats.waiting)),
    meter("batch", [[stats.running / one.largest, ""]], `${stats.running} of ${one.largest}`),
    meter("pages", [[stats.pages_owned / pages, ""], [stats.pages_cached / pages, "cache"]],
      `${stats.pages_owned} of ${stats.pages_total}`),
  );
  if (one.role === "prefill") root.append(meter("parked", [[stats.parked / 16, ""]], String(stats.parked)));
  if (one.role === "decode") root.append(meter("pulling", [[stats.pulling / 4, ""]], String(stats.pulling)));
  return root;
}

// From card to card: across the middle where they stand side by side, along the right edge where they do not (a phone).
function curve(from, to, frame) {
  const a = from.getBoundingClientRect(), b = to.getBoundingClientRect();
  const beside = b.left >= a.right;
  const [x0, y0] = [a.right - frame.left, a.top + a.height / 2 - frame.top];
  const [x1, y1] = [(beside ? b.left : b.right) - frame.left, b.top + b.height / 2 - frame.top];
  const mid = (x0 + x1) / 2, out = frame.width;
  return beside ? `M${x0} ${y0}C${mid} ${y0} ${mid} ${y1} ${x1} ${y1}` : `M${x0} ${y0}C${out} ${y0} ${out} ${y1} ${x1} ${y1}`;
}

function dot(path, delay) {
  const circle = document.createElementNS(SVG, "circle");
  const motion = document.createElementNS(SVG, "animateMotion");
  circle.setAttribute("r", "4");
  for (const [name, value] of [["path", path], ["dur", "0.8s"], ["fill", "freeze"], ["begin", "indefinite"]]) {
    motion.setAttribute(name, value);
  }
  circle.append(motion);
  $("links").append(circle);
  circle.style.visibility = "hidden";
  setTimeout(() => {
    circle.style.visibility = "visible";
    motion.beginElement();
  }, delay);
  setTimeout(() => circle.remove(), delay + 800);
}

const transfersOf = (state, name) => state?.instances.find((one) => one.name === name)?.stats.transfers ?? 0;

export function drawPlan(now, before) {
  const cards = now.instances.map((one) => [one, card(one)]);
  const alone = now.links.length === 0;
  const right = (one) => one.role === "decode";
  $("plan").className = alone ? "plan alone" : "plan";
  $("left").replaceChildren(...cards.filter(([one]) => !right(one)).map(([, made]) => made));
  $("right").replaceChildren(...cards.filter(([one]) => right(one)).map(([, made]) => made));
  $("right").hidden = alone;
  const frame = $("plan").getBoundingClientRect();
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const made = new Map(cards.map(([one, root]) => [one.name, root]));
  $("links").querySelectorAll("path").forEach((path) => path.remove());
  for (const link of now.links) {
    const path = document.createElementNS(SVG, "path");
    const line = curve(made.get(link.source), made.get(link.destination), frame);
    const moved = before ? transfersOf(now, link.destination) - transfersOf(before, link.destination) : 0;
    path.setAttribute("d", line);
    path.setAttribute("class", moved > 0 ? "busy" : "");
    path.dataset.link = `${link.source} ${link.destination}`;
    $("links").prepend(path);
    for (let i = 0; !still && i < Math.min(moved, DOTS); i++) dot(line, i * 200);
  }
  const ways = [...new Set(now.links.map((link) => link.transport))].join(", ");
  $("plan-note").textContent = alone ? "Each instance does both phases; no KV moves." : `KV moves by ${ways}.`;
}
