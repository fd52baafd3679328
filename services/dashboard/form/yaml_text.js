// The YAML of a job as text: read as the service's own reader (PyYAML) does, and changed in place.
//
// A change rewrites only the characters of its field, so that comments and layout stay. Each change
// is read again and compared; where it went wrong (aliases, unusual layout) it is made by the
// library, which keeps comments and loses alignment.

import { Document, isAlias, isMap, isScalar, isSeq, parseDocument } from "../vendor/yaml.min.js";

/** A kind of plain scalar; a scalar that has not changed is written as it was read. */
const plain = (name, test, resolve, identify) => ({
  tag: `tag:yaml.org,2002:${name}`, default: true, test, resolve, identify,
  stringify: ({ source, value }) =>
    (source !== undefined && resolve(source) === value ? source : flow(value)),
});
const WORDS = { yes: true, on: true, true: true, no: false, off: false, false: false };
// The plain scalars of YAML 1.1 as PyYAML reads them; 1e-4 is a text to it, 1.0e-4 a number.
const TAGS = [
  plain("null", /^(?:~|null|Null|NULL)?$/, () => null, (value) => value === null),
  plain("bool",
    /^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$/,
    (text) => WORDS[text.toLowerCase()], (value) => typeof value === "boolean"),
  plain("int", /^[-+]?(?:0b[01_]+|0x[\da-fA-F_]+|0[0-7_]+|0|[1-9][\d_]*)$/, integerOf),
  plain("int", /^[-+]?[1-9][\d_]*(?::[0-5]?\d)+$/, sexagesimalOf),
  plain("float", /^(?:[-+]?\d[\d_]*\.[\d_]*|[-+]?\.[\d_]+)(?:[eE][-+]\d+)?$/,
    (text) => Number(text.replaceAll("_", "")), (value) => typeof value === "number"),
];
const OPTIONS = { schema: "failsafe", customTags: TAGS, merge: true, prettyErrors: false };
const LAYOUT = { lineWidth: 0, flowCollectionPadding: false };

function integerOf(text) {
  const digits = text.replaceAll("_", "").replace(/^[-+]/, "");
  const size = Number(/^0[0-7]+$/.test(digits) ? `0o${digits.slice(1)}` : digits);
  return text.startsWith("-") ? -size : size;
}

function sexagesimalOf(text) {
  const parts = text.replaceAll("_", "").replace(/^[-+]/, "").split(":").map(Number);
  const size = parts.reduce((sum, part) => 60 * sum + part, 0);
  return text.startsWith("-") ? -size : size;
}

const documentOf = (text) => parseDocument(text, OPTIONS);

/** Read a text: {data} or, where it is not YAML, {problem: {message, line}}. */
export function read(text) {
  const document = documentOf(text);
  const [error] = document.errors;
  if (error) return { problem: { message: error.message, line: lineOf(text, error.pos[0]) } };
  try {
    return { data: document.toJS() };
  } catch (unreadable) {
    return { problem: { message: unreadable.message, line: 1 } };
  }
}

const lineOf = (text, place) => text.slice(0, place).split("\n").length;

/** Find the key and the value at a path: {start, end, line}; null if the text has none there. */
export function locate(text, path) {
  const found = walk(documentOf(text).contents, path);
  const range = found.rest.length === 0 && path.length && (found.pair?.key ?? found.node)?.range;
  if (!range) return null;
  const end = found.node?.range?.[1] ?? range[1];
  return { start: range[0], end: trimmed(text, range[0], end), line: lineOf(text, range[0]) };
}

/** Write data as new YAML. */
export const write = (data) => new Document(data, OPTIONS).toString(LAYOUT);

/**
 * Return {text, kept} with `value` at a path of keys and indices; undefined removes what is there.
 *
 * `order` gives the keys of a section as they are written, by the path of the section; `isOptional`
 * tells the sections that stay as {} when their last key goes. `kept` is "all" where only the field
 * changed, "comments" where the layout was made anew, "data" where comments were lost.
 */
export function change(text, path, value, order = () => [], isOptional = () => true) {
  const before = read(text).data ?? {};
  const after = changed(before, path, value);
  const holds = (candidate) => same(read(candidate).data ?? {}, after, isOptional);
  const tries = { all: () => splice(text, path, value, order, isOptional),
    comments: () => rewritten(text, path, value) };
  for (const [kept, make] of Object.entries(tries)) {
    const candidate = make();
    if (candidate !== null && holds(candidate)) return { text: candidate, kept };
  }
  return { text: write(after), kept: "data" };
}

// ------------------------------------------------------------------ data

/** Return data with `value` at a path; undefined removes it. */
export function changed(data, path, value) {
  if (path.length === 0) return value;
  const [key, ...rest] = path;
  if (Array.isArray(data) && Number.isInteger(key)) {
    const inner = changed(data[key], rest, value);
    return inner === undefined ? data.toSpliced(key, 1) : data.toSpliced(key, 1, inner);
  }
  const known = isObject(data) ? data : {};
  if (value === undefined && !(key in known)) return data;
  const inner = changed(known[key], rest, value);
  const { [key]: _, ...others } = known;
  return inner === undefined ? others : { ...known, [key]: inner };
}

