// A new job: its JSON, checked by the server before it is posted.

import { Refused, get, post } from "./api.js";
import { bytes, duration, facts, h, number } from "./elements.js";

const EXAMPLE = {
  kind: "distill",
  name: "mine",
  teacher: { model: "examples/austen/teacher" },
  student: { init: { layers: 2, hidden_size: 128 } },
  data: { train: ["examples/austen/text/prideprejudice.txt"], validation: "examples/austen/text/persuasion.txt", sequence_length: 256 },
  train: { max_steps: 200, batch_size: 8, learning_rate: 0.003, warmup_steps: 20, eval_steps: 50 },
};

export function newPage(_, from) {
  const editor = h("textarea", { rows: 24, spellcheck: "false", "aria-label": "The job, as JSON" });
  const answer = h("div", { "aria-live": "polite" });
  editor.value = JSON.stringify(EXAMPLE, null, 2);

  const tried = (act) => async () => {
    answer.replaceChildren();
    try {
      answer.replaceChildren(await act(text(editor)));
    } catch (error) {
      answer.replaceChildren(whatIsWrong(error));
    }
  };
  const validate = tried(async (body) => planOf(await post("/jobs/validate", body)));
  const submit = tried(async (body) => {
    const job = await post("/jobs", body);
    location.hash = `#/jobs/${job.id}`;
    return h("p", {}, "Taken.");
  });
  const element = h("div", {},
    h("h1", {}, "New job"),
    h("p", {}, "Models and texts are paths on the server, or ids of the hub. Everything left out has its default."),
    editor,
    h("p", {}, h("button", { type: "button", onclick: validate }, "Check"), " ", h("button", { type: "button", class: "main", onclick: submit }, "Post")),
    answer);

  async function refresh() {
    if (from) editor.value = JSON.stringify((await get(`/jobs/${from}`)).config, null, 2);
    return false;
  }
  return { element, refresh };
}

/** The editor's text, which must be JSON. */
function text(editor) {
  JSON.parse(editor.value);
  return editor.value;
}

function planOf({ stages, steps, tokens, capture, memory, free_bytes, warnings }) {
  return h("div", {},
    h("p", { class: "good" }, "It would be taken."),
    warnings.map((warning) => h("p", { class: "error" }, warning)),
    facts([
      ["Stages", stages.join(", then ")],
      ["Steps", number(steps)],
      ["Tokens read", number(tokens)],
      ["Cache", bytes(capture?.bytes)],
      ["Bytes per token", number(capture?.bytes_per_token, 3)],
      ["Capture", duration(capture?.seconds)],
      ["Student", memory.student_parameters ? `${number(memory.student_parameters, 3)} parameters` : null],
      ["Disk free", bytes(free_bytes)],
    ]));
}

function whatIsWrong(error) {
  if (error instanceof SyntaxError) return h("p", { class: "error" }, `This is not JSON: ${error.message}.`);
  if (!(error instanceof Refused)) return h("p", { class: "error" }, "The server does not answer.");
  const { errors = [], remedy, title } = error.problem;
  return h("div", { class: "error", role: "alert" },
    h("p", {}, errors.length ? `${title}:` : error.message), remedy && h("p", {}, remedy),
    h("ul", {}, errors.map((each) => h("li", {}, h("code", {}, each.pointer || "/"), ` ${each.detail} ${each.remedy}`))));
}
