// Refreshes, sorts, filters and groups what the page holds already. Without it the page can be read all the same.
"use strict";

const REFRESH_MS = 1000;
const tables = [...document.querySelectorAll("table.endpoints")];
const stale = document.getElementById("stale");
let paused = false;
let step = Number(document.body.dataset.step);

document.documentElement.classList.add("has-script");

// --- refresh

async function refresh() {
  const live = document.body.dataset.live;
  try {
    const answer = await fetch(live, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(`the picker answers ${answer.status}`);
    const said = await answer.json();
    if (document.body.dataset.version !== said.version) return again();
    for (const [id, html] of Object.entries(said.parts)) draw(document.getElementById(id), html);
    (said.columns || []).forEach((columns, number) => fill(tables[number], columns, said));
    step = said.step;
    stale.textContent = "";
    document.body.dataset.refreshed = Number(document.body.dataset.refreshed || 0) + 1;
  } catch (error) {
    stale.textContent = `not refreshed: ${error.message}`;
  }
}

// What is drawn anew would take the focus and the selection with it; what was opened stays open.
function draw(element, html) {
  if (!element || element.drawn === html || element.contains(document.activeElement)) return;
  const selection = document.getSelection();
  if (selection.type === "Range" && element.contains(selection.anchorNode)) return;
  const open = element.querySelector("details")?.open;
  element.innerHTML = html;
  element.drawn = html;
  if (open) element.querySelector("details")?.setAttribute("open", "");
}

// Other endpoints, or another picker: the server draws them. What was typed is kept.
function again() {
  sessionStorage.setItem("tools", JSON.stringify(tables.map(table => table.tools)));
  location.reload();
}

function fill(table, values, said) {
  const { heads, lines, scale } = table;
  if (said.scales[tables.indexOf(table)] !== scale) return again();
  const grown = said.step - step;
  if (grown > 1) return again(); // this page slept
  values.forEach((column, at) => {
    const { chart, unit } = heads[at + 1].dataset;
    if (chart && !grown) return;
    column.forEach((value, number) => {
      const cell = lines[number].cells[at + 1];
      if (chart) return extend(cell.firstChild, value, chart === "kv" ? 200 : scale);
      const text = value === null ? "" : String(value);
      if (cell.dataset.v === text) return;
      cell.dataset.v = text;
      cell.lastChild.textContent = value === null ? "–" : text + unit;
      if (cell.childNodes.length > 1) cell.firstChild.firstChild.setAttribute("width", value || 0);
    });
  });
  columns(table);
  if (!table.tBodies[0].matches(":hover")) return arrange(table);
  for (const line of table.tBodies[0].rows) if (line.members) title(table, line);
  count(table);
}

// One point more at the right end; the drawing is the server's.
function extend(svg, value, most) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const line = svg.firstChild;
  const points = line.getAttribute("points").split(" ").filter(Boolean).map(point => point.split(",").map(Number));
  const kept = points.map(([x, y]) => [x - 1, y]).filter(([x]) => x >= 0);
  if (value !== null) kept.push([width, height - Math.floor((Math.min(value, most) * height) / most)]);
  line.setAttribute("points", kept.map(point => point.join(",")).join(" "));
}

function loop() {
  setTimeout(async () => {
    if (!paused && !document.hidden) await refresh();
    loop();
  }, REFRESH_MS);
}

// --- the table of endpoints

function arrange(table) {
  const { column, down, filter, group } = table.tools;
  const wanted = filter.toLowerCase();
  const body = table.tBodies[0];
  const shown = table.lines.filter(line => {
    line.hidden = wanted !== "" && !line.cells[0].textContent.toLowerCase().includes(wanted);
    return !line.hidden;
  });
  const order = [...table.lines];
  if (column !== null) {
    order.sort((one, other) => compare(key(one, column), key(other, column)) * (down ? -1 : 1));
  }
  if (group) order.sort((one, other) => one.dataset[group].localeCompare(other.dataset[group], undefined, { numeric: true }));
  const wants = group ? grouped(table, order, group) : order;
  const have = body.children;
  if (wants.length !== have.length || wants.some((line, at) => have[at] !== line)) body.replaceChildren(...wants);
  if (group) for (const line of wants) if (line.members) title(table, line);
  count(table, shown.length);
}

function count(table, shown = table.lines.filter(line => !line.hidden).length) {
  const all = table.lines.length;
  const text = shown === all ? endpoints(all) : `${shown} of ${endpoints(all)}`;
  if (table.count.textContent !== text) table.count.textContent = text; // it is read aloud where it changes
}

