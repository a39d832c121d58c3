// Charts of runs with uPlot. Loads the steps of each run, and polls for new steps while the page is visible.

import { FEW_POINTS, findRange, format, labelTicks, limit, measureAxis, smooth, widen } from "./chart_numbers.js";
import { cssColour, dark } from "./colours.js";
import { visible } from "./text.js";

/* global uPlot */

const POLL_MS = 2000;
const IDLE_POLL_MS = 10000;
const MOST_POINTS = 5000;
const PALETTE = [
  ["#4338ca", "#a5b4fc"], ["#c2410c", "#fdba74"], ["#0f766e", "#5eead4"], ["#be185d", "#f9a8d4"],
  ["#4d7c0f", "#bef264"], ["#7e22ce", "#d8b4fe"], ["#0369a1", "#7dd3fc"], ["#a16207", "#fde047"],
];
const DASHES = [[], [8, 4], [2, 4], [10, 3, 2, 3], [14, 5], [4, 4], [1, 3], [8, 2, 2, 2]];
const STEP_INCREMENTS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const GROUPS = ["Reward and loss", "Logged by the client", "Training", "Samples", "Size and time"];
const REMEMBERED = "skyrl_tx-chart-options";

const box = document.querySelector("[data-charts]");
const controls = document.querySelector("[data-controls]");
const runs = JSON.parse(box.dataset.runs).map((run) => ({ ...run, data: null }));
const charts = new Map();
const groups = new Map();
let unchanged = 0;

const option = (name) => controls.elements[name];
const colour = (index) => PALETTE[index % PALETTE.length][dark.matches ? 1 : 0];

/** Loads all steps of a run, or later only from its last known step on, which may have changed. */
async function load(run) {
  const last = run.data?.step.at(-1);
  const since = last && run.data.step.length < MOST_POINTS ? last : 0;
  const answer = await fetch(run.url + (since ? `?since=${since}` : ""), { headers: { Accept: "application/json" } });
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  const fresh = await answer.json();
  const before = run.data && JSON.stringify([run.data.step.length, run.data.time.at(-1), run.data.loggedCount, run.data.checkpoints.length]);
  run.data = since ? merge(run.data, fresh, since) : fresh;
  run.data.loggedCount = Object.values(run.data.logged).reduce((sum, curve) => sum + curve.step.length, 0);
  return before !== JSON.stringify([run.data.step.length, run.data.time.at(-1), run.data.loggedCount, run.data.checkpoints.length]);
}

function merge(old, fresh, since) {
  const keep = old.step.findIndex((step) => step >= since);
  const kept = keep < 0 ? old.step.length : keep;
  const curves = {};
  for (const name of new Set([...Object.keys(old.curves), ...Object.keys(fresh.curves)])) {
    const head = old.curves[name]?.slice(0, kept) ?? Array(kept).fill(null);
    curves[name] = head.concat(fresh.curves[name] ?? Array(fresh.step.length).fill(null));
  }
  const logged = {};
  for (const name of new Set([...Object.keys(old.logged), ...Object.keys(fresh.logged)])) {
    const before = old.logged[name] ?? { step: [], time: [], value: [] };
    const after = fresh.logged[name] ?? { step: [], time: [], value: [] };
    const end = before.step.findIndex((step) => step >= since);
    const part = end < 0 ? before.step.length : end;
    logged[name] = Object.fromEntries(["step", "time", "value"].map((key) => [key, before[key].slice(0, part).concat(after[key])]));
  }
  return {
    ...fresh,
    reward: fresh.reward ?? old.reward,
    step: old.step.slice(0, kept).concat(fresh.step),
    time: old.time.slice(0, kept).concat(fresh.time),
    curves,
    logged,
    titles: { ...old.titles, ...fresh.titles },
  };
}

/** The steps, times and values of one curve of a run, or null if the run has no curve of this name. */
function curveOf(run, name) {
  if (name.startsWith("logged/")) {
    const curve = run.data.logged[name.slice(7)];
    return curve && { step: curve.step, time: curve.time, value: curve.value };
  }
  const value = run.data.curves[name];
  return value && { step: run.data.step, time: run.data.time, value };
}

