// What HTML and htmx do not: keys, times in the reader's zone, questions before danger, charts, and coming back after a failure.
// Nothing here writes HTML: what comes from a cluster is put into pages as text only.
"use strict";

// --- times ------------------------------------------------------------------------------------------------------------

function showTimes(root) {
  for (const element of root.querySelectorAll("time[data-time]")) {
    const moment = new Date(Number(element.dataset.time));
    if (Number.isNaN(moment.getTime()) || element.title) continue;
    element.title = element.textContent;
    const pad = (number, width = 2) => String(number).padStart(width, "0");
    element.textContent =
      `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())} ` +
      `${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}.${pad(moment.getMilliseconds(), 3)}`;
  }
}

// --- charts: <div class="chart" data-chart='{"series": [...], "unit": ""}'> fed by events of [data-events] ---------------

const charts = new Map();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function shortNumber(value, unit) {
  if (value === null || value === undefined) return "–";
  const units = unit === "bytes" ? ["B", "kB", "MB", "GB", "TB"] : ["", "k", "M", "G", "T"];
  const base = 1000;
  let index = 0;
  while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index += 1; }
  const digits = index === 0 && Number.isInteger(value) ? 0 : 1;
  return `${value.toFixed(digits)} ${units[index]}`.trim();
}

function makeChart(element) {
  const wanted = JSON.parse(element.dataset.chart);
  const colours = ["--accent", "--warn", "--good", "--bad"];
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const chart = new uPlot(
    {
      width: Math.max(element.clientWidth, 200),
      height: 200,
      series: [
        {},
        ...wanted.series.map((label, index) => ({
          label,
          stroke: colour(colours[index % colours.length]),
          width: 2,
          points: { show: false },
          value: (_, value) => shortNumber(value, wanted.unit),
        })),
      ],
      axes: [axis, { ...axis, size: 70, values: (_, values) => values.map((value) => shortNumber(value, wanted.unit)) }],
      scales: { y: { range: (_, least, most) => [Math.min(0, least ?? 0), Math.max(most ?? 1, 1) * 1.1] } },
      legend: { live: true },
    },
    wanted.data ?? [[], ...wanted.series.map(() => [])],
    element,
  );
  charts.set(element, chart);
  new ResizeObserver(() => chart.setSize({ width: Math.max(element.clientWidth, 200), height: 200 })).observe(element);
}

function showCharts(root) {
  for (const element of root.querySelectorAll("[data-chart]")) if (!charts.has(element)) makeChart(element);
}

// --- live values: a stream of events that fills [data-live="name"] and the charts ----------------------------------------

function openStreams(root) {
  for (const element of root.querySelectorAll("[data-events]")) {
    if (element.stream) continue;
    const stream = (element.stream = new EventSource(element.dataset.events));
    stream.addEventListener("values", (event) => {
      element.classList.remove("stale");
      for (const [name, value] of Object.entries(JSON.parse(event.data))) {
        for (const place of element.querySelectorAll(`[data-live="${CSS.escape(name)}"]`)) place.textContent = value;
      }
    });
    stream.addEventListener("series", (event) => {
      for (const [name, data] of Object.entries(JSON.parse(event.data))) {
        const chart = charts.get(document.getElementById(name));
        if (chart) chart.setData(data);
      }
    });
    // What is shown is of another shape by now: the page is made again, unless somebody is in the middle of something.
    stream.addEventListener("reload", () => { if (!isBusy()) location.reload(); });
    stream.addEventListener("failure", (event) => {
      element.classList.add("stale");
      const place = element.querySelector("[data-live-failure]");
      if (place) { place.textContent = JSON.parse(event.data); place.hidden = place.textContent === ""; }
    });
    // The page is as good as its stream.
    stream.addEventListener("error", () => element.classList.add("stale"));
  }
}

// A browser has six connections for one address, and a stream is one of them: tabs in the background give theirs back.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) { openStreams(document); return; }
  for (const element of document.querySelectorAll("[data-events]")) { element.stream?.close(); element.stream = null; }
});

// --- is the cluster there? Asked while somebody looks, so that a page that is open says so, and takes it back -------------

const ASK_EVERY_MS = 5000;

function watchCluster() {
  const place = document.querySelector("[data-watches]");
  if (!place || document.querySelector("[data-look-again]")) return;
  const say = (text) => { if (place.textContent !== text) place.textContent = text; place.hidden = text === ""; };
  const ask = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(place.dataset.watches);
        if (answer.redirected) { say("You are not logged in any more: load the page again."); return; }
        if (answer.ok) say((await answer.json()).failure);
      } catch { say("The console does not answer."); }
    }
    setTimeout(ask, ASK_EVERY_MS);
  };
  setTimeout(ask, ASK_EVERY_MS);
}

// --- coming back after a failure -------------------------------------------------------------------------------------------

function lookAgain(root) {
  const failed = root.querySelector("[data-look-again]");
  if (!failed || failed.dataset.looking) return;
  failed.dataset.looking = "yes";
  const look = async () => {
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.status < 500 && !(await answer.text()).includes("data-look-again")) { location.reload(); return; }
    } catch { /* the console itself is away: it is tried again */ }
    setTimeout(look, Number(failed.dataset.lookAgain));
  };
  setTimeout(look, Number(failed.dataset.lookAgain));
}

// A page with [data-reload] shows work under way: it is loaded again while nobody types or selects something there.

function isBusy() {
  const typing = document.activeElement?.matches("input, textarea, select") || document.querySelector("dialog[open]");
  return Boolean(typing) || String(getSelection()) !== "";
}

function reloadLater(root) {
  const element = root.querySelector("[data-reload]");
  if (!element || element.dataset.reloading) return;
  element.dataset.reloading = "yes";
  setInterval(() => {
    if (!isBusy() && !document.hidden) location.reload();
  }, Number(element.dataset.reload));
}

// --- clicks and keys ---------------------------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const button = event.target.closest("button, a");
  if (!button) return;
  if (button.dataset.confirm && !window.confirm(button.dataset.confirm)) event.preventDefault();
  if (button.dataset.opens) document.getElementById(button.dataset.opens)?.showModal();
  if (button.dataset.closes) document.getElementById(button.dataset.closes)?.close();
  if (button.dataset.toggles) {
    const open = document.getElementById(button.dataset.toggles).classList.toggle("open");
    button.setAttribute("aria-expanded", String(open));
  }
  if (button.dataset.copies) navigator.clipboard?.writeText(document.getElementById(button.dataset.copies).textContent);
});

let leader = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, [contenteditable]")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const follow = (element) => { if (element) { event.preventDefault(); element.click(); } };
  if (leader) {
    leader = false;
    follow(document.querySelector(`#menu a[data-key="${CSS.escape(event.key)}"]`));
    return;
  }
  if (event.key === "g") leader = true;
  else if (event.key === "/") {
    const field = document.querySelector("[data-search]");
    if (field) { event.preventDefault(); field.focus(); field.select(); }
  } else if (event.key === "n") follow(document.querySelector('[data-page="next"]'));
  else if (event.key === "p") follow(document.querySelector('[data-page="previous"]'));
  else if (event.key === "?") document.getElementById("keys-help")?.showModal();
});

// --- begin, and again for whatever htmx brings ---------------------------------------------------------------------------

function awaken(root) {
  showTimes(root);
  showCharts(root);
  openStreams(root);
  lookAgain(root);
  reloadLater(root);
}
document.addEventListener("DOMContentLoaded", () => { awaken(document); watchCluster(); });
document.addEventListener("htmx:afterSwap", (event) => awaken(event.detail.elt.parentElement ?? document));
