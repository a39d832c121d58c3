// The timeline of a session on a canvas. Each model and sampler has a track with its requests, queued and running.

import { cssColour, dark } from "./colours.js";

const POLL_MS = 3000;
const IDLE_POLL_MS = 10000;
const MOST_SPANS = 2000;
const MOST_TRACKS = 40;
const LIVE_VIEW_S = 600;
const LABEL = 20;
const AXIS = 24;
const GAP = 12;
const MOST_ROW = 12;
const MOST_TRACK = 108;
const WAITING = 34;
const FAILED_MARK = 4;
const KINDS = {
  pass: ["#4338ca", "#a5b4fc"], step: ["#be185d", "#f9a8d4"], sample: ["#0f766e", "#5eead4"], other: ["#a16207", "#fde047"],
};

const box = document.querySelector("[data-timeline]");
const field = box.querySelector(".tracks");
const canvas = box.querySelector("canvas");
const said = box.querySelector(".said");
const tip = box.querySelector(".tip");
const tracks = new Map();
let cursor = 0;
let unchanged = 0;
let view = null; // seconds since the epoch: { from, to }
let whole = { from: 0, to: 1 };
let follows = true;
let places = []; // what was drawn where, for the pointer
let selected = null;
let drag = null;

function kindOf(name) {
  if (name === "optim_step") return "step";
  if (name === "forward_backward" || name === "forward" || name === "model_pass") return "pass";
  return name.includes("sample") ? "sample" : "other";
}

const colour = (name) => KINDS[kindOf(name)][dark.matches ? 1 : 0];

