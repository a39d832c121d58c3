// Tokens as coloured spans with numbers: by probability, or by the difference to another model. Arrow keys move.

import { visible } from "./text.js";

const LIKELY = [[0.9, "p4", "p ≥ 0.9"], [0.5, "p3", "0.5 to 0.9"], [0.1, "p2", "0.1 to 0.5"], [0.01, "p1", "0.01 to 0.1"], [-1, "p0", "below 0.01"]];
const CHANGE = [[2, "up2", "≥ 2"], [0.25, "up1", "0.25 to 2"], [-0.25, "same", "about equal"], [-2, "down1", "−0.25 to −2"], [-Infinity, "down2", "≤ −2"]];

const tip = document.getElementById("tip");
const details = new WeakMap();

export const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

const probability = (logprob) => {
  const value = Math.exp(logprob);
  return value >= 0.001 ? value.toFixed(3) : value.toExponential(1);
};
const classOf = (scale, value) => scale.find(([least]) => value >= least)[1];
const shape = (token) => token.text || (token.bytes ? `‹${token.bytes}›` : `#${token.id} `);
const quoted = (text) => `“${visible(text).replaceAll("\n", "↵")}”`;

/** The span of a token. `detail` has `token`, and if known `other` ({logprob, top}) and the names of both models. */
function span(detail) {
  const { token, other } = detail;
  const text = shape(token);
  const made = element("span", "tok", visible(text).replaceAll("\n", "↵\n"));
  made.setAttribute("role", "option");
  made.tabIndex = -1;
  let said = `token ${token.text || token.id}`;
  if (token.logprob !== undefined && token.logprob !== null) {
    said += `, probability ${probability(token.logprob)}`;
    made.classList.add(other ? classOf(CHANGE, token.logprob - other.logprob) : classOf(LIKELY, Math.exp(token.logprob)));
    if (other) said += `, difference ${signed(token.logprob - other.logprob)}`;
  }
  made.setAttribute("aria-label", said);
  if (!token.text) made.classList.add("part");
  details.set(made, detail);
  return made;
}

/** A list that tokens are added to. */
export function tokenList(label) {
  const list = element("div", "toks");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", label);
  list.setAttribute("aria-orientation", "horizontal");
  return list;
}

export function addTokens(list, items) {
  const isFirst = !list.firstElementChild;
  list.append(...items.map(span));
  if (isFirst && list.firstElementChild) list.firstElementChild.tabIndex = 0;
}

/** Explains the colours of a view. */
export function legend(box, view) {
  box.replaceChildren();
  box.hidden = view === "text";
  if (view === "text") return;
  const isChange = view === "changed";
  box.append(element("span", "muted", isChange ? "log p of this model − log p of the other:" : "Probability of each token:"));
  for (const [, name, title] of isChange ? CHANGE : LIKELY) box.append(element("span", `tok ${name}`, title));
  box.append(element("span", "muted", isChange ? "Underlined: more likely under this model. Wavy: less likely. The temperature is not applied." : "Hover over a token, or use the arrow keys, to see its alternatives."));
}

function line(name, value) {
  const row = element("div", "pair");
  row.append(element("span", "muted", name), element("span", "", value));
  return row;
}

function show(made) {
  const { token, other, names } = details.get(made);
  tip.replaceChildren(element("strong", "", token.text ? quoted(token.text) : token.bytes ? `bytes ${token.bytes}` : "token"));
  tip.append(element("span", "muted", ` id ${token.id}`));
  if (token.logprob !== undefined && token.logprob !== null) {
    const of = (logprob) => `p ${probability(logprob)} · log p ${signed(logprob)}`;
    tip.append(line(names?.[0] ?? "this token", of(token.logprob)));
    if (other) tip.append(line(names?.[1] ?? "other", of(other.logprob)), line("difference", signed(token.logprob - other.logprob, 3)));
  }
  if (token.top?.length) {
    const table = element("div", "tops");
    for (const [id, text, logprob] of token.top.slice(0, 5)) {
      const row = element("div", id === token.id ? "top own" : "top");
      row.style.setProperty("--share", Math.min(Math.exp(logprob), 1).toFixed(4));
      const also = other?.top?.find(([each]) => each === id);
      row.append(element("span", "", text ? quoted(text) : `#${id}`), element("span", "", probability(logprob) + (also ? ` · ${probability(also[2])}` : "")));
      table.append(row);
    }
    tip.append(element("div", "muted small", other ? "likeliest here · there" : "likeliest here"), table);
  }
  if (!tip.matches(":popover-open")) tip.showPopover();
  made.setAttribute("aria-describedby", "tip");
  const at = made.getClientRects()[0] ?? made.getBoundingClientRect();
  const below = at.bottom + 8;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${fits ? below : Math.max(8, at.top - tip.offsetHeight - 8)}px`;
}

export function hide() {
  if (tip.matches(":popover-open")) tip.hidePopover();
}

function focus(made) {
  if (!made) return;
  for (const each of made.parentElement.querySelectorAll('.tok[tabindex="0"]')) each.tabIndex = -1;
  made.tabIndex = 0;
  made.focus();
}

const tokenAt = (target) => (target instanceof Element && details.has(target) ? target : null);
document.addEventListener("mouseover", (event) => {
  const made = tokenAt(event.target);
  if (made) show(made);
  else hide();
});
document.addEventListener("focusin", (event) => {
  const made = tokenAt(event.target);
  if (made) show(made);
  else hide();
});
document.addEventListener("scroll", hide, { passive: true });
document.addEventListener("keydown", (event) => {
  const made = tokenAt(event.target);
  if (event.key === "Escape" && tip.matches(":popover-open")) hide();
  if (!made || event.ctrlKey || event.metaKey || event.altKey) return;
  const steps = { ArrowRight: made.nextElementSibling, ArrowLeft: made.previousElementSibling, ArrowDown: made.nextElementSibling, ArrowUp: made.previousElementSibling, Home: made.parentElement.firstElementChild, End: made.parentElement.lastElementChild };
  if (!(event.key in steps)) return;
  event.preventDefault();
  focus(steps[event.key]);
});
