// The pages of records: how far a scan is, and what comes in live. What a record holds is only ever put into a page as text.
"use strict";

// --- scans: <div data-scan="events" data-again="the page with this scan"> ------------------------------------------------

const LOOK_EVERY_MS = 1000;

function fill(element, values) {
  for (const [name, value] of Object.entries(values)) {
    for (const place of element.querySelectorAll(`[data-live="${CSS.escape(name)}"]`)) place.textContent = value;
  }
}

function isBusy(element) {
  return element.contains(document.activeElement) || element.querySelector("details[open]") !== null;
}

function watchScans(root) {
  for (const element of root.querySelectorAll("[data-scan]")) {
    if (element.watched) continue;
    const stream = (element.watched = new EventSource(element.dataset.scan));
    let shown = "";
    let looked = 0;
    const take = (part) => htmx.ajax("GET", element.dataset.again, { target: part, select: part, swap: "outerHTML" });
    stream.addEventListener("progress", (event) => {
      if (!element.isConnected) { stream.close(); return; }
      const values = JSON.parse(event.data);
      element.classList.remove("stale");
      fill(element, values);
      const bar = element.querySelector("progress");
      if (bar) bar.value = values.share;
      const found = document.getElementById("found");
      if (values.matched !== shown && performance.now() - looked > LOOK_EVERY_MS && found && !isBusy(found)) {
        shown = values.matched;
        looked = performance.now();
        take("#found");
      }
    });
    stream.addEventListener("over", () => {
      stream.close();
      const found = document.getElementById("found");
      // Whoever reads an opened record keeps it: only what is beside it changes.
      if (found && isBusy(found)) take("#progress");
      else take("#scan");
    });
    stream.addEventListener("error", () => element.classList.add("stale"));
  }
}

// --- live: <div data-tail="events"> with a list and a <template> of a line -------------------------------------------------

const MOST_LINES = 500;

function followTails(root) {
  for (const element of root.querySelectorAll("[data-tail]")) {
    if (element.followed) continue;
    const stream = (element.followed = new EventSource(element.dataset.tail));
    const lines = element.querySelector("[data-tail-lines]");
    const template = element.querySelector("template[data-tail-line]");
    const failure = element.querySelector("[data-live-failure]");
    const pause = element.querySelector("[data-tail-pause]");
    let name = "";
    const tell = (text) => { failure.textContent = text; failure.hidden = text === ""; };
    stream.addEventListener("begin", (event) => { name = JSON.parse(event.data).name; });
    stream.addEventListener("records", (event) => {
      for (const record of JSON.parse(event.data)) {
        const line = template.content.cloneNode(true);
        const part = (which) => line.querySelector(`[data-part="${which}"]`);
        part("link").href = `${element.dataset.place}${record.partition}/${record.offset}${element.dataset.shownAs}`;
        part("place").textContent = `${record.partition}:${record.offset}`;
        part("time").textContent = record.moment;
        if (record.time >= 0) part("time").dataset.time = record.time;
        part("key").textContent = record.key;
        part("value").textContent = record.value;
        showTimes(line);
        lines.prepend(line);
      }
      while (lines.children.length > MOST_LINES) lines.lastElementChild.remove();
    });
    stream.addEventListener("state", (event) => {
      const state = JSON.parse(event.data);
      const standing = state.over ? "ended" : state.paused ? "paused" : state.following ? "live" : "waiting for the cluster";
      fill(element, { ...state, standing });
      tell(state.failure);
      if (state.over) stream.close();
    });
    stream.addEventListener("refused", (event) => { stream.close(); tell(JSON.parse(event.data)); fill(element, { standing: "ended" }); });
    stream.addEventListener("error", () => fill(element, { standing: "the console does not answer" }));
    pause.addEventListener("click", async () => {
      const isPaused = pause.getAttribute("aria-pressed") === "true";
      const answer = await fetch(`/tails/${encodeURIComponent(name)}/${isPaused ? "resume" : "pause"}`);
      if (answer.ok) {
        pause.setAttribute("aria-pressed", String(!isPaused));
        pause.textContent = isPaused ? "Pause" : "Go on";
      }
    });
  }
}

function awakenRecords(root) {
  watchScans(root);
  followTails(root);
}
document.addEventListener("DOMContentLoaded", () => awakenRecords(document));
document.addEventListener("htmx:afterSwap", (event) => awakenRecords(event.detail.elt.parentElement ?? document));