export const isObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value);

/** Whether two jobs say the same; a section that is always there may be missing or empty. */
function same(one, other, isOptional) {
  const plainOf = (value, path) => {
    if (Array.isArray(value)) return value.map((each, index) => plainOf(each, [...path, index]));
    if (!isObject(value)) return value;
    const entries = Object.entries(value)
      .map(([key, each]) => [key, plainOf(each, [...path, key])])
      .filter(([key, each]) => !(isEmpty(each) && !isOptional([...path, key])));
    return Object.fromEntries(entries.sort(([left], [right]) => (left < right ? -1 : 1)));
  };
  return JSON.stringify(plainOf(one, [])) === JSON.stringify(plainOf(other, []));
}

const isEmpty = (value) => value === null || (isObject(value) && Object.keys(value).length === 0);

// ------------------------------------------------------------------ changes in place

/** Follow a path as far as the nodes go: the last node, its pair and parent, and what is left. */
function walk(node, path) {
  let found = { node, pair: null, parent: null, at: -1 };
  for (const [depth, key] of path.entries()) {
    const next = childOf(found.node, key);
    if (next === null) return { ...found, rest: path.slice(depth) };
    found = { ...next, parent: found.node };
  }
  return { ...found, rest: [] };
}

function childOf(node, key) {
  if (isMap(node)) {
    const at = node.items.findIndex((pair) => isScalar(pair.key) && String(pair.key.value) === key);
    return at < 0 ? null : { node: node.items[at].value, pair: node.items[at], at };
  }
  const item = isSeq(node) ? node.items[key] : undefined;
  return item === undefined ? null : { node: item, pair: null, at: key };
}

function splice(text, path, value, order, isOptional) {
  const document = documentOf(text);
  if (document.errors.length) return null;
  const found = walk(document.contents, path);
  if (isAlias(found.node) && found.rest.length) {
    // What the alias stands for is written out, because the change is for this place alone.
    const place = path.slice(0, path.length - found.rest.length);
    const held = place.reduce((data, key) => data[key], document.toJS());
    return splice(text, place, changed(held, found.rest, value), order, isOptional);
  }
  if (value === undefined) {
    return found.rest.length ? text : removed(text, path, found, order, isOptional);
  }
  if (found.rest.length === 0) return replaced(text, found, value);
  const nested = found.rest.slice(1).reduceRight((inner, key) => ({ [key]: inner }), value);
  return inserted(text, path, found, nested, order);
}

function replaced(text, found, value) {
  const { node, pair, parent } = found;
  if (!pair) {
    if (!node?.range || (!isScalar(node) && !node.flow)) return null;
    return cut(text, node.range[0], trimmed(text, ...node.range), flow(value));
  }
  const keyEnd = pair.key.range[1];
  const end = Math.max(keyEnd, node?.range ? trimmed(text, ...node.range) : keyEnd);
  if (isScalar(node) && end > node.range[0] && !isObject(value)) {
    return cut(text, node.range[0], end, flow(value));
  }
  const colon = text.indexOf(":", keyEnd);
  const from = colon < 0 || colon > end ? keyEnd : colon + 1;
  const written = parent.flow ? ` ${flow(value)}` : after(value, indentOf(text, parent));
  return cut(text, keyEnd, Math.max(end, from), `:${written}`);
}

function inserted(text, path, found, value, order) {
  const { node, rest } = found;
  const [key] = rest;
  if (isSeq(node)) return appended(text, node, value);
  if (node === null || (isScalar(node) && node.value === null)) {
    if (path.length > rest.length) return replaced(text, found, { [key]: value });
    const start = text.trim() ? `${text.trimEnd()}\n` : "";
    return `${start}${quoted(key)}:${after(value, 0)}\n`;
  }
  if (!isMap(node)) {
    return path.length > rest.length ? replaced(text, found, { [key]: value }) : null;
  }
  const entry = quoted(key);
  if (node.items.length === 0) {
    if (!node.flow) return null;
    if (path.length > rest.length && !found.parent?.flow && isObject(value)) {
      return replaced(text, found, { [key]: value });
    }
    return cut(text, node.range[0], node.range[1], `{${entry}: ${flow(value)}}`);
  }
  const names = order(path.slice(0, path.length - rest.length));
  const before = placeBefore(node, key, names);
  if (node.flow) {
    const written = `${entry}: ${flow(value)}`;
    if (before < 0) return cut(text, ...twice(node.items[0].key.range[0]), `${written}, `);
    return cut(text, ...twice(endOfItem(text, node.items[before])), `, ${written}`);
  }
  const indent = indentOf(text, node);
  const written = `${entry}:${after(value, indent)}`;
  if (before < 0) {
    const start = node.items[0].key.range[0];
    return cut(text, start, start, `${written}\n${" ".repeat(indent)}`);
  }
  const end = endOfLine(text, endOfItem(text, node.items[before]));
  return cut(text, end, end, `\n${" ".repeat(indent)}${written}`);
}

