"use strict";
// The curve

// The turns that led to the head: those of versions that are not kept any more count all.
function lineage(session) {
  const kept = new Map(session.versions.map((version) => [version.version, version])), found = new Set();
  let version = session.version;
  for (; kept.has(version); version = kept.get(version).parent_version) found.add(kept.get(version).content_version);
  const oldest = Math.min(...kept.keys(), version + 1);
  return (turn) => found.has(turn) || (turn <= version && turn < oldest);
}

// Lay out the points of the turns that led to the head; of one that this page did not see, its mean.
function recall(session, log) {
  const leads = lineage(session), points = [], cuts = [];
  let place = session.tokens_seen;
  for (const update of log.toReversed()) {
    if (!update.tokens || !leads(update.version)) continue;
    place -= update.tokens;
    cuts.push(place);
    const seen = state.seen.get(update.version);
    if (seen?.length) points.push(...seen.toReversed());
    else if (update.surprise !== null) points.push([place, update.surprise, update.tokens]);
  }
  Object.assign(state, { known: points.reverse(), cuts: cuts.reverse() });
  for (const turn of document.querySelectorAll(".turn[data-version]")) turn.classList.toggle("undone", !leads(Number(turn.dataset.version)));
}

// Running mean over about 64 tokens: each point weighs as many tokens as it stands for.
function means(points) {
  let mean = null, weight = 0;
  return points.map(([place, surprise, tokens]) => {
    const kept = Math.exp(-tokens / 64);
    mean = (mean ?? 0) * weight * kept + surprise * (1 - kept);
    weight = weight * kept + (1 - kept);
    mean /= weight;
    return [place + tokens / 2, mean];
  });
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function thinned(items, most) {
  const step = Math.ceil(items.length / most);
  return step > 1 ? items.filter((_, i) => i % step === 0 || i === items.length - 1) : items;
}

let frame = 0;
function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    drawNow();
  });
}

function drawNow() {
  const points = [...state.known, ...state.live], { cuts } = state, line = means(points);
  $("now").textContent = line.length ? `now ${number(line.at(-1)[1])}` : "";
  const [left, right, top, bottom] = [26, 352, 8, 166];
  const first = Math.min(...points.map(([place]) => place), Infinity), last = Math.max(...points.map(([place, , tokens]) => place + tokens), state.session?.tokens_seen ?? 0, 1);
  const begin = Number.isFinite(first) ? first : 0, high = Math.max(4, Math.ceil(Math.max(0, ...thinned(points, 4000).map(([, surprise]) => surprise))));
  const x = (place) => left + ((place - begin) / Math.max(1, last - begin)) * (right - left);
  const y = (surprise) => bottom - (surprise / high) * (bottom - top);
  const parts = [];
  for (let i = 0; i <= 4; i += 1) {
    const value = (high * i) / 4;
    parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, Number(value.toFixed(1))));
  }
  for (const cut of thinned(cuts, 60)) if (cut > begin) parts.push(svg("line", { class: "cut", x1: x(cut), x2: x(cut), y1: top, y2: bottom }));
  for (const [place, surprise, tokens] of thinned(points, 700)) parts.push(svg("circle", { class: "dot", r: 1.9, cx: x(place + tokens / 2).toFixed(1), cy: y(surprise).toFixed(1) }));
  const path = thinned(line, 700).map(([place, mean]) => `${x(place).toFixed(1)},${y(mean).toFixed(1)}`).join(" ");
  if (line.length > 1) parts.push(svg("polyline", { class: "mean", points: path }));
  parts.push(svg("text", { x: left, y: 183 }, `token ${begin}`), svg("text", { x: right, y: 183, "text-anchor": "end" }, points.length ? last : ""));
  $("curve").replaceChildren(...parts);
}