/** The aligned columns of a chart: the smoothed curve of each run, and for a single run also its raw curve. */
function columns(name) {
  const byTime = option("x").value === "time";
  const weight = Number(option("smooth").value);
  const isLog = option("log").checked;
  const tables = [];
  for (const run of runs) {
    const curve = run.data && curveOf(run, name);
    if (!curve) {
      tables.push([[], [], []]);
      continue;
    }
    const rows = curve.step.map((_, index) => index).filter((index) => curve.value[index] !== null);
    const x = rows.map((index) => (byTime ? curve.time[index] : curve.step[index]));
    const raw = rows.map((index) => (isLog && curve.value[index] <= 0 ? null : limit(curve.value[index])));
    tables.push([x, smooth(raw, weight), raw]);
  }
  if (runs.length === 1) return tables[0];
  return uPlot.join(tables.map(([x, soft]) => [x, soft]));
}

function marks(plot) {
  if (runs.length !== 1 || !option("marks")?.checked) return;
  const { ctx } = plot;
  const byTime = option("x").value === "time";
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = cssColour("muted");
  ctx.setLineDash([3, 4]);
  for (const mark of runs[0].data.checkpoints) {
    const at = byTime ? mark.time : mark.step;
    if (at === null || at < plot.scales.x.min || at > plot.scales.x.max) continue;
    const x = plot.valToPos(at, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, plot.bbox.top);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x, plot.bbox.top + plot.bbox.height - 9 * devicePixelRatio);
    ctx.lineTo(x - 5 * devicePixelRatio, plot.bbox.top + plot.bbox.height);
    ctx.lineTo(x + 5 * devicePixelRatio, plot.bbox.top + plot.bbox.height);
    ctx.fill();
  }
  ctx.restore();
}

function build(name, chart) {
  chart.plot?.destroy();
  const byTime = option("x").value === "time";
  const axis = { stroke: cssColour("muted"), grid: { stroke: cssColour("line"), width: 1 }, ticks: { stroke: cssColour("line"), width: 1 }, font: "12px system-ui, sans-serif" };
  const hasFewPoints = (plot, index) => plot.data[index].filter((value) => typeof value === "number").length < FEW_POINTS;
  const series = [{}];
  runs.forEach((run, index) => {
    series.push({ label: run.name, stroke: colour(index), width: 2, dash: runs.length > 1 ? DASHES[index % DASHES.length] : [], spanGaps: true, points: { show: hasFewPoints } });
  });
  if (runs.length === 1) series.push({ label: "raw", stroke: colour(0) + "55", width: 1, spanGaps: true, points: { show: false } });
  chart.plot = new uPlot({
    width: chart.plotBox.clientWidth,
    height: 210,
    cursor: { sync: { key: "runs" }, y: false },
    legend: { show: false },
    scales: {
      x: byTime ? { time: true } : { time: false, range: (_, low, high) => widen(low, high, 1e-9) },
      y: option("log").checked ? { distr: 3 } : { range: findRange },
    },
    axes: [{ ...axis, ...(byTime ? {} : { incrs: STEP_INCREMENTS }) }, { ...axis, size: measureAxis, values: labelTicks }],
    series,
    hooks: {
      draw: [marks],
      setCursor: [(plot) => show(chart, plot.cursor.idx)],
    },
  }, columns(name), chart.plotBox);
  show(chart, null);
}

/** Shows the values under the cursor, or the newest value of each run. */
function show(chart, index) {
  const data = chart.plot?.data;
  if (!data || !data[0].length) return;
  const isNewest = index === null || index === undefined;
  const of = (column) => (isNewest ? column.findLast((value) => value !== null && value !== undefined) : column[index]);
  const shown = runs.length === 1 ? [data[2]] : data.slice(1);
  const words = shown.map((column) => format(of(column))).join(" · ");
  if (isNewest) {
    chart.output.textContent = words;
    return;
  }
  const at = data[0][index];
  const x = option("x").value === "time" ? new Date(at * 1000).toLocaleTimeString() : `step ${at}`;
  chart.output.textContent = `${words}  (${x})`;
}

/** Name, title, help and group of each chart, in the order of the page. */
function names() {
  const found = new Map();
  for (const { data } of runs) {
    for (const name of Object.keys(data?.logged ?? {})) {
      const group = name === data.reward ? GROUPS[0] : name.includes("/") ? name.split("/", 1)[0] : GROUPS[1];
      found.set(`logged/${name}`, { title: name, help: "logged by the client", group });
    }
    for (const name of Object.keys(data?.curves ?? {})) found.set(name, data.titles[name]);
  }
  const rank = ({ group }) => (GROUPS.includes(group) ? GROUPS.indexOf(group) : GROUPS.length);
  return [...found].sort(([, a], [, b]) => rank(a) - rank(b) || a.group.localeCompare(b.group));
}

