// The grid of all shards of a cache. One cell can be chosen with the arrow keys or the mouse; it
// says what it stands for, and opens the records of its first sequence.

import { Refused, get } from "./api.js";
import { fill, h, itemAfter, number, time } from "./elements.js";

// The states by their digit in the answer, from the best to the worst.
const STATES = ["sealed", "missing", "in work", "corrupt"];
const NAMES = ["sealed", "missing", "in_work", "corrupt"];
const NAMED = 12;

export function shardSection(path, openSequence) {
  const summary = h("p", { class: "legend" });
  const about = h("p", { class: "quiet" });
  const said = h("p", { "aria-live": "polite" });
  const cells = h("div", {
    class: "shards", role: "listbox", tabindex: 0, "aria-label": "Shards", onkeydown: move,
    onclick: ({ target }) => choose([...cells.children].indexOf(target)),
    ondblclick: () => open(),
  });
  const button = h("button", { type: "button", hidden: true, onclick: () => open() },
    "Records of this shard");
  const root = h("section", { "aria-labelledby": "shards" },
    h("h2", { id: "shards" }, "Shards"), summary, cells, said, button, about);
  let known = null; // what the grid was drawn for
  let states = null;
  let chosen = -1;

  /** Read the states again, unless they are those of `version`; false: they change all the time. */
  async function refresh(version) {
    if (version && version === known) return;
    try {
      states = await get(`${path}/shards`);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      fill(about, h("span", { class: "error breaks" }, error.message));
      return;
    }
    known = version;
    draw();
  }

  function draw() {
    fill(summary, NAMES.map((name, at) => (at === 0 || states.counts[name] > 0) && h("span", {},
      h("i", { class: `cell state-${at}`, "aria-hidden": "true" }),
      `${number(states.counts[name])} ${STATES[at]}`)));
    // A cell of a known place only changes its state, so that the chosen one stays.
    const digits = [...states.cells];
    while (cells.children.length > digits.length) cells.lastChild.remove();
    for (const [at, digit] of digits.entries()) {
      const cell = cells.children[at] ?? cells.appendChild(
        h("span", { role: "option", id: `shard-${at}`, "aria-selected": "false" }));
      cell.className = `cell state-${digit}`;
      cell.ariaLabel = nameOf(at);
      cell.title = nameOf(at);
    }
    cells.hidden = digits.length === 0;
    fill(about, aboutOf(states));
    if (chosen >= digits.length) chosen = -1;
    if (chosen >= 0) tell();
  }

  const shardsOf = (at) => [
    at * states.cell_shards, Math.min((at + 1) * states.cell_shards, states.shards) - 1,
  ];
  function nameOf(at) {
    const [first, last] = shardsOf(at);
    const state = STATES[states.cells[at]];
    if (first === last) return `Shard ${first}: ${state}`;
    return `Shards ${first} to ${last}: ${state === "sealed" ? "all sealed" : `some ${state}`}`;
  }

  function choose(at) {
    if (at < 0) return;
    cells.children[chosen]?.setAttribute("aria-selected", "false");
    chosen = at;
    cells.children[at].setAttribute("aria-selected", "true");
    cells.setAttribute("aria-activedescendant", `shard-${at}`);
    cells.children[at].scrollIntoView({ block: "nearest" });
    tell();
  }

  function tell() {
    const size = states.shard_sequences;
    const first = shardsOf(chosen)[0] * (size ?? 0);
    said.textContent = nameOf(chosen) + (size ? `; it begins with sequence ${number(first)}` : "");
    button.hidden = !states.complete || !size;
  }

  function open() {
    if (chosen >= 0 && !button.hidden) openSequence(shardsOf(chosen)[0] * states.shard_sequences);
  }

  function move(event) {
    const width = getComputedStyle(cells).gridTemplateColumns.split(" ").length;
    const next = itemAfter(event.key, chosen, cells.children.length, width);
    // Without a chosen cell every arrow chooses the first.
    if (next !== null) choose(chosen < 0 ? 0 : next);
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
  }
  return { root, refresh };
}

function aboutOf(states) {
  const lines = [];
  if (states.cell_shards > 1) {
    lines.push(`A cell stands for ${number(states.cell_shards)} shards, and shows the worst of them. `);
  }
  if (!states.complete) {
    lines.push(states.captured ? "A process of this host captures the cache now. "
      : "No process of this host captures the cache now. ");
  } else if (states.measured) {
    lines.push("The sizes of all files were compared with the seals. ");
  } else {
    lines.push("With this many shards, only the presence of the seals was checked. ");
  }
  if (states.verified_at) lines.push("Last job that verified every byte: ", time(states.verified_at), ". ");
  for (const [name, title] of [["corrupt", "Corrupt"], ["in_work", "In work"]]) {
    const numbers = states[name];
    if (!numbers.length) continue;
    const more = states.counts[name] > NAMED ? ", …" : "";
    lines.push(`${title}: ${numbers.slice(0, NAMED).join(", ")}${more}. `);
  }
  return lines;
}
