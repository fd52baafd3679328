// The phases of a job on the axis of time: its stages, with the names that the API gives them, the
// time in which it waits or is paused, and the evaluation of the student at the end of a training.

import { ENDED, duration, h, table, time } from "./elements.js";

const LOST = "worker lost";

/**
 * Return the phases of a job: [{name, from, until, parts: [{text, from, until}]}], in milliseconds.
 * A part is what the run says that it does. `now` ends the last phase of a job that has not ended.
 */
export function phasesOf(events, now) {
  const found = [];
  let status = null;
  let stage = null;
  let profiled = false; // a training, which alone says so, is over, and its student is evaluated
  let heard = null; // the time of the last event
  const begin = (name, text, at) => {
    const last = found.at(-1);
    if (last) last.until = at;
    if (last?.name !== name) found.push({ name, from: at, until: at, parts: [] });
    const { parts } = found.at(-1);
    if (parts.length) parts.at(-1).until = at;
    if (text && parts.at(-1)?.text !== text) parts.push({ text, from: at, until: at });
  };
  const end = (at) => {
    const last = found.at(-1);
    if (!last) return;
    last.until = at;
    if (last.parts.length) last.parts.at(-1).until = at;
  };
  for (const { type, ts, data } of events) {
    const at = Date.parse(ts);
    // From its last event until its lease ended the worker did nothing that anybody knows of.
    if ([data.error, data.error?.type].includes("worker_lost")) begin(LOST, "", heard ?? at);
    heard = at;
    if (type === "status") {
      if (data.status === "running" && status !== "running") profiled = false;
      // It has ended before, and somebody continues it: the time between is no part of a phase.
      if (ENDED.includes(status)) begin(status, "", found.at(-1)?.until ?? at);
      ({ status, stage } = data);
      if (ENDED.includes(status)) end(at);
      else begin(phaseOf(status, stage, profiled), "", at);
    } else if (type === "profile") {
      profiled = true;
      begin(phaseOf(status, stage, profiled), "", at);
    } else if (type === "stage" && status && !ENDED.includes(status)) {
      // A running count follows the colon: one part, not one for each count.
      begin(phaseOf(status, stage, profiled), String(data.phase ?? "").split(":")[0], at);
    }
  }
  if (status && !ENDED.includes(status)) end(now);
  return found;
}

function phaseOf(status, stage, profiled) {
  if (["waiting", "queued"].includes(status)) return "waiting";
  if (status === "paused") return status;
  return profiled ? "evaluation" : stage;
}

/** Draw the phases as a bar whose widths are times, with a table of the same below it. */
export function phaseSection(phases) {
  const [first, last] = [phases[0], phases.at(-1)];
  const whole = last.until - first.from;
  const seconds = ({ from, until }) => duration((until - from) / 1000);
  const said = phases.map((phase) => `${phase.name} ${seconds(phase)}`).join(", ");
  const bars = phases.map((phase) => {
    const part = h("span", { class: `phase ${phase.name}`, title: `${phase.name}, ${seconds(phase)}` },
      phase.name);
    // A style attribute would break the page's policy; this does not.
    part.style.flexGrow = (phase.until - phase.from) / Math.max(whole, 1);
    return part;
  });
  const rows = phases.flatMap((phase) => [
    [h("strong", {}, phase.name), time(iso(phase.from)), seconds(phase)],
    ...phase.parts.map((part) => [h("span", { class: "part" }, part.text), time(iso(part.from)), seconds(part)]),
  ]);
  return [
    h("h2", {}, "Phases"),
    h("div", { class: "phases", role: "img", "aria-label": `Phases over time: ${said}.` }, bars),
    h("p", { class: "ends" }, time(iso(first.from)), h("span", {}, `${seconds({ from: first.from, until: last.until })} in all`)),
    h("details", {}, h("summary", {}, "Phases as a table"),
      table("Phases", ["Phase", "Began", "Took"], rows)),
  ];
}

const iso = (milliseconds) => new Date(milliseconds).toISOString();
