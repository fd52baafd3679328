// The page of one job: its progress, curves, events, report, files, log and configuration.

import { ablation } from "./ablation.js";
import { address, attemptWith, download, get, getText, post } from "./api.js";
import { Charts, NAMES } from "./charts.js";
import {
  ENDED, bar, bytes, chip, duration, facts, fill, h, heldOut, number, secondsOf, table, time,
} from "./elements.js";
import { jobTable, newest } from "./jobs.js";
import { History, MarkList, marksOf } from "./marks.js";
import { to } from "./paths.js";
import { phaseSection, phasesOf } from "./phases.js";
import { blocks, warnings } from "./report.js";
import { NAMES as RESOURCES, Resources } from "./resources.js";
import { samplesSection } from "./samples.js";
import { Sparklines } from "./sparklines.js";
import { follow } from "./stream.js";
import { FILE as TOKENS } from "./tokens.js";
import { wordsOf } from "./words.js";

// An action without a button, because it cannot be undone.
const WITHOUT_BUTTON = "delete";
// An ended job is read less often, but still: a retry starts it again.
const ENDED_MS = 5000;
const LOG_LINES = 200;
// Events that come together are drawn together.
const EVENTS_MS = 50;
const SEARCHED_LINES = 10_000;
// Points of each curve: more than the pixels of a chart show would be wasted.
const POINTS = 400;
// Points of each curve of a range that was opened, the most that the API sends.
const MOST_POINTS = 8192;
// A search lists only its newest trials.
const MOST_TRIALS = 100;
// Values of the report that the curves of perplexity are compared with.
const LEVELS = [
  ["teacher", (report) => report.teacher_perplexity],
  ["without a teacher", (report) => report.evaluation?.models?.["cross-entropy only"]?.perplexity],
];
// The report's picture of the curves is left out, because the charts show the same.
const DRAWN_ABOVE = "curves.png";
// What `kd ablate --out RUN/ablation` adds to a run folder.
const ABLATION = "ablation/report.json";

