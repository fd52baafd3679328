// The report of `kd ablate` on the page of its job: for each setting a table and the losses.

import { describe, lineChart } from "./charts.js";
import { bytes, duration, h, number, table } from "./elements.js";

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
  const lines = rows.map(({ label, curves: { loss } }, at) => ({
    label, at, steps: loss.map(([tokens]) => tokens), values: loss.map(([, value]) => value),
  }));
  lineChart(figure, lines, { width, unit: "tokens" });
  const last = lines.map(({ label, values }) => `${label} ${number(values.at(-1))}`);
  describe(figure, `Loss of ${title}: ${last.join(", ")}.`);
  return figure;
}