function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(Math.max(seconds, 0) * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** Loads the requests after the cursor. They replace known requests with the same position. */
async function load() {
  const answer = await fetch(box.dataset.timeline + (cursor ? `?after=${cursor}` : ""), { headers: { Accept: "application/json" } });
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  const data = await answer.json();
  let changed = false;
  for (const sent of data.tracks) {
    const track = tracks.get(sent.key) ?? { spans: new Map() };
    tracks.set(sent.key, track);
    track.title = sent.title;
    track.detail = sent.detail;
    for (const row of sent.spans) {
      const span = Object.fromEntries(data.columns.map((name, index) => [name, row[index]]));
      const known = track.spans.get(span.position);
      changed ||= !known || known.status !== span.status || known.started !== span.started || span.status === "open";
      track.spans.set(span.position, { ...span, track });
    }
  }
  cursor = data.cursor;
  forgetOldest();
  arrange(data.now);
  return changed;
}

function allSpans() {
  return [...tracks.values()].flatMap((track) => [...track.spans.values()]).sort((a, b) => a.position - b.position);
}

function forgetOldest() {
  const spans = allSpans();
  for (const span of spans.slice(0, Math.max(spans.length - MOST_SPANS, 0))) span.track.spans.delete(span.position);
}

/** Puts the requests of each track in rows without overlaps, and finds the first and last time. */
function arrange(now) {
  let from = Infinity;
  let to = -Infinity;
  let isOpen = false;
  for (const track of tracks.values()) {
    track.list = [...track.spans.values()].sort((a, b) => a.created - b.created || a.position - b.position);
    track.ends = [];
    for (const span of track.list) {
      if (span.status === "open") { span.ended = now; isOpen = true; }
      let row = track.ends.findIndex((end) => end <= span.created);
      if (row < 0) row = track.ends.push(0) - 1;
      track.ends[row] = span.ended;
      span.row = row;
      from = Math.min(from, span.created);
      to = Math.max(to, span.ended);
    }
  }
  if (from > to) return;
  const margin = Math.max((to - from) * 0.02, 0.05);
  whole = { from: from - margin, to: to + margin };
  if (!view) {
    const isLong = (box.dataset.live === "yes" || isOpen) && to - from > LIVE_VIEW_S;
    view = { from: isLong ? to - LIVE_VIEW_S : whole.from, to: whole.to };
  } else if (follows) {
    const isWhole = view.from <= whole.from + margin;
    view = { from: isWhole ? whole.from : whole.to - (view.to - view.from), to: whole.to };
  }
}

function shownTracks() {
  return [...tracks.values()].filter((track) => track.list?.length).slice(-MOST_TRACKS);
}

/** The number of queued requests over time, as steps. */
function waitingSteps() {
  const events = [];
  for (const track of tracks.values()) {
    for (const span of track.list ?? []) events.push([span.created, 1], [span.started ?? span.ended, -1]);
  }
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let number = 0;
  return events.map(([at, change]) => [at, (number += change)]);
}

function draw() {
  const width = field.clientWidth;
  const shown = shownTracks();
  const heights = shown.map((track) => Math.max(Math.min(track.ends.length * MOST_ROW, MOST_TRACK), MOST_ROW));
  const onDevice = deviceSpans();
  const height = AXIS + LABEL + WAITING + GAP + heights.reduce((sum, trackHeight) => sum + trackHeight + LABEL + GAP, 0) + (onDevice.length ? LABEL + MOST_ROW + GAP : 0);
  const scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  ctx.font = "12px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  places = [];
  if (!view) return;
  const x = (at) => ((at - view.from) / (view.to - view.from)) * width;
  const style = { text: cssColour("text"), muted: cssColour("muted"), line: cssColour("line"), bad: cssColour("bad"), accent: cssColour("accent"), raised: cssColour("raised") };
  drawAxis(ctx, x, width, height, style);
  let top = drawWaiting(ctx, x, width, AXIS, style);
  shown.forEach((track, index) => {
    label(ctx, track.title, track.detail, top, width, style);
    const rowHeight = Math.min(MOST_ROW, heights[index] / track.ends.length);
    for (const span of track.list) drawSpan(ctx, span, x, top + LABEL + span.row * rowHeight, rowHeight, width, style);
    top += LABEL + heights[index] + GAP;
  });
  if (onDevice.length) {
    label(ctx, "device", "passes and optimizer steps of this session", top, width, style);
    ctx.fillStyle = style.raised;
    ctx.fillRect(0, top + LABEL, width, MOST_ROW);
    for (const span of onDevice) {
      const left = x(span.ended - span.device_s);
      const right = Math.max(x(span.ended), left + 1);
      if (right < 0 || left > width) continue;
      ctx.fillStyle = colour(span.name);
      ctx.fillRect(left, top + LABEL, right - left, MOST_ROW);
      places.push({ span, left, right, top: top + LABEL, bottom: top + LABEL + MOST_ROW });
    }
  }
}

function deviceSpans() {
  return [...tracks.values()].flatMap((track) => (track.list ?? []).filter((span) => span.device_s > 0));
}

/** Writes text, truncated to a width with an ellipsis. Returns its width. */
function write(ctx, text, left, y, room) {
  let cut = text;
  while (cut && ctx.measureText(cut === text ? cut : `${cut}…`).width > room) cut = cut.slice(0, -1);
  if (cut) ctx.fillText(cut === text ? cut : `${cut}…`, left, y);
  return ctx.measureText(cut).width;
}

function label(ctx, title, detail, top, width, style) {
  ctx.font = "600 12px system-ui, sans-serif";
  ctx.fillStyle = style.text;
  const end = write(ctx, title, 0, top + LABEL / 2, width);
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = style.muted;
  if (detail) write(ctx, detail, end + 10, top + LABEL / 2, width - end - 10);
}

function drawSpan(ctx, span, x, top, rowHeight, width, style) {
  const left = x(span.created);
  const right = Math.max(x(span.ended), left + 1.5);
  if (right < 0 || left > width) return;
  const started = span.started === null ? right : Math.min(Math.max(x(span.started), left), right);
  const tall = rowHeight > 4 ? rowHeight - 2 : rowHeight;
  ctx.fillStyle = span.status === "failed" ? style.bad : colour(span.name);
  ctx.globalAlpha = 0.3;
  ctx.fillRect(left, top, started - left, tall);
  ctx.globalAlpha = 1;
  if (span.started !== null) ctx.fillRect(Math.min(started, right - 1.5), top, Math.max(right - started, 1.5), tall);
  if (span.status === "failed") {
    ctx.strokeStyle = style.bad;
    ctx.lineWidth = 2;
    const [middleX, middleY] = [right + FAILED_MARK + 2, top + tall / 2];
    ctx.beginPath();
    for (const way of [-1, 1]) {
      ctx.moveTo(middleX - FAILED_MARK, middleY - way * FAILED_MARK);
      ctx.lineTo(middleX + FAILED_MARK, middleY + way * FAILED_MARK);
    }
    ctx.stroke();
  }
  if (span.position === selected) {
    ctx.strokeStyle = style.text;
    ctx.lineWidth = 2;
    ctx.strokeRect(left - 1, top - 1, right - left + 2, tall + 2);
  }
  places.push({ span, left, right, top, bottom: top + rowHeight });
}

function drawAxis(ctx, x, width, height, style) {
  const seconds = view.to - view.from;
  const wanted = Math.max(Math.floor(width / 110), 2);
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400];
  const step = steps.find((length) => seconds / length <= wanted) ?? 86400 * Math.ceil(seconds / wanted / 86400);
  ctx.fillStyle = style.muted;
  ctx.strokeStyle = style.line;
  ctx.lineWidth = 1;
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const place = Math.round(x(at)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(place, AXIS - 6);
    ctx.lineTo(place, height);
    ctx.stroke();
    const time = clock(at, step);
    if (place + ctx.measureText(time).width < width) ctx.fillText(time, place + 4, AXIS / 2 - 2);
  }
}

