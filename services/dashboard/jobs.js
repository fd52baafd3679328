// The page of all jobs, newest first, and the table of jobs.

import { get, post, reasonOf } from "./api.js";
import { bar, chip, duration, fill, h, heldOut, number, table, time } from "./elements.js";
import { keepInAddress, query, to } from "./paths.js";
import { Sparklines } from "./sparklines.js";

const PAGE = 20;
const STATUSES = [
  "waiting", "queued", "running", "cancelling", "pausing", "paused", "succeeded", "failed",
  "cancelled",
];
const TITLES = [
  "Status", "Name", "Kind", "Stage", "Progress", "ETA", "Loss", "Curve", "Held-out perplexity",
  "Tokens/s", "Created",
];
// The newest trials of a search that its row opens.
const MOST_TRIALS = 50;
// What can be done with several jobs at once; each job says which of these it takes.
const ACTIONS = ["cancel", "retry"];
const TYPING_MS = 300;
const SOON_MS = 60_000;

export function jobsPage(redraw) {
  const asked = query();
  let wanted = PAGE;
  let typing = null;
  let shown = [];
  const chosen = new Set();
  const opened = new Set(); // searches whose trials are shown
  const curves = new Sparklines();
  const list = h("div");
  const bulk = h("p", { class: "options", "aria-live": "polite" });
  const refused = h("p", { class: "error", role: "alert", hidden: true });
  const showMore = () => {
    wanted += PAGE;
    redraw();
  };
  const more = h("button", { type: "button", hidden: true, onclick: showMore }, "Older jobs");
  const filter = () => {
    keepInAddress({ status: status.value, q: text.value.trim(), trials: trials.checked ? "1" : "" });
    redraw();
  };
  const status = h("select", { onchange: filter },
    h("option", { value: "" }, "any status"),
    STATUSES.map((name) => h("option", { value: name }, name)));
  status.value = asked.get("status") ?? "";
  const typed = () => {
    clearTimeout(typing);
    typing = setTimeout(filter, TYPING_MS);
  };
  const text = h("input", {
    type: "search", oninput: typed, placeholder: "name, label, model or id", size: 24,
    value: asked.get("q"),
  });
  const trials = h("input", { type: "checkbox", onchange: filter, checked: asked.has("trials") });
  const element = h("div", {},
    h("div", { class: "title" },
      h("h1", {}, "Jobs"),
      h("a", { href: to("/compare") }, "Runs"),
      h("label", {}, h("span", { class: "hidden" }, "Search "), text),
      h("label", {}, trials, " trials"),
      h("label", {}, h("span", { class: "hidden" }, "Status "), status)),
    bulk, refused, list, more);

  function choose(id, wants) {
    if (wants) chosen.add(id);
    else chosen.delete(id);
    showBulk();
  }

  function showBulk() {
    const jobs = shown.filter((job) => chosen.has(job.id));
    const able = (action) => jobs.filter((job) => job.actions.includes(action));
    const buttons = ACTIONS.filter((action) => able(action).length).map((action) =>
      h("button", { type: "button", onclick: () => actOn(able(action), action) },
        `${action} ${able(action).length}`));
    fill(bulk, jobs.length ? [
      h("span", {}, `${jobs.length} selected`),
      h("a", { href: to(`/compare?jobs=${jobs.map((job) => job.id).join(",")}`) }, "Compare"),
      ...buttons,
    ] : null);
  }

  function toggle(id) {
    if (!opened.delete(id)) opened.add(id);
    redraw();
  }

  /** Put the trials of each opened search below it: [job, whether it is one of these trials]. */
  async function withTrials(jobs) {
    const rows = await Promise.all(jobs.map(async (job) => {
      if (!opened.has(job.id)) return [[job, false]];
      const [below] = await newest(MOST_TRIALS, { parent: job.id });
      return [[job, false], ...below.map((trial) => [trial, true])];
    }));
    return rows.flat();
  }

  async function actOn(jobs, action) {
    const failed = [];
    for (const job of jobs) {
      await post(`/jobs/${job.id}/${action}`).catch((error) => failed.push([job, error]));
    }
    refused.hidden = !failed.length;
    refused.textContent = failed.map(([job, error]) => `${job.name}: ${reasonOf(error)}`).join(" ");
    redraw();
  }

  async function refresh() {
    const filters = {
      status: status.value, q: text.value.trim(), trials: trials.checked ? "" : "false",
    };
    const [jobs, cursor] = await newest(wanted, filters);
    const rows = await withTrials(jobs);
    shown = rows.map(([job]) => job);
    await curves.read(shown);
    more.hidden = cursor === null;
    const filtered = status.value || filters.q;
    const ways = { curves, chosen, choose, opened, toggle: trials.checked ? null : toggle };
    fill(list, jobs.length ? jobTable("Jobs", rows, ways) : nothing(filtered));
    showBulk();
  }
  return { title: "Jobs", element, refresh };
}

