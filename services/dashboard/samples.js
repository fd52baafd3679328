// How the student continues prompts, evaluation by evaluation.

import { h, table } from "./elements.js";

// Evaluations that are shown, the newest first.
const SHOWN = 20;

/** The section of a job's samples, from its events of type samples; null without one. */
export function samplesSection(events) {
  // A run that resumed writes a step again.
  const known = new Map(events.filter(({ type }) => type === "samples")
    .map(({ data }) => [data.step, data.texts]));
  const steps = [...known.keys()].sort((a, b) => b - a);
  if (!steps.length) return null;
  const prompts = known.get(steps[0]).map(({ prompt }) => prompt);
  return [h("h2", {}, "Samples"), ...prompts.map((prompt, at) => [
    h("p", { class: "written" }, shorten(prompt), " …"),
    table(`How the student continues prompt ${at + 1}`, ["Step", "The student writes"],
      steps.slice(0, SHOWN).map((step) => [
        String(step), h("span", { class: "written" }, shorten(known.get(step)[at]?.text ?? "")),
      ])),
  ]).flat()];
}

/** The text, with the number of line breaks in place of many: a young student may write nothing else. */
const shorten = (text) => text.replace(/\n{3,}/g, (breaks) => `↵×${breaks.length}\n`);
