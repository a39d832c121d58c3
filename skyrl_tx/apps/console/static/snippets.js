// A request of the playground as code: curl, the openai package, the tinker package.

const CONTINUES = { add_generation_prompt: false, continue_final_message: true };

/** The fields of OpenAI's API, and further fields, which the openai package takes as `extra_body`. */
function openaiFields(body) {
  const { model, messages, prompt, prompt_tokens: tokens, thinking, max_tokens, temperature, top_p, n, seed } = body;
  const source = messages ? { messages } : { prompt: prompt ?? tokens };
  const extra = {};
  if (messages?.at(-1).role === "assistant") Object.assign(extra, CONTINUES);
  if (thinking !== undefined) extra.chat_template_kwargs = { enable_thinking: thinking };
  if (tokens) extra.return_token_ids = true;
  return { fields: { model, ...source, max_tokens, temperature, top_p, n, seed }, extra };
}

const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Writes a value as a Python literal. JSON's strings and numbers are Python's. */
function inPython(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    if (value.every((part) => typeof part === "number")) return `[${value.join(", ")}]`;
    return `[\n${value.map((part) => `${inner}${inPython(part, inner)},\n`).join("")}${indent}]`;
  }
  return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${inPython(part, inner)}`).join(", ")}}`;
}

export function curl(body, { baseUrl, isKeyless }) {
  const { fields, extra } = openaiFields(body);
  const path = body.messages ? "chat/completions" : "completions";
  const key = isKeyless ? "" : ` \\\n  -H "Authorization: Bearer $TINKER_API_KEY"`;
  const data = inShell(JSON.stringify({ ...fields, ...extra }, null, 2));
  return `curl ${baseUrl}/oai/api/v1/${path}${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${data}\n`;
}

export function openai(body, { baseUrl, isKeyless }) {
  const { fields, extra } = openaiFields(body);
  const given = Object.entries(fields).concat(Object.keys(extra).length ? [["extra_body", extra]] : []);
  const lines = given.map(([name, value]) => `    ${name}=${inPython(value, "    ")},\n`).join("");
  const key = isKeyless ? JSON.stringify("tml-local") : 'os.environ["TINKER_API_KEY"]';
  const kind = body.messages ? "chat.completions" : "completions";
  const shown = body.messages ? "choice.message.content" : body.prompt_tokens ? "choice.token_ids" : "choice.text";
  return `${isKeyless ? "" : "import os\n\n"}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(`${baseUrl}/oai/api/v1`)}, api_key=${key})
response = client.${kind}.create(
${lines})
for choice in response.choices:
    print(${shown})
`;
}

/** `prompt` is the rendered prompt: its tokens, the tokens that end a reply, and the path of the weights. */
export function tinker(body, prompt, { baseUrl, isKeyless, hasTokenizer }) {
  const path = prompt.model_path;
  const weights = path ? `model_path=${JSON.stringify(path)}` : `base_model=${JSON.stringify(body.model)}`;
  const stop = prompt.stop.length ? `, stop=[${prompt.stop.join(", ")}]` : "";
  const key = isKeyless ? ', api_key="tml-local"' : "";
  const shown = hasTokenizer ? "        # print(client.get_tokenizer().decode(sequence.tokens))\n" : "";
  return `import tinker
from tinker import types

prompt = types.ModelInput.from_ints([${prompt.tokens.join(", ")}])
params = types.SamplingParams(
    max_tokens=${prompt.max_tokens ?? body.max_tokens}, temperature=${body.temperature}, top_p=${body.top_p}, seed=${body.seed}${stop}
)
${isKeyless ? "" : "# The key is in TINKER_API_KEY.\n"}with tinker.ServiceClient(base_url=${JSON.stringify(baseUrl)}${key}) as service:
    client = service.create_sampling_client(${weights}).result()
    result = client.sample(prompt, num_samples=${body.n}, sampling_params=params).result()
    for sequence in result.sequences:
        print(sequence.tokens, sequence.logprobs)
${shown}`;
}
