// Line charts of a job's metrics over its steps. A chart is drawn once and then gets new data.

import { h, number } from "./elements.js";

const CHARTS = [
  { title: "Loss, nats per token", names: ["loss", "kd_loss", "ce_loss"] },
  { title: "Perplexity", names: ["perplexity", "validation_perplexity"], log: true },
  { title: "KL(teacher || student), held out", names: ["validation_kl"] },
  { title: "Agreement with the teacher, held out", names: ["validation_agreement"] },
  { title: "Learning rate", names: ["learning_rate"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "Temperature", names: ["temperature"] },
  { title: "Tokens a second", names: ["throughput/tokens_per_second"] },
  { title: "Memory, GiB", names: ["memory/*"], unit: 2 ** 30 },
  { title: "Waiting for data, share of the time", names: ["loader/waited_share"] },
  { title: "Loss scale of float16", names: ["loss_scale/scale"], log: true },
  { title: "Steps lost to an overflow", names: ["loss_scale/overflowed_steps"] },
  {
    title: "Gradient norm by layer, from red at the bottom to the top",
    names: ["grad_norm/embeddings", "grad_norm/layer*", "grad_norm/head"],
    log: true,
  },
];
/** The metrics of all charts: the API sends only these. A star stands for any end of a name. */
export const NAMES = CHARTS.flatMap((chart) => chart.names);
const HEIGHT = 220; // pixels
const SMOOTHING = 0.9; // the weight of the earlier points
const COLOURS = 3; // of the style sheet; more lines get hues at equal distances
const LEGEND = 8; // the most lines that a legend lists

/** The charts of a page. `update` takes the API's series; a chart appears with its first point. */
export class Charts {
  constructor() {
    this.drawn = new Map();
    this.series = new Map();
    this.box = h("div", { class: "charts" });
    this.log = h("input", { type: "checkbox", onchange: () => this.redraw() });
    this.smooth = h("input", { type: "checkbox", onchange: () => this.update() });
    this.root = h("section", { "aria-label": "Metrics" },
      h("p", { class: "options" },
        h("label", {}, this.log, " logarithmic"),
        h("label", {}, this.smooth, " smooth")),
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
        drawn.plot.setData(this.data(chart, names));
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
    const options = this.options(names, chart.log || this.log.checked);
    const plot = new uPlot(options, this.data(chart, names), figure);
    this.drawn.set(chart, { figure, names, plot });
    // A new chart may belong between older ones, so all figures are put in order again.
    if (!known) this.box.append(...CHARTS.flatMap((each) => this.drawn.get(each)?.figure ?? []));
    this.describe(chart, names);
    this.fit();
  }

  redraw() {
    for (const [chart, { names }] of this.drawn) this.draw(chart, names);
  }

  options(names, logarithmic) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--quiet"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
    };
    const label = (value) => (value == null ? "" : number(value, 3));
    // Without a cursor the legend shows the newest value.
    const stroke = (at) => (names.length <= COLOURS
      ? colour(`--series-${at + 1}`) : `hsl(${(360 * at) / names.length} 65% 50%)`);
    const newest = (plot, series) => plot.data[series].findLast((each) => each != null);
    return {
      width: this.width(), height: HEIGHT,
      legend: { show: names.length <= LEGEND },
      cursor: { sync: { key: "step" } },
      scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : {} },
      axes: [axis, { ...axis, size: 64, values: (_, values) => values.map(label) }],
      series: [
        { label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) },
        ...names.map((name, at) => ({
          label: name.split("/").at(-1).replace(/_bytes$/, "").replaceAll("_", " "),
          stroke: stroke(at),
          width: 2,
          spanGaps: true,
          // Dots help to see few points, and hide the line of many.
          points: { show: this.series.get(name).steps.length < 40, size: 5 },
          value: (plot, value, series) => number(value ?? newest(plot, series)) ?? "",
        })),
      ],
    };
  }

  data(chart, names) {
    // Evaluations are few and exact, so only training metrics are smoothed.
    const smoothed = (name) => this.smooth.checked && !name.startsWith("validation_");
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
    const canvas = this.drawn.get(chart).figure.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title}: ${last.join(", ")}.`);
  }

  width() {
    const style = getComputedStyle(this.box);
    return parseFloat(style.gridTemplateColumns) || this.box.clientWidth || 320;
  }

  fit() {
    for (const { plot } of this.drawn.values()) {
      plot.setSize({ width: this.width(), height: HEIGHT });
    }
  }

  close() {
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
