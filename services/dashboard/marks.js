// What happened to a job and when: its events as marks on the curves, and as a list below them.

import { get } from "./api.js";
import { fill, h, number, time } from "./elements.js";

// Events of these types are read; "stage" and "profile" only tell the phases (phases.js), and
// "samples" what the student writes (samples.js).
const TYPES = "status,warning,check,checkpoint,evaluation,samples,stage,profile";
// The kinds of marks. Where marks lie on each other, the first kind of this list is shown.
const KINDS = [
  { name: "alarm", sign: "!", title: "alarms" },
  { name: "rollback", sign: "↩", title: "roll-backs" },
  { name: "status", sign: "▶", title: "status" },
  { name: "check", sign: "✓", title: "passed checks" },
  { name: "evaluation", sign: "●", title: "evaluations" },
  { name: "checkpoint", sign: "◆", title: "checkpoints" },
];
const SIGNS = { paused: "‖", pausing: "‖", failed: "✕", cancelled: "✕", succeeded: "■" };
const WIDTH = 24; // pixels of a mark: less would be hard to hit

/** The events of a job, oldest first; each refresh reads only the new ones. */
export class History {
  constructor(id) {
    Object.assign(this, { id, after: "0", events: [] });
  }

  async refresh() {
    for (let more = true; more; ) {
      const query = `types=${TYPES}&limit=1000&after=${this.after}`;
      const page = await get(`/jobs/${this.id}/events?${query}`);
      this.events.push(...page.data);
      this.after = page.next_after;
      more = page.has_more;
    }
  }
}

/** Turn events into marks: {id, ts, step, kind, sign, text}. */
export function marksOf(events) {
  let before = null; // the status before
  const found = [];
  for (const event of events) {
    const kind = kindOf(event);
    if (!kind) continue;
    const text = sentence(event, before);
    const sign = (kind.name === "status" && SIGNS[event.data.status]) || kind.sign;
    found.push({ id: event.id, ts: event.ts, step: event.step, kind: kind.name, sign, text });
    if (event.type === "status") before = event.data.status;
  }
  return found;
}

function kindOf({ type, data }) {
  const named = (name) => KINDS.find((kind) => kind.name === name);
  if (type === "warning" || data.ok === false || data.status === "failed") return named("alarm");
  if (type === "check" && data.check === "spike") return named("rollback");
  return named(type);
}

function sentence({ type, data }, before) {
  if (type === "status") {
    return [data.stage, data.status, changeOf(data, before), data.reason].filter(Boolean).join(" · ");
  }
  if (type === "warning") return data.message;
  if (type === "checkpoint") return "checkpoint saved";
  if (type === "evaluation") return evaluationText(data);
  const remedy = data.ok ? "" : data.remedy;
  return [`${data.check}:`, data.message, remedy].filter(Boolean).join(" ");
}

/** What a client did, if the change of the status tells it. */
function changeOf({ status }, before) {
  const goesOn = ["waiting", "queued", "running"].includes(status);
  if (goesOn && ["paused", "pausing"].includes(before)) return "resumed";
  if (goesOn && ["failed", "cancelled"].includes(before)) return "retried";
  return "";
}

function evaluationText(data) {
  const known = [
    ["perplexity", data.validation_perplexity], ["KL", data.validation_kl],
    ["agreement", data.validation_agreement],
  ].filter(([, value]) => Number.isFinite(value));
  return `evaluation: ${known.map(([name, value]) => `${name} ${number(value)}`).join(", ")}`;
}

const placed = ({ step, text }) => (step == null ? text : `step ${step}: ${text}`);

/**
 * The list of marks, newest first, with a choice of their kinds, which `changed` hears of.
 * The list says all that the marks on the curves say.
 */
export class MarkList {
  constructor(changed) {
    this.marks = [];
    this.hidden = new Set();
    this.list = h("ol", { class: "events", tabindex: 0, "aria-label": "Events" });
    this.options = h("p", { class: "options" });
    this.root = h("section", { hidden: true }, h("h2", {}, "Events"), this.options, this.list);
    this.changed = changed;
  }

