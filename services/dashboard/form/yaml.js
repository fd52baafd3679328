// The YAML of a job: the library reads it, changes it and writes it, with the comments of the user.

import { isMap, isSeq, parseDocument, visit } from "../vendor/yaml.min.js";

// What YAML 1.1 takes for something else and the service's reader (PyYAML) for a text: y, n, 1e-4,
// 1.5e4, a dot, and dates. The first tag that fits a text decides.
const TEXT = {
  tag: "tag:yaml.org,2002:str", default: true, resolve: (text) => text,
  test: /^(?:[yYnN]|[-+]?(?:\.|[\d_]+[eE][-+]?\d+|[\d_]*\.[\d_]*[eE]\d+)|\d{4}-\d\d?-\d\d?(?:[tT\s].*)?)$/,
};
/** A number with a point in it where it has an exponent: PyYAML takes 1e-7 for a text. */
export const numberText = (value) => String(value).replace(/^(-?\d+)e/, "$1.0e");
/** Write a number as it was read, unless it has changed. */
const stringify = ({ source, value }) =>
  (!Number.isFinite(value) || Number(source) === value ? source : numberText(value));
const isNumber = ({ tag, format }) => tag.endsWith(":float") || format === "TIME";
const customTags = (tags) => [TEXT, ...tags
  .filter(({ tag }) => !tag.endsWith(":omap"))
  .map((tag) => (isNumber(tag) ? { ...tag, stringify } : tag))];
const OPTIONS = { version: "1.1", customTags, prettyErrors: false };
const LAYOUT = { lineWidth: 0, flowCollectionPadding: false };

export const isObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value);
const lineAt = (text, place) => text.slice(0, place).split("\n").length;

/** Read the text of a job: {data}, or {problem: {message, line}} if it is none. */
export function read(text) {
  const document = parseDocument(text, OPTIONS);
  try {
    if (document.errors.length) throw document.errors[0];
    const data = document.toJS() ?? {};
    if (!isObject(data)) throw new TypeError("a job is a mapping of keys to values");
    return { data };
  } catch ({ message, pos = [0] }) {
    return { problem: { message, line: lineAt(text, pos[0]) } };
  }
}

/** Return the text with `value` at a path of keys and indices; undefined removes what is there. */
export function change(text, path, value) {
  const document = parseDocument(text, OPTIONS);
  writeOutAliases(document);
  for (const [depth, key] of path.entries()) makeRoom(document, path.slice(0, depth), key);
  if (value === undefined) {
    if (document.hasIn(path)) document.deleteIn(path);
  } else {
    document.setIn(path, typeof value === "object" ? document.createNode(value) : value);
  }
  return document.toString(LAYOUT);
}

/** Write what an alias stands for in its place, because a change is for one place. */
function writeOutAliases(document) {
  visit(document, { Alias: (_, alias) => document.createNode(alias.resolve(document).toJS(document)) });
  visit(document, { Value: (_, node) => { delete node.anchor; } });
}

/** Let the place hold `key`: a list, if it is an index, else a mapping. */
function makeRoom(document, place, key) {
  const node = document.getIn(place, true);
  const isList = typeof key === "number";
  if (node == null) return;
  if (isList ? isSeq(node) : isMap(node)) {
    if (node.items.length === 0) node.flow = false;
    return;
  }
  const made = document.createNode(isList ? [] : {});
  // A list may be given as its only item.
  if (isList && node.value !== null) made.items.push(node);
  document.setIn(place, made);
}

/** Return the line of what is at a path, or of the nearest section around it; null if none is. */
export function lineOf(text, path) {
  const document = parseDocument(text, OPTIONS);
  for (const outer = [...path]; outer.length > 0; ) {
    const last = String(outer.pop());
    const items = document.getIn(outer, true)?.items ?? [];
    const item = items.find(({ key }, at) => String(key?.value ?? at) === last);
    if (item) return lineAt(text, (item.key ?? item).range[0]);
  }
  return null;
}
