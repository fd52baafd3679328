// Parallel coordinates: each job is a line over the settings that differ, and over its quality.

import { fill, h, number, svg, table } from "./elements.js";
import { qualities, shown } from "./measures.js";
import { to } from "./paths.js";
import { scale } from "./scatter.js";

const MOST_AXES = 8; // settings beside the quality
const LEAST_JOBS = 3;
const [WIDTH, HEIGHT] = [960, 320];
const [SIDE, TOP, BOTTOM] = [80, 40, 30];

/** The part of the page: `update` takes all {job, report}, and the settings that differ. */
export class ParallelCoordinates {
  constructor() {
    this.picture = h("div", { class: "scroll", tabindex: 0 });
    this.table = h("div");
    this.root = h("section", { hidden: true },
      h("h2", {}, "Settings and quality"),
      h("p", { class: "quiet" }, "Each line is a job; the best has a thick line. Point at a row of the table to highlight its line."),
      this.picture, this.table);
    this.root.addEventListener("focusin", (event) => this.highlight(event));
    this.root.addEventListener("pointerover", (event) => this.highlight(event));
  }

  /** `settings`: [name, value of each job] of those that differ, as JSON texts. */
  update(all, settings) {
    const [quality] = qualities(all);
    this.root.hidden = all.length < LEAST_JOBS || !quality || !settings.length;
    if (this.root.hidden) return;
    const axes = [
      ...settings.slice(0, MOST_AXES).map(([name, ...values]) => axisOf(name, values)),
      { title: quality.title, values: all.map((one) => quality.of(one)), text: (value) => shown(quality, value) },
    ];
    const order = all.map((one, at) => ({ job: one.job, at, quality: quality.of(one) }))
      .sort((a, b) => rank(a.quality, quality) - rank(b.quality, quality));
    fill(this.picture, picture(axes, order, `${quality.title} of ${all.length} jobs over ${axes.length - 1} settings; the table has the numbers.`));
    const rows = order.map(({ job, at }) => [
      h("a", { href: to(`/jobs/${job.id}`), "data-job": job.id }, job.name),
      ...axes.map(({ values, text }) => (values[at] == null ? "" : text(values[at]))),
    ]);
    fill(this.table, table("Settings and quality", ["Job", ...axes.map(({ title }) => title)], rows));
  }

  highlight({ target }) {
    const id = target.closest("tr")?.querySelector("[data-job]")?.dataset.job;
    for (const line of this.picture.querySelectorAll("polyline")) {
      line.classList.toggle("chosen", line.dataset.job === id);
    }
  }
}

const rank = (value, { higher }) => (Number.isFinite(value) ? (higher ? -value : value) : Infinity);

/** Numbers lie on a scale; other values at equal distances. */
function axisOf(name, texts) {
  const values = texts.map((text) => (text === "" ? null : JSON.parse(text)));
  if (values.every((value) => value === null || typeof value === "number")) {
    return { title: name, values, text: (value) => number(value) };
  }
  const kinds = [...new Set(texts)].sort();
  return { title: name, values: texts.map((text) => kinds.indexOf(text)), text: (at) => kinds[at] || "none", kinds };
}

function picture(axes, order, said) {
  const x = (at) => SIDE + (at * (WIDTH - 2 * SIDE)) / Math.max(axes.length - 1, 1);
  const scales = axes.map(({ values }) =>
    scale(values.filter((value) => Number.isFinite(value)), HEIGHT - BOTTOM, TOP));
  const ticks = ({ values, kinds }) => {
    const found = values.filter((value) => Number.isFinite(value));
    return kinds ? [...new Set(found)] : [...new Set([Math.min(...found), Math.max(...found)])];
  };
  const pointsOf = (job) => axes.flatMap(({ values }, at) =>
    (Number.isFinite(values[job]) ? [`${x(at).toFixed(1)},${scales[at](values[job]).toFixed(1)}`] : []));
  const short = (text) => (text.length > 22 ? `…${text.slice(-21)}` : text);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "parallel", role: "img", "aria-label": said },
    ...axes.flatMap((axis, at) => [
      svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM, class: "axis" }),
      svg("text", { x: x(at), y: 14, "text-anchor": "middle" }, short(axis.title)),
    ]),
    // The best last, so that nothing covers it.
    ...[...order].reverse().map(({ job, at }, place) => svg("polyline", {
      points: pointsOf(at).join(" "), "data-job": job.id,
      class: place === order.length - 1 ? "best" : null,
    }, svg("title", {}, job.name))),
    ...axes.flatMap((axis, at) => ticks(axis).map((value) => svg("text", {
      x: x(at) + 6, y: scales[at](value) + (scales[at](value) < HEIGHT / 2 ? -4 : 14), class: "tick",
    }, short(String(axis.text(value)))))));
}
