// Show text of a model: inert, with a little Markdown.
//
// No HTML is parsed: every piece becomes a text node. Control characters (ANSI escapes, overrides of
// the writing direction, invisible tags) are replaced by visible marks. Links are not clickable.

import { h } from "./dom.js";

const CONTROLS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;

/** Return a text with control characters replaced by visible marks. */
export function visible(text) {
  return String(text).replace(/\r\n/g, "\n").replace(CONTROLS, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** Return a text without control characters, for the clipboard. */
export function withoutControls(text) {
  return String(text).replace(/\r\n/g, "\n").replace(CONTROLS, "");
}

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`~]*)$/;
const HEADING = /^(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const MAX_DEPTH = 6;
const DIVIDER = /^[ |:-]*-[ |:-]*$/;

/** Return the blocks of a text: { kind, lines, ... }. */
function blocksOf(text) {
  const lines = visible(text).split("\n"), blocks = [];
  let at = 0;
  const take = (accepts) => {
    const begin = at++;
    while (at < lines.length && accepts(lines[at])) at++;
    return lines.slice(begin, at);
  };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line);
    if (!line.trim()) { at++; continue; }
    if (fence) {
      const isEnd = (each) => each.trim().startsWith(fence[1]) && !each.trim().slice(fence[1].length).trim();
      const code = take((each) => !isEnd(each)).slice(1);
      const closed = at++ < lines.length;
      blocks.push({ kind: "code", lines: code, language: fence[2].trim(), closed });
    } else if (HEADING.test(line)) {
      blocks.push({ kind: "heading", lines: take(() => false) });
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: take(() => false) });
    } else if (QUOTE.test(line)) {
      blocks.push({ kind: "quote", lines: take((each) => QUOTE.test(each)) });
    } else if (ITEM.test(line)) {
      blocks.push({ kind: "list", lines: take((each) => ITEM.test(each) || /^ +\S/.test(each)) });
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && DIVIDER.test(lines[at + 1])) {
      blocks.push({ kind: "table", lines: take((each) => each.includes("|")) });
    } else {
      const isText = (each) => each.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(each));
      blocks.push({ kind: "text", lines: take(isText) });
    }
  }
  return blocks;
}

/** Show a text in a container. Blocks that have not changed keep their elements. */
export function showText(container, text) {
  const blocks = blocksOf(text), known = container.blockKeys ?? [];
  const keys = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < keys.length && keys[same] === known[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(elementOf(block));
  container.blockKeys = keys;
}

function elementOf({ kind, lines, language }) {
  if (kind === "code") return codeBlock(lines.join("\n"), language);
  if (kind === "rule") return h("hr");
  if (kind === "heading") {
    const [, marks, title] = HEADING.exec(lines[0]);
    return withInline(h(`h${Math.min(marks.length + 2, 6)}`), title);
  }
  if (kind === "quote") {
    return withInline(h("blockquote"), lines.map((line) => line.replace(QUOTE, "")).join("\n"));
  }
  if (kind === "list") return listOf(lines);
  if (kind === "table") return tableOf(lines);
  return withInline(h("p", { dir: "auto" }), lines.join("\n"));
}

/** Return a block of code with a button that copies it. */
export function codeBlock(code, language = "") {
  const button = h("button", { class: "copy", type: "button", onclick: () => copy(code, button) }, "Copy");
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), button);
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", { dir: "ltr" }, code)));
}

/** Copy a text without control characters; the button shows the outcome. */
export async function copy(text, button) {
  const copied = withoutControls(text);
  let done = true;
  try {
    await navigator.clipboard.writeText(copied);
  } catch { // plain HTTP from another machine
    const area = h("textarea", { class: "hidden" });
    document.body.append(area);
    area.value = copied;
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function listOf(lines) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) items.push({ indent: item[1].length, mark: item[2], text: item[3] });
    else items.at(-1).text += `\n${line.trim()}`;
  }
  const open = []; // the lists from the outermost to the innermost
  for (const { indent, mark, text } of items) {
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || (indent > open.at(-1).indent + 1 && open.length < MAX_DEPTH)) {
      const start = /^\d/.test(mark) ? String(parseInt(mark, 10)) : null;
      const list = h(start ? "ol" : "ul", { start });
      open.at(-1)?.list.lastChild.append(list);
      open.push({ indent, list });
    }
    open.at(-1).list.append(withInline(h("li", { dir: "auto" }), text));
  }
  return open[0].list;
}

function tableOf(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell) => withInline(h(tag), cell)));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, ...body)));
}

/** Add a text with `code`, **strong** and *emphasis* to an element. */
function withInline(element, text) {
  let plain = "", at = 0;
  const absent = new Set(); // marks that do not occur any more
  const flush = () => { if (plain) element.append(plain); plain = ""; };
  const closing = (mark, from) => {
    if (absent.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) absent.add(mark);
    return found;
  };
  while (at < text.length) {
    const mark = /^(`+|\*\*|\*)/.exec(text.slice(at, at + 16))?.[0];
    const begin = at + (mark?.length ?? 0);
    const end = mark ? closing(mark, begin) : -1;
    const inner = end > begin ? text.slice(begin, end) : "";
    if (inner && (mark[0] === "`" || (inner === inner.trim() && !(mark === "*" && inner.includes("\n"))))) {
      flush();
      if (mark[0] === "`") element.append(h("code", {}, inner.trim() || inner));
      else element.append(withInline(h(mark === "**" ? "strong" : "em"), inner));
      at = end + mark.length;
    } else {
      const length = mark?.length ?? 1;
      plain += text.slice(at, at + length);
      at += length;
    }
  }
  flush();
  return element;
}
