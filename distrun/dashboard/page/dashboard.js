// The page of `distrun dashboard`: asks for the list of jobs, or for one job, again and again, and shows what comes.
//
// Names and messages come from scripts and hosts, so text is only ever set by textContent. What has not changed is not
// touched: what a user has selected or scrolled stays.
"use strict";

const AGAIN_MS = 1000, OVER_MS = 5000, HIDDEN_MS = 15000, LIMIT_MS = 20000;
const KEY = "distrun-token";
const at = (id) => document.getElementById(id);

// ---------------------------------------------------------------------- where the page is

/** Take the token out of the URL's fragment, so that it stays in no bookmark, and return which job is shown. */
function place() {
  const told = new URLSearchParams(location.hash.slice(1));
  if (told.has("token")) {
    token(told.get("token"));
    told.delete("token");
    history.replaceState(null, "", location.pathname + (told.size ? `#${told}` : ""));
  }
  return told.get("job") || "";
}

let own = ""; // the token, if the browser keeps nothing

/** Return the token, which all tabs share and a reload finds; `given`: a new one. */
function token(given = "") {
  try {
    if (given) localStorage.setItem(KEY, given);
    return localStorage.getItem(KEY) || "";
  } catch {
    return (own = given || own);
  }
}

let job = "", timer = 0, turn = 0, axis = "steps";

async function go() {
  const here = ++turn;
  clearTimeout(timer);
  let wait = AGAIN_MS;
  try {
    const value = await ask(job ? `api/job?${query()}` : "api/jobs");
    if (here !== turn) return;
    job ? showJob(value) : showJobs(value);
    reached(value);
    if (value.is_over) wait = OVER_MS;
  } catch (error) {
    if (here !== turn) return;
    failed(error);
    wait = OVER_MS;
  }
  timer = setTimeout(go, document.hidden ? HIDDEN_MS : wait);
}

function query() {
  const fold = at("fold").checked ? "1" : "";
  return new URLSearchParams({ id: job, only: at("only").value, order: at("order").value, fold });
}

async function ask(path) {
  const headers = { Authorization: `Bearer ${token()}` };
  const reply = await fetch(path, { headers, signal: AbortSignal.timeout(LIMIT_MS) });
  if (reply.ok) return reply.json();
  const isJson = reply.headers.get("Content-Type") === "application/json";
  throw Object.assign(new Error(isJson ? (await reply.json()).error : await reply.text()), { status: reply.status });
}

function reached(value) {
  const isLive = !job || !value.is_over;
  link(isLive ? "live" : "", isLive ? "live" : "ended");
  only(job ? "job" : "list");
}

/** Say why nothing comes. What was shown stays if it may come back. */
function failed(error) {
  const hasShown = !at("job").hidden || !at("list").hidden;
  link("lost", error.status ? "not shown" : "no answer");
  if (hasShown && !(error.status < 500)) return;
  if (!error.status) return problem("No answer", "Is distrun dashboard still running, and the port forwarded?");
  const title = { 401: "Open the URL that distrun dashboard printed", 404: "No such job" }[error.status];
  problem(title || (job ? "This job cannot be shown" : "The list cannot be shown"), error.message);
}

function problem(title, why) {
  set(at("problem-title"), title);
  set(at("problem-text"), why);
  only("problem");
}

function link(style, text) {
  at("link").className = `link ${style}`;
  set(at("link"), text);
}

function only(shown) {
  for (const id of ["problem", "list", "job"]) at(id).hidden = id !== shown;
}

function arrive() {
  job = place();
  only("");
  document.title = job ? `${job} – distrun` : "distrun";
  at("crumb").textContent = job ? ` / ${job}` : "";
  link("", "connecting");
  scrollTo(0, 0);
  go();
}

// ---------------------------------------------------------------------- text and tables

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function style(node, name) {
  if (node.className !== name) node.className = name;
}

function make(kind, parent) {
  return parent.appendChild(document.createElement(kind));
}

/** Let a node have so many children, and return them. */
function children(node, count, kind) {
  while (node.children.length > count) node.lastElementChild.remove();
  while (node.children.length < count) make(kind, node);
  return [...node.children];
}

/** Fill a table with what rows.TextTable.as_json tells. `link` gives the address for a row's first cell, if it has one. */
function table(node, told, link) {
  if (!node.tHead) {
    make("tr", node.createTHead());
    node.createTBody();
  }
  children(node.tHead.rows[0], told.headings.length, "th").forEach((cell, column) => {
    cell.scope = "col";
    style(cell, told.numbers[column] ? "number" : "");
    set(cell, told.headings[column]);
  });
  const state = told.headings.indexOf("STATE");
  children(node.tBodies[0], told.rows.length, "tr").forEach((row, number) => {
    const isDim = told.styles[number] === "dim";
    style(row, isDim ? "dim" : "");
    children(row, told.headings.length, "td").forEach((cell, column) => {
      style(cell, (told.numbers[column] ? "number" : "") + (column === state ? ` ${told.styles[number]}` : ""));
      if (link && column === 0) {
        const [anchor] = children(cell, 1, "a");
        anchor.href = link(number);
        set(anchor, told.rows[number][column]);
      } else {
        set(cell, told.rows[number][column]);
      }
    });
  });
}

