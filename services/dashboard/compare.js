// The page that compares jobs: results, settings that differ, quality against cost, and curves.

import { get } from "./api.js";
import { columnWidth, lineChart } from "./charts.js";
import { bytes, chip, duration, fill, h, number, secondsOf, table, time } from "./elements.js";
import { newest } from "./jobs.js";
import { Reports, sameText } from "./measures.js";
import { nameOf } from "./operator.js";
import { ParallelCoordinates } from "./parallel.js";
import { query, to } from "./paths.js";
import { Scatter } from "./scatter.js";

const POINTS = 400;
// Curves of more jobs could not be told apart.
const MOST_CURVES = 12;
const MOST_TRIALS = 100;
// These differ in all jobs, and explain nothing.
const NAMES = ["name", "webhook"];
const CURVES = [
  { title: "Loss, nats per token", name: "loss" },
  { title: "Held-out perplexity", name: "validation_perplexity", log: true },
  { title: "KL(teacher || student), held out", name: "validation_kl" },
  { title: "Learning rate", name: "learning_rate" },
];
const OTHER_TEXT = "The perplexities are not comparable: the jobs held out different texts, or their "
  + "tokenizers cut the text differently. Bits per byte compare tokenizers on one text.";

export function comparePage() {
  const asked = (query().get("jobs") ?? "").split(",").filter(Boolean);
  const study = query().get("study");
  const element = h("div");
  const charts = [];
  const reports = new Reports();
  const scatter = new Scatter();
  const parallel = new ParallelCoordinates();
  const title = h("h1", {}, "Comparison");
  const results = h("div");
  const settings = h("div");
  const otherText = h("p", { class: "quiet", role: "note", hidden: true }, OTHER_TEXT);
  const note = h("p", { class: "quiet" });
  const pictures = h("div", { class: "charts" });
  const curves = h("section", { hidden: true }, h("h2", {}, "Curves"), note, pictures);
  element.append(title, results, otherText, parallel.root, scatter.root, curves, settings);

  /** The jobs of the address, or the trials of the search that it names, the best first. */
  async function readJobs() {
    if (!study) return Promise.all(asked.map((id) => get(`/jobs/${id}`)));
    const search = await get(`/jobs/${study}`);
    title.replaceChildren("Trials of ", h("a", { href: to(`/jobs/${study}`) }, search.name));
    const quality = ({ metrics }) => metrics.validation_perplexity ?? Infinity;
    const [trials] = await newest(MOST_TRIALS, { parent: study });
    return trials.sort((a, b) => quality(a) - quality(b));
  }

  async function refresh() {
    const jobs = await readJobs();
    if (!jobs.length) {
      const none = study ? "The search has no trials yet." : [
        "Select jobs in the ", h("a", { href: to("/jobs") }, "list"), "."];
      const runs = study ? [] : (await get("/runs")).data;
      fill(results, h("p", {}, none), runs.length ? runTable(runs) : null);
      return Boolean(study);
    }
    const drawn = jobs.slice(0, MOST_CURVES);
    const names = CURVES.map((curve) => curve.name).join(",");
    const wanted = `max_points=${POINTS}&names=${names}`;
    const [all, ...found] = await Promise.all([
      reports.with(jobs), ...drawn.map(({ id }) => get(`/jobs/${id}/metrics?${wanted}`)),
    ]);
    const differences = differencesOf(jobs);
    // A table with a column for each job is readable for a few.
    fill(results, jobs.length <= MOST_CURVES ? resultTable(jobs, all) : null);
    otherText.hidden = sameText(jobs);
    fill(settings, jobs.length <= MOST_CURVES ? differenceTable(jobs, differences) : null);
    scatter.update(all);
    parallel.update(all, differences.filter(([name]) => !NAMES.includes(name)));
    note.textContent = drawn.length < jobs.length ? `The first ${drawn.length} jobs.` : "";
    note.hidden = !note.textContent;
    drawCurves(drawn, found.map(({ series }) => series));
    return jobs.some((job) => !job.finished_at);
  }

  function drawCurves(jobs, series) {
    for (const plot of charts.splice(0)) plot.destroy();
    const figures = CURVES.flatMap(({ title: caption, name, log }) => {
      const lines = jobs.map((job, at) => ({
        label: job.name, at, ...series[at].find((each) => each.name === name),
      })).filter((line) => line.steps?.length);
      if (!lines.length) return [];
      const figure = h("figure", {}, h("figcaption", {}, caption));
      charts.push(lineChart(figure, lines, { log, width: columnWidth(pictures) }));
      return [figure];
    });
    curves.hidden = !figures.length;
    pictures.replaceChildren(...figures);
  }
  return {
    title: "Comparison", element, refresh, every: 5000,
    close: () => charts.forEach((plot) => plot.destroy()),
  };
}