export function jobPage(redraw, id) {
  const names = ["head", "verdict", "phases", "trials", "resources", "files", "samples", "report", "ablation", "config"];
  const parts = Object.fromEntries(names.map((name) => [name, h("div")]));
  let range = null; // of steps that the charts show, while it is not all of them
  let curves = null; // all of them, thinned
  let attempts = null;
  let hasTokens = false;
  const charts = new Charts(async (wanted) => {
    range = wanted;
    await drawCurves().catch(() => {}); // the next refresh says what is wrong
  });
  const story = new History(id);
  const events = new MarkList((marks) => charts.setMarks(marks));
  const log = new Log(id);
  const sparklines = new Sparklines();
  const resources = new Resources(id);
  const refused = h("p", { class: "error", role: "alert", hidden: true });
  const element = h("div", {},
    parts.verdict, parts.head, refused, parts.phases, parts.trials, charts.root, events.root,
    parts.samples, parts.resources, parts.report, parts.ablation, parts.files, log.root, parts.config);
  let version = null;
  let title = id;
  let ended = false;
  let drawn = null; // when the ablation that is shown was written
  charts.root.hidden = true;

  const attempt = attemptWith(refused);
  const act = (action) => attempt(() => post(`/jobs/${id}/${action}`)).then(redraw);
  const save = ({ name, url }) => attempt(() => download(url, name.split("/").at(-1)));

  async function showTrials() {
    const [trials] = await newest(MOST_TRIALS, { parent: id });
    await sparklines.read(trials);
    const rows = trials.map((trial) => [trial, false]);
    fill(parts.trials, trials.length
      ? [h("h2", {}, "Trials"), h("p", {}, h("a", { href: to(`/compare?study=${id}`) }, "Compare the trials")),
        jobTable("Trials", rows, { curves: sparklines })] : null);
  }

  // Each event shows at once; without a stream the page still asks now and then.
  let due = null;
  const leave = follow(id, () => {
    due ??= setTimeout(() => {
      due = null;
      redraw();
    }, EVENTS_MS);
  });

  /** Read the whole curves, thinned; of known ones only the points after the last step. */
  async function readCurves() {
    const crowded = curves?.some(({ steps }) => steps.length > 2 * POINTS);
    const ask = (more) => get(`/jobs/${id}/metrics?names=${[...NAMES, ...RESOURCES]}&${more}`);
    if (curves === null || crowded) {
      curves = (await ask(`max_points=${POINTS}`)).series;
      return;
    }
    const last = Math.max(0, ...curves.map(({ steps }) => steps.at(-1)));
    // The last step once more: its evaluation may have come since.
    const { series } = await ask(`max_points=${MOST_POINTS}&after_step=${last - 1}`);
    const fresh = new Map(series.map((each) => [each.name, each]));
    const known = curves.map((each) => refine(each, fresh.get(each.name), [last, Infinity]));
    const names = new Set(curves.map(({ name }) => name));
    curves = [...known, ...series.filter(({ name }) => !names.has(name))];
  }

  /** Draw the curves: of the steps that are shown, in full as far as the service has them. */
  async function drawCurves() {
    await readCurves();
    if (range === null) return charts.update(curves);
    const [first, last] = [Math.max(Math.floor(range[0]), 0), Math.ceil(range[1])];
    const asked = `after_step=${first - 1}&before_step=${last + 1}&max_points=${MOST_POINTS}`;
    const part = get(`/jobs/${id}/metrics?${asked}&names=${NAMES}`);
    const within = new Map((await part).series.map((each) => [each.name, each]));
    charts.update(curves.map((each) => refine(each, within.get(each.name), [first, last])));
  }

  function drawPhases() {
    const phases = phasesOf(story.events, Date.now());
    fill(parts.phases, phases.length ? phaseSection(phases) : null);
  }

  async function refresh() {
    const job = await get(`/jobs/${id}`);
    if (job.kind === "search") await showTrials();
    if (job.version === version) return;
    ended = ENDED.includes(job.status);
    title = job.name;
    // Before the curves, so that nothing moves once they are there.
    fill(parts.head, head(job, act, hasTokens));
    if (job.attempt !== attempts) curves = null; // another attempt may begin at an earlier step
    attempts = job.attempt;
    const [, { data: files }] = await Promise.all([
      drawCurves(),
      ended ? get(`/jobs/${id}/artifacts`) : { data: [] },
      story.refresh(),
      log.refresh(),
    ]);
    events.update(marksOf(story.events));
    drawPhases();
    fill(parts.samples, samplesSection(story.events));
    const saved = story.events.filter(({ type }) => type === "checkpoint").length;
    fill(parts.resources, await resources.draw(job, curves, saved, files));
    hasTokens = files.some(({ name }) => name === TOKENS);
    fill(parts.head, head(job, act, hasTokens));
    fill(parts.files, files.length ? fileTable(files, save) : null);
    if (version === null) {
      // A job of another version may have settings that this server does not know.
      const found = await get(`/jobs/${id}/settings`).catch(() => null);
      fill(parts.config, configOf(job, found?.data));
    }
    if (files.some((file) => file.name === "report.md")) {
      const text = await getText(`/jobs/${id}/artifacts/report.md`);
      fill(parts.verdict, warnings(text));
      fill(parts.report, h("section", { class: "report", "aria-label": "Report" }, await report(id, files, text)));
    }
    if (files.some((file) => file.name === "report.json")) {
      const found = JSON.parse(await getText(`/jobs/${id}/artifacts/report.json`));
      if (found.verdict?.ok) fill(parts.verdict, goodVerdict(found.verdict));
      charts.setLevels("Perplexity", LEVELS
        .map(([label, find]) => ({ label, value: find(found) }))
        .filter(({ value }) => Number.isFinite(value)));
    }
    const compared = files.find((file) => file.name === ABLATION);
    if (compared && compared.modified_at !== drawn) {
      const text = await getText(`/jobs/${id}/artifacts/${ABLATION}`);
      parts.ablation.replaceChildren(...ablation(JSON.parse(text), element.clientWidth));
      drawn = compared.modified_at;
    }
    version = job.version;
  }
  return {
    element,
    refresh,
    get title() { return title; },
    get every() { return ended ? ENDED_MS : undefined; },
    close: () => {
      leave();
      charts.close();
    },
  };
}

/** Put the points of a part of a curve in place of those that the whole curve has there. */
function refine(whole, part, [first, last]) {
  if (!part) return whole;
  const outside = (from, until) => whole.steps
    .map((step, at) => [step, whole.values[at]])
    .filter(([step]) => step >= from && step <= until);
  const pairs = [
    ...outside(-Infinity, first - 1),
    ...part.steps.map((step, at) => [step, part.values[at]]),
    ...outside(last + 1, Infinity),
  ];
  return {
    ...whole, steps: pairs.map(([step]) => step), values: pairs.map(([, value]) => value),
  };
}

function head(job, act, hasTokens) {
  const { progress, metrics, cache, error } = job;
  const goes = !ENDED.includes(job.status);
  const done = `${number(progress.done)} of ${number(progress.total)} ${progress.unit ?? ""}`;
  const fingerprint = cache?.fingerprint;
  const offered = job.actions.filter((action) => action !== WITHOUT_BUTTON);
  const buttons = offered.map((action) =>
    h("button", { type: "button", onclick: () => act(action) }, action));
  return [
    h("div", { class: "title" },
      h("h1", {}, job.name), chip(job.status), buttons,
      hasTokens && h("a", { href: to(`/tokens?jobs=${job.id}`) }, "Tokens"),
      h("a", { href: to(`/new?from=${job.id}`) }, "Copy into a new job")),
    error && h("div", { class: "error", role: "alert" },
      h("p", {}, h("strong", {}, error.type), ` ${error.detail}`),
      error.remedy && h("p", {}, error.remedy),
      h("p", {}, "Help: ", h("code", {}, error.help))),
    goes && h("p", { class: "now" },
      h("span", {}, [job.stage, job.phase].filter(Boolean).join(" · ")),
      bar(progress)),
    facts([
      ["Id", h("code", {}, job.id)],
      ["Kind", job.kind],
      ["Reason", job.reason],
      ["Queue", goes && job.queue_position != null ? `${job.queue_position} before it` : null],
      ["Done", goes && progress.total ? done : null],
      ["ETA", goes ? duration(progress.eta_seconds) : null],
      ["Tokens per second", goes ? number(progress.tokens_per_second, 3) : null],
      ["Step", number(metrics.step)],
      ["Held-out perplexity", heldOut(metrics)],
      ["KL to the teacher", number(metrics.validation_kl)],
      ["Cache", fingerprint
        && h("a", { href: to(`/caches/${fingerprint}`) }, fingerprint.slice(0, 12))],
      ["Bytes per token", number(cache?.bytes_per_token, 3)],
      ["Worker", job.worker],
      ["Attempt", job.attempt > 1 ? `${job.attempt} of ${job.max_attempts}` : null],
      ["Created", time(job.created_at)],
      ["Duration", duration(secondsOf(job))],
      ["Device time", job.device_seconds ? duration(job.device_seconds) : null],
      ["Cost", job.cost && costOf(job.cost)],
    ]),
    job.capture && workersOf(job.capture),
  ];
}