/** Fill a list with texts and their styles. */
function list(node, items) {
  children(node, items.length, "li").forEach((item, number) => {
    const [text, name] = items[number];
    set(item, text);
    style(item, name || "");
  });
}

function more(node, hidden) {
  node.hidden = !hidden;
  set(node, `${hidden} more are not shown: filter or fold them`);
}

// ---------------------------------------------------------------------- the two views

function showJobs(told) {
  table(at("jobs"), told.jobs, (number) => `#${new URLSearchParams({ job: told.ids[number] })}`);
  at("jobs").hidden = !told.ids.length;
  at("no-jobs").hidden = told.ids.length > 0;
}

function showJob(told) {
  set(at("id"), told.id);
  set(at("crumb"), ` / ${told.id}`);
  set(at("state"), told.state);
  style(at("state"), `pill ${told.style}`);
  const code = told.code === null ? "" : `exit code ${told.code}`;
  set(at("elapsed"), [told.elapsed, code, told.backend, told.name].filter(Boolean).join("  ·  "));
  set(at("command"), told.command);
  list(at("notes"), told.notes);
  showProgress(told);

  at("error-card").hidden = !told.error;
  set(at("error-title"), told.error ? told.error.title : "");
  set(at("error-lines"), told.error ? told.error.lines.join("\n") : "");
  at("error-lines").hidden = !told.error || !told.error.lines.length;

  const reports = told.charts.filter((each) => each.kind === "report");
  at("axis-label").hidden = !reports.some((each) => each.steps);
  charts(at("reports"), reports);
  charts(at("usage"), told.charts.filter((each) => each.kind === "usage"));
  at("reports-card").hidden = !reports.length;
  at("usage-card").hidden = reports.length === told.charts.length;

  list(at("counts"), told.counts);
  if (!at("order").length) for (const each of told.orders) make("option", at("order")).textContent = each;
  const hasTasks = told.tasks.rows.length > 0;
  table(at("tasks"), told.tasks);
  at("tasks").hidden = !hasTasks;
  at("no-tasks").hidden = hasTasks;
  set(at("no-tasks"), told.counts.length ? "No task matches the filter." : "No tasks yet.");
  more(at("tasks-more"), told.tasks_hidden);

  table(at("hosts"), told.hosts);
  more(at("hosts-more"), told.hosts_hidden);
  at("hosts-card").hidden = !told.hosts.rows.length;
  table(at("servers"), told.servers);
  list(at("store"), told.store.map((text) => [text, "dim"]));
  at("servers-card").hidden = !told.servers.rows.length;
  at("events-card").hidden = !told.events.length;
  children(at("events"), told.events.length, "li").forEach((item, number) => {
    const [time, words, name] = told.events[number];
    if (!item.children.length) make("time", item), make("span", item);
    set(item.children[0], time);
    set(item.children[1], words);
    style(item.children[1], name);
  });
}

function showProgress(told) {
  const progress = told.progress || { fraction: null, parts: [] };
  const percent = progress.fraction === null ? null : Math.round(100 * progress.fraction);
  at("progress-card").hidden = !told.progress;
  at("meter").hidden = percent === null;
  at("meter").setAttribute("aria-valuenow", percent || 0);
  at("meter-full").style.width = `${percent || 0}%`;
  list(at("progress"), progress.parts.map((part) => [part, ""]));
  const share = percent === null || told.is_over ? told.state : `${percent} %`;
  document.title = `${share} · ${told.id} – distrun`;
}

// ---------------------------------------------------------------------- plots

const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power); // what lies between two marks of an axis
const CLOCK = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800, 2592000];
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

const plots = new Map(); // by figure: its plot, and what that was made for

function charts(parent, told) {
  children(parent, told.length, "figure").forEach((figure, number) => chart(figure, told[number]));
}

