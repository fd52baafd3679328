// How the student continues prompts, evaluation by evaluation.

import { h, table } from "./elements.js";

// Evaluations that are shown, the newest first.
const SHOWN = 20;
// White space that is shown as it is, as in a report: an empty line, and an indent.
const [SHOWN_BREAKS, SHOWN_SPACES] = [2, 16];

/** The section of a job's samples, from its events of type samples; null without one. */
export function samplesSection(events) {
  // A run that resumed writes a step again.
  const known = new Map(events.filter(({ type }) => type === "samples")
    .map(({ data }) => [data.step, data.texts]));
  const steps = [...known.keys()].sort((a, b) => b - a);
  if (!steps.length) return null;
  const prompts = known.get(steps[0]).map(({ prompt }) => prompt);
  return [h("h2", {}, "Samples"), ...prompts.map((prompt, at) => [
    h("h3", {}, `Prompt ${at + 1}`),
    h("p", { class: "written" }, visible(prompt.trim()), " …"),
    table(`How the student continues prompt ${at + 1}`, ["Step", "The student writes"],
      steps.slice(0, SHOWN).map((step) => [
        String(step), h("span", { class: "written" }, visible(known.get(step)[at]?.text ?? "")),
      ])),
  ]).flat()];
}

/** The text with marks, such as ↵×12, in place of white space that would leave a page empty. */
function visible(text) {
  if (!text) return "(no text)";
  return text.replace(/\s+/g, (space) => {
    const breaks = space.split(/\r\n|[\n\r\v\f\u2028\u2029]/).length - 1;
    const others = space.length - breaks;
    if (space !== text && breaks <= SHOWN_BREAKS && others <= SHOWN_SPACES) return space;
    return [["↵", breaks], ["␣", others]].filter(([, count]) => count)
      .map(([sign, count]) => `${sign}×${count}`).join(" ");
  });
}
