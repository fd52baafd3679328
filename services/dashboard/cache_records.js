// A browser of the records of a cache: some positions of one sequence, each with what the teacher
// expected there. The address keeps the place.

import { Refused, get } from "./api.js";
import { borderOf, fill, h, levelOf, number, percent, shareBar, visible } from "./elements.js";
import { keepInAddress, query } from "./paths.js";

const PAGE = 25;
// Entries beside the position; all are below it.
const BRIEF = 3;
// A value from the edge on has the next darker level.
const EDGES = [0.5, 1, 2, 3, 4, 6];

export function recordBrowser(path) {
  const asked = query();
  const place = {
    sequence: Number.parseInt(asked.get("sequence") ?? "0", 10) || 0,
    start: Number.parseInt(asked.get("record") ?? "0", 10) || 0,
  };
  const input = h("input", {
    type: "number", min: 0, step: 1, name: "sequence", size: 8, "aria-label": "Sequence",
  });
  const button = (text, act) => h("button", { type: "button", onclick: act }, text);
  const buttons = {
    before: button("Sequence before", () => go(place.sequence - 1, 0)),
    after: button("Next sequence", () => go(place.sequence + 1, 0)),
    earlier: button("Earlier records", () => go(place.sequence, Math.max(place.start - PAGE, 0))),
    later: button("Later records", () => go(place.sequence, place.start + PAGE)),
  };
  const about = h("p", { "aria-live": "polite" });
  const text = h("div");
  const list = h("div");
  const form = h("form", { class: "choices", onsubmit: jump },
    h("label", {}, "Sequence ", input), h("button", {}, "Go"),
    buttons.before, buttons.after);
  const root = h("section", { "aria-labelledby": "records" },
    h("h2", { id: "records", tabindex: -1 }, "Text with its records"),
    form, about, text, list,
    h("p", { class: "choices" }, buttons.earlier, buttons.later));

  function jump(event) {
    event.preventDefault();
    if (input.value !== "") go(Number(input.value), 0);
  }

  async function go(sequence, start) {
    Object.assign(place, { sequence, start });
    keepInAddress({ sequence: sequence || "", record: start || "" });
    await load();
  }

  async function load() {
    try {
      const wanted = `sequence=${place.sequence}&start=${place.start}&limit=${PAGE}`;
      show(await get(`${path}/records?${wanted}`));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fill(about, h("span", { class: "error breaks" }, error.message));
      fill(text);
      fill(list);
      for (const each of Object.values(buttons)) each.disabled = true;
    }
  }

  function show(page) {
    place.start = page.start;
    input.value = page.sequence;
    input.max = page.sequences - 1;
    const end = page.start + page.records.length;
    buttons.before.disabled = page.sequence === 0;
    buttons.after.disabled = page.sequence + 1 >= page.sequences;
    buttons.earlier.disabled = page.start === 0;
    buttons.later.disabled = end >= page.count;
    fill(about, aboutOf(page, end));
    fill(text, textOf(page));
    fill(list, h("ol", { class: "records", start: page.start + 1 },
      page.records.map((record) => recordOf(record, page))));
  }

  /** Show a sequence from its first record on, and bring it into view. */
  async function open(sequence) {
    await go(sequence, 0);
    const heading = root.querySelector("h2");
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  }
  return { root, load, open };
}

function aboutOf(page, end) {
  const split = page.split === "validation" ? "held out" : "to train on";
  const which = page.records.length
    ? `records ${number(page.start + 1)} to ${number(end)} of ${number(page.count)}`
    : `no record here; it has ${number(page.count)}`;
  const texts = page.texts_known ? "" : " This cache does not hold the text of its tokens.";
  const last = number(page.sequences - 1);
  return `Sequence ${number(page.sequence)} (there are 0 to ${last}), ${split}: ${which}.${texts}`;
}

/** Whether an entropy is the mean of its sequence, so that it tells nothing of a token. */
const isMean = (page) => page.entropy_of === "sequences";

