// The playground: settings and texts for all panels, sending and stopping, dialogs with code and prompt.

import { copy } from "./live.js";
import { render } from "./playground_calls.js";
import { Panel } from "./playground_panel.js";
import { bodyOf, load, save } from "./playground_state.js";
import { curl, openai, tinker } from "./snippets.js";
import { addTokens, element, hide, legend, tokenList } from "./token_views.js";

const MOST_PANELS = 4;
const MOST_SEED = 2 ** 31;
const setup = JSON.parse(document.getElementById("playground").dataset.setup);
const settings = document.getElementById("settings");
const composer = document.getElementById("composer");
const dialog = document.getElementById("dialog");
const box = document.getElementById("panels");
const button = (id) => document.getElementById(id);
const field = (name) => settings.elements[name];

const page = {
  setup,
  panels: [],
  view: () => document.querySelector('input[name="view"]:checked').value,
  changed: () => keep(),
  remove(panel) {
    panel.stop();
    page.panels = page.panels.filter((other) => other !== panel);
    panel.root.remove();
    drawAll();
    page.panels[0].select.focus();
  },
  showCode,
  showPrompt,
};

function add(state) {
  const panel = new Panel(page, state);
  page.panels.push(panel);
  box.append(panel.root);
  return panel;
}

function drawAll() {
  legend(button("legend"), page.view());
  hide();
  for (const panel of page.panels) panel.draw();
  box.dataset.count = page.panels.length;
  refresh();
  keep();
}

/** Enables the buttons that can be used now. */
function refresh() {
  const isRunning = page.panels.some((panel) => panel.isRunning);
  const mode = field("mode").value;
  button("send").disabled = isRunning || !setup.may_sample || !composer.elements.user.value;
  button("again").disabled = isRunning || !setup.may_sample || !page.panels.some((panel) => panel.turns.length);
  button("stop").hidden = !isRunning;
  button("add-panel").disabled = isRunning || page.panels.length >= MOST_PANELS;
  button("clear").disabled = isRunning;
  button("more").hidden = mode !== "chat";
  composer.elements.user.placeholder = { chat: "Ask all models…", text: "Text to continue", tokens: "Token ids, for example 1, 2, 3" }[mode];
}

function keep() {
  const values = (form) => Object.fromEntries([...new FormData(form)]);
  save({ settings: values(settings), drafts: values(composer), panels: page.panels.map((panel) => ({ ...panel.state, against: page.panels.findIndex((other) => String(other.number) === String(panel.against)) })) });
}

/** The settings and the texts of the composer, with a seed so that the request can be repeated. */
function draft() {
  const number = (name) => Number(field(name).value);
  const texts = Object.fromEntries(["user", "system", "prefill"].map((name) => [name, composer.elements[name].value]));
  const isChat = field("mode").value === "chat";
  return {
    ...texts,
    system: isChat ? texts.system : "",
    prefill: isChat ? texts.prefill : "",
    mode: field("mode").value,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    n: number("n"),
    seed: field("seed").value === "" ? Math.floor(Math.random() * MOST_SEED) : number("seed"),
    thinking: field("thinking")?.value ?? "",
  };
}

/** Sends the text to all models. `isAgain` sends the last text again and replaces its replies. */
async function send(isAgain) {
  if (!settings.reportValidity()) return;
  const given = draft();
  const last = page.panels.find((panel) => panel.turns.length)?.turns.at(-1);
  if (isAgain) Object.assign(given, { user: last.user, prefill: last.prefill, mode: last.mode });
  const runs = page.panels.map((panel) => {
    if (given.mode !== "chat") panel.turns = [];
    else if (isAgain) panel.turns.pop();
    const turn = { user: given.user, prefill: given.prefill, mode: given.mode, replies: [] };
    let body;
    try {
      body = bodyOf(panel.model, panel.turns, given);
    } catch (error) {
      panel.turns.push({ ...turn, error: error.message, chosen: 0 });
      panel.draw();
      return null;
    }
    panel.turns.push(turn);
    return panel.run(turn, body);
  });
  if (!isAgain && given.mode === "chat") composer.elements.user.value = "";
  refresh();
  await Promise.all(runs);
  drawAll();
}

function open(title, actions, body) {
  button("dialog-title").textContent = title;
  const close = element("button", "", "Close");
  close.type = "button";
  close.addEventListener("click", () => dialog.close());
  button("dialog-actions").replaceChildren(...actions, close);
  button("dialog-body").replaceChildren(body);
  dialog.showModal();
}

