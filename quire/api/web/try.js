// /docs: a form at each operation that sends a request to this server and shows the answer.

import { ROOT, keys } from "./api.js";
import { $, h } from "./dom.js";
import { visible } from "./text.js";

const MAX_SHOWN = 200_000;

function indented(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function build(article) {
  const { method, path, example } = article.dataset;
  const inputs = [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => [name, h("input", { id: `${article.id}-${name}`, spellcheck: "false", required: true })]);
  const body = example ? h("textarea", { rows: String(Math.min(example.split("\n").length + 1, 14)), spellcheck: "false", "aria-label": "Body" }) : null;
  if (body) body.value = example;
  const key = $("try-key"), output = h("pre", { tabindex: "0", hidden: true, "aria-label": "Answer" }), state = h("span", { role: "status" });
  const stop = h("button", { type: "button", hidden: true }, "Stop"), button = h("button", {}, `Send ${method} ${path}`);
  const form = h("form", { class: "try" }, ...inputs.map(([name, input]) => h("label", {}, `${name} `, input)), body, h("p", {}, button, stop, state), output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const controller = new AbortController(), started = performance.now();
    stop.onclick = () => controller.abort();
    let target = path, text = "";
    for (const [name, input] of inputs) target = target.replace(`{${name}}`, encodeURIComponent(input.value));
    Object.assign(output, { hidden: false, textContent: "" });
    [stop.hidden, button.disabled, state.textContent] = [false, true, "…"];
    try {
      const headers = { ...(body ? { "content-type": "application/json" } : {}), ...(keys.api ? { authorization: `Bearer ${keys.api}` } : {}) };
      const response = await fetch(new URL(target.slice(1), ROOT), { method, headers, body: body?.value, signal: controller.signal, cache: "no-store", credentials: "omit", redirect: "error" });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done && text.length < MAX_SHOWN; part = await reader.read()) {
        text += part.value;
        output.textContent = visible(text);
      }
      const isCut = text.length >= MAX_SHOWN, type = response.headers.get("content-type") ?? "";
      if (isCut) controller.abort();
      else if (type.startsWith("application/json")) output.textContent = visible(indented(text));
      state.textContent = `${response.status}, ${Math.round(performance.now() - started)} ms${isCut ? `; only the first ${text.length.toLocaleString("en")} characters are shown` : ""}`;
      if (response.status === 401) key?.focus();
    } catch (error) {
      state.textContent = error.name === "AbortError" ? "Stopped" : `Failed: ${error.message}`;
    }
    [stop.hidden, button.disabled] = [true, false];
  });
  return form;
}

const header = document.querySelector("main > header");
if (header?.dataset.keys) {
  const key = h("input", { id: "try-key", type: "password", autocomplete: "off", value: keys.api });
  key.addEventListener("input", () => { keys.api = key.value.trim(); });
  header.append(h("p", { class: "try" }, h("label", {}, "Key for requests from this page ", key)));
}
for (const article of document.querySelectorAll("article[data-path]")) {
  const details = h("details", {}, h("summary", {}, "Try it"));
  details.addEventListener("toggle", () => { if (details.childElementCount === 1) details.append(build(article)); });
  article.append(details);
}
