// The view of the engine: /metrics and /v1/engine, read once a second while the view is visible.

import { keys, send } from "./api.js";
import { $, h, setText } from "./dom.js";
import { duration } from "./message.js";
import { histogram, parseMetrics, total } from "./metrics.js";
import { visible } from "./text.js";

const EVERY_MS = 1000;
const KEPT = 120; // readings
const WINDOW_MS = 60_000;
const SPEED_MS = 5000;
const MAX_ROWS = 40;

const TILES = [
  // name, title, value of a reading for the curve
  ["running", "Running", (one) => one.gauge("quire_running_requests")],
  ["waiting", "Waiting", (one) => one.gauge("quire_waiting_requests")],
  ["speed", "Output tokens/s", (one, before) => rate(one, before, "quire_generated_tokens_total")],
  ["kv", "KV blocks in use", (one) => share(one.gauge("quire_kv_blocks_used"), one.gauge("quire_kv_blocks"))],
  ["hits", "Prefix hit rate", (one, before) => share(grown(one, before, "quire_prefix_hit_tokens_total"), grown(one, before, "quire_prefix_queried_tokens_total"))],
  ["busy", "Device busy", (one, before) => (before ? Math.min(rate(one, before, "quire_device_busy_seconds_total"), 1) : one.gauge("quire_device_busy_share"))],
];
const LATENCIES = [
  ["quire_time_to_first_token_seconds", "First token"],
  ["quire_time_per_output_token_seconds", "Per output token"],
  ["quire_queue_seconds", "In the queue"],
  ["quire_request_seconds", "Whole answer"],
];
const USES = {
  running: "running", shared: "shared by several", pinned: "held by a step", cached: "cached", protected: "cached, used again", free: "free",
};

const share = (part, whole) => (whole ? part / whole : null);
const grown = (one, before, name) => one.gauge(name) - (before?.gauge(name) ?? 0);
const rate = (one, before, name) => (before ? grown(one, before, name) / Math.max((one.at - before.at) / 1e3, 1e-3) : null);
const percent = (value, digits = 0) => (value === null ? "–" : `${(value * 100).toFixed(digits)} %`);
const count = (value) => Math.round(value).toLocaleString("en");
const tenantName = (name) => visible(name || "default");

export class EngineView {
  constructor() {
    this.readings = []; // { at, samples, gauge }
    this.snapshot = null;
    this.isShown = false;
    this.pinned = null; // the request whose blocks are emphasized
    this.timer = 0;
    this.tiles = new Map(TILES.map(([name, title]) => {
      const value = h("span", { class: "value" }, "–"), note = h("span", { class: "under" }), curve = h("canvas", { "aria-hidden": "true" });
      $("tiles").append(h("section", { class: "tile", "aria-label": title }, h("h2", {}, title), h("p", {}, value), note, curve));
      return [name, { value, note, curve }];
    }));
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    for (const input of document.querySelectorAll("[name=by]")) input.addEventListener("change", () => this.#drawMap());
    $("map").addEventListener("pointermove", (event) => this.#pointed(event));
    $("map").addEventListener("pointerleave", () => { $("map-tip").textContent = "\u00a0"; });
    $("admin-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keys.admin = $("admin-key").value.trim();
      $("admin-key").value = "";
      this.#schedule(0);
    });
    new ResizeObserver(() => this.redraw()).observe($("map"));
  }

  /** Start or stop reading. */
  show(isShown) {
    this.isShown = isShown;
    this.#schedule(0);
  }

  /** Draw again what was read last, after a change of size or colours. */
  redraw() {
    if (!this.isShown || !this.readings.length) return;
    this.#drawTiles();
    this.#drawMap();
  }

  #schedule(delay_ms) {
    clearTimeout(this.timer);
    if (this.isShown && document.visibilityState === "visible") this.timer = setTimeout(() => this.#read(), delay_ms);
  }

  async #read() {
    const started = performance.now();
    const [metrics, snapshot] = await Promise.allSettled([
      send("metrics", { admin: true }).then((response) => response.text()),
      send("v1/engine", { admin: true }).then((response) => response.json()),
    ]);
    if (metrics.status === "fulfilled") this.#add(parseMetrics(metrics.value));
    this.snapshot = snapshot.value ?? null;
    this.#explain(metrics.reason, snapshot.reason);
    if (this.readings.length && metrics.value) {
      this.#drawTiles();
      this.#drawLatency();
    }
    this.#drawSnapshot();
    this.#schedule(Math.max(EVERY_MS - (performance.now() - started), EVERY_MS / 4));
  }