/** What every run has measured: those of jobs, and to an admin also those of `kd run`. */
function runTable(runs) {
  const titles = ["Run", "Kind", "State", "Teacher", "Student", "Parameters", "Bits per byte",
    "KL to the teacher", "Training", "Size", "Began"];
  const rows = runs.map((run) => [
    nameOf(run), run.kind, run.state, run.teacher, run.student, number(run.parameters),
    number(run.bits_per_byte), number(run.kl), duration(run.seconds), bytes(run.bytes),
    time(run.began),
  ]);
  return [h("h2", {}, "Runs"), table("Runs", titles, rows),
    h("p", { class: "quiet" }, "Compare bits per byte only between runs with the same held-out text.")];
}

function resultTable(jobs, all) {
  const link = (job) => h("a", { href: to(`/jobs/${job.id}`) }, job.name);
  const rows = [
    ["Status", ...jobs.map((job) => chip(job.status))],
    ["Held-out perplexity", ...jobs.map((job) => number(job.metrics.validation_perplexity))],
    ["Bits per byte", ...jobs.map((job) => number(job.metrics.student_bits_per_byte))],
    ["Teacher's bits per byte", ...jobs.map((job) => number(job.metrics.teacher_bits_per_byte))],
    ["KL to the teacher", ...jobs.map((job) => number(job.metrics.validation_kl))],
    ["Loss", ...jobs.map((job) => number(job.metrics.loss))],
    ["Step", ...jobs.map((job) => number(job.metrics.step))],
    ["Bytes per token", ...jobs.map((job) => number(job.cache?.bytes_per_token, 3))],
    ["Tokens per second", ...jobs.map((job) => number(job.progress.tokens_per_second, 3))],
    ["Duration", ...jobs.map((job) => duration(secondsOf(job)))],
    ["Peak memory", ...all.map(({ report }) => bytes(report?.profile?.peak_memory_bytes))],
  ];
  const known = rows.filter(([, ...values]) => values.some((value) => value != null));
  return [h("h2", {}, "Results"), table("Results", ["", ...jobs.map(link)], known)];
}

/** Return [name, value of each job as JSON] of the settings that are not the same in all jobs. */
function differencesOf(jobs) {
  const flat = jobs.map((job) => new Map(flatten(job.config)));
  const names = [...new Set(flat.flatMap((each) => [...each.keys()]))].sort();
  return names
    .map((name) => [name, ...flat.map((each) => each.get(name) ?? "")])
    .filter(([, first, ...others]) => others.some((value) => value !== first));
}

function differenceTable(jobs, differences) {
  if (!differences.length) return h("p", {}, "All settings are the same.");
  const rows = differences.map(([name, ...values]) => [h("code", {}, name), ...values]);
  const titles = ["Setting", ...jobs.map((job) => job.name)];
  return [h("h2", {}, "Settings that differ"), table("Settings that differ", titles, rows)];
}

function flatten(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    return [[name, value === null ? "" : JSON.stringify(value)]];
  }
  const below = (key) => (name ? `${name}.${key}` : key);
  return Object.entries(value).flatMap(([key, each]) => flatten(each, below(key)));
}
