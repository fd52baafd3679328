// One job: how it goes, its curves, what it warned of, what it made.

import { Refused, address, download, get, getText, post } from "./api.js";
import { Charts, NAMES } from "./charts.js";
import { bar, bytes, chip, duration, facts, fill, h, number, table, time } from "./elements.js";
import { jobTable, newest } from "./jobs.js";
import { blocks } from "./report.js";

const ENDED = ["succeeded", "failed", "cancelled"];
/** What may be asked of a job, by its status. */
const ACTIONS = {
  waiting: ["pause", "cancel"], queued: ["pause", "cancel"], running: ["pause", "cancel"],
  pausing: ["resume", "cancel"], paused: ["resume", "cancel"], failed: ["retry"], cancelled: ["retry"],
};
const TOLD = "status,warning,check";
const ENDED_MS = 5000; // somebody may have it run again
const LOG_LINES = 200;
const POINTS = 400;
const MOST_TRIALS = 100; // of the newest
const DRAWN_ABOVE = "curves.png"; // as charts

export function jobPage(redraw, id) {
  const parts = Object.fromEntries(["head", "trials", "files", "report", "config"].map((name) => [name, h("div")]));
  const charts = new Charts();
  const events = new Events(id);
  const log = new Log(id);
  const refused = h("p", { class: "error", role: "alert", hidden: true });
  const element = h("div", {}, parts.head, refused, parts.trials, charts.root, parts.report, parts.files, events.root, log.root, parts.config);
  let [version, ended] = [null, false];
  charts.root.hidden = true;

  async function tried(work) {
    refused.hidden = true;
    try {
      await work();
    } catch (error) {
      refused.hidden = false;
      refused.textContent = error instanceof Refused ? `${error.message} ${error.problem.remedy ?? ""}` : "The server does not answer.";
    }
  }
  const act = (action) => tried(() => post(`/jobs/${id}/${action}`)).then(redraw);
  const save = ({ name, url }) => tried(() => download(url, name.split("/").at(-1)));

  async function showTrials() {
    const [trials] = await newest(MOST_TRIALS, { parent: id });
    fill(parts.trials, trials.length ? [h("h2", {}, "Trials"), jobTable("Trials", trials)] : null);
  }

  async function refresh() {
    const job = await get(`/jobs/${id}`);
    if (job.kind === "search") await showTrials();
    if (job.version === version) return;
    ended = ENDED.includes(job.status);
    const [{ series }, { data: files }] = await Promise.all([
      get(`/jobs/${id}/metrics?max_points=${POINTS}&names=${NAMES}`),
      ended ? get(`/jobs/${id}/artifacts`) : { data: [] },
      events.refresh(),
      log.refresh(),
    ]);
    fill(parts.head, head(job, act));
    charts.update(series);
    fill(parts.files, files.length ? fileTable(files, save) : null);
    if (version === null) fill(parts.config, configOf(job));
    if (files.some((file) => file.name === "report.md")) {
      fill(parts.report, h("section", { class: "report", "aria-label": "Report" }, await report(id, files)));
    }
    version = job.version;
  }
  return { element, refresh, get every() { return ended ? ENDED_MS : undefined; }, close: () => charts.close() };
}

