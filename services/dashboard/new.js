// The page of a new job: its JSON, which the server can check before the job is created.

import { Refused, get, post } from "./api.js";
import { bytes, duration, facts, h, number } from "./elements.js";
import { go, query } from "./paths.js";

const EXAMPLE = {
  kind: "distill",
  name: "mine",
  teacher: { model: "examples/austen/teacher" },
  student: { init: { layers: 2, hidden_size: 128 } },
  data: {
    train: ["examples/austen/text/prideprejudice.txt"],
    validation: "examples/austen/text/persuasion.txt",
    sequence_length: 256,
  },
  train: { max_steps: 200, batch_size: 8, learning_rate: 0.003, warmup_steps: 20, eval_steps: 50 },
};

export function newPage() {
  const from = query().get("from");
  const attributes = { rows: 24, spellcheck: "false", "aria-label": "The job, as JSON" };
  const editor = h("textarea", attributes);
  const answer = h("div", { "aria-live": "polite" });
  editor.value = JSON.stringify(EXAMPLE, null, 2);

  const withErrors = (act) => async () => {
    answer.replaceChildren();
    try {
      answer.replaceChildren(await act(text(editor)));
    } catch (error) {
      answer.replaceChildren(problemOf(error));
    }
  };
  const validate = withErrors(async (body) => planOf(await post("/jobs/validate", body)));
  const submit = withErrors(async (body) => {
    const job = await post("/jobs", body);
    go(`/jobs/${job.id}`);
    return h("p", {}, "The job is created.");
  });
  const element = h("div", {},
    h("h1", {}, "New job"),
    h("p", {}, "Models and texts are paths on the server or hub ids. Other values have defaults."),
    editor,
    h("p", {},
      h("button", { type: "button", onclick: validate }, "Check"), " ",
      h("button", { type: "button", class: "main", onclick: submit }, "Create")),
    answer);

  async function refresh() {
    if (from) editor.value = JSON.stringify((await get(`/jobs/${from}`)).config, null, 2);
    return false;
  }
  return { title: "New job", element, refresh };
}

/** Return the editor's text; throws a SyntaxError if it is not JSON. */
function text(editor) {
  JSON.parse(editor.value);
  return editor.value;
}

function planOf({ stages, steps, tokens, capture, memory, free_bytes, warnings }) {
  const parameters = memory.student_parameters;
  return h("div", {},
    h("p", { class: "good" }, "This job would be accepted."),
    warnings.map((warning) => h("p", { class: "error" }, warning)),
    facts([
      ["Stages", stages.join(", then ")],
      ["Steps", number(steps)],
      ["Tokens read", number(tokens)],
      ["Cache", bytes(capture?.bytes)],
      ["Bytes per token", number(capture?.bytes_per_token, 3)],
      ["Capture", duration(capture?.seconds)],
      ["Student", parameters ? `${number(parameters, 3)} parameters` : null],
      ["Disk free", bytes(free_bytes)],
    ]));
}

function problemOf(error) {
  if (error instanceof SyntaxError) {
    return h("p", { class: "error" }, `This is not JSON: ${error.message}.`);
  }
  if (!(error instanceof Refused)) return h("p", { class: "error" }, "The server does not answer.");
  const { errors = [], remedy, title } = error.problem;
  const itemOf = ({ pointer, detail, remedy: advice }) =>
    h("li", {}, h("code", {}, pointer || "/"), ` ${detail} ${advice}`);
  return h("div", { class: "error", role: "alert" },
    h("p", {}, errors.length ? `${title}:` : error.message),
    remedy && h("p", {}, remedy),
    h("ul", {}, errors.map(itemOf)));
}