  #add(samples) {
    const last = this.readings.at(-1), name = "quire_steps_total";
    if (last && total(samples, name) < total(last.samples, name)) this.readings = []; // another engine
    this.readings.push({ at: performance.now(), samples, gauge: (metric) => total(samples, metric) });
    if (this.readings.length > KEPT) this.readings.shift();
  }

  /** Return the latest reading that is at least so old, or the oldest; null if there is only one. */
  #before(age_ms, at = this.readings.length - 1) {
    const until = this.readings[at].at - age_ms;
    for (let index = at - 1; index >= 0; index--) {
      if (this.readings[index].at <= until || index === 0) return this.readings[index];
    }
    return null;
  }

  #explain(metricsError, snapshotError) {
    const error = snapshotError ?? metricsError, isRefused = [401, 403].includes(error?.status);
    $("engine-note").hidden = !error;
    $("admin-form").hidden = !isRefused;
    if (!error) return;
    const what = metricsError ? "The engine view" : "The queue, the batch and the block map";
    const isElsewhere = error.code === "unknown_url";
    setText($("engine-note"), isRefused
      ? `${what} need${metricsError ? "s" : ""} an admin's key. ${visible(error.message)}`
      : isElsewhere ? `${what} are served at --admin-port, on the server's own machine.` : visible(error.message));
  }

  #drawTiles() {
    const now = this.readings.at(-1), minute = this.#before(WINDOW_MS), gauge = now.gauge;
    const speed = rate(now, this.#before(SPEED_MS), "quire_generated_tokens_total");
    const hits = share(grown(now, minute, "quire_prefix_hit_tokens_total"), grown(now, minute, "quire_prefix_queried_tokens_total"));
    const everHits = share(gauge("quire_prefix_hit_tokens_total"), gauge("quire_prefix_queried_tokens_total"));
    const slots = this.snapshot?.slots_total;
    const values = {
      running: [count(gauge("quire_running_requests")), slots ? `of ${slots} slots` : ""],
      waiting: [count(gauge("quire_waiting_requests")), gauge("quire_held_requests") ? `${gauge("quire_held_requests")} held` : `${count(gauge("quire_waiting_tokens"))} tokens`],
      speed: [speed === null ? "–" : count(speed), `${count(gauge("quire_generated_tokens_total"))} since start`],
      kv: [percent(share(gauge("quire_kv_blocks_used"), gauge("quire_kv_blocks"))), `${count(gauge("quire_kv_blocks_used"))} of ${count(gauge("quire_kv_blocks"))}`],
      hits: [percent(minute ? hits : everHits), `${percent(everHits)} since start`],
      busy: [percent(gauge("quire_device_busy_share")), "last minute"],
    };
    for (const [name, , read] of TILES) {
      const tile = this.tiles.get(name);
      setText(tile.value, values[name][0]);
      setText(tile.note, values[name][1]);
      drawCurve(tile.curve, this.readings.map((one, at) => read(one, at ? this.#before(SPEED_MS, at) : null)), ["kv", "hits", "busy"].includes(name) ? 1 : 0);
    }
  }

  #drawLatency() {
    const { samples, gauge } = this.readings.at(-1), minute = this.#before(WINDOW_MS);
    const shown = (value) => (value === null ? "–" : duration(value * 1e3));
    const rows = LATENCIES.map(([name, title]) => {
      const lately = histogram(samples, name, minute?.samples), ever = histogram(samples, name);
      const values = minute ? [0.5, 0.9, 0.99].map((at) => shown(lately.at(at))) : ["–", "–", "–"];
      return [title, ...values, shown(ever.at(0.5)), shown(ever.at(0.99))];
    });
    fillTable($("latency"), ["Last minute", "p50", "p90", "p99", "p50 overall", "p99 overall"], rows);
    const good = minute ? grown(this.readings.at(-1), minute, "quire_goodput_requests_total") : 0;
    const ended = minute ? histogram(samples, "quire_request_seconds", minute.samples).count : 0;
    const pairs = [
      ["Answers that met their objectives", ended ? `${percent(Math.min(good / ended, 1))} of ${ended} in the last minute` : "none ended in the last minute"],
      ["Tokens of such answers", `${count(rate(this.readings.at(-1), minute, "quire_goodput_tokens_total") ?? 0)} per second`],
      ["Objectives missed since start", count(gauge("quire_missed_objectives_total"))],
      ["Refused, timed out, failed since start", [gauge("quire_refused_requests_total"), gauge("quire_timeouts_total"), gauge("quire_errors_total")].map(count).join(", ")],
      ["Preemptions since start", count(gauge("quire_preemptions_total"))],
      ["Mean rows and tokens of a step", [mean(samples, minute, "quire_batch_rows"), mean(samples, minute, "quire_batch_tokens")].join(", ")],
    ];
    $("goodput").replaceChildren(...pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  #drawSnapshot() {
    const { snapshot } = this;
    const cards = document.querySelectorAll("[aria-labelledby=h-blocks], [aria-labelledby=h-running], [aria-labelledby=h-waiting]");
    for (const card of cards) card.hidden = !snapshot;
    if (!snapshot) return;
    if (!snapshot.running.some((one) => one.request === this.pinned)) this.pinned = null;
    this.#drawMap();
    const tenants = [...snapshot.running, ...snapshot.waiting].some((one) => one.tenant);
    const named = (one, ...cells) => [`#${one.request}`, ...(tenants ? [tenantName(one.tenant)] : []), ...cells];
    const titles = ["Request", ...(tenants ? ["Tenant"] : [])];
    const running = snapshot.running.slice(0, MAX_ROWS);
    fillTable($("running"), [...titles, "Phase", "Progress", "Prompt", "Cached", "Output", "Blocks", "Age", "Preempted"], running.map((one) => {
      const output = one.known_tokens - one.prompt_tokens, isPrefill = one.computed_tokens < one.prompt_tokens;
      const done = isPrefill ? one.computed_tokens / one.prompt_tokens : output / Math.max(one.max_tokens - one.prompt_tokens, 1);
      return named(one, isPrefill ? "prefill" : "decode", progress(done), count(one.prompt_tokens), count(one.cached_tokens), `${count(output)} / ${count(one.max_tokens - one.prompt_tokens)}`, count(one.blocks), duration(one.age_ms), one.preemptions || "–");
    }));
    [...$("running").tBodies[0].rows].forEach((row, at) => {
      if (!running[at]) return;
      const { request } = running[at], swatch = h("span", { class: "swatch" });
      swatch.style.background = this.#colour({ use: "running", request, tenant: running[at].tenant });
      row.cells[0].prepend(swatch);
      row.onpointerenter = () => { this.pinned = request; this.#drawMap(); };
      row.onpointerleave = () => { this.pinned = null; this.#drawMap(); };
    });
    fillTable($("waiting"), [...titles, "Prompt", "Generated before", "Waited", "Preempted"], snapshot.waiting.slice(0, MAX_ROWS).map((one) =>
      named(one, count(one.prompt_tokens), count(one.known_tokens - one.prompt_tokens), duration(one.age_ms), one.preemptions || "–")));
    setText($("running-count"), shownOf(snapshot.running_total));
    setText($("waiting-count"), shownOf(snapshot.waiting_total));
  }

  // ---- the map of KV blocks

  #colour({ use, request, tenant, salt }) {
    const byTenant = document.querySelector("[name=by]:checked")?.value === "tenant";
    if (use === "free") return cssColour("--cell-free");
    if (use === "pinned") return cssColour("--cell-pinned");
    if (use === "shared") return cssColour("--cell-shared");
    const isRunning = use === "running";
    if (!byTenant && !isRunning) return cssColour(use === "protected" ? "--cell-protected" : "--cell-cached");
    const number = byTenant ? hash(`${tenant}/${salt ?? ""}`) : request;
    return `hsl(${(number * 137.508 + 205) % 360} ${cssValue(isRunning ? "--cell-run" : "--cell-dim")})`;
  }

  #drawMap() {
    const canvas = $("map"), blocks = this.snapshot?.blocks;
    const width = canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(canvas.parentElement).paddingLeft);
    if (!blocks || width < 50) return;
    const cells = blocks.run_lengths.reduce((sum, length) => sum + length, 0);
    const size = Math.max(5, Math.min(20, Math.floor(Math.sqrt(width * 300 / cells)))), gap = size > 7 ? 2 : 1;
    const columns = Math.floor((width + gap) / size), rows = Math.ceil(cells / columns);
    this.grid = { size, columns, cells };
    const draw = prepared(canvas, width, rows * size), colours = blocks.owners.map((owner) => this.#colour(owner));
    let at = 0;
    blocks.run_lengths.forEach((length, index) => {
      const owner = blocks.owners[blocks.run_owners[index]];
      draw.fillStyle = colours[blocks.run_owners[index]];
      draw.globalAlpha = this.pinned === null || owner.request === this.pinned ? 1 : 0.25;
      for (const end = at + length; at < end; at++) draw.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - gap, size - gap);
    });
    this.#drawLegend(blocks);
  }

  #drawLegend({ owners, total: all, per_cell: perCell, size }) {
    const sums = Object.keys(USES).map((use) => [use, owners.filter((owner) => owner.use === use).reduce((sum, owner) => sum + owner.blocks, 0)]).filter(([, sum]) => sum);
    const items = sums.map(([use, sum]) => {
      const swatch = h("span", { class: `swatch ${use}` });
      swatch.style.background = use === "running" ? "" : this.#colour({ use, tenant: "", request: 0 });
      return h("li", {}, swatch, `${count(sum)} ${USES[use]}`);
    });
    $("legend").replaceChildren(...items, h("li", { class: "hint" }, `${count(all)} blocks of ${size} tokens${perCell > 1 ? `, one cell for ${perCell}` : ""}`));
    $("map").setAttribute("aria-label", `Map of ${all} KV blocks: ${sums.map(([use, sum]) => `${sum} ${USES[use]}`).join(", ")}`);
    const tiers = this.snapshot.tiers.map((tier) => h("div", { class: "tier" },
      h("span", {}, `${tier.tier === "host" ? "Host memory" : "Disk"} tier`), progress(tier.blocks_total ? tier.blocks_used / tier.blocks_total : 0),
      h("span", {}, tier.failed ? "out of use" : `${count(tier.blocks_used)} of ${count(tier.blocks_total)} blocks${tier.fetching ? `, ${tier.fetching} on their way back` : ""}`)));
    $("tiers").replaceChildren(...tiers);
  }

  #pointed(event) {
    const { size, columns, cells } = this.grid ?? {}, blocks = this.snapshot?.blocks;
    if (!size || !blocks) return;
    const cell = Math.floor(event.offsetY / size) * columns + Math.min(Math.floor(event.offsetX / size), columns - 1);
    let end = 0;
    const index = cell < cells ? blocks.run_lengths.findIndex((length) => (end += length) > cell) : -1;
    const owner = blocks.owners[blocks.run_owners[index]];
    if (!owner) return;
    const label = owner.request !== null ? `request #${owner.request}` : USES[owner.use];
    const tenant = ["running", "cached", "protected"].includes(owner.use) ? `, ${tenantName(owner.tenant)}${owner.salt ? `, salt ${owner.salt.slice(0, 8)}` : ""}` : "";
    setText($("map-tip"), `Block ${count(cell * blocks.per_cell)}: ${label}${tenant}, ${count(owner.blocks)} blocks`);
  }
}

