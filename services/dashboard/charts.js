// Line charts of a job's metrics over its steps. A chart is drawn once and then gets new data.

import { h, number } from "./elements.js";
import { drawMarkLines, placeMarks } from "./marks.js";

const CHARTS = [
  { title: "Loss, nats per token", names: ["loss", "kd_loss", "ce_loss"] },
  { title: "Perplexity", names: ["train_perplexity", "validation_perplexity"], log: true },
  { title: "KL(teacher || student), held out", names: ["validation_kl"] },
  { title: "Agreement with the teacher, held out", names: ["validation_agreement"] },
  { title: "Learning rate", names: ["learning_rate"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "Temperature", names: ["temperature"] },
  { title: "Tokens per second", names: ["throughput/tokens_per_second"] },
  { title: "Memory, GiB", names: ["memory/*"], unit: 2 ** 30 },
  { title: "Waiting for data, share of the time", names: ["loader/waited_share"] },
  { title: "Seconds that a rank works alone in a step", names: ["rank_seconds/*"] },
  { title: "Loss scale of float16", names: ["loss_scale/scale"], log: true },
  { title: "Steps skipped after an overflow", names: ["loss_scale/overflowed_steps"] },
  {
    title: "Gradient norm by layer, from red at the bottom to the top",
    names: ["grad_norm/embeddings", "grad_norm/layer*", "grad_norm/head"],
    log: true,
  },
];
/** The metrics of all charts: the API sends only these. A star stands for any end of a name. */
export const NAMES = CHARTS.flatMap((chart) => chart.names);
const HEIGHT = 240; // pixels
const MARKS = 26; // pixels above a chart, for marks
const SMOOTHING = 0.9; // the weight of the earlier points
// Only these are smoothed: a learning rate has no noise, and evaluations are few and exact.
const SMOOTHED = ["loss", "kd_loss", "ce_loss", "train_perplexity"];
/** Colours of the style sheet; more lines get hues at equal distances. */
export const COLOURS = 3;
const LEGEND = 8; // the most lines that a legend lists

const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const strokeOf = (at, count) => (count <= COLOURS
  ? colour(`--series-${at + 1}`) : `hsl(${(360 * at) / count} 65% 50%)`);

// Without a cursor the legend shows the newest values.
const LAST_STEP = { label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) };
const newest = (plot, value, series) =>
  number(value ?? plot.data[series].findLast((each) => each != null)) ?? "";

/** Say what the picture of a figure shows, for screen readers. */
export function describe(figure, said) {
  const canvas = figure.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", said);
}

/** The width of a column of a box of charts. */
export const columnWidth = (box) =>
  parseFloat(getComputedStyle(box).gridTemplateColumns) || box.clientWidth || 320;

function axes() {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  return [{ ...axis, size: 32 }, { ...axis, size: 64, values: (_, values) => values.map((value) => number(value, 3) ?? "") }];
}

/**
 * Draw lines of {label, at, steps, values} into a figure; returns the chart, which must be destroyed.
 * `unit` is what the steps count: charts of one unit have one cursor.
 */
