// report.md as elements: the Markdown that reports are written in, and no more. Its text goes into text nodes alone.

import { h, table } from "./elements.js";

const HEADING = /^(#{2,4}) (.+)/;
const PICTURE = /^!\[(.*)\]\((.*)\)$/;
const INDENT = "    ";
const starts = (line) => !line.trim() || /^(#|\||- |!\[| {4})/.test(line);

/** The blocks of a report; `picture(name, title)` makes the element of a picture that lies beside it, or null. */
export function blocks(markdown, picture) {
  const lines = markdown.split("\n");
  const found = [];
  /** The next line, and those after it that are of its kind. */
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
    } else if (line.startsWith("|")) found.push(tableOf(run((next) => next.startsWith("|"))));
    else if (line.startsWith("- ")) {
      found.push(h("ul", {}, run((next) => next.startsWith("- ")).map((item) => h("li", {}, inline(item.slice(2))))));
    } else if (line.startsWith(INDENT)) {
      const quoted = run((next) => next.startsWith(INDENT)).map((each) => each.slice(INDENT.length));
      found.push(h("pre", { tabindex: 0 }, quoted.join("\n")));
    } else found.push(h("p", {}, inline(run((next) => !starts(next)).join(" "))));
  }
  return found.filter((block) => block != null);
}

/** Text, and code between backticks. */
const inline = (text) => text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));

function tableOf(lines) {
  const cells = (line) => line.replace(/^\||\|\s*$/g, "").split(/(?<!\\)\|/).map((cell) => inline(cell.trim().replaceAll("\\|", "|")));
  const [heads, , ...rows] = lines.map(cells);
  return table("A table of the report", heads, rows);
}
