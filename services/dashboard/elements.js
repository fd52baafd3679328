// Functions that make elements and format values. Text from the server only goes into text nodes,
// because the names in it cannot be trusted.

/**
 * Make an element. A function as an attribute, such as onclick, is a listener; children that are
 * null or false are left out.
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Make an element of a picture. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Replace the children of `box` if they differ; the focus stays on the same link or button. */
export function fill(box, ...children) {
  const fresh = box.cloneNode(false);
  fresh.append(...children.flat().filter((child) => child != null && child !== false));
  keepOpen(box, fresh);
  if (box.isEqualNode(fresh)) return;
  const nameOf = (element) => element.href ?? element.ariaLabel ?? element.textContent;
  const held = box.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  box.replaceChildren(...fresh.childNodes);
  if (held === null) return;
  const focusable = [...box.querySelectorAll("a, button, input, [tabindex]")];
  focusable.find((element) => nameOf(element) === held)?.focus();
}

/** Open those parts of `fresh` that the user has opened in `box`. */
function keepOpen(box, fresh) {
  const titleOf = (details) => details.querySelector("summary").textContent;
  const opened = new Set([...box.querySelectorAll("details[open]")].map(titleOf));
  for (const details of fresh.querySelectorAll("details")) details.open = opened.has(titleOf(details));
}

/** Make a table in a box of its own, which scrolls sideways in a narrow window. */
export function table(caption, titles, rows) {
  const box = h("div", { class: "scroll" },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, titles.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell ?? "")))))));
  // Something in the box must take the focus, so that the keyboard can scroll it.
  if (!box.querySelector("a, button, input")) box.tabIndex = 0;
  return box;
}

/** Make a list of names and values; unknown values are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value != null && value !== "");
  const pairOf = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h("dl", { class: "facts" }, known.map(pairOf));
}

/** Make a button that copies a text, and says so; without TLS a page has no clipboard. */
export const copyButton = (text, said, label) => navigator.clipboard && h("button", {
  type: "button", "aria-label": label,
  onclick: async () => {
    await navigator.clipboard.writeText(text());
    said.textContent = "Copied.";
  },
}, "Copy");

/** The statuses in which a job has ended. */
export const ENDED = ["succeeded", "failed", "cancelled"];

export const chip = (status) => h("span", { class: `chip ${status}` }, status);

/** Make a progress bar with its share beside it; nothing if the share is unknown. */
export const bar = (progress) =>
  (progress?.fraction == null ? null : shareBar(progress.fraction, percent(progress.fraction)));

/** Make a bar of a share, with its text beside it. */
export const shareBar = (share, text) => h("span", { class: "progress" },
  h("progress", { max: 1, value: share, "aria-hidden": "true" }), h("span", {}, text));

/** Make the spaces of a token visible. */
export const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "↵");

/** The class of a value's colour: the number of edges that it reaches, and whether it is below 0. */
export const levelOf = (value, edges) =>
  `level-${edges.filter((edge) => Math.abs(value) >= edge).length}${value < 0 ? " below" : ""}`;

/** A sign between two documents of a text. */
export const borderOf = () => h("span", { class: "quiet" }, "\n⁂\n");

/** Return the item that an arrow key leads to from `at`, of `count`; null for another key. */
export function itemAfter(key, at, count, width) {
  const steps = {
    ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width, Home: -Infinity, End: Infinity,
  };
  return key in steps ? Math.min(Math.max(at + steps[key], 0), count - 1) : null;
}

const missing = (value) => value == null || !Number.isFinite(value);

export const percent = (value, digits = 0) =>
  (missing(value) ? null : `${(100 * value).toFixed(digits)}%`);

export function number(value, digits = 4) {
  if (missing(value)) return null;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  // Digits before the decimal point are never rounded away.
  const whole = Math.ceil(Math.log10(size + 1));
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, whole) });
}

/** The held-out perplexity with its tokens, and with its interval where they are few. */
export function heldOut(metrics) {
  const { validation_perplexity: perplexity, validation_tokens: tokens } = metrics;
  if (missing(perplexity) || missing(tokens)) return number(perplexity);
  const ends = ["low", "high"].map((end) => number(metrics[`validation_perplexity_${end}`]));
  const interval = ends.includes(null) ? "" : `, 95 % interval ${ends.join(" to ")}`;
  return `${number(perplexity)} (${tokens.toLocaleString("en")} tokens${interval})`;
}

export function bytes(value) {
  if (missing(value)) return null;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), units.length - 1);
  return `${(value / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export function duration(seconds) {
  if (missing(seconds)) return null;
  const whole = Math.max(0, Math.round(seconds));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

const AGES = [["year", 31536000], ["month", 2592000], ["day", 86400], ["hour", 3600], ["minute", 60]];
const AGO = new Intl.RelativeTimeFormat("en", { numeric: "auto" });

/** A time as people say it, such as "2 hours ago"; the title has the time itself. */
export function time(text) {
  if (!text) return null;
  const seconds = (Date.parse(text) - Date.now()) / 1000;
  const [unit, size] = AGES.find(([, each]) => Math.abs(seconds) >= each) ?? ["minute", 60];
  const count = Math.round(seconds / size);
  const said = unit === "minute" && count === 0 ? "just now" : AGO.format(count, unit);
  return h("time", { datetime: text, title: new Date(text).toLocaleString() }, said);
}

/** The seconds from a job's first start to its end; null until it has ended. */
export const secondsOf = ({ started_at, finished_at }) => (started_at && finished_at
  ? (Date.parse(finished_at) - Date.parse(started_at)) / 1000 : null);