function chart(figure, told) {
  if (!figure.children.length) {
    figure.className = "card chart";
    const caption = make("figcaption", figure);
    for (const name of ["name", "value", "about"]) make("span", caption).className = name;
    make("div", figure).className = "plot";
  }
  const [caption, plot] = figure.children;
  const steps = axis === "steps" ? told.steps : null;
  const wanted = JSON.stringify([told.name, told.unit, told.series.map(([label]) => label), Boolean(steps)]);
  const data = [steps || told.times, ...told.series.map(([, values]) => values)];
  let known = plots.get(figure);
  if (!known || known.wanted !== wanted) {
    if (known) known.plot.destroy();
    known = { wanted, told, plot: draw(figure, plot, told, Boolean(steps), data) };
    plots.set(figure, known);
  } else if (JSON.stringify(known.told) !== JSON.stringify(told)) {
    known.told = told;
    known.plot.setData(data);
  }
  set(caption.children[0], told.name);
  if (known.plot.cursor.idx == null) now(figure, known.told);
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${told.name}, last ${caption.children[1].textContent}, ${caption.children[2].textContent}`);
}

/** Write the last values beside the name of a plot. */
function now(figure, told) {
  const known = told.series.flatMap(([, values]) => values).filter((each) => each !== null);
  const most = known.length ? `max ${amount(Math.max(...known), told.unit)}` : "";
  tell(figure, told, told.series.map(([, values]) => last(values)), told.last ? told.about : most);
}

/** Write the values below the pointer there. */
function point(figure, told, isSteps, index) {
  const where = isSteps ? `step ${told.steps[index]}` : `at ${clock(told.times[index])}`;
  tell(figure, { ...told, last: "" }, told.series.map(([, values]) => values[index]), where);
}

function tell(figure, told, values, about) {
  const [, value, aside] = figure.firstElementChild.children;
  children(value, values.length, "span").forEach((span, number) => {
    const [label] = told.series[number];
    const shown = told.last || (values[number] === null ? "–" : amount(values[number], told.unit));
    style(span, label ? `label-${number + 1}` : "");
    set(span, label ? `${label} ${shown}  ` : shown);
  });
  set(aside, about);
}

function last(values) {
  return values.findLast((value) => value !== null) ?? null;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function draw(figure, parent, told, isSteps, data) {
  const side = { stroke: colour("dim"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const isSize = told.unit.startsWith("B");
  const points = { show: true, filter: (plot, number) => lone(plot.data[number]) };
  const lines = told.series.map((_, number) => ({ stroke: colour(`line-${number + 1}`), width: 1.6, dash: number ? [5, 4] : [], points }));
  const amounts = (_, ticks, axis, space, step) => ticks.map((tick) => amount(tick, told.unit.replace("/s", ""), digits(ticks, step)));
  const setCursor = (plot) => {
    const { told } = plots.get(figure) || {};
    if (told) plot.cursor.idx == null ? now(figure, told) : point(figure, told, isSteps, plot.cursor.idx);
  };
  return new uPlot({
    width: parent.clientWidth || 320, height: parent.clientHeight || 180,
    legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range: told.unit ? (_, low, high) => [0, high > 0 ? high * 1.05 : 1] : padded } },
    axes: [
      { ...side, values: (_, ticks) => ticks.map((tick) => (isSteps ? amount(tick, "") : clock(tick))), incrs: isSteps ? WHOLE : CLOCK, space: 70, size: 26 },
      { ...side, values: amounts, incrs: isSize ? BINARY : undefined, size: room, gap: 6 },
    ],
    series: [{}, ...lines],
    hooks: { setCursor: [setCursor] },
  }, data, parent);
}

/** Return which values have no neighbour, so that no line shows them. */
function lone(values) {
  return [...values.keys()].filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);
}

/** Return how many digits tell one mark of an axis from the next. */
function digits(ticks, step) {
  return Math.min(15, Math.max(4, 1 + Math.ceil(Math.log10(Math.max(...ticks.map(Math.abs)) / step)))) || 4;
}

/** Return the width of an axis, by its longest mark. */
function room(_, marks) {
  return 16 + Math.max(30, ...(marks || []).map((mark) => 6.2 * mark.length));
}

function padded(_, low, high) {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** Return a number with few digits: 1.5 GiB, 12k, 0.0312. */
function amount(value, unit, precision = 4) {
  const isSize = unit.startsWith("B"), base = isSize ? 1024 : 1000;
  let shown = value, power = 0;
  while (Math.abs(shown) >= base && power < 5) shown /= base, power += 1;
  if (power === 5 || (value !== 0 && Math.abs(value) < 1e-4)) return `${value.toExponential(precision - 2)} ${unit}`.trim();
  const prefix = isSize ? ["", "Ki", "Mi", "Gi", "Ti"][power] : ["", "k", "M", "G", "T"][power];
  const digits = Number(shown.toPrecision(precision));
  return isSize ? `${digits} ${prefix}${unit}` : `${digits}${prefix}${unit && unit !== "cores" ? ` ${unit}` : ""}`;
}

/** Return seconds as a clock shows them: 1:05, 2:01:05. */
function clock(seconds) {
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  const minutes = seconds / 60;
  return minutes < 60 ? `${Math.floor(minutes)}:${two(seconds % 60)}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(seconds % 60)}`;
}

/** Draw all plots anew: their colours are others, or the axis is. */
function redraw() {
  for (const { plot } of plots.values()) plot.destroy();
  plots.clear();
  go();
}

new ResizeObserver(() => {
  for (const [figure, { plot }] of plots) {
    if (figure.isConnected) plot.setSize({ width: figure.lastElementChild.clientWidth, height: 180 });
    else plot.destroy(), plots.delete(figure);
  }
}).observe(document.body);

// ---------------------------------------------------------------------- what a user does

addEventListener("hashchange", arrive);
addEventListener("visibilitychange", () => document.hidden || go());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
at("only").addEventListener("input", go);
at("order").addEventListener("change", go);
at("fold").addEventListener("change", go);
at("axis").addEventListener("change", (event) => {
  axis = event.target.value;
  redraw();
});
arrive();
