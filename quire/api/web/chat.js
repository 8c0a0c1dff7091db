// The chat: conversations, and one running request for each of them at most.

import { events } from "./api.js";
import { $, h, notify } from "./dom.js";
import { MessageView, hideTip } from "./message.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { visible } from "./text.js";

const SAVE_EVERY_MS = 1500;
const NEAR_END_PX = 80;

export class Chat {
  /** needsKey: called with an error after which the user should enter a key. closePanels: called
   *  after a choice in the list. */
  constructor(needsKey, closePanels) {
    this.needsKey = needsKey;
    this.closePanels = closePanels;
    this.runs = new Map(); // by conversation id: { controller, message, conversation }
    this.views = new Map(); // by message
    this.follows = true;
    this.settings = new Settings((system) => {
      this.conversation.system = system;
      if (this.conversation.messages.length) this.#save();
    });
    const messages = $("messages"), prompt = $("prompt");
    messages.addEventListener("scroll", () => {
      this.follows = messages.scrollHeight - messages.scrollTop - messages.clientHeight < NEAR_END_PX;
      hideTip();
    }, { passive: true });
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.#submit(); }
    });
    prompt.addEventListener("input", () => this.#fit());
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => { this.open(store.newConversation()); this.closePanels(); prompt.focus(); });
    store.onListChanged(() => this.#showList());
    addEventListener("pagehide", () => { for (const run of this.runs.values()) store.saveConversation(run.conversation); });
    const latest = store.conversations()[0];
    this.open((latest && store.loadConversation(latest.id)) ?? store.newConversation());
  }

  get run() { return this.runs.get(this.conversation.id); }

  /** Show a conversation. */
  open(conversation) {
    this.conversation = this.runs.get(conversation.id)?.conversation ?? conversation;
    this.settings.system.value = this.conversation.system;
    this.edited = null;
    this.views.clear();
    $("messages").replaceChildren();
    this.follows = true;
    this.#show();
    this.#showList();
  }

  /** End the running request of the shown conversation; what was generated stays. */
  stop() {
    this.run?.controller.abort();
    if (!this.edited) return;
    this.edited = null;
    $("prompt").value = "";
    this.#show();
  }

  #fit() { // for browsers without field-sizing
    const prompt = $("prompt");
    if (CSS.supports("field-sizing", "content")) return;
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  }

  #submit() {
    const prompt = $("prompt"), text = prompt.value;
    if (!text.trim() || this.run || !this.#fields()) return;
    const { messages } = this.conversation;
    if (messages.includes(this.edited)) messages.splice(messages.indexOf(this.edited));
    this.edited = null;
    prompt.value = "";
    this.#fit();
    this.#ask([{ role: "user", text }]);
  }

  /** Add messages and let the model answer. */
  #ask(added) {
    const fields = this.#fields();
    if (!fields) return;
    this.conversation.messages.push(...added, { role: "assistant", answers: [], shown: 0 });
    this.#answer(fields);
  }

  #regenerate(message) {
    const fields = this.#fields();
    if (!fields || this.run || this.conversation.messages.at(-1) !== message) return;
    this.#answer(fields);
  }

  /** Let the user change a message. It and what follows are replaced when it is sent. */
  #edit(message) {
    if (this.run) return;
    this.edited = message;
    $("prompt").value = message.text;
    this.#show();
    this.#fit();
    $("prompt").focus();
  }

  #fields() {
    try {
      return this.settings.fields();
    } catch (error) {
      notify(error.message);
      return null;
    }
  }

  /** Generate one more answer to the last message. */
  async #answer(fields) {
    const { conversation } = this, message = conversation.messages.at(-1), controller = new AbortController();
    const answer = { text: "", reasoning: "", calls: [] };
    message.answers.push(answer);
    message.shown = message.answers.length - 1;
    const run = { controller, message, conversation };
    this.runs.set(conversation.id, run);
    this.follows = true;
    this.#save(conversation);
    this.#show();
    $("status").textContent = "The model answers.";
    const body = {
      messages: requestMessages(conversation), stream: true, return_timings: true,
      stream_options: { include_usage: true, continuous_usage_stats: true }, ...fields,
    };
    let saved = performance.now(), frame = 0;
    const draw = () => { frame = 0; this.#update(run); };
    try {
      for await (const chunk of events("v1/chat/completions", body, controller.signal)) {
        apply(answer, chunk);
        frame ||= requestAnimationFrame(draw);
        if (performance.now() - saved > SAVE_EVERY_MS) { saved = performance.now(); store.saveConversation(conversation); }
      }
    } catch (error) {
      if (controller.signal.aborted) answer.finish = "stopped";
      else answer.error = error.message;
      if (error.status === 401) this.needsKey(error);
    }
    cancelAnimationFrame(frame);
    if (this.runs.get(conversation.id) !== run) return; // the conversation was deleted
    this.runs.delete(conversation.id);
    store.saveConversation(conversation);
    if (this.conversation === conversation) this.#show();
    this.#showList();
    $("status").textContent = answer.error ? "The request failed." : "The answer is complete.";
  }

  #save(conversation = this.conversation) {
    store.saveConversation(conversation);
    this.#showList();
  }

  /** Show all messages of the conversation; views of messages that are shown stay. */
  #show() {
    const container = $("messages"), { messages } = this.conversation;
    const actions = {
      regenerate: (message) => this.#regenerate(message),
      edit: (message) => this.#edit(message),
      results: (results) => this.#ask(results),
      changed: () => { this.#save(); this.#show(); },
    };
    for (const [message, view] of this.views) {
      if (!messages.includes(message)) { view.element.remove(); this.views.delete(message); }
    }
    container.querySelector(".welcome")?.remove();
    if (!messages.length) container.append(h("div", { class: "welcome" }, h("h1", {}, "Ask the model something"), h("p", {}, "Enter sends, Shift+Enter begins a new line, Escape stops an answer.")));
    for (const message of messages) {
      if (!this.views.has(message)) {
        const view = new MessageView(message, actions);
        this.views.set(message, view);
        container.append(view.element);
      }
      const edited = messages.indexOf(this.edited);
      this.views.get(message).element.classList.toggle("replaced", edited >= 0 && messages.indexOf(message) >= edited);
      this.views.get(message).update({ isRunning: this.run?.message === message, isLast: message === messages.at(-1) });
    }
    $("send").hidden = !!this.run;
    $("stop").hidden = !this.run;
    this.#scroll();
  }

  #update(run) {
    if (run.conversation !== this.conversation || !this.views.has(run.message)) return;
    this.views.get(run.message).update({ isRunning: true, isLast: true });
    this.#scroll();
  }

  #scroll() {
    const messages = $("messages");
    if (this.follows) messages.scrollTop = messages.scrollHeight;
  }

  #showList() {
    const open = (id) => {
      const conversation = store.loadConversation(id);
      if (conversation) this.open(conversation);
      this.closePanels();
    };
    const remove = (id, button) => {
      if (button.dataset.sure !== "yes") {
        Object.assign(button.dataset, { sure: "yes" });
        button.textContent = "Delete?";
        setTimeout(() => { delete button.dataset.sure; button.textContent = "×"; }, 3000);
        return;
      }
      this.runs.get(id)?.controller.abort();
      this.runs.delete(id);
      store.deleteConversation(id);
      if (this.conversation.id === id) this.open(store.newConversation());
      else this.#showList();
    };
    $("conversations").replaceChildren(...store.conversations().map(({ id, title }) => {
      const shown = visible(title).replace(/\s+/g, " ") || "Untitled";
      const button = h("button", { class: "delete", "aria-label": `Delete ${shown}`, onclick: () => remove(id, button) }, "×");
      const current = id === this.conversation.id ? "true" : null;
      return h("li", {}, h("button", { class: "title", dir: "auto", "aria-current": current, onclick: () => open(id) }, shown), button);
    }));
  }
}

/** Add a chunk of the stream to an answer. */
function apply(answer, chunk) {
  if (chunk.usage) {
    answer.usage = chunk.usage;
    answer.timings = chunk.usage.timings;
  }
  const [choice] = chunk.choices;
  if (!choice) return;
  const { delta } = choice;
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = answer.calls[part.index] ??= { id: part.id, name: "", arguments: "" };
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.logprobs?.content) (answer.tokens ??= []).push(...choice.logprobs.content);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** Return the messages of a request: all but the answer that is being generated. */
function requestMessages({ system, messages }) {
  const sent = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages.slice(0, -1)) {
    if (message.role === "user") sent.push({ role: "user", content: message.text });
    if (message.role === "tool") sent.push({ role: "tool", tool_call_id: message.id, content: message.text });
    if (message.role !== "assistant") continue;
    const { text, calls, error } = message.answers[message.shown];
    if (error && !text) continue;
    const tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    sent.push({ role: "assistant", content: text, ...(calls.length ? { tool_calls } : {}) });
  }
  return sent;
}
