// One panel of the playground: a model, its conversation, and its replies while they are streamed.

import { Refusal, score, stream } from "./playground_calls.js";
import { visible } from "./text.js";
import { addTokens, element, signed, tokenList } from "./token_views.js";

const BY_PATH = "by path…";
const EXPLAIN_MS = 2000; // until the first token of a reply
const template = document.getElementById("panel-template");
const scoring = new WeakMap();
let numMade = 0;

/** Scores a reply under a model, once. */
function scoreOnce(reply, model, prompt, formToken) {
  if (!scoring.has(reply)) scoring.set(reply, {});
  const ids = reply.tokens.map((token) => token.id);
  const made = (scoring.get(reply)[model] ??= score(model, prompt.tokens, ids, formToken));
  return made.finally(() => { delete scoring.get(reply)[model]; });
}

export class Panel {
  /** `page` has setup, view(), panels, changed(), showCode(panel) and showPrompt(panel). */
  constructor(page, { model, turns = [], against = "" }) {
    this.page = page;
    this.turns = turns;
    this.against = against;
    this.abort = null;
    this.waiting = "";
    this.root = template.content.firstElementChild.cloneNode(true);
    this.select = this.part(".model");
    this.path = this.part(".path");
    this.number = ++numMade;
    this.root.setAttribute("aria-label", `Model ${this.number}`);
    this.select.setAttribute("aria-label", `Model ${this.number}`);
    this.path.setAttribute("aria-label", `Path of model ${this.number}`);
    this.fillMenu(model);
    this.select.addEventListener("change", () => {
      this.path.hidden = this.select.value !== BY_PATH;
      if (!this.path.hidden) this.path.focus();
      page.changed();
    });
    this.path.addEventListener("change", () => page.changed());
    this.part(".remove").addEventListener("click", () => page.remove(this));
    this.part(".code").addEventListener("click", () => page.showCode(this));
    this.part(".prompt").addEventListener("click", () => page.showPrompt(this));
    this.other = this.part(".other");
    this.other.addEventListener("change", () => {
      this.against = this.other.value;
      page.changed();
      this.draw();
    });
  }

  part(selector) {
    return this.root.querySelector(selector);
  }

  get model() {
    return this.select.value === BY_PATH ? this.path.value.trim() : this.select.value;
  }

  get title() {
    const option = this.select.selectedOptions[0];
    return this.select.value === BY_PATH ? this.model : option.textContent;
  }

  get isRunning() {
    return this.abort !== null;
  }

  get state() {
    return { model: this.model, turns: this.turns, against: this.against };
  }

  fillMenu(model) {
    const { models, checkpoints, named } = this.page.setup;
    const listed = new Set([...models, ...checkpoints.map((checkpoint) => checkpoint.path)]);
    const others = [...new Set([named, model])].filter((path) => path && !listed.has(path));
    for (const [title, options] of [
      ["Base model", models.map((name) => [name, name])],
      ["By path", others.map((path) => [path, path.replace("tinker://session-", "")])],
      ["Your checkpoints", checkpoints.map((checkpoint) => [checkpoint.path, checkpoint.name])],
      ["Others", [[BY_PATH, BY_PATH]]],
    ]) {
      if (!options.length) continue;
      const group = element("optgroup");
      group.label = title;
      group.append(...options.map(([value, label]) => {
        const option = element("option", "", label);
        option.value = value;
        return option;
      }));
      this.select.append(group);
    }
    this.select.value = model || BY_PATH;
    this.path.hidden = this.select.value !== BY_PATH;
  }

  /** Sends a request and shows its replies. `turn` has the texts. The body is sent to the server. */
  async run(turn, body) {
    Object.assign(turn, { body, model: this.model, prompt: null, error: "", chosen: 0 });
    turn.replies = Array.from({ length: body.n }, () => ({ text: "", tokens: [], count: 0, reason: "", scores: {} }));
    this.abort = new AbortController();
    this.draw();
    const started = performance.now();
    let first = started;
    const explaining = setInterval(() => this.explainWait(), EXPLAIN_MS);
    try {
      for await (const event of stream(body, this.page.setup.form_token, this.abort.signal)) {
        if (event.type === "prompt") turn.prompt = event;
        if (event.type === "error") throw new Refusal(event.detail);
        const reply = turn.replies[event.index];
        if (event.type === "finish") reply.reason = event.reason;
        if (event.type === "delta") {
          if (!turn.replies.some((reply) => reply.count)) first = performance.now();
          clearInterval(explaining);
          this.waiting = "";
          reply.count += event.tokens.length;
          reply.text += event.text;
          reply.tokens.push(...event.tokens);
          turn.speed = { first_s: (first - started) / 1000, s: (performance.now() - first) / 1000 };
          this.grow(event);
        }
      }
    } catch (error) {
      const isStopped = error.name === "AbortError";
      turn.error = isStopped ? "" : error instanceof Refusal ? error.message : "The server is not responding.";
      for (const reply of turn.replies) reply.reason ||= isStopped ? "stopped" : "error";
    }
    clearInterval(explaining);
    this.waiting = "";
    this.abort = null;
    this.draw();
    this.page.changed();
  }

  /** Says what the engine is doing while no token has arrived. */
  async explainWait() {
    const answer = await fetch("/console/data/engine").catch(() => null);
    const { detail } = answer?.ok ? await answer.json() : {};
    if (!this.isRunning || this.turns.at(-1)?.replies.some((reply) => reply.count)) return;
    this.waiting = detail ?? "";
    this.tell();
  }

