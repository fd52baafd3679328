// Elements and how numbers are written. Text from the server goes into text nodes alone: names are not to be trusted.

/** An element: attributes, listeners (functions, as onclick), and children, of which null and false are left out. */
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

/** Put children into a box where they differ from what it holds; who stands on a link or button stays there. */
export function fill(box, ...children) {
  const fresh = box.cloneNode(false);
  fresh.append(...children.flat().filter((child) => child != null && child !== false));
  if (box.isEqualNode(fresh)) return;
  const nameOf = (element) => element.href ?? element.textContent;
  const held = box.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  box.replaceChildren(...fresh.childNodes);
  if (held !== null) [...box.querySelectorAll("a, button")].find((element) => nameOf(element) === held)?.focus();
}

/** A table in a box that scrolls by itself where the window is narrow. */
export function table(caption, heads, rows) {
  return h("div", { class: "scroll" },
    h("table", {},
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell ?? "")))))));
}

/** Terms and what they are; those that are not known are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value != null && value !== "");
  return h("dl", { class: "facts" }, known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export const chip = (status) => h("span", { class: `chip ${status}` }, status);

/** A bar with its share beside it; nothing where there is nothing to count. */
export function bar(progress) {
  if (progress?.fraction == null) return null;
  const share = percent(progress.fraction);
  return h("span", { class: "progress" },
    h("progress", { max: 1, value: progress.fraction, "aria-label": share }), h("span", {}, share));
}

const missing = (value) => value == null || !Number.isFinite(value);

export const percent = (value, digits = 0) => (missing(value) ? null : `${(100 * value).toFixed(digits)}%`);

export function number(value, digits = 4) {
  if (missing(value)) return null;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
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
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export const time = (text) => (text ? h("time", { datetime: text }, new Date(text).toLocaleString()) : null);
