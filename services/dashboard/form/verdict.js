// What the server says of a job before it is created: its plan, or its problems with their places.

import { Refused, reasonOf } from "../api.js";
import { bytes, duration, facts, h, number } from "../elements.js";

/** The JSON pointer (RFC 6901) of a path of keys and indices, such as /data/train/0. */
export const pointerOf = (path) =>
  path.map((key) => `/${String(key).replaceAll("~", "~0").replaceAll("/", "~1")}`).join("");

export const pathOf = (pointer) => pointer.split("/").slice(1)
  .map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"))
  .map((key) => (/^\d+$/.test(key) ? Number(key) : key));

/** The plan of a job as elements. */
export function planOf(plan) {
  const { stages, steps, tokens, capture, memory, cost, free_bytes, warnings, learned } = plan;
  const parameters = memory.student_parameters;
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
      ["Estimated cost", number(cost?.estimated)],
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
  const errors = error instanceof Refused ? error.problem.errors ?? [] : [];
  if (errors.length === 0) return [{ pointer: null, text: reasonOf(error) }];
  return errors.map(({ pointer, detail, remedy }) =>
    ({ pointer: pointer ?? "", text: `${detail} ${remedy ?? ""}`.trim() }));
}

/** The pointer of the field that a problem is about; `find` returns the element of a field. */
export function fieldOf({ pointer, text }, find) {
  // A rule for several fields is reported at the section or the job, and its text names the fields.
  if (pointer && !find(pointer)?.querySelector("[data-path]")) return pointer;
  const names = text.match(/[a-z_][\w]*(?:\.[\w]+)*/g) ?? [];
  const places = names.map((name) => `/${name.replaceAll(".", "/")}`)
    .flatMap((tail) => [tail, `${pointer}${tail}`]);
  return places.find((place) => place.startsWith(pointer) && find(place)) ?? pointer;
}
