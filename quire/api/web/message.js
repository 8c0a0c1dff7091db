// One message on the page, and its parts: text, reasoning, tool calls, tokens, statistics.

import { $, h, setText } from "./dom.js";
import { codeBlock, copy, showText, visible } from "./text.js";

const MAX_TOKENS_SHOWN = 4000;

/** The view of a message. update() shows its current state. */
export class MessageView {
  /** actions: { regenerate, edit, results, changed }, called with the message. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = h("article", { class: `message ${message.role}`, "aria-label": { user: "You", tool: "Tool" }[message.role] ?? "Answer" });
    if (message.role === "assistant") this.#build();
  }

  update({ isRunning = false, isLast = false } = {}) {
    if (this.message.role === "assistant") return this.#updateAnswer(isRunning, isLast);
    const { element, message, actions } = this;
    if (message.role === "tool") {
      element.replaceChildren(h("span", { class: "label" }, `Result of ${visible(message.name)}`), h("div", { class: "body" }, codeBlock(visible(message.text), "result")));
      return undefined;
    }
    const body = h("div", { class: "body plain-text", dir: "auto" }, visible(message.text));
    element.replaceChildren(body, h("div", { class: "actions" },
      copyButton(() => message.text), h("button", { onclick: () => actions.edit(message) }, "Edit")));
    return undefined;
  }

  get #answer() { return this.message.answers[this.message.shown]; }

  #build() {
    this.reasoningText = h("div", { class: "reasoning-text" });
    this.reasoningTitle = h("summary");
    this.reasoning = h("details", { class: "reasoning", hidden: true }, this.reasoningTitle, this.reasoningText);
    this.text = h("div", { class: "text" });
    this.tokens = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move between them", hidden: true });
    listenToTokens(this.tokens);
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "error", hidden: true });
    this.stats = h("span", { class: "stats" });
    const step = (by) => { this.message.shown += by; this.showsTokens = null; this.actions.changed(this.message); };
    this.back = h("button", { "aria-label": "Previous answer", onclick: () => step(-1) }, "‹");
    this.next = h("button", { "aria-label": "Next answer", onclick: () => step(1) }, "›");
    this.place = h("span", { class: "place" });
    this.pager = h("span", { class: "pager", hidden: true }, this.back, this.place, this.next);
    this.again = h("button", { onclick: () => this.actions.regenerate(this.message) }, "Regenerate");
    this.mode = h("button", { hidden: true, onclick: () => { this.showsTokens = !this.showsTokens; this.update(this.last); } }, "Tokens");
    this.bar = h("div", { class: "actions" }, this.pager, copyButton(() => this.#answer.text), this.again, this.mode, this.stats);
    this.element.append(this.reasoning, h("div", { class: "body" }, this.text, this.tokens), this.calls, this.error, this.bar);
  }

  #updateAnswer(isRunning, isLast) {
    const answer = this.#answer, { message } = this;
    this.last = { isRunning, isLast };
    this.element.classList.toggle("running", isRunning);
    this.element.classList.toggle("empty", isRunning && !answer.text && !answer.calls.length && !answer.reasoning);
    this.reasoning.hidden = !answer.reasoning;
    if (answer.reasoning) {
      const thinks = isRunning && !answer.text && !answer.calls.length;
      setText(this.reasoningTitle, thinks ? "Reasoning …" : "Reasoning");
      showText(this.reasoningText, answer.reasoning);
    }
    const hasTokens = !!answer.tokens?.length;
    this.showsTokens ??= hasTokens ? true : null;
    const showsTokens = hasTokens && this.showsTokens;
    this.text.hidden = showsTokens;
    this.tokens.hidden = !showsTokens;
    if (showsTokens) showTokens(this.tokens, answer.tokens);
    else showText(this.text, answer.text);
    this.mode.hidden = !hasTokens;
    this.mode.setAttribute("aria-pressed", String(!!showsTokens));
    this.#updateCalls(answer, isRunning, isLast);
    this.error.hidden = !answer.error;
    setText(this.error, visible(answer.error ?? ""));
    this.again.hidden = isRunning || !isLast;
    this.pager.hidden = message.answers.length < 2 || !isLast || isRunning;
    setText(this.place, `${message.shown + 1}/${message.answers.length}`);
    this.back.disabled = message.shown === 0;
    this.next.disabled = message.shown === message.answers.length - 1;
    setText(this.stats, statistics(answer));
  }

  #updateCalls(answer, isRunning, isLast) {
    const wants = isLast && !isRunning && answer.calls.length > 0;
    const key = JSON.stringify([answer.calls, wants]);
    if (key === this.callsKey) return;
    this.callsKey = key;
    const areas = answer.calls.map((call, at) => h("textarea", { rows: "2", class: "mono", "aria-label": `Result of call ${at + 1}`, placeholder: "Result for the model" }));
    this.calls.replaceChildren(...answer.calls.map((call, at) => h("div", { class: "call" },
      h("div", { class: "call-name" }, h("span", { class: "label" }, "Tool call"), h("code", {}, visible(call.name))),
      codeBlock(visible(pretty(call.arguments)), "arguments"), wants ? areas[at] : null)));
    if (wants) {
      const results = () => answer.calls.map((call, at) => ({ role: "tool", id: call.id, name: call.name, text: areas[at].value }));
      this.calls.append(h("button", { class: "results", onclick: () => this.actions.results(results()) }, "Send results"));
    }
  }
}

function copyButton(read) {
  const button = h("button", { onclick: () => copy(read(), button) }, "Copy");
  return button;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Return one line about an answer: tokens, speed, times, and why it ended. */
function statistics({ usage, timings, finish }) {
  const parts = [], count = usage?.completion_tokens ?? 0;
  if (count) parts.push(`${count} token${count === 1 ? "" : "s"}`);
  if (timings && count > 1 && timings.total_ms > timings.first_token_ms) {
    parts.push(`${((count - 1) / (timings.total_ms - timings.first_token_ms) * 1e3).toFixed(1)} tok/s`);
  }
  if (timings) parts.push(`first token ${duration(timings.first_token_ms)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  const reason = { length: "length limit", stopped: "stopped", tool_calls: "" }[finish];
  if (reason) parts.push(reason);
  return parts.join(" · ");
}

export const duration = (ms) => (ms < 1 ? `${ms.toFixed(2)} ms` : ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : ms < 60_000 ? `${(ms / 1e3).toFixed(ms < 10_000 ? 2 : 1)} s` : `${Math.floor(ms / 60_000)} min ${Math.round(ms % 60_000 / 1e3)} s`);

/** Show one element a token, shaded by its probability; those shown before stay. */
function showTokens(container, tokens) {
  if (container.shown !== tokens) { container.replaceChildren(); container.shown = tokens; }
  for (let at = container.childElementCount; at < Math.min(tokens.length, MAX_TOKENS_SHOWN); at++) {
    const level = Math.min(Math.floor(-tokens[at].logprob / 0.7), 4);
    container.append(h("span", { class: `token level${level}` }, visible(tokens[at].token)));
  }
}

/** Show the alternatives of a token under the pointer, or of the one that the arrow keys reach. */
function listenToTokens(container) {
  const show = (span) => {
    container.querySelector(".at")?.classList.remove("at");
    if (!span || span.parentElement !== container) { hideTip(); return; }
    span.classList.add("at");
    const token = container.shown[[...container.children].indexOf(span)];
    showTip(span, token);
  };
  for (const kind of ["pointerover", "click"]) container.addEventListener(kind, (event) => show(event.target.closest(".token")));
  container.addEventListener("pointerleave", () => show(null));
  container.addEventListener("blur", () => show(null));
  container.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!move) return;
    event.preventDefault();
    const at = [...container.children].indexOf(container.querySelector(".at"));
    const next = container.children[Math.max(0, Math.min(at + move, container.childElementCount - 1))];
    if (next) { next.scrollIntoView({ block: "nearest" }); show(next); }
  });
}

const percent = (logprob) => `${(Math.exp(logprob) * 100).toFixed(logprob > -0.05 || logprob < -4.6 ? 2 : 1)} %`;
const quoted = (text) => visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "(empty)";

function showTip(span, token) {
  const tip = $("tip"), rows = token.top_logprobs.map((one) => {
    const bar = h("span", { class: "bar" });
    bar.style.width = `${Math.exp(one.logprob) * 100}%`;
    return h("tr", { class: one.token === token.token ? "chosen" : "" }, h("td", {}, h("code", {}, quoted(one.token))), h("td", {}, percent(one.logprob)), h("td", { class: "share" }, bar));
  });
  const title = h("p", {}, h("code", {}, quoted(token.token)), ` ${percent(token.logprob)}, logprob ${token.logprob.toFixed(3)}`);
  tip.replaceChildren(title, h("table", {}, h("tbody", {}, ...rows)));
  tip.hidden = false;
  const box = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + size.height + 12 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)}px`;
}

export function hideTip() { $("tip").hidden = true; }