const shownOf = (all) => (all > MAX_ROWS ? `the first ${MAX_ROWS} of ${count(all)}` : all ? count(all) : "none");

function mean(samples, before, name) {
  const of = (each, suffix) => (each ? total(each, `${name}_${suffix}`) : 0);
  const steps = of(samples, "count") - of(before?.samples, "count");
  return steps ? ((of(samples, "sum") - of(before?.samples, "sum")) / steps).toFixed(1) : "–";
}

function hash(text) {
  let value = 7;
  for (const character of text) value = (value * 31 + character.codePointAt(0)) % 9973;
  return value;
}

/** Return a colour of the style sheet as the theme has it: a canvas does not support light-dark(). */
function cssColour(name) {
  const probe = $("legend");
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.style.color = "";
  return color;
}

const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function progress(value) {
  const bar = h("span", { class: "fill" });
  bar.style.width = `${Math.min(Math.max(value, 0), 1) * 100}%`;
  return h("span", { class: "progress", role: "img", "aria-label": percent(value) }, bar);
}

/** Fill a table; cells that have not changed stay. */
function fillTable(table, titles, rows) {
  if (table.dataset.titles !== titles.join()) {
    table.dataset.titles = titles.join();
    table.replaceChildren(h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)))), h("tbody"));
  }
  const [body] = table.tBodies;
  body.replaceChildren(...rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), ...cells.map((cell) => h("td", {}, cell)))));
}

