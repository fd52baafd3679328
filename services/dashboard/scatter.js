// Quality of several jobs against what it costs: a picture with chosen axes, and a table beside it.

import { COLOURS } from "./charts.js";
import { fill, h, svg, table } from "./elements.js";
import { COSTS, QUALITY, known, qualities, shown } from "./measures.js";
import { keepInAddress, query, to } from "./paths.js";

const [WIDTH, HEIGHT] = [560, 300];
const EDGE = { left: 70, right: 24, top: 16, bottom: 44 };

/** The part of the page: `update` takes all {job, report}. */
export class Scatter {
  constructor() {
    this.all = [];
    const change = () => {
      keepInAddress({ x: this.x.value, y: this.y.value });
      this.draw();
    };
    this.y = h("select", { onchange: change });
    this.x = h("select", { onchange: change });
    this.picture = h("div", { class: "scroll", tabindex: 0 });
    this.table = h("div");
    this.root = h("section", { hidden: true },
      h("h2", {}, "Quality against cost"),
      h("p", { class: "choices" }, h("label", {}, "Vertical axis ", this.y), h("label", {}, "Horizontal axis ", this.x)),
      h("div", { class: "beside" }, this.picture, this.table));
  }

  update(all) {
    this.all = all;
    choices(this.y, qualities(all), query().get("y"));
    choices(this.x, known(COSTS, all), query().get("x"));
    this.root.hidden = !this.x.options.length || !this.y.options.length;
    if (!this.root.hidden) this.draw();
  }

  draw() {
    const x = COSTS.find(({ name }) => name === this.x.value);
    const y = QUALITY.find(({ name }) => name === this.y.value);
    const points = this.all
      .map((one, at) => ({ job: one.job, at, x: x.of(one), y: y.of(one) }))
      .filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y));
    fill(this.picture, points.length ? picture(points, x, y) : null);
    const sorted = [...points].sort((a, b) => (y.higher ? b.y - a.y : a.y - b.y));
    fill(this.table, table(`${y.title} against ${x.title}`, ["Job", y.title, x.title],
      sorted.map(({ job, x: cost, y: quality }) => [
        h("a", { href: to(`/jobs/${job.id}`) }, job.name), shown(y, quality), shown(x, cost),
      ])));
  }
}

/** Offer the measures that are known; the choice stays. */
function choices(select, measures, asked) {
  const wanted = select.value || asked;
  fill(select, measures.map(({ name, title }) => h("option", { value: name }, title)));
  const found = measures.find(({ name }) => name === wanted) ?? measures[0];
  if (found) select.value = found.name;
}

/** A scale from values to places; logarithmic where the values differ much. */
export function scale(values, from, until) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const bend = low > 0 && high / low > 30 ? Math.log : (value) => value;
  const span = bend(high) - bend(low);
  return (value) => (span === 0 ? (from + until) / 2
    : from + ((bend(value) - bend(low)) / span) * (until - from));
}

function picture(points, xMeasure, yMeasure) {
  const [right, bottom] = [WIDTH - EDGE.right, HEIGHT - EDGE.bottom];
  const [xs, ys] = [points.map((point) => point.x), points.map((point) => point.y)];
  const x = scale(xs, EDGE.left + 12, right - 12);
  const y = scale(ys, bottom - 12, EDGE.top + 8);
  const ends = (values) => [...new Set([Math.min(...values), Math.max(...values)])];
  const said = points.map((point) =>
    `${point.job.name} ${shown(yMeasure, point.y)} at ${shown(xMeasure, point.x)}`);
  return svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "scatter", role: "img",
    "aria-label": `${yMeasure.title} against ${xMeasure.title}: ${said.join(", ")}.`,
  },
    svg("line", { x1: EDGE.left, y1: bottom, x2: right, y2: bottom, class: "axis" }),
    svg("line", { x1: EDGE.left, y1: EDGE.top, x2: EDGE.left, y2: bottom, class: "axis" }),
    ...ends(xs).map((value) => svg("text",
      { x: x(value), y: bottom + 16, "text-anchor": "middle", class: "tick" }, shown(xMeasure, value))),
    ...ends(ys).map((value) => svg("text",
      { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end", class: "tick" }, shown(yMeasure, value))),
    svg("text", { x: (EDGE.left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, xMeasure.title),
    svg("text", { x: 0, y: 10, class: "tick" }, yMeasure.title),
    ...points.flatMap((point) => {
      const late = x(point.x) > WIDTH / 2;
      return [
        svg("circle", { cx: x(point.x), cy: y(point.y), r: 5, class: `series-${(point.at % COLOURS) + 1}` },
          svg("title", {}, point.job.name)),
        // The names of many jobs would cover each other; the table has them.
        ...(points.length > 12 ? [] : [svg("text", {
          x: x(point.x) + (late ? -9 : 9), y: y(point.y) + 4, "text-anchor": late ? "end" : "start",
        }, point.job.name)]),
      ];
    }));
}