function makeElement(kind, parent, properties) {
  const element = Object.assign(document.createElement(kind), properties);
  parent.append(element);
  return element;
}

/** The element that contains the charts of a group. */
function findGroup(title) {
  if (!groups.has(title)) {
    const element = makeElement("section", box, { className: "chart-group" });
    makeElement("h2", element, { textContent: visible(title) });
    groups.set(title, makeElement("div", element, { className: "charts" }));
  }
  return groups.get(title);
}

function makeChart(about) {
  const element = makeElement("section", findGroup(about.group), { className: "chart", ariaLabel: visible(about.title) });
  const heading = makeElement("h3", element);
  makeElement("span", heading, { textContent: visible(about.title) + (about.unit ? `, ${about.unit}` : "") });
  const output = makeElement("output", heading);
  makeElement("p", element, { className: "help", textContent: about.help });
  return { output, element, plotBox: makeElement("div", element, { className: "plot" }), plot: null };
}

function draw(rebuild) {
  const words = option("filter").value.toLowerCase().split(/\s+/);
  const found = names();
  const isNew = found.some(([name]) => !charts.has(name));
  for (const [name, about] of found) {
    if (!charts.has(name)) charts.set(name, makeChart(about));
    const chart = charts.get(name);
    if (isNew) {
      findGroup(about.group).append(chart.element);
      box.append(findGroup(about.group).parentElement);
    }

    const text = `${about.group} ${about.title}`.toLowerCase();
    chart.element.hidden = !words.every((word) => text.includes(word));
    if (chart.element.hidden) continue;
    if (!chart.plot || rebuild) {
      build(name, chart);
    } else {
      chart.plot.setData(columns(name));
      show(chart, null);
    }
    chart.element.dataset.points = String(chart.plot.data[0].length);
  }
  for (const group of groups.values()) group.parentElement.hidden = [...group.children].every((element) => element.hidden);
}

async function poll() {
  if (!document.hidden) {
    const offline = document.querySelector(".offline");
    try {
      const changes = await Promise.all(runs.map(load));
      offline.hidden = true;
      unchanged = changes.some(Boolean) ? 0 : unchanged + 1;
      if (changes.some(Boolean)) draw(false);
    } catch {
      offline.hidden = false;
    }
  }
  if (box.dataset.live === "yes") setTimeout(poll, unchanged > 15 ? IDLE_POLL_MS : POLL_MS);
}

function legend() {
  if (runs.length < 2) return;
  const list = document.createElement("ul");
  list.className = "legend";
  list.setAttribute("aria-label", "Runs");
  runs.forEach((run, index) => {
    const item = document.createElement("li");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("width", "34");
    svg.setAttribute("height", "8");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ x1: 0, x2: 34, y1: 4, y2: 4, stroke: colour(index), "stroke-width": 3, "stroke-dasharray": DASHES[index % DASHES.length].join(" ") })) line.setAttribute(name, value);
    svg.append(line);
    const name = document.createElement("span");
    name.textContent = run.name;
    item.append(svg, name);
    list.append(item);
  });
  document.querySelector(".legend")?.remove();
  box.before(list);
}

/** Keeps the options for the next page. A browser can refuse to store them. */
function remember() {
  const values = [...controls.elements].filter(({ name }) => name).map(({ name, type, value, checked }) => [name, type === "checkbox" ? checked : value]);
  try {
    localStorage.setItem(REMEMBERED, JSON.stringify(values));
  } catch { /* the options hold for this page */ }
}

function recall() {
  let values = [];
  try {
    values = JSON.parse(localStorage.getItem(REMEMBERED) ?? "[]");
  } catch { /* the defaults */ }
  for (const [name, value] of values) if (option(name)) option(name)[typeof value === "boolean" ? "checked" : "value"] = value;
  controls.querySelector("output").textContent = Number(option("smooth").value).toFixed(2);
}

controls.addEventListener("submit", (event) => event.preventDefault());
controls.addEventListener("input", (event) => {
  controls.querySelector("output").textContent = Number(option("smooth").value).toFixed(2);
  remember();
  draw(!["smooth", "filter"].includes(event.target.name));
});
dark.addEventListener("change", () => { legend(); draw(true); });
new ResizeObserver(() => {
  for (const chart of charts.values()) if (chart.plot && !chart.element.hidden) chart.plot.setSize({ width: chart.plotBox.clientWidth, height: 210 });
}).observe(box);

recall();
legend();
poll();