/** The workers that capture the cache together. */
function workersOf({ ranges, ranges_done, ranges_untaken, workers }) {
  const rows = workers.map((each) => [
    h("code", {}, each.worker), number(each.ranges), number(each.sequences),
    number(each.tokens_per_second, 3), duration(each.seconds),
  ]);
  const titles = ["Worker", "Ranges now", "Sequences done", "Tokens per second", "Since"];
  return h("section", { class: "capture" },
    h("h2", {}, "Workers of the capture"),
    h("p", {}, `${ranges_done} of ${ranges} ranges of shards are done, ${ranges_untaken} wait for a worker.`),
    table("Workers of the capture", titles, rows));
}

/** A cost: final, or so far and of what is expected. */
function costOf({ amount, estimated }) {
  return estimated == null ? number(amount) : `${number(amount)} of about ${number(estimated)}`;
}

/** Make the first line of a page whose report has a verdict that is no warning. */
const goodVerdict = ({ message, remedy }) =>
  h("p", { class: "good", role: "status" }, [message, remedy].filter(Boolean).join(" "));

/** Make the report's elements, without its title, which the page has, and missing pictures. */
async function report(id, files, markdown) {
  const at = (name) => `/jobs/${id}/artifacts/${name}`;
  const pictures = files.filter(({ name, media_type }) =>
    media_type.startsWith("image/") && name !== DRAWN_ABOVE);
  const found = pictures.map(async ({ name }) => [name, await address(at(name))]);
  const addresses = new Map(await Promise.all(found));
  const picture = (name, alt) =>
    (addresses.has(name) ? h("img", { src: addresses.get(name), alt }) : null);
  const text = markdown.replace(/^# .*\n/, "");
  const words = wordsOf("bits per byte", "held out", "KL", "nats", "parity", "perplexity");
  return [h("h2", {}, "Report"), ...blocks(text, picture), words];
}

function fileTable(files, save) {
  const rows = files.map((file) => [
    h("button", { type: "button", class: "link", onclick: () => save(file) }, file.name), bytes(file.bytes), file.media_type]);
  return h("section", {}, h("h2", {}, "Files"), table("Files", ["Name", "Size", "Type"], rows));
}

/** The end of the log; it is read only while the section is open. With a search, its lines. */
class Log {
  constructor(id) {
    Object.assign(this, { id, text: h("pre", { tabindex: 0 }) });
    const read = () =>
      this.refresh().catch((error) => { this.text.textContent = error.message; });
    this.search = h("input", { type: "search", size: 24, oninput: read });
    this.root = h("details", { ontoggle: read },
      h("summary", {}, "Log"),
      h("p", { class: "options" }, h("label", {}, "Search ", this.search)),
      this.text);
  }

  async refresh() {
    if (!this.root.open) return;
    const wanted = this.search.value.trim().toLowerCase();
    const lines = wanted ? SEARCHED_LINES : LOG_LINES;
    const text = await getText(`/jobs/${this.id}/logs?tail=${lines}`);
    const found = text.split("\n").filter((each) => each.toLowerCase().includes(wanted));
    const none = wanted ? `No line of the last ${lines} has this.` : "The log is empty.";
    this.text.textContent = found.join("\n").trim() ? found.join("\n") : none;
  }
}

/** Make the part of the configuration: what is not the default first, all of it on demand. */
function configOf(job, settings) {
  const shown = (value) => h("span", { class: "words" }, h("code", {}, JSON.stringify(value)));
  const rows = (settings ?? []).map(({ name, value, default: usual, required }) =>
    [h("code", {}, name), shown(value), required ? "(must be given)" : shown(usual)]);
  return [
    h("h2", {}, "Configuration"),
    rows.length > 0 && table("Settings that are not the defaults", ["Setting", "Value", "Default"], rows),
    h("details", {}, h("summary", {}, "All settings"),
      h("pre", { tabindex: 0 }, JSON.stringify(job.config, null, 2))),
  ];
}