export function lineChart(figure, lines, { log = false, width, unit = "step" }) {
  return new uPlot({
    width, height: HEIGHT,
    cursor: { sync: { key: unit } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
    axes: axes(),
    series: [{ ...LAST_STEP, label: unit }, ...lines.map(({ label, at }) => ({
      label, stroke: strokeOf(at, lines.length), width: 2, spanGaps: true, value: newest,
    }))],
  }, uPlot.join(lines.map(({ steps, values }) => [steps, values])), figure);
}

/**
 * The charts of a page. `update` takes the API's series; a chart appears with its first point.
 *
 * A range of steps that is dragged open stays open while points come, in all charts; `zoomed` is
 * called with its first and last step, so that more points of it can be read. A double click ends
 * it, and then `zoomed` is called with null.
 */
export class Charts {
  constructor(zoomed = () => {}) {
    this.zoomed = zoomed;
    this.range = null; // of steps, while it is not all of them
    this.levels = new Map(); // lines of {label, value} across a chart, by its title
    this.marks = []; // of events, at their steps
    this.drawn = new Map();
    this.series = new Map();
    this.box = h("div", { class: "charts" });
    this.log = h("input", { type: "checkbox", onchange: () => this.redraw() });
    this.smooth = h("input", { type: "checkbox", onchange: () => this.update() });
    this.root = h("section", { "aria-label": "Metrics" },
      h("p", { class: "options" },
        h("label", {}, this.log, " logarithmic"),
        h("label", {}, this.smooth, " smooth losses")),
      this.box);
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.box);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recoloured = () => this.redraw();
    this.scheme.addEventListener("change", this.recoloured);
  }

  update(series = null) {
    if (series) this.series = new Map(series.map((each) => [each.name, each]));
    for (const chart of CHARTS) {
      const names = this.resolve(chart.names);
      if (!names.length) continue;
      const drawn = this.drawn.get(chart);
      if (drawn?.names.join() === names.join()) {
        this.quietly(() => {
          drawn.plot.setData(this.data(chart, names), this.range === null);
          this.keepRange(drawn.plot);
        });
        this.describe(chart, names);
      } else this.draw(chart, names);
    }
    this.root.hidden = !this.drawn.size;
  }

  /** The metrics that have points, in the order of their numbers. */
  resolve(patterns) {
    const known = [...this.series.keys()].filter((name) => this.series.get(name).steps.length);
    const order = new Intl.Collator("en", { numeric: true }).compare;
    return patterns.flatMap((pattern) => pattern.endsWith("*")
      ? known.filter((name) => name.startsWith(pattern.slice(0, -1))).sort(order)
      : known.filter((name) => name === pattern));
  }

  draw(chart, names) {
    const known = this.drawn.get(chart);
    known?.plot.destroy();
    const figure = known?.figure ?? h("figure", {}, h("figcaption", {}, chart.title));
    const options = this.options(chart, names);
    const plot = this.quietly(() => {
      const made = new uPlot(options, this.data(chart, names), figure);
      this.keepRange(made);
      return made;
    });
    this.drawn.set(chart, { figure, names, plot });
    // A new chart may belong between older ones, so all figures are put in order again.
    if (!known) this.box.append(...CHARTS.flatMap((each) => this.drawn.get(each)?.figure ?? []));
    this.describe(chart, names);
    this.fit();
  }

  /** Draw lines across the chart with this title: values to compare its curves with. */
  setLevels(title, levels) {
    if (JSON.stringify(levels) === JSON.stringify(this.levels.get(title) ?? [])) return;
    this.levels.set(title, levels);
    this.redraw();
  }

  /** Show these marks on all charts. */
  setMarks(marks) {
    this.marks = marks;
    for (const { plot } of this.drawn.values()) plot.redraw(false);
  }

  drawMarks(plot, chart) {
    drawMarkLines(plot, this.marks, colour);
    const layer = plot.root.querySelector(".marks")
      ?? plot.root.querySelector(".u-wrap").appendChild(h("div", { class: "marks" }));
    // One chart is enough for the Tab key.
    placeMarks(plot, layer, this.marks, chart === this.drawn.keys().next().value);
  }

  drawLevels(plot, title) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([6, 4]);
    ctx.textAlign = "right";
    ctx.strokeStyle = ctx.fillStyle = colour("--quiet");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const { label, value } of this.levels.get(title) ?? []) {
      const y = plot.valToPos(value, "y", true);
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(`${label} ${number(value, 3)}`, bbox.left + bbox.width - 4, y - 4);
    }
    ctx.restore();
  }

  /** Change a chart without a call of `zoomed`. */
  quietly(change) {
    this.quiet = true;
    const found = change();
    this.quiet = false;
    return found;
  }

  keepRange(plot) {
    if (this.range) plot.setScale("x", { min: this.range[0], max: this.range[1] });
  }

  /** A chart has another range of steps; the others follow by their common cursor. */
  ranged(plot) {
    if (this.quiet || !plot.data?.[0].length) return;
    const { min, max } = plot.scales.x;
    const steps = plot.data[0];
    const whole = min <= steps[0] && max >= steps.at(-1);
    const range = whole ? null : [min, max];
    if (String(range) === String(this.range)) return;
    this.range = range;
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.zoomed(range), 200);
  }

  redraw() {
    for (const [chart, { names }] of this.drawn) this.draw(chart, names);
  }

  options(chart, names) {
    const logarithmic = chart.log || this.log.checked;
    const values = (this.levels.get(chart.title) ?? []).map(({ value }) => value);
    const around = (_, low, high) => (logarithmic
      ? uPlot.rangeLog(Math.min(low, ...values), Math.max(high, ...values), 10, false)
      : uPlot.rangeNum(Math.min(low, ...values), Math.max(high, ...values), 0.1, true));
    return {
      width: columnWidth(this.box), height: HEIGHT,
      padding: [MARKS, null, null, null],
      legend: { show: names.length <= LEGEND },
      cursor: { sync: { key: "step" } },
      scales: {
        x: { time: false },
        y: { ...(logarithmic && { distr: 3 }), ...(values.length && { range: around }) },
      },
      axes: axes(),
      hooks: {
        setScale: [(plot, key) => key === "x" && this.ranged(plot)],
        draw: [
          (plot) => this.drawLevels(plot, chart.title),
          (plot) => this.drawMarks(plot, chart),
        ],
      },
      series: [
        LAST_STEP,
        ...names.map((name, at) => ({
          label: name.split("/").at(-1).replace(/_bytes$/, "").replaceAll("_", " "),
          stroke: strokeOf(at, names.length),
          width: 2,
          spanGaps: true,
          // Dots help to see few points, and hide the line of many.
          points: { show: this.series.get(name).steps.length < 40, size: 5 },
          value: newest,
        })),
      ],
    };
  }

  data(chart, names) {
    const smoothed = (name) => this.smooth.checked && SMOOTHED.includes(name);
    return uPlot.join(names.map((name) => {
      const { steps, values } = this.series.get(name);
      const shown = chart.unit ? values.map((value) => value / chart.unit) : values;
      return [steps, this.above(smoothed(name) ? smooth(shown) : shown)];
    }));
  }

  /** On a logarithmic scale, replace values that are not above zero by gaps. */
  above(values) {
    return this.log.checked ? values.map((value) => (value > 0 ? value : null)) : values;
  }

  /** Describe the picture in words, for screen readers. */
  describe(chart, names) {
    const last = names.map((name) => {
      const { steps, values } = this.series.get(name);
      const last = values.at(-1) / (chart.unit ?? 1);
      return `${name.replaceAll("_", " ")} ${number(last)} at step ${steps.at(-1)}`;
    });
    last.push(...(this.levels.get(chart.title) ?? []).map(({ label, value }) =>
      `${label} ${number(value)}`));
    describe(this.drawn.get(chart).figure, `${chart.title}: ${last.join(", ")}.`);
  }

  fit() {
    for (const { plot } of this.drawn.values()) {
      plot.setSize({ width: columnWidth(this.box), height: HEIGHT });
    }
  }

  close() {
    clearTimeout(this.asking);
    this.resized.disconnect();
    this.scheme.removeEventListener("change", this.recoloured);
    for (const { plot } of this.drawn.values()) plot.destroy();
  }
}

/** The exponential moving average of the points; dividing by the weight removes the bias to 0. */
function smooth(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    sum = SMOOTHING * sum + (1 - SMOOTHING) * value;
    weight = SMOOTHING * weight + 1 - SMOOTHING;
    return sum / weight;
  });
}
