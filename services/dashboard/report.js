// Turns report.md into elements. It knows only the Markdown that reports use, and writes text only
// into text nodes.

import { h, table } from "./elements.js";

const HEADING = /^(#{2,4}) (.+)/;
const PICTURE = /^!\[(.*)\]\((.*)\)$/;
const INDENT = "    ";
const WARNING = /^> (.+)/;
const FENCE = /^(`{3,})\w*$/;
const starts = (line) => !line.trim() || /^(#|\||- |> |!\[| {4}|```)/.test(line);

/** Make the warnings of a report, which are its quoted lines, for the top of the page. */
export function warnings(markdown) {
  const told = markdown.split(/^## /m)[0].split("\n").filter((line) => WARNING.test(line));
  return told.map((line) => h("p", { class: "error", role: "alert" }, inline(line.slice(2))));
}

/** Make the elements of a report; `picture(name, title)` makes those of its pictures, or null. */
export function blocks(markdown, picture) {
  const lines = markdown.split("\n");
  const found = [];
  /** Take the next line, and the lines after it for which `same` is true. */
  const run = (same) => {
    let end = 1;
    while (end < lines.length && same(lines[end])) end += 1;
    return lines.splice(0, end);
  };
  while (lines.length) {
    const [line] = lines;
    if (!line.trim()) lines.shift();
    else if (HEADING.test(line)) {
      const [, { length }, text] = HEADING.exec(lines.shift());
      found.push(h(`h${length + 1}`, {}, inline(text)));
    } else if (PICTURE.test(line)) {
      const [, title, name] = PICTURE.exec(lines.shift());
      found.push(picture(name, title));
    } else if (WARNING.test(line)) {
      found.push(h("p", { class: "error" }, inline(lines.shift().slice(2))));
    } else if (line.startsWith("|")) {
      found.push(tableOf(run((next) => next.startsWith("|"))));
    } else if (line.startsWith("- ")) {
      const items = run((next) => next.startsWith("- "));
      found.push(h("ul", {}, items.map((item) => h("li", {}, inline(item.slice(2))))));
    } else if (FENCE.test(line)) {
      const [, mark] = FENCE.exec(lines.shift());
      const end = lines.includes(mark) ? lines.indexOf(mark) : lines.length;
      found.push(h("pre", { tabindex: 0 }, lines.splice(0, end).join("\n")));
      lines.shift();
    } else if (line.startsWith(INDENT)) {
      const quoted = run((next) => next.startsWith(INDENT));
      const text = quoted.map((each) => each.slice(INDENT.length)).join("\n");
      found.push(h("pre", { tabindex: 0 }, text));
    } else {
      found.push(h("p", {}, inline(run((next) => !starts(next)).join(" "))));
    }
  }
  return found.filter((block) => block != null);
}

/** Turn text between backticks into code elements. */
const inline = (text) =>
  text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));

function tableOf(lines) {
  const cellOf = (text) => inline(text.trim().replaceAll("\\|", "|"));
  // A cell ends at a bar that has no backslash before it.
  const cellsOf = (line) => line.replace(/^\||\|\s*$/g, "").split(/(?<!\\)\|/).map(cellOf);
  const [titles, , ...rows] = lines.map(cellsOf);
  return table("A table of the report", titles, rows);
}