/**
 * Make a table of jobs, given as [job, whether it is a trial below its search].
 * `curves` draws their curves. With `choose` each row has a box, and with `toggle` the row of a
 * search has a button that opens its trials; `chosen` and `opened` have the ids that are.
 */
export function jobTable(caption, rows, { curves, chosen, choose, opened, toggle }) {
  const box = (job) => h("input", {
    type: "checkbox", "aria-label": `Select ${job.name}`, checked: chosen.has(job.id),
    onchange: (event) => choose(job.id, event.target.checked),
  });
  const button = (job) => h("button", {
    type: "button", class: "fold", "aria-label": `Trials of ${job.name}`,
    "aria-expanded": String(opened.has(job.id)), onclick: () => toggle(job.id),
  });
  const found = table(caption, choose ? ["", ...TITLES] : TITLES, rows.map(([job]) => [
    ...(choose ? [box(job)] : []),
    ...cellsOf(job, curves, toggle && job.kind === "search" ? button(job) : null),
  ]));
  found.querySelectorAll("tbody tr").forEach((element, at) => {
    if (rows[at][1]) element.classList.add("below");
  });
  return found;
}

/**
 * Read up to `count` jobs, newest first; return them and the cursor of the next ones.
 * A page of the API may be short although more jobs follow, so pages are read until it is enough.
 */
export async function newest(count, filters) {
  let jobs = [];
  let cursor = "";
  while (jobs.length < count && cursor !== null) {
    const known = Object.entries({ ...filters, cursor }).filter(([, value]) => value);
    const limit = Math.min(count - jobs.length, 100);
    const asked = new URLSearchParams([["limit", limit], ...known]);
    const page = await get(`/jobs?${asked}`);
    jobs = jobs.concat(page.data);
    cursor = page.next_cursor;
  }
  return [jobs, cursor];
}

/** What a row of a search says of its trials. */
function trialsOf({ progress, metrics }) {
  if (progress.unit !== "trials") return null;
  const best = metrics.best_trial == null ? ""
    : `, best ${metrics.best_trial} with loss ${number(metrics.validation_loss)}`;
  return h("span", { class: "quiet" }, `${progress.done} of ${progress.total} trials ended${best}`);
}

/** When a job that runs will end, or one that is queued will begin. */
function etaOf({ status, progress, estimated_start_at: start }) {
  if (status === "running") return duration(progress.eta_seconds);
  if (status !== "queued" || !start) return null;
  const soon = Date.parse(start) - Date.now() < SOON_MS;
  return soon ? "starts soon" : h("span", {}, "starts ", time(start));
}

function cellsOf(job, curves, button) {
  const { progress, metrics } = job;
  const runs = job.status === "running";
  const labels = Object.entries(job.labels ?? {}).map(([name, value]) =>
    h("span", { class: "label" }, value ? `${name}: ${value}` : name));
  return [
    chip(job.status),
    h("span", { class: "names" }, button, h("a", { href: to(`/jobs/${job.id}`) }, job.name), trialsOf(job), ...labels),
    job.kind,
    runs && job.phase ? `${job.stage} · ${job.phase}` : job.stage,
    bar(progress),
    etaOf(job),
    number(metrics.loss),
    curves.of(job),
    h("span", { class: "wrapped" }, heldOut(metrics)),
    runs ? number(progress.tokens_per_second, 3) : null,
    time(job.created_at),
  ];
}

function nothing(filtered) {
  if (filtered) return h("p", {}, "No job matches.");
  return h("p", {},
    "There are no jobs yet. ", h("a", { href: to("/new") }, "Create one"), ", or run ",
    h("code", {}, "kd submit job.yaml"), ".");
}