function head(job, act) {
  const { progress, metrics, cache, error } = job;
  const goes = !ENDED.includes(job.status);
  const buttons = (ACTIONS[job.status] ?? []).map((action) => h("button", { type: "button", onclick: () => act(action) }, action));
  return [
    h("div", { class: "title" },
      h("h1", {}, job.name), chip(job.status), buttons, h("a", { href: `#/new?from=${job.id}` }, "Copy into a new job")),
    error && h("div", { class: "error", role: "alert" },
      h("p", {}, h("strong", {}, error.type), ` ${error.detail}`), error.remedy && h("p", {}, error.remedy)),
    goes && h("p", { class: "now" }, h("span", {}, [job.stage, job.phase].filter(Boolean).join(" · ")), bar(progress)),
    facts([
      ["Id", h("code", {}, job.id)],
      ["Kind", job.kind],
      ["Why", job.reason],
      ["Queue", goes && job.queue_position != null ? `${job.queue_position} before it` : null],
      ["Done", goes && progress.total ? `${number(progress.done)} of ${number(progress.total)} ${progress.unit ?? ""}` : null],
      ["Left", goes ? duration(progress.eta_seconds) : null],
      ["Tokens per second", goes ? number(progress.tokens_per_second, 3) : null],
      ["Step", number(metrics.step)],
      ["Held-out perplexity", number(metrics.validation_perplexity)],
      ["KL to the teacher", number(metrics.validation_kl)],
      ["Cache", cache?.fingerprint && h("a", { href: `#/caches/${cache.fingerprint}` }, cache.fingerprint.slice(0, 12))],
      ["Bytes per token", number(cache?.bytes_per_token, 3)],
      ["Worker", job.worker],
      ["Attempt", job.attempt > 1 ? `${job.attempt} of ${job.max_attempts}` : null],
      ["Made", time(job.created_at)],
      ["Took", job.finished_at && job.started_at ? duration((Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000) : null],
    ]),
  ];
}

/** The report without its title, which the page has, and with the pictures of it that are among the files. */
async function report(id, files) {
  const at = (name) => `/jobs/${id}/artifacts/${name}`;
  const shown = files.filter(({ name, media_type }) => media_type.startsWith("image/") && name !== DRAWN_ABOVE);
  const addresses = new Map(await Promise.all(shown.map(async ({ name }) => [name, await address(at(name))])));
  const picture = (name, alt) => (addresses.has(name) ? h("img", { src: addresses.get(name), alt }) : null);
  const text = (await getText(at("report.md"))).replace(/^# .*\n/, "");
  return [h("h2", {}, "Report"), ...blocks(text, picture)];
}

function fileTable(files, save) {
  const named = (file) => h("button", { type: "button", class: "link", onclick: () => save(file) }, file.name);
  const rows = files.map((file) => [named(file), bytes(file.bytes), file.media_type]);
  return h("section", {}, h("h2", {}, "Files"), table("Files", ["Name", "Size", "Type"], rows));
}

/** What happened, newest first: its stream is read on from where it was left. */
class Events {
  constructor(id) {
    Object.assign(this, { id, after: "0", list: h("ol", { class: "events" }) });
    this.root = h("section", { hidden: true }, h("h2", {}, "What happened"), this.list);
  }

  async refresh() {
    for (let more = true; more; ) {
      const page = await get(`/jobs/${this.id}/events?types=${TOLD}&limit=1000&after=${this.after}`);
      this.list.prepend(...page.data.map(line).reverse());
      this.after = page.next_after;
      more = page.has_more;
    }
    this.root.hidden = !this.list.childElementCount;
  }
}

function line({ ts, type, data }) {
  const bad = type === "warning" || data.ok === false || data.status === "failed";
  return h("li", bad ? { class: "bad" } : {}, time(ts), " ", h("span", {}, sentence(type, data)));
}

function sentence(type, data) {
  if (type === "status") return [data.stage, data.status, data.reason].filter(Boolean).join(" · ");
  if (type === "warning") return data.message;
  return [`${data.check}:`, data.message, data.ok ? "" : data.remedy].filter(Boolean).join(" ");
}

/** The end of the log, read while it is open. */
class Log {
  constructor(id) {
    Object.assign(this, { id, text: h("pre", { tabindex: 0 }) });
    const read = () => this.refresh().catch((error) => { this.text.textContent = error.message; });
    this.root = h("details", { ontoggle: read }, h("summary", {}, "Log"), this.text);
  }

  async refresh() {
    if (!this.root.open) return;
    this.text.textContent = (await getText(`/jobs/${this.id}/logs?tail=${LOG_LINES}`)) || "It is empty.";
  }
}

function configOf(job) {
  return h("details", {}, h("summary", {}, "Configuration"), h("pre", {}, JSON.stringify(job.config, null, 2)));
}