/** The number of the item after which a key is written: behind those that stand before it. */
function placeBefore(map, key, names) {
  const place = names.indexOf(key);
  if (place < 0) return map.items.length - 1;
  const places = map.items.map((pair) => names.indexOf(String(pair.key.value)));
  return places.findLastIndex((each) => each >= 0 && each < place);
}

function appended(text, seq, value) {
  const last = seq.items.at(-1);
  if (seq.flow) {
    if (!last) return cut(text, seq.range[0], seq.range[1], `[${flow(value)}]`);
    return cut(text, ...twice(trimmed(text, ...last.range)), `, ${flow(value)}`);
  }
  const column = indentOf(text, seq);
  const end = endOfLine(text, trimmed(text, ...last.range));
  return cut(text, end, end, `\n${" ".repeat(column)}- ${flow(value)}`);
}

function removed(text, path, found, order, isOptional) {
  const { node, pair, parent, at } = found;
  if (parent.items.length === 1) {
    const outer = path.slice(0, -1);
    if (isMap(parent) && outer.length && !isOptional(outer)) {
      return splice(text, outer, undefined, order, isOptional);
    }
    return outer.length ? splice(text, outer, isMap(parent) ? {} : [], order, isOptional) : "";
  }
  const first = pair?.key ?? node;
  const end = pair ? endOfItem(text, pair) : trimmed(text, ...node.range);
  const startOf = (item) => (item.key ?? item).range[0];
  if (parent.flow) {
    const next = parent.items[at + 1];
    if (next) return cut(text, first.range[0], startOf(next), "");
    const previous = parent.items[at - 1];
    return cut(text, endOfItem(text, previous), end, "");
  }
  const line = startOfLine(text, first.range[0]);
  const lead = text.slice(line, first.range[0]);
  if (pair ? lead.trim() === "" : lead.trim() === "-") {
    return cut(text, line, Math.min(endOfLine(text, end) + 1, text.length), "");
  }
  const next = parent.items[at + 1];
  return next ? cut(text, first.range[0], startOf(next), "") : null;
}

/** Let the library make the change: it keeps comments, and writes the layout anew. */
function rewritten(text, path, value) {
  const document = documentOf(text);
  if (document.errors.length) return null;
  try {
    if (value === undefined) document.deleteIn(path);
    else {
      const node = document.getIn(path, true);
      if (isScalar(node) && !isObject(value) && !Array.isArray(value)) node.value = value;
      else document.setIn(path, document.createNode(value));
    }
    return document.toString(LAYOUT);
  } catch {
    return null;
  }
}

// ------------------------------------------------------------------ places and values

const cut = (text, start, end, by) => text.slice(0, start) + by + text.slice(end);
const twice = (place) => [place, place];
const startOfLine = (text, place) => text.lastIndexOf("\n", place - 1) + 1;
const endOfLine = (text, place) => {
  const end = text.indexOf("\n", place);
  return end < 0 ? text.length : end;
};

/** The end of a node without the blanks, line ends and comments behind it. */
const trimmed = (text, start, end) => {
  const inner = text.slice(start, end);
  return start + inner.trimEnd().length;
};

function endOfItem(text, item) {
  if (!item.key) return trimmed(text, ...item.range);
  const { key, value } = item;
  if (!value?.range || value.range[1] <= key.range[1]) {
    const colon = text.slice(key.range[1]).match(/^\s*:/);
    return key.range[1] + (colon ? colon[0].length : 0);
  }
  return trimmed(text, value.range[0], value.range[1]);
}

/** The column of a collection's first item: its key, or its dash. */
function indentOf(text, node) {
  const first = node.items[0]?.key ?? node.items[0];
  const line = startOfLine(text, first.range[0]);
  const lead = text.slice(line, first.range[0]);
  return isSeq(node) ? lead.lastIndexOf("-") : lead.length;
}

/** A value as it stands behind "key:" in a block: on the line, or a section below it. */
function after(value, indent) {
  if (!isObject(value) || Object.keys(value).length === 0) return ` ${flow(value)}`;
  const inner = " ".repeat(indent + 2);
  return Object.entries(value)
    .map(([key, each]) => `\n${inner}${quoted(key)}:${after(each, indent + 2)}`).join("");
}

/** A value on one line. */
function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (isObject(value)) {
    const pairs = Object.entries(value).map(([key, each]) => `${quoted(key)}: ${flow(each)}`);
    return `{${pairs.join(", ")}}`;
  }
  if (typeof value === "string") return quoted(value);
  return typeof value === "number" ? numberText(value) : String(value);
}

/** A number with a point in it where it has an exponent: PyYAML takes 1e-7 for a text. */
export const numberText = (value) => String(value).replace(/^(-?\d+)e/, "$1.0e");

const SAFE = /^[A-Za-z0-9_./][\w./+-]*(?: [\w./+-]+)*$/;
/** A text as YAML: plain where nothing could take it for something else. */
function quoted(text) {
  const isPlain = SAFE.test(text) && !/^\d[\d_]*(?:[.:eE-]|$)/.test(text)
    && !TAGS.some(({ test }) => test.test(text));
  return isPlain ? text : JSON.stringify(text);
}