function clock(at, step) {
  const date = new Date(at * 1000);
  if (step >= 86400) return date.toLocaleDateString();
  if (step >= 60) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toLocaleTimeString([], step >= 1 ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : { minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
}

function drawWaiting(ctx, x, width, top, style) {
  const steps = waitingSteps();
  const inView = steps.filter(([at]) => at >= view.from && at <= view.to).map(([, number]) => number);
  const before = steps.findLast(([at]) => at < view.from)?.[1] ?? 0;
  const most = Math.max(1, before, ...inView);
  label(ctx, "waiting", `at most ${Math.max(before, 0, ...inView)} at once`, top, width, style);
  const bottom = top + LABEL + WAITING;
  ctx.beginPath();
  ctx.moveTo(0, bottom);
  let y = bottom - (before / most) * (WAITING - 2);
  ctx.lineTo(0, y);
  let end = 0;
  for (const [at, number] of steps) {
    if (at < view.from || at > view.to) continue;
    end = x(at);
    ctx.lineTo(end, y);
    y = bottom - (number / most) * (WAITING - 2);
    ctx.lineTo(end, y);
  }
  ctx.lineTo(Math.min(x(whole.to), width), y);
  ctx.lineTo(Math.min(x(whole.to), width), bottom);
  ctx.closePath();
  ctx.fillStyle = style.accent;
  ctx.globalAlpha = 0.3;
  ctx.fill();
  ctx.globalAlpha = 1;
  ctx.strokeStyle = style.line;
  ctx.lineWidth = 1;
  ctx.strokeRect(0.5, bottom + 0.5, width - 1, 0.01);
  return bottom + GAP;
}

function describe(span) {
  const queued = (span.started ?? span.ended) - span.created;
  const parts = [span.name, span.track.title, span.detail, new Date(span.created * 1000).toLocaleTimeString(), `queued ${duration(queued)}`];
  if (span.started !== null) parts.push(`${span.status === "open" ? "running for" : "ran"} ${duration(span.ended - span.started)}`);
  if (span.device_s > 0) parts.push(`device ${duration(span.device_s)}`);
  if (span.status === "failed") parts.push("failed");
  if (span.status === "open" && span.started === null) parts.push("still waiting");
  return parts.filter(Boolean).join(" · ");
}

function place(event) {
  const inside = canvas.getBoundingClientRect();
  const [left, top] = [event.clientX - inside.left, event.clientY - inside.top];
  const found = places.findLast((place) => left >= place.left - 2 && left <= place.right + 2 && top >= place.top && top <= place.bottom);
  return { span: found?.span ?? null, left, top, width: inside.width };
}

function zoom(factor, about = 0.5) {
  if (!view) return;
  const middle = view.from + (view.to - view.from) * about;
  const most = (whole.to - whole.from) * 1.05;
  const seconds = Math.min(Math.max((view.to - view.from) * factor, 0.005), most);
  show(middle - seconds * about, middle + seconds * (1 - about));
}

/** The place of the selected request in the view, from 0 to 1, or the middle if it is not in view. */
function selectedPlace() {
  const span = view && allSpans().find((each) => each.position === selected);
  const about = span ? ((span.created + span.ended) / 2 - view.from) / (view.to - view.from) : 0.5;
  return about >= 0 && about <= 1 ? about : 0.5;
}

function pan(share) {
  if (!view) return;
  const seconds = (view.to - view.from) * share;
  show(view.from + seconds, view.to + seconds);
}

/** Sets the view, moved so that a part of the session stays visible. */
function show(from, to) {
  const seconds = to - from;
  const first = Math.min(Math.max(from, whole.from - seconds * 0.5), whole.to - seconds * 0.5);
  view = { from: first, to: first + seconds };
  follows = view.to >= whole.to;
  draw();
}

function fit() {
  view = { ...whole };
  follows = true;
  draw();
}

function select(span) {
  selected = span?.position ?? null;
  said.textContent = span ? describe(span) : "";
  if (span && view && (span.ended < view.from || span.created > view.to)) {
    const seconds = view.to - view.from;
    show(span.created - seconds / 3, span.created + (seconds * 2) / 3);
  } else {
    draw();
  }
}

function step(by) {
  const spans = allSpans();
  if (!spans.length) return;
  const index = spans.findIndex((span) => span.position === selected);
  const next = index < 0 ? spans.length - 1 : Math.min(Math.max(index + by, 0), spans.length - 1);
  select(spans[next]);
}

const KEYS = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => step(-1), ArrowDown: () => step(1),
  "+": () => zoom(0.5, selectedPlace()), "=": () => zoom(0.5, selectedPlace()), "-": () => zoom(2, selectedPlace()), 0: fit, Escape: () => select(null),
};
field.addEventListener("keydown", (event) => {
  const act = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
box.addEventListener("click", (event) => {
  const act = { in: () => zoom(0.5), out: () => zoom(2), fit }[event.target.dataset?.zoom];
  act?.();
});
canvas.addEventListener("pointerdown", (event) => {
  if (!view || event.button) return;
  drag = { at: event.clientX, view: { ...view }, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    const seconds = ((drag.at - event.clientX) / canvas.clientWidth) * (drag.view.to - drag.view.from);
    drag.moved ||= Math.abs(drag.at - event.clientX) > 3;
    tip.hidden = true;
    if (drag.moved) show(drag.view.from + seconds, drag.view.to + seconds);
    return;
  }
  const { span, left, top, width } = place(event);
  tip.hidden = !span;
  if (!span) return;
  tip.textContent = describe(span);
  tip.style.left = `${Math.max(Math.min(left, width - tip.offsetWidth), 0)}px`;
  tip.style.top = `${top + 18}px`;
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) select(place(event).span);
  drag = null;
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("dblclick", (event) => zoom(0.4, (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth));
canvas.addEventListener("wheel", (event) => {
  const isZoom = event.ctrlKey || event.metaKey;
  if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
  event.preventDefault();
  const inside = canvas.getBoundingClientRect();
  if (isZoom) zoom(Math.exp(event.deltaY * 0.004), (event.clientX - inside.left) / inside.width);
  else pan(event.deltaX / inside.width);
}, { passive: false });

async function poll() {
  if (!document.hidden) {
    const offline = document.querySelector(".offline");
    try {
      unchanged = (await load()) ? 0 : unchanged + 1;
      offline.hidden = true;
      const number = allSpans().length;
      box.dataset.spans = String(number);
      box.querySelector(".empty").hidden = number > 0;
      field.hidden = number === 0;
      if (!drag && number) draw();
    } catch {
      offline.hidden = false;
    }
  }
  if (box.dataset.live === "yes") setTimeout(poll, unchanged > 10 ? IDLE_POLL_MS : POLL_MS);
}

dark.addEventListener("change", draw);
new ResizeObserver(draw).observe(field);
poll();
