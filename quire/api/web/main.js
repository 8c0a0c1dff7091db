// Start the page: views, theme, panels, keys.

import { keys, send } from "./api.js";
import { $, notify } from "./dom.js";
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";
import { visible } from "./text.js";

const NARROW = matchMedia("(max-width: 56rem)");
const THEMES = ["system", "light", "dark"];

const engine = new EngineView();
const chat = new Chat(askKey, () => closePanels());
let hasChat = true; // not at the port for admins

// ---- views

function showView() {
  const isEngine = location.hash === "#engine" || !hasChat;
  $("engine").hidden = !isEngine;
  $("chat").hidden = isEngine;
  for (const [id, isShown] of [["tab-engine", isEngine], ["tab-chat", !isEngine]]) {
    if (isShown) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  for (const id of ["open-list", "open-settings"]) $(id).hidden = isEngine;
  document.title = isEngine ? "Quire: engine" : "Quire";
  engine.show(isEngine);
}
addEventListener("hashchange", showView);

// ---- panels: beside the messages, above them on a narrow page

const PANELS = { "open-list": "show-list", "open-settings": "show-settings" };
function setPanel(button, shown) {
  document.body.classList.toggle(PANELS[button], shown);
  $(button).setAttribute("aria-expanded", String(shown));
}
function closePanels() {
  if (NARROW.matches) for (const button of Object.keys(PANELS)) setPanel(button, false);
}
for (const [button, name] of Object.entries(PANELS)) {
  $(button).addEventListener("click", () => {
    const shown = !document.body.classList.contains(name);
    closePanels();
    setPanel(button, shown);
  });
}
setPanel("open-list", !NARROW.matches);
NARROW.addEventListener("change", closePanels);
$("scrim").addEventListener("click", closePanels);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  if (NARROW.matches && /show-/.test(document.body.className)) closePanels();
  else chat.stop();
});

// ---- theme

function currentTheme() { return document.documentElement.dataset.theme ?? "system"; }
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("quire:theme", theme); } catch { /* blocked */ }
  $("theme").setAttribute("aria-label", `Theme: ${theme}`);
  $("theme").title = `Theme: ${theme}`;
  engine.redraw();
}
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());

// ---- keys

function askKey(error) {
  $("key").hidden = false;
  $("key-why").textContent = keys.api
    ? `${visible(error.message)} It is kept until this tab is closed.`
    : "This server needs a key. It is kept until this tab is closed.";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}
$("key").addEventListener("click", () => $("key-dialog").showModal());
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.api = $("key-input").value.trim();
  $("key-input").value = "";
  $("key-dialog").close();
  loadModel();
});

// ---- start

let retry = 0;
async function loadModel() {
  clearTimeout(retry);
  try {
    const { data } = await (await send("v1/models")).json();
    $("model").textContent = visible(data[0].id);
    $("model").title = `${visible(data[0].id)}, ${data[0].dtype}, ${data[0].max_model_len} tokens of context`;
  } catch (error) {
    if (error.status === 401) askKey(error);
    else if (error.code === "unknown_url") { // the port for admins: no chat
      $("tab-chat").hidden = true;
      hasChat = false;
      showView();
    } else if (error.status === 503) {
      $("model").textContent = "loading …";
      retry = setTimeout(loadModel, 1500);
    } else notify(visible(error.message));
  }
}
setTheme(currentTheme());
showView();
await loadModel();
if (location.hash !== "#engine" && !NARROW.matches) $("prompt").focus();
