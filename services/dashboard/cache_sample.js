// Histograms of a sample of the records of a cache, and how many records were read.

import { Refused, get } from "./api.js";
import { fill, h, number, percent, svg } from "./elements.js";

const [WIDTH, HEIGHT, FOOT] = [360, 130, 20];
const HISTOGRAMS = [
  { name: "entropy", title: "Entropy of the teacher, nats",
    ofMeans: "Mean entropy of a sequence, nats" }, // a cache may keep only these
  { name: "entries", title: "Entries per token" },
  { name: "kept_mass", title: "Kept mass" },
];

export function sampleSection(path) {
  const box = h("div", { class: "charts" });
  const about = h("p", { "aria-live": "polite" }, "Reading a sample …");
  const another = h("button", { type: "button", onclick: () => load(seed + 1) }, "Another sample");
  let seed = 0;

  async function load(next = seed) {
    another.disabled = true;
    try {
      const found = await get(`${path}/statistics?seed=${next}`);
      seed = next;
      fill(box, HISTOGRAMS.map(({ name, title, ofMeans }) => figureOf(
        found.entropy_of === "sequences" ? ofMeans ?? title : title, found[name], found)));
      fill(about, aboutOf(found));
      another.hidden = found.whole;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fill(about, h("span", { class: "error breaks" }, error.message));
    } finally {
      another.disabled = false;
    }
  }
  const root = h("section", { "aria-labelledby": "sample" },
    h("h2", { id: "sample" }, "Statistics"), box, about, another);
  return { root, load };
}

function aboutOf({ whole, records, positions, sequences, sequences_read: read, seed }) {
  if (whole) return `All ${number(records)} records were read.`;
  return `${number(records)} of ${number(positions)} records were read, of ${number(read)} of `
    + `${number(sequences)} sequences, chosen over the whole cache by seed ${seed}.`;
}

function figureOf(title, histogram, { entry_counts: entries }) {
  const { counts, edges, mean, unknown } = histogram;
  const total = counts.reduce((sum, each) => sum + each, 0);
  const more = title.startsWith("Entries") && entries
    ? `, 99 % up to ${number(entries.p99)}, most ${number(entries.max)}` : "";
  const said = mean === null ? "not known" : `mean ${number(mean, 3)}${more}`;
  return h("figure", {},
    h("figcaption", {}, title, " ", h("span", { class: "quiet" }, said)),
    // One bar of all records would say less than its name.
    total > 0 && (counts.length > 1 ? bars(title, histogram, total, said)
      : h("p", {}, `It is ${number(mean)} in every record.`)),
    unknown > 0 && h("p", { class: "quiet" }, `${number(unknown)} records do not have it.`));
}

/** The bars of a histogram, with the range and the share of each in its title. */
function bars(title, { counts, edges }, total, said) {
  const width = WIDTH / counts.length;
  const most = Math.max(...counts);
  const floor = HEIGHT - FOOT;
  const rangeOf = (at) => `${number(edges[at], 3)} to ${number(edges[at + 1], 3)}`;
  const shapes = counts.map((count, at) => {
    const height = count && Math.max((count / most) * (floor - 4), 1.5);
    return svg("rect", {
      x: at * width + 0.5, y: floor - height, width: Math.max(width - 1, 0.5), height, class: "bar",
    }, svg("title", {}, `${rangeOf(at)}: ${number(count)} records, ${percent(count / total, 1)}`));
  });
  const ends = [
    svg("text", { x: 0, y: HEIGHT - 5 }, number(edges[0], 3)),
    svg("text", { x: WIDTH / 2, y: HEIGHT - 5, "text-anchor": "middle" }, number((edges[0] + edges.at(-1)) / 2, 3)),
    svg("text", { x: WIDTH, y: HEIGHT - 5, "text-anchor": "end" }, number(edges.at(-1), 3)),
  ];
  const peak = counts.indexOf(most);
  return svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "histogram", role: "img",
    "aria-label": `${title}: ${said}; most often ${rangeOf(peak)}, in ${percent(most / total)} of the records.`,
  }, svg("line", { x1: 0, y1: floor, x2: WIDTH, y2: floor, class: "axis" }), ...shapes, ...ends);
}
