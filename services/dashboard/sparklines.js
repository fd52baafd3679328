// Curves of the size of a word, for the rows of a list of jobs.

import { get } from "./api.js";
import { h, number, svg } from "./elements.js";

const AGAIN_MS = 10_000; // a curve of a job that runs is read again after this time
const MOST = 100; // jobs of one request
const [WIDTH, HEIGHT] = [84, 20];

/** Reads the curves of jobs, each once for a version of its record, and not too often. */
export class Sparklines {
  constructor() {
    this.known = new Map(); // id -> {version, at, curve}
  }

  /** Read what is missing or old; the API reads a few points of each job, however long it is. */
  async read(jobs) {
    const now = Date.now();
    const due = jobs.filter(({ id, version }) => {
      const found = this.known.get(id);
      return !found || (found.version !== version && now - found.at > AGAIN_MS);
    });
    for (let at = 0; at < due.length; at += MOST) {
      const part = due.slice(at, at + MOST);
      const { data } = await get(`/curves?jobs=${part.map(({ id }) => id).join(",")}`);
      const curves = new Map(data.map((curve) => [curve.job, curve]));
      for (const { id, version } of part) {
        this.known.set(id, { version, at: now, curve: curves.get(id) });
      }
    }
  }

  /** Draw the curve of a job; null without one. */
  of({ id }) {
    const curve = this.known.get(id)?.curve;
    return curve && curve.values.length > 1 ? draw(curve) : null;
  }
}

function draw({ steps, values }) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => ((step - steps[0]) / (steps.at(-1) - steps[0] || 1)) * (WIDTH - 4) + 2;
  const y = (value) => HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4);
  const points = steps.map((step, at) => `${x(step).toFixed(1)},${y(values[at]).toFixed(1)}`);
  const said = `Loss from ${number(values[0], 3)} to ${number(values.at(-1), 3)}`;
  return h("span", { class: "spark", title: `${said} nats per token` },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said },
      svg("polyline", { points: points.join(" ") })));
}