  /** The marks of the kinds that are chosen, oldest first. */
  get shown() {
    return this.marks.filter(({ kind }) => !this.hidden.has(kind));
  }

  update(marks) {
    if (marks.length === this.marks.length && marks.at(-1)?.id === this.marks.at(-1)?.id) return;
    this.marks = marks;
    this.draw();
  }

  draw() {
    const there = KINDS.filter(({ name }) => this.marks.some(({ kind }) => kind === name));
    if (this.options.childElementCount !== there.length) {
      this.options.replaceChildren(...there.map((kind) => this.choice(kind)));
    }
    fill(this.list, this.shown.map(line).reverse());
    this.root.hidden = !this.marks.length;
    this.changed(this.shown);
  }

  choice({ name, sign, title }) {
    const change = (event) => {
      if (event.target.checked) this.hidden.delete(name);
      else this.hidden.add(name);
      this.draw();
    };
    return h("label", {},
      h("input", { type: "checkbox", checked: !this.hidden.has(name), onchange: change }),
      " ", h("span", { class: `sign ${name}`, "aria-hidden": "true" }, sign), ` ${title}`);
  }
}

function line({ ts, step, kind, sign, text }) {
  return h("li", kind === "alarm" ? { class: "bad" } : {},
    time(ts), h("span", { class: `sign ${kind}`, "aria-hidden": "true" }, sign), " ",
    h("span", {}, text), step != null && h("span", { class: "quiet" }, ` · step ${step}`));
}

/**
 * Put the marks above a plot; those that would lie on each other become one.
 * Only with `reachable` the Tab key stops at them: the list has the same for the keyboard.
 */
export function placeMarks(plot, layer, marks, reachable) {
  const { left, width } = plot.over.getBoundingClientRect();
  const shift = left - plot.root.getBoundingClientRect().left;
  const first = plot.data[0][0] ?? 0;
  const groups = [];
  const inOrder = marks.filter(({ step }) => step != null).sort((a, b) => a.step - b.step);
  for (const mark of inOrder) {
    const x = plot.valToPos(Math.max(mark.step, first), "x");
    if (!(x >= -1 && x <= width + 1)) continue;
    const group = groups.at(-1);
    if (group && x - group.x < WIDTH) group.marks.push(mark);
    else groups.push({ x, marks: [mark] });
  }
  const buttons = groups.map((group) => markOf(group, reachable));
  groups.forEach(({ x }, at) => {
    buttons[at].style.left = `${Math.round(shift + x - WIDTH / 2)}px`;
    buttons[at].classList.toggle("late", x > width / 2);
  });
  fill(layer, buttons);
}

function markOf({ marks }, reachable) {
  const rank = (mark) => KINDS.findIndex(({ name }) => name === mark.kind);
  const chief = marks.reduce((best, mark) => (rank(mark) < rank(best) ? mark : best));
  const lines = marks.map((mark) => h("span", {}, placed(mark)));
  const close = (event) => {
    if (event.key === "Escape") event.currentTarget.classList.add("closed");
  };
  const open = (event) => event.currentTarget.classList.remove("closed");
  return h("button", {
    type: "button", class: `mark ${chief.kind}`, tabindex: reachable ? 0 : -1,
    onkeydown: close, onblur: open, onpointerleave: open,
  },
    h("span", { "aria-hidden": "true" }, chief.sign, marks.length > 1 && h("sup", {}, marks.length)),
    h("span", { class: "tip" }, lines));
}

/** Draw a line down the plot at each mark that may explain a change of the curves. */
export function drawMarkLines(plot, marks, colourOf) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([2, 4]);
  for (const { step, kind } of marks) {
    if (step == null || !["alarm", "rollback", "status"].includes(kind)) continue;
    const x = plot.valToPos(step, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.strokeStyle = colourOf(kind === "alarm" ? "--bad" : "--quiet");
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