/** The tokens around the page, coloured by the entropy of the teacher before each. */
function textOf(page) {
  if (!page.texts_known) return null;
  const means = isMean(page);
  const before = new Map(page.records.map((record) => [record.position + 1, record]));
  const starts = new Set(page.document_starts.filter((place) => place > 0));
  const words = page.text.flatMap((word, at) => {
    const place = page.text_start + at;
    const border = starts.has(place) ? [borderOf()] : [];
    const shown = word.replaceAll("\n", "↵\n");
    const record = before.get(place);
    if (!record) return [...border, h("span", { class: "quiet" }, shown)];
    const title = `position ${record.position}, entropy ${number(record.entropy, 3) ?? "unknown"} nats`;
    return [...border, h("span", means ? {} : { class: levelOf(record.entropy, EDGES), title }, shown)];
  });
  return [
    h("div", { class: "text" }, h("p", {}, words)),
    h("p", { class: "scale" }, means ? "This cache keeps the mean entropy of each sequence." : [
      "Entropy before the token:",
      ...EDGES.map((edge) => h("span", { class: levelOf(edge, EDGES) }, edge)), "nats or more"]),
  ];
}

/** A probability as a percentage; small ones keep two digits. */
function share(value) {
  if (value === null) return null;
  if (value > 0 && value < 1e-5) return "<\u00a00.001%";
  return value >= 0.001 || value === 0 ? percent(value, 1) : `${number(100 * value, 2)}%`;
}

/** A value with its name, which is seen only where the names do not stand above all values. */
const cell = (name, value, ...classes) => h("span", { class: ["part", ...classes].join(" ") },
  h("span", { class: "name" }, name, " "), value);

function recordOf(record, page) {
  return h("li", {},
    cell("Position", number(record.position)),
    cell("Text", [spaced(record.token, record, page), " → ",
      h("strong", {}, spaced(record.said, record, page, record.said_id))], "words"),
    cell("Its probability", share(record.said_probability) ?? "unknown"),
    isMean(page) ? cell("Mean entropy, nats", number(record.entropy, 3))
      : cell("Entropy, nats", h("span", { class: levelOf(record.entropy, EDGES) },
        number(record.entropy, 3) ?? "unknown")),
    cell("Most probable", headOf(record, page), "words"),
    cell("Tail", tailOf(record)));
}

/** A token with its spaces visible; its id where the cache has no text. */
function spaced(text, record, page, id = null) {
  if (!page.texts_known || text === "") return h("code", {}, id === null ? "…" : `#${id}`);
  return h("code", {}, visible(text));
}

function headOf(record, page) {
  if (record.entries === null) {
    return h("span", { class: "quiet" }, "in the hidden state");
  }
  const entryOf = ({ id, text, probability }) => [
    spaced(text, record, page, id), ` ${share(probability)}`,
  ];
  const brief = record.head.slice(0, BRIEF).map((entry) => h("span", { class: "entry" }, entryOf(entry)));
  if (record.head.length <= BRIEF && !record.tail_tokens.length) return brief;
  const rows = record.head.map((entry) => h("li", {},
    spaced(entry.text, record, page, entry.id), " ",
    shareBar(entry.probability, share(entry.probability))));
  const drawn = record.tail_tokens.map((text) => [spaced(text, record, page), " "]).flat();
  return h("details", {},
    h("summary", {}, brief),
    h("ul", {}, rows),
    record.entries > record.head.length
      && h("p", { class: "quiet" }, `${number(record.entries - record.head.length)} more`),
    drawn.length > 0 && page.texts_known && h("p", {},
      `${number(record.tail_count)} drawn from the tail: `, drawn));
}

function tailOf({ tail, tail_count: count }) {
  if (tail === null) return "not kept";
  const drawn = count === null ? "" : `, ${number(count)} drawn`;
  return `${share(tail)}${drawn}`;
}
