// The report of `kd ablate` on the page of its job: for each setting a table and the losses.

import { bytes, duration, h, number, table } from "./elements.js";

const HEIGHT = 260; // pixels
const TITLES = ["Run", "Held-out loss", "KL", "Perplexity", "Time", "Tokens/s", "Peak memory"];

/** Make the elements of a report; `width` is that of a chart in pixels. */
export function ablation(report, width) {
  return [
    h("h2", {}, `Ablation: ${number(report.steps)} steps of each run`),
    ...report.axes.map((axis) => section(axis, report.runs, width)),
  ];
}

function section(axis, runs, width) {
  const rows = axis.rows.map((row) => ({ ...row, ...(runs[row.run] ?? {}), label: row.label }));
  return h("section", { "aria-label": axis.name },
    h("h3", {}, axis.name),
    axis.why && h("p", {}, axis.why),
    table(axis.name, TITLES, rows.map(cells)),
    chart(axis.name, rows.filter((row) => row.curves?.loss.length), width));
}

function cells(row) {
  const problem = row.refusal || row.error;
  if (problem || row.state !== "finished") return [row.label, problem || (row.state ?? "")];
  return [
    row.label, number(row.held_out_loss), number(row.held_out_kl), number(row.held_out_perplexity),
    duration(row.train_seconds), number(row.tokens_per_second, 3), bytes(row.peak_memory_bytes),
  ];
}

/** Draw the loss of every run over the tokens that it was trained on; null without a curve. */
function chart(title, rows, width) {
  if (!rows.length) return null;
  const figure = h("figure", {}, h("figcaption", {}, "Loss by tokens trained, nats per token"));
  const quiet = getComputedStyle(document.documentElement).getPropertyValue("--quiet").trim();
  const axis = { stroke: quiet, ticks: { show: false } };
  const options = {
    width,
    height: HEIGHT,
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 56 }],
    series: [
      { label: "tokens" },
      ...rows.map((row, at) => ({
        label: row.label,
        stroke: `hsl(${(360 * at) / rows.length} 65% 50%)`,
        width: 2,
        spanGaps: true,
      })),
    ],
  };
  const series = rows.map(({ curves }) => [
    curves.loss.map(([tokens]) => tokens), curves.loss.map(([, loss]) => loss),
  ]);
  new uPlot(options, uPlot.join(series), figure);
  const last = rows.map((row) => `${row.label} ${number(row.curves.loss.at(-1)[1])}`);
  const canvas = figure.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Loss of ${title}: ${last.join(", ")}.`);
  return figure;
}
