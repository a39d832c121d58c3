// The server's routes for the playground: a streamed reply, a rendered prompt, the score of a reply.

export class Refusal extends Error {}

async function call(path, body, formToken, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Form-Token": formToken },
    body: JSON.stringify(body),
    signal,
  });
  if (answer.status === 401) location.reload(); // to the log-in page
  if (!answer.ok) {
    const { detail } = await answer.json().catch(() => ({}));
    throw new Refusal(detail ?? `the server answered with status ${answer.status}`);
  }
  return answer;
}

/** Yields the events of a reply. */
export async function* stream(body, formToken, signal) {
  const answer = await call("/console/chat", body, formToken, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/** Renders a body without sampling fields. Returns the prompt: text, tokens, texts, stop. */
export async function render(body, formToken) {
  const { model, messages, prompt, prompt_tokens, thinking } = body;
  return (await call("/console/render", { model, messages, prompt, prompt_tokens, thinking }, formToken)).json();
}

let queue = Promise.resolve();

/** Scores the tokens of a reply under another model. Calls run one at a time, so that they do not delay replies. */
export function score(model, promptTokens, replyTokens, formToken) {
  const body = { model, prompt_tokens: promptTokens, reply_tokens: replyTokens };
  const work = () => call("/console/score", body, formToken).then((answer) => answer.json()).then((answer) => answer.tokens);
  const made = queue.then(work);
  queue = made.catch(() => {});
  return made;
}
