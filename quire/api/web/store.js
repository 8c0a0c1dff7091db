// Conversations and settings in the browser's storage.
//
// A conversation is { id, title, updated, system, messages }. A message of the user or of a tool is
// { role, text }, one of the assistant { role, answers, shown }: regenerating adds an answer, which
// is { text, reasoning, calls, usage, timings, finish, error, tokens }. Tokens, which have their
// log-probabilities, are stored of the latest answers, as far as there is room.

import { ROOT } from "./api.js";
import { notify } from "./dom.js";

const PREFIX = `quire:${ROOT.pathname}:`, INDEX = `${PREFIX}conversations`;
const MAX_STORED_TOKENS = 4000; // of a conversation: some 600 KB of the 5 MB that browsers allow
const memory = new Map(); // stands in where storage is blocked

function read(name, fallback) {
  try {
    return JSON.parse(memory.get(name) ?? localStorage.getItem(name) ?? "null") ?? fallback;
  } catch {
    return fallback;
  }
}

/** Write a value. kept: arrays of tokens to store with it. */
function write(name, value, kept = new Set()) {
  const stringify = (tokens) => JSON.stringify(value, (key, item) => (key !== "tokens" ? item : tokens.has(item) ? packed(item) : undefined));
  for (const tokens of kept.size ? [kept, new Set()] : [kept]) {
    try {
      localStorage.setItem(name, stringify(tokens));
      memory.delete(name);
      return;
    } catch { /* full or blocked */ }
  }
  memory.set(name, stringify(kept));
  notify("The browser's storage is full or blocked: new messages are lost when this page is closed. Delete old conversations.");
}

const rounded = (logprob) => Math.round(logprob * 1e4) / 1e4;

/** Return tokens as [token, logprob, alternative, its logprob, ...]. */
function packed(tokens) {
  return tokens.map(({ token, logprob, top_logprobs }) => [token, rounded(logprob), ...top_logprobs.flatMap((one) => [one.token, rounded(one.logprob)])]);
}

function unpacked(tokens) {
  return tokens.map(([token, logprob, ...top]) => ({
    token, logprob, top_logprobs: top.flatMap((one, at) => (at % 2 ? [] : [{ token: one, logprob: top[at + 1] }])),
  }));
}

/** Return the arrays of tokens of the latest answers that are stored. */
function storedTokens(conversation) {
  const kept = new Set();
  let left = MAX_STORED_TOKENS;
  for (const { answers = [] } of [...conversation.messages].reverse()) {
    for (const { tokens = [] } of [...answers].reverse()) {
      left -= tokens.length;
      if (left < 0) return kept;
      kept.add(tokens);
    }
  }
  return kept;
}

/** Return { id, title, updated } of all conversations, the latest first. */
export const conversations = () => read(INDEX, []).sort((a, b) => b.updated - a.updated);

export function loadConversation(id) {
  const conversation = read(`${PREFIX}chat:${id}`, null);
  for (const { answers = [] } of conversation?.messages ?? []) {
    for (const answer of answers) if (answer.tokens) answer.tokens = unpacked(answer.tokens);
  }
  return conversation;
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", updated: Date.now(), system: "", messages: [] };
}

export function saveConversation(conversation) {
  conversation.updated = Date.now();
  const first = conversation.messages.find((message) => message.role === "user");
  conversation.title = first ? first.text.trim().slice(0, 80) : "";
  const { id, title, updated } = conversation;
  write(`${PREFIX}chat:${id}`, conversation, storedTokens(conversation));
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