const endpoints = number => `${number} endpoint${number === 1 ? "" : "s"}`;

// Those of which nothing is known anywhere take no room.
function columns(table) {
  table.heads.forEach((head, at) => {
    if (!at || head.dataset.chart !== undefined || !table.lines.length) return;
    const hidden = table.lines.every(line => line.cells[at].dataset.v === "");
    if (hidden !== head.hidden) for (const line of [head.parentElement, ...table.lines]) line.cells[at].hidden = hidden;
  });
}

const key = (line, column) => (column === 0 ? line.cells[0].firstChild.data : line.cells[column].dataset.v);

function compare(one, other) {
  if (one === other) return 0;
  if (one === "" || other === "") return one === "" ? -1 : 1;
  const difference = Number(one) - Number(other);
  return Number.isNaN(difference) ? one.localeCompare(other, undefined, { numeric: true }) : difference;
}

function grouped(table, order, by) {
  const wants = [];
  let last = null;
  for (const line of order) {
    const name = line.dataset[by];
    if (last === null || last.name !== name) {
      last = (table.groups[`${by} ${name}`] ??= heading(table, by, name));
      last.members = [];
      wants.push(last);
    }
    last.members.push(line);
    wants.push(line);
  }
  return wants;
}

function heading(table, by, name) {
  const line = document.createElement("tr");
  line.className = "group";
  line.name = name;
  line.label = name ? `${by} ${name}` : `no ${by}`;
  const cell = document.createElement("th");
  cell.colSpan = table.heads.length;
  cell.scope = "rowgroup";
  line.append(cell);
  return line;
}

function title(table, line) {
  const members = line.members.filter(each => !each.hidden);
  line.hidden = members.length === 0;
  const known = head => members.map(each => key(each, table.named[head])).filter(value => value !== "").map(Number);
  const sum = head => known(head).reduce((total, value) => total + value, 0);
  const all = known("KV use").length;
  const kv = all ? `${Math.round(sum("KV use") / all)} %` : "–";
  const text = `${line.label}: ${endpoints(members.length)}, ${sum("ours")} in flight, ${sum("queue")} queued, KV use ${kv}`;
  if (line.firstChild.textContent !== text) line.firstChild.textContent = text;
}

function sort(table, column) {
  const tools = table.tools;
  if (tools.column !== column) Object.assign(tools, { column, down: column !== 0 });
  else if (tools.down === (column !== 0)) tools.down = !tools.down;
  else tools.column = null;
  mark(table);
  arrange(table);
}

function mark(table) {
  const { column, down } = table.tools;
  table.heads.forEach((head, at) => {
    if (head.hasAttribute("aria-sort")) head.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending");
  });
}

function prepare(table, number) {
  const kept = JSON.parse(sessionStorage.getItem("tools") || "[]")[number];
  table.tools = kept || { column: null, down: false, filter: "", group: "" };
  table.lines = [...table.tBodies[0].rows];
  table.heads = [...table.tHead.rows[0].cells];
  table.named = Object.fromEntries(table.heads.map((head, at) => [head.textContent, at]));
  table.scale = Number(table.dataset.scale);
  table.groups = {};
  const tools = table.parentElement.previousElementSibling;
  table.count = tools.querySelector(".shown");
  const filter = tools.querySelector("[data-filter]"), group = tools.querySelector("[data-group]");
  filter.value = table.tools.filter;
  group.value = table.tools.group;
  filter.addEventListener("input", () => { table.tools.filter = filter.value; arrange(table); });
  group.addEventListener("change", () => { table.tools.group = group.value; arrange(table); });
  table.heads.forEach((head, at) => head.querySelector("button")?.addEventListener("click", () => sort(table, at)));
  columns(table);
  mark(table);
  arrange(table);
}

// --- keys

function pause(on) {
  paused = on;
  const button = document.getElementById("pause");
  button.setAttribute("aria-pressed", String(on));
  button.textContent = on ? "Go on" : "Pause";
}

document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && event.target.matches("[data-filter]")) {
    event.target.value = "";
    event.target.dispatchEvent(new Event("input"));
    event.target.blur();
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const filter = document.querySelector("[data-filter], #text");
  if (event.key === "/" && filter) {
    event.preventDefault();
    filter.focus();
  } else if (event.key === "p" && document.body.dataset.live) pause(!paused);
});

tables.forEach(prepare);
sessionStorage.removeItem("tools");
if (document.body.dataset.live) {
  document.getElementById("pause").addEventListener("click", () => pause(!paused));
  loop();
}
