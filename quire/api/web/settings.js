// The panel of settings: the system prompt, sampling parameters, tools and further fields.

import { $, h } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = [
  // field, label, least, most, step
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["top_k", "Top k", 0, null, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Max tokens", 1, null, 1],
  ["seed", "Seed", 0, null, 1],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["repetition_penalty", "Repetition penalty", 0.1, 2, 0.05],
];
const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

/** The settings, and the panel that edits them. */
export class Settings {
  /** onSystem: called with the text of the system prompt, which belongs to the conversation. */
  constructor(onSystem) {
    this.values = loadSettings();
    this.system = h("textarea", { id: "system", rows: "4", placeholder: "None", oninput: () => onSystem(this.system.value) });
    const numbers = NUMBERS.map(([name, label, min, max, step]) => this.#field(name, label, h("input", {
      type: "number", min: String(min), max: max === null ? null : String(max), step: String(step), placeholder: "default",
    })));
    const stop = this.#field("stop", "Stop strings, one a line", h("textarea", { rows: "2" }));
    const logprobs = h("input", { type: "checkbox", id: "set-logprobs", checked: !!this.values.logprobs, onchange: () => this.#set("logprobs", logprobs.checked) });
    this.tools = this.#field("tools", "Tools, as a JSON array", h("textarea", { rows: "5", class: "mono", spellcheck: "false" }));
    const choice = h("select", {}, ...["auto", "required", "none"].map((name) => h("option", {}, name)));
    const extra = this.#field("extra", "Further fields, as a JSON object", h("textarea", {
      rows: "2", class: "mono", spellcheck: "false", placeholder: '{"reasoning_effort": "low"}',
    }));
    $("settings").append(
      h("div", { class: "panel-head" }, h("h2", {}, "Settings"), h("button", { class: "plain", onclick: () => this.#reset() }, "Reset")),
      h("label", { for: "system" }, "System prompt"), this.system, h("p", { class: "hint" }, "Of this conversation."),
      h("h3", {}, "Sampling"), h("div", { class: "grid" }, ...numbers), stop,
      h("label", { class: "check" }, logprobs, h("span", {}, "Log-probabilities of tokens")),
      h("h3", {}, "Tools"), this.tools,
      h("button", { class: "plain", onclick: () => this.#example() }, "Insert an example"),
      this.#field("tool_choice", "Tool choice", choice), h("h3", {}, "More"), extra,
    );
  }

  /** Return the fields of a request. Throws Error with a reason if a field is not valid. */
  fields() {
    const { values } = this, fields = {};
    for (const [name, label] of NUMBERS) {
      if (!values[name]) continue;
      const number = Number(values[name]);
      if (Number.isNaN(number)) throw new Error(`${label} is not a number.`);
      fields[name] = number;
    }
    const stop = (values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    if (values.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    const tools = parsed(values.tools, "Tools", Array.isArray, "a JSON array");
    if (tools?.length) Object.assign(fields, { tools, tool_choice: values.tool_choice || "auto" });
    const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
    return { ...fields, ...parsed(values.extra, "Further fields", isObject, "a JSON object") };
  }

  #field(name, label, control) {
    control.id = `set-${name}`;
    if (this.values[name]) control.value = this.values[name];
    control.addEventListener("input", () => this.#set(name, control.value));
    return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
  }

  #set(name, value) {
    this.values[name] = value;
    saveSettings(this.values);
  }

  #example() {
    const area = $("set-tools");
    area.value = JSON.stringify(EXAMPLE_TOOL, null, 2);
    this.#set("tools", area.value);
  }

  #reset() {
    this.values = {};
    saveSettings(this.values);
    for (const control of $("settings").querySelectorAll("[id^=set-]")) {
      if (control.type === "checkbox") control.checked = false;
      else if (control.tagName === "SELECT") control.selectedIndex = 0;
      else control.value = "";
    }
  }
}

function parsed(text, label, accepts, expected) {
  if (!text?.trim()) return undefined;
  let value;
  try { value = JSON.parse(text); } catch (error) { throw new Error(`${label}: ${error.message}`); }
  if (!accepts(value)) throw new Error(`${label}: ${expected} is needed.`);
  return value;
}
