// Conversations and settings in the browser's storage.
//
// A conversation is { id, title, updated, system, messages }. A message of the user or of a tool is
// { role, text }, one of the assistant { role, answers, shown }: regenerating adds an answer, which
// is { text, reasoning, calls, usage, timings, finish, error, tokens }. Tokens with their
// log-probabilities are not stored.

import { ROOT } from "./api.js";
import { notify } from "./dom.js";

const PREFIX = `quire:${ROOT.pathname}:`, INDEX = `${PREFIX}conversations`;
const memory = new Map(); // stands in where storage is blocked

function read(name, fallback) {
  try {
    return JSON.parse(memory.get(name) ?? localStorage.getItem(name) ?? "null") ?? fallback;
  } catch {
    return fallback;
  }
}

function write(name, value) {
  const text = JSON.stringify(value, (key, item) => (key === "tokens" ? undefined : item));
  try {
    localStorage.setItem(name, text);
    memory.delete(name);
  } catch {
    memory.set(name, text);
    notify("The browser's storage is full or blocked: new messages are lost when this page is closed. Delete old conversations.");
  }
}

/** Return { id, title, updated } of all conversations, the latest first. */
export const conversations = () => read(INDEX, []).sort((a, b) => b.updated - a.updated);

export const loadConversation = (id) => read(`${PREFIX}chat:${id}`, null);

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), system: "", messages: [] };
}

export function saveConversation(conversation) {
  conversation.updated = Date.now();
  const first = conversation.messages.find((message) => message.role === "user");
  conversation.title = first ? first.text.trim().slice(0, 80) : "";
  const { id, title, updated } = conversation;
  write(`${PREFIX}chat:${id}`, conversation);
  write(INDEX, [{ id, title, updated }, ...read(INDEX, []).filter((one) => one.id !== id)]);
}

export function deleteConversation(id) {
  try { localStorage.removeItem(`${PREFIX}chat:${id}`); } catch { /* blocked */ }
  memory.delete(`${PREFIX}chat:${id}`);
  write(INDEX, read(INDEX, []).filter((one) => one.id !== id));
}

export const loadSettings = () => read(`${PREFIX}settings`, {});
export const saveSettings = (settings) => write(`${PREFIX}settings`, settings);

/** Call back when another tab has changed the list of conversations. */
export function onListChanged(callback) {
  addEventListener("storage", (event) => { if (event.key === INDEX) callback(); });
}
