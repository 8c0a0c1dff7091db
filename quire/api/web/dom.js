// Build elements. Texts are set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** Return an element. Properties that start with "on" are listeners; null and false are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element if it differs: unchanged nodes keep their selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let noticeTimer = 0;

/** Show a message at the top of the page for a while. */
export function notify(text) {
  const notice = $("notice");
  notice.textContent = text;
  notice.hidden = false;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => { notice.hidden = true; }, 8000);
}
