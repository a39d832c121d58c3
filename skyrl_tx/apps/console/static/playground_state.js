// The state of the tab: settings, texts, and the conversation of each panel. It is stored in sessionStorage only.

const KEY = "playground";
const NEEDS = { chat: "messages", text: "prompt", tokens: "prompt_tokens" };

/** The state that an earlier page of this tab has stored, or null. */
export function load() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY));
  } catch {
    return null;
  }
}

/** Stores the state. If it is too large, first the tokens of replies are dropped, then the conversations. */
export function save(state) {
  const withoutTokens = (key, value) => (key === "tokens" || key === "scores" || key === "texts" ? [] : value);
  const withoutTurns = (key, value) => (key === "turns" ? [] : value);
  for (const replacer of [undefined, withoutTokens, withoutTurns]) {
    try {
      sessionStorage.setItem(KEY, JSON.stringify(state, replacer));
      return;
    } catch { /* the quota is exceeded */ }
  }
}

/** Reads token ids from text such as "1, 2 3" or "[1, 2, 3]". */
export function tokenIds(text) {
  const words = text.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^\d+$/.test(word));
  if (wrong !== undefined) throw new Error(`${wrong.slice(0, 40)} is not a token id`);
  return words.map(Number);
}

/** The messages before the next turn. */
function history(turns) {
  return turns.flatMap((turn) => {
    const reply = turn.replies[turn.chosen];
    return reply?.text ? [{ role: "user", content: turn.user }, { role: "assistant", content: turn.prefill + reply.text }] : [];
  });
}

/** The body of a request for the next turn of a conversation. `draft` has the texts and the settings. */
export function bodyOf(model, turns, draft) {
  const body = { model, max_tokens: draft.max_tokens, temperature: draft.temperature, top_p: draft.top_p, n: draft.n, seed: draft.seed };
  const field = NEEDS[draft.mode];
  if (field === "prompt") body.prompt = draft.user;
  if (field === "prompt_tokens") body.prompt_tokens = tokenIds(draft.user);
  if (field === "messages") {
    body.messages = [
      ...(draft.system ? [{ role: "system", content: draft.system }] : []),
      ...history(turns),
      { role: "user", content: draft.user },
      ...(draft.prefill ? [{ role: "assistant", content: draft.prefill }] : []),
    ];
    if (draft.thinking) body.thinking = draft.thinking === "yes";
  }
  return body;
}