/** The last request of a panel, or the request that would be sent now, with the rendered prompt. */
async function requestOf(panel) {
  const turn = panel.turns.at(-1);
  if (turn?.prompt?.tokens.length) return [turn.body, turn.prompt];
  const body = turn?.body ?? bodyOf(panel.model, panel.turns, draft());
  return [body, await render(body, setup.form_token)];
}

async function withRequest(panel, show) {
  try {
    show(...await requestOf(panel));
  } catch (error) {
    open("There is no prompt", [], element("p", "bad", error.message));
  }
}

function copyButton(text) {
  const made = element("button", "primary", "Copy");
  made.type = "button";
  made.addEventListener("click", async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

function showCode(panel) {
  return withRequest(panel, (body, prompt) => {
    const about = { baseUrl: setup.base_url, isKeyless: setup.is_keyless, hasTokenizer: setup.has_tokenizer };
    const fitting = { ...body, max_tokens: prompt.max_tokens ?? body.max_tokens };
    const code = { curl: curl(fitting, about), openai: openai(fitting, about), tinker: tinker(body, prompt, about) };
    const shown = element("pre", "snippet", code.tinker);
    shown.tabIndex = 0;
    const kinds = element("div", "segments");
    kinds.setAttribute("role", "radiogroup");
    kinds.setAttribute("aria-label", "Program");
    for (const kind of Object.keys(code)) {
      const label = element("label");
      const choice = element("input");
      Object.assign(choice, { type: "radio", name: "kind", value: kind, checked: kind === "tinker" });
      choice.addEventListener("change", () => { shown.textContent = code[kind]; });
      label.append(choice, element("span", "", kind));
      kinds.append(label);
    }
    open("This request as code", [kinds, copyButton(() => shown.textContent)], shown);
  });
}

function showPrompt(panel) {
  return withRequest(panel, (_, prompt) => {
    const list = tokenList("Tokens of the prompt");
    addTokens(list, prompt.tokens.map((id, index) => ({ token: { id, text: prompt.texts[index] ?? "" } })));
    const shown = element("div", "raw");
    shown.append(list);
    open(`Prompt: ${prompt.tokens.length} tokens`, [copyButton(() => prompt.text || prompt.tokens.join(", "))], shown);
  });
}

function restore() {
  const kept = load();
  for (const [form, values] of [[settings, kept?.settings], [composer, kept?.drafts]]) {
    for (const [name, value] of Object.entries(values ?? {})) {
      if (form.elements[name]) form.elements[name].value = value;
    }
  }
  for (const [mode, isThere] of [["chat", setup.has_template], ["text", setup.has_tokenizer]]) {
    field("mode").querySelector(`[value="${mode}"]`).disabled = !isThere;
  }
  if (field("mode").selectedOptions[0].disabled) field("mode").value = setup.has_tokenizer ? "text" : "tokens";
  button("more").open = Boolean(composer.elements.system.value || composer.elements.prefill.value);
  const isWanted = kept?.panels?.length && (!setup.named || kept.panels.some((panel) => panel.model === setup.named));
  const base = setup.models[0];
  const fresh = setup.named && setup.named !== base ? [{ model: base }, { model: setup.named }] : [{ model: base }];
  for (const state of isWanted ? kept.panels : fresh) add(state);
  page.panels.forEach((panel) => { panel.against = page.panels[panel.against]?.number ?? ""; });
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!button("send").disabled) send(false);
});
composer.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  composer.requestSubmit();
});
composer.addEventListener("input", () => { refresh(); keep(); });
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("change", () => { refresh(); keep(); });
for (const choice of document.querySelectorAll('input[name="view"]')) choice.addEventListener("change", drawAll);
button("again").addEventListener("click", () => send(true));
button("stop").addEventListener("click", () => page.panels.forEach((panel) => panel.stop()));
button("clear").addEventListener("click", () => {
  page.panels.forEach((panel) => { panel.turns = []; });
  drawAll();
  composer.elements.user.focus();
});
button("add-panel").addEventListener("click", () => {
  const first = page.panels[0];
  const used = new Set(page.panels.map((panel) => panel.model));
  const free = [...setup.models, ...setup.checkpoints.map((checkpoint) => checkpoint.path)].find((name) => !used.has(name));
  const turns = structuredClone(first.turns);
  if (turns.length) Object.assign(turns.at(-1), { replies: [], prompt: null, body: undefined, error: "", speed: null });
  add({ model: free ?? first.model, turns }).select.focus();
  drawAll();
});
addEventListener("pagehide", keep);

restore();
drawAll();
