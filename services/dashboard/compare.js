// The page that compares jobs: their curves in one picture, the settings that differ, and results.

import { get } from "./api.js";
import { COLOURS, columnWidth, lineChart } from "./charts.js";
import { bytes, chip, duration, fill, h, number, secondsOf, table } from "./elements.js";
import { query, to } from "./paths.js";

const POINTS = 400;
const CURVES = [
  { title: "Loss, nats per token", name: "loss" },
  { title: "Held-out perplexity", name: "validation_perplexity", log: true },
  { title: "KL(teacher || student), held out", name: "validation_kl" },
  { title: "Learning rate", name: "learning_rate" },
];
// The axes of the scatter: quality against what it costs.
const COSTS = [
  ["bytes per token of the cache", (job) => job.cache?.bytes_per_token],
  ["duration, seconds", (job) => secondsOf(job)],
  ["tokens per second", (job) => job.progress.tokens_per_second],
];

export function comparePage() {
  const ids = (query().get("jobs") ?? "").split(",").filter(Boolean);
  const element = h("div");
  const charts = [];
  const results = h("div");
  const settings = h("div");
  const pictures = h("div", { class: "charts" });
  element.append(h("h1", {}, "Comparison"), results, h("h2", {}, "Curves"), pictures, settings);

  async function refresh() {
    if (!ids.length) {
      fill(results, h("p", {}, "Select jobs in the ", h("a", { href: to("/jobs") }, "list"), "."));
      return false;
    }
    const jobs = await Promise.all(ids.map((id) => get(`/jobs/${id}`)));
    const names = CURVES.map((curve) => curve.name).join(",");
    const asked = `max_points=${POINTS}&names=${names}`;
    const found = await Promise.all(ids.map((id) => get(`/jobs/${id}/metrics?${asked}`)));
    fill(results, resultTable(jobs));
    fill(settings, differenceTable(jobs));
    drawCurves(jobs, found.map(({ series }) => series));
    return jobs.some((job) => !job.finished_at);
  }

  function drawCurves(jobs, series) {
    for (const plot of charts.splice(0)) plot.destroy();
    const figures = CURVES.flatMap((curve) => {
      const lines = jobs.map((job, at) => ({
        label: job.name, at, ...series[at].find((each) => each.name === curve.name),
      })).filter((line) => line.steps?.length);
      return lines.length ? [figureOf(curve.title, (figure) => {
        charts.push(lineChart(figure, lines, { log: curve.log, width: columnWidth(pictures) }));
      })] : [];
    });
    const points = COSTS.map(([title, cost]) => [title, pointsOf(jobs, cost)])
      .filter(([, found]) => found.length > 1);
    for (const [title, found] of points) {
      figures.push(figureOf(`Held-out perplexity against ${title}`, (figure) => {
        figure.append(scatter(found, title));
      }));
    }
    pictures.replaceChildren(...figures);
  }
  return {
    title: "Comparison", element, refresh, every: 5000,
    close: () => charts.forEach((plot) => plot.destroy()),
  };
}

function figureOf(title, draw) {
  const figure = h("figure", {}, h("figcaption", {}, title));
  draw(figure);
  return figure;
}

function resultTable(jobs) {
  const link = (job) => h("a", { href: to(`/jobs/${job.id}`) }, job.name);
  const rows = [
    ["Status", ...jobs.map((job) => chip(job.status))],
    ["Held-out perplexity", ...jobs.map((job) => number(job.metrics.validation_perplexity))],
    ["KL to the teacher", ...jobs.map((job) => number(job.metrics.validation_kl))],
    ["Loss", ...jobs.map((job) => number(job.metrics.loss))],
    ["Step", ...jobs.map((job) => number(job.metrics.step))],
    ["Bytes per token", ...jobs.map((job) => number(job.cache?.bytes_per_token, 3))],
    ["Tokens per second", ...jobs.map((job) => number(job.progress.tokens_per_second, 3))],
    ["Duration", ...jobs.map((job) => duration(secondsOf(job)))],
    ["Memory at the peak", ...jobs.map((job) => bytes(job.metrics["memory/peak_bytes"]))],
  ];
  const known = rows.filter(([, ...values]) => values.some((value) => value != null));
  return [h("h2", {}, "Results"), table("Results", ["", ...jobs.map(link)], known)];
}

/** Make the table of the settings that are not the same in all jobs. */
function differenceTable(jobs) {
  const flat = jobs.map((job) => new Map(flatten(job.config)));
  const names = [...new Set(flat.flatMap((each) => [...each.keys()]))].sort();
  const rows = names
    .map((name) => [name, ...flat.map((each) => each.get(name) ?? "")])
    .filter(([, first, ...others]) => others.some((value) => value !== first));
  if (!rows.length) return h("p", {}, "All settings are the same.");
  const shown = rows.map(([name, ...values]) => [h("code", {}, name), ...values]);
  const titles = ["Setting", ...jobs.map((job) => job.name)];
  return [h("h2", {}, "Settings that differ"), table("Settings that differ", titles, shown)];
}

function flatten(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    return [[name, value === null ? "" : JSON.stringify(value)]];
  }
  const below = (key) => (name ? `${name}.${key}` : key);
  return Object.entries(value).flatMap(([key, each]) => flatten(each, below(key)));
}

function pointsOf(jobs, cost) {
  return jobs
    .map((job, at) => ({ at, name: job.name, x: cost(job), y: job.metrics.validation_perplexity }))
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y));
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Draw points with their names; the best is at the bottom left. */
function scatter(points, title) {
  const [width, height, edge] = [480, 220, 48];
  const scale = (values, from, until) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return (value) => (high === low ? (from + until) / 2
      : from + ((value - low) / (high - low)) * (until - from));
  };
  const x = scale(points.map((point) => point.x), edge, width - 110);
  const y = scale(points.map((point) => point.y), height - edge, 16);
  const said = points.map(({ name, x: cost, y: quality }) =>
    `${name} ${number(quality)} at ${number(cost)}`);
  return svg("svg", {
    viewBox: `0 0 ${width} ${height}`, class: "scatter", role: "img",
    "aria-label": `Held-out perplexity against ${title}: ${said.join(", ")}.`,
  },
    svg("line", { x1: edge - 12, y1: height - 32, x2: width, y2: height - 32, class: "axis" }),
    svg("line", { x1: edge - 12, y1: 0, x2: edge - 12, y2: height - 32, class: "axis" }),
    svg("text", { x: edge, y: height - 10 }, title),
    ...points.flatMap((point) => [
      svg("circle", { cx: x(point.x), cy: y(point.y), r: 5, class: `series-${(point.at % COLOURS) + 1}` }),
      svg("text", { x: x(point.x) + 9, y: y(point.y) + 4 }, `${point.name} ${number(point.y, 3)}`),
    ]));
}
