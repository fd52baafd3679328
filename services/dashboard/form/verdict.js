// What the server says of a job before it is created: its plan, or its problems with their places.

import { Refused } from "../api.js";
import { bytes, duration, facts, h, number } from "../elements.js";

/** The plan of a job as elements. */
export function planOf(plan) {
  const { stages, steps, tokens, capture, memory, cost, free_bytes, warnings, learned } = plan;
  const parameters = memory.student_parameters;
  const estimated = cost?.estimated;
  return [
    h("p", { class: "good" }, "This job would be accepted."),
    ...warnings.map((warning) => h("p", { class: "warning" }, warning)),
    facts([
      ["Stages", stages.join(", then ")],
      ["Steps", number(steps)],
      ["Tokens read", number(tokens)],
      ["Cache", bytes(capture?.bytes)],
      ["Bytes per token", number(capture?.bytes_per_token, 3)],
      ["Capture", duration(capture?.seconds)],
      ["Student", parameters ? `${number(parameters, 3)} parameters` : null],
      ["Student in training", bytes(memory.student_bytes)],
      ["Teacher's weights", bytes(memory.teacher_bytes)],
      ["Estimated cost", number(estimated)],
      ["Disk free", bytes(free_bytes)],
    ]),
    ...learnedOf(learned),
  ];
}

/** The first rows of chats, with what is learned of them marked. */
function learnedOf(rows) {
  return rows.length === 0 ? [] : [
    h("h3", {}, "What is learned, marked"),
    ...rows.map(({ where, pieces }) => h("figure", { class: "learned" },
      h("figcaption", { class: "quiet" }, where),
      h("pre", {}, pieces.map(({ text, learned }) => learned ? h("mark", {}, text) : text)))),
  ];
}

/** The problems in an error of a request, each {pointer, text}; null is no place in the job. */
export function problemsOf(error) {
  if (!(error instanceof Refused)) return [{ pointer: null, text: "The server does not answer." }];
  const { errors = [], remedy } = error.problem;
  if (errors.length === 0) {
    return [{ pointer: null, text: `${error.message} ${remedy ?? ""}`.trim() }];
  }
  return errors.map(({ pointer, detail, remedy: advice }) =>
    ({ pointer: pointer ?? "", text: `${detail} ${advice ?? ""}`.trim() }));
}

/**
 * The pointer of the field that a problem is about.
 *
 * A rule for several fields is reported at the section or the job; its text names the fields, such
 * as train.max_steps, and `isField` tells which pointers are fields.
 */
export function fieldOf({ pointer, text }, isField, isSection) {
  if (pointer && !isSection(pointer)) return pointer;
  const names = text.match(/[a-z_][\w]*(?:\.[\w]+)*/g) ?? [];
  const places = names.flatMap((name) => {
    const tail = `/${name.replaceAll(".", "/")}`;
    return [tail, `${pointer}${tail}`];
  });
  const named = places.filter((place) => place.startsWith(pointer) && isField(place));
  return named[0] ?? pointer;
}