  stop() {
    this.abort?.abort();
  }

  /** The status line: tokens, speed, how it ended. */
  tell() {
    const turn = this.turns.at(-1);
    const total = turn?.replies.reduce((sum, reply) => sum + reply.count, 0) ?? 0;
    const words = [];
    if (total) words.push(`${total} tok`);
    if (turn?.speed?.s > 0.05) words.push(`${Math.round(total / turn.speed.s)} tok/s`, `first after ${turn.speed.first_s.toFixed(2)} s`);
    if (turn && !this.isRunning && turn.replies.length === 1 && turn.replies[0].reason) words.push(turn.replies[0].reason);
    if (this.isRunning) words.push(this.waiting ? `waiting: ${this.waiting}` : "writing…");
    this.part(".status").textContent = words.join(" · ");
  }

  /** Shows new tokens without redrawing the rest. */
  grow({ index, text, tokens }) {
    const body = this.bodies?.[index];
    if (!body) return;
    const turns = this.part(".turns");
    const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
    if (body.list) addTokens(body.list, tokens.map((token) => ({ token })));
    else body.append(visible(text));
    if (isAtEnd) turns.scrollTop = turns.scrollHeight;
    this.tell();
  }

  /** Draws the whole panel. */
  draw() {
    const others = this.page.panels.filter((panel) => panel !== this);
    this.part(".remove").hidden = !others.length;
    this.part(".against").hidden = this.page.view() !== "changed" || !others.length;
    this.other.replaceChildren(...others.map((panel) => {
      const option = element("option", "", panel.title);
      option.value = panel.number;
      return option;
    }));
    if (others.some((panel) => String(panel.number) === String(this.against))) this.other.value = this.against;
    const turns = this.part(".turns");
    turns.replaceChildren(...this.turns.map((turn, index) => this.drawTurn(turn, index === this.turns.length - 1)));
    if (!this.turns.length) turns.append(element("p", "empty", "No reply yet."));
    turns.scrollTop = turns.scrollHeight;
    this.tell();
  }

  drawTurn(turn, isLast) {
    const box = element("div", "turn");
    box.append(element("div", "said", visible(turn.user)));
    const cards = element("div", turn.replies.length > 1 ? "replies many" : "replies");
    const bodies = turn.replies.map((reply, index) => this.drawReply(turn, reply, index, isLast, cards));
    if (isLast) this.bodies = bodies;
    box.append(cards);
    if (turn.error) {
      const problem = element("p", "banner error", turn.error);
      problem.setAttribute("role", "alert");
      box.append(problem);
    }
    return box;
  }

  drawReply(turn, reply, index, isLast, cards) {
    const card = element("article", "reply");
    const many = turn.replies.length > 1;
    if (many) {
      const head = element("label", "small muted");
      const choice = element("input");
      choice.type = "radio";
      choice.name = `chosen-${this.number}-${this.turns.indexOf(turn)}`;
      choice.checked = turn.chosen === index;
      choice.addEventListener("change", () => {
        turn.chosen = index;
        this.page.changed();
      });
      head.append(choice, ` sample ${index + 1}${reply.reason ? ` · ${reply.count} tok · ${reply.reason}` : ""}`);
      card.append(head);
    }
    const body = element("div", "body");
    if (turn.prefill) body.append(element("span", "prefill", visible(turn.prefill)));
    card.append(body);
    cards.append(card);
    const view = this.page.view();
    const hasTokens = reply.tokens.length > 0 || this.isRunning;
    if (view === "tokens" && hasTokens) {
      body.list = tokenList(`Tokens of reply ${index + 1} of model ${this.number}`);
      addTokens(body.list, reply.tokens.map((token) => ({ token })));
      body.append(body.list);
    } else if (view === "changed" && isLast && reply.tokens.length && !this.isRunning) this.drawChange(turn, reply, index, card, body);
    else if (!this.page.setup.has_tokenizer) body.append(reply.tokens.map((token) => token.id).join(" "));
    else body.append(visible(reply.text));
    return body;
  }

  /** Scores a reply under its own model and under the other panel's, and shows the difference. */
  async drawChange(turn, reply, index, card, body) {
    const other = this.page.panels.find((panel) => String(panel.number) === this.other.value);
    const result = element("p", "small muted change");
    card.append(result);
    if (!other) {
      body.append(visible(reply.text));
      result.textContent = "Add a second model for comparison.";
      return;
    }
    const models = [turn.model, other.model];
    const names = [turn.model === this.model ? this.title : turn.model, other.title];
    if (!models.every((model) => reply.scores[model])) {
      body.append(visible(reply.text));
      result.textContent = `Scoring under both models…`;
      try {
        for (const model of models) reply.scores[model] ??= await scoreOnce(reply, model, turn.prompt, this.page.setup.form_token);
      } catch (error) {
        result.textContent = error.message;
        result.className = "small bad change";
        return;
      }
      this.page.changed();
      body.replaceChildren();
      if (turn.prefill) body.append(element("span", "prefill", visible(turn.prefill)));
    }
    const [own, theirs] = models.map((model) => reply.scores[model]);
    const list = tokenList(`Change of reply ${index + 1} of model ${this.number}`);
    addTokens(list, own.map((token, at) => ({ token, other: theirs[at], names })));
    body.append(list);
    const sum = own.reduce((total, token, at) => total + token.logprob - theirs[at].logprob, 0);
    result.textContent = `Sum of log p − log p′: ${signed(sum)} over ${own.length} tokens, mean ${signed(sum / own.length, 3)}`;
  }
}