/** Return the context of a canvas of this size in CSS pixels, cleared. */
function prepared(canvas, width, height) {
  const scale = devicePixelRatio || 1, pixels = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
    [canvas.width, canvas.height] = pixels;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  return draw;
}

/** Draw the last readings as a curve. most: the upper end; 0: the largest value. */
function drawCurve(canvas, values, most) {
  const width = canvas.parentElement.clientWidth, height = 34;
  if (!width) return;
  const draw = prepared(canvas, width, height), top = most || Math.max(...values.map((value) => value ?? 0), 1);
  const x = (at) => width - (values.length - 1 - at) * (width / (KEPT - 1)), y = (value) => height - 1 - (value / top) * (height - 4);
  const points = values.map((value, at) => [x(at), value]).filter(([, value]) => value !== null);
  if (points.length < 2) return;
  draw.beginPath();
  points.forEach(([at, value]) => draw.lineTo(at, y(value)));
  draw.strokeStyle = cssColour("--accent");
  draw.lineWidth = 1.5;
  draw.stroke();
  draw.lineTo(points.at(-1)[0], height);
  draw.lineTo(points[0][0], height);
  draw.fillStyle = cssColour("--accent");
  draw.globalAlpha = 0.1;
  draw.fill();
  draw.globalAlpha = 1;
}
