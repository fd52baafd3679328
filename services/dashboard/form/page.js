// The page of a new job: a form and the job's YAML beside it, the server's verdict, and the job as
// commands. The YAML is the truth: the form shows what stands in it, and changes it.

import { Refused, askForKey, get, post } from "../api.js";
import { h } from "../elements.js";
import { go, query } from "../paths.js";
import { commandsBox } from "./commands.js";
import { sectionBody } from "./controls.js";
import { readSchema } from "./schema.js";
import { fieldOf, pathOf, planOf, problemsOf } from "./verdict.js";
import { change, lineOf, read } from "./yaml.js";

// The pause after a change before the server is asked, in milliseconds.
const CHECK_MS = 700;
// The pause before it is asked again after it refused to answer.
const AGAIN_MS = 10_000;
const DRAFT = "potstill-draft";

/** Fill the page: load the schema, the templates and the job to begin with, and show them. */
export async function fillPage(element) {
  const from = query().get("from");
  const [openapi, { data: templates }, known] = await Promise.all([
    get("/openapi.json"), get("/templates"), from ? copyOf(from) : sessionStorage.getItem(DRAFT),
  ]);
  const { job, examples } = readSchema(openapi);
  const texts = [...templates, ...examples];
  const page = new NewJob(job, texts);
  element.replaceChildren(h("h1", {}, from ? "Copy of another job" : "New job"), ...page.elements);
  page.begin(known ?? texts.find(({ name }) => name === "distill").text, known !== null);
}

/** The YAML of another job: its settings that are not the defaults. */
async function copyOf(id) {
  // A job of another version may have settings that this server does not know: it is shown whole.
  const settings = await get(`/jobs/${id}/settings`).catch(() => null);
  if (settings === null) return change("", [], (await get(`/jobs/${id}`)).config);
  return settings.data.reduce((text, { name, value }) => change(text, name.split("."), value), "");
}

class NewJob {
  constructor(job, texts) {
    Object.assign(this, { job, texts });
    this.editor = h("textarea", {
      rows: 24, spellcheck: "false", wrap: "off", "aria-label": "The job, as YAML",
      "aria-describedby": "yaml-problem", oninput: () => {
        this.edited();
        this.drawForm();
      },
    });
    this.form = h("div");
    this.unreadable = h("p", { id: "yaml-problem", class: "error" });
    this.state = h("p", { class: "state", role: "status" });
    this.verdict = h("div", { class: "verdict" });
    this.problems = h("div", { class: "problems" });
    this.commands = commandsBox();
    this.creating = h("button", { type: "button", class: "main", onclick: () => this.create() }, "Create");
    const template = h("select", { id: "template", onchange: () => this.choose(template) },
      h("option", { value: "" }, "Start with …"),
      this.texts.map(({ name, title }) => h("option", { value: name }, `${name}: ${title}`)));
    const toYaml = { type: "button", class: "link to-yaml", onclick: () => this.editor.focus() };
    this.elements = [
      h("div", { class: "choices" }, h("label", {}, "Template ", template)),
      h("div", { class: "act" }, this.state, h("button", toYaml, "YAML"), this.creating),
      this.problems,
      h("div", { class: "columns" },
        h("fieldset", { class: "parts" }, h("legend", { class: "hidden" }, "The job's fields"), this.form),
        h("div", { class: "side" }, this.editor, this.unreadable, this.verdict, this.commands.element)),
    ];
  }

  // ---------------------------------------------------------------- the text and the form

  /** Show a text; `check` asks the server about it at once, else it waits for the first change. */
  begin(text, check) {
    this.began = text;
    this.editor.value = text;
    this.form.replaceChildren();
    this.readText();
    this.drawForm();
    if (check) this.plan();
    else this.state.textContent = "Fill in the empty fields, or start with an example.";
  }

  choose(select) {
    const found = this.texts.find(({ name }) => name === select.value);
    select.value = "";
    const edited = this.editor.value !== this.began;
    if (!found || (edited && !confirm(`Replace what you wrote by "${found.name}"?`))) return;
    sessionStorage.removeItem(DRAFT);
    this.showProblems([]);
    this.verdict.replaceChildren();
    this.begin(found.text, found.name.startsWith("example"));
  }

  /** Keep a text that was edited, read it, and have it checked. */
  edited() {
    sessionStorage.setItem(DRAFT, this.editor.value);
    this.readText();
    this.state.textContent = this.data ? "Checking …" : "The YAML cannot be read.";
    this.planAfter(CHECK_MS);
  }

  /** Read the text; the form waits while that cannot be done. */
  readText() {
    const { data = null, problem } = read(this.editor.value);
    this.data = data;
    this.form.parentElement.disabled = data === null;
    this.creating.disabled = data === null;
    this.unreadable.textContent = problem
      ? `Line ${problem.line}: ${problem.message}. The form waits until the YAML can be read.` : "";
    this.commands.show(data && { text: this.editor.value, data });
  }

  /** Draw the form anew; parts that were opened stay open. */
  drawForm() {
    if (this.data === null) return;
    const opened = [...this.form.querySelectorAll("details[open]")].map(({ id }) => id);
    this.form.replaceChildren(sectionBody(this.job, [], this.data, {
      change: (path, value) => {
        this.editor.value = change(this.editor.value, path, value);
        this.edited();
      },
      valueAt: (path) => path.reduce((data, key) => data?.[key], this.data),
    }));
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  }

  // ---------------------------------------------------------------- the server's verdict

  planAfter(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.plan(), milliseconds);
  }

  /** Ask for the plan of the job, and show it unless the job has changed meanwhile. */
  async plan() {
    const { data } = this;
    // A page that was left asks nothing.
    if (data === null || !this.form.isConnected) return;
    const show = await post("/jobs/validate", JSON.stringify(data)).then(
      (plan) => () => this.showPlan(plan), (error) => () => this.showRefusal(error));
    if (data === this.data && this.form.isConnected) show();
  }

  showPlan(plan) {
    this.showProblems([]);
    this.state.textContent = plan.warnings.length ? "Accepted, with warnings" : "Accepted";
    this.verdict.replaceChildren(...planOf(plan));
  }

  async showRefusal(error) {
    this.verdict.replaceChildren();
    if (error instanceof Refused && error.status === 401) {
      await askForKey(error.message);
      this.planAfter(CHECK_MS);
      return;
    }
    const problems = problemsOf(error);
    this.showProblems(problems);
    if (problems.some(({ pointer }) => pointer === null)) {
      this.state.textContent = "Not checked";
      this.planAfter(AGAIN_MS);
    }
  }

  /** Show problems at their fields, and as a list at the top whose links lead to them. */
  showProblems(problems) {
    for (const slot of this.form.querySelectorAll(".problem")) slot.textContent = "";
    for (const entry of this.form.querySelectorAll("[aria-invalid]")) entry.removeAttribute("aria-invalid");
    const rows = problems.map(({ pointer, text }) => {
      const name = pointer === null ? "" : fieldOf({ pointer, text }, (each) => this.at(each));
      const shown = this.nearest(name);
      const slot = this.at(shown)?.querySelector(":scope > .problem");
      slot?.append(slot.textContent && " ", text);
      entryOf(this.at(shown))?.setAttribute("aria-invalid", "true");
      const line = pointer && lineOf(this.editor.value, pathOf(pointer));
      const dotted = pathOf(name).join(".");
      return h("li", {},
        shown ? linkTo(dotted, () => this.reveal(shown)) : h("code", {}, dotted), " ",
        line && linkTo(`line ${line}`, () => this.select(line)), ` ${text}`);
    });
    const count = rows.length === 1 ? "1 problem" : `${rows.length} problems`;
    if (rows.length) this.state.textContent = count;
    this.problems.replaceChildren(...(rows.length ? [h("h2", { class: "hidden" }, count), h("ul", {}, rows)] : []));
  }

  at(pointer) {
    return this.form.querySelector(`[data-path="${CSS.escape(pointer)}"]`);
  }

  /** The pointer of a field, or of the nearest section around it; empty if there is none. */
  nearest(pointer) {
    if (!pointer || this.at(pointer)) return pointer;
    return this.nearest(pointer.slice(0, pointer.lastIndexOf("/")));
  }

  /** Open what is around a field, and go to it. */
  reveal(pointer) {
    const field = this.at(pointer);
    for (let outer = field; outer !== this.form; outer = outer.parentElement) {
      if (outer.tagName === "DETAILS") outer.open = true;
    }
    const entry = entryOf(field) ?? field.querySelector(":scope > .line > .kind, :scope > summary");
    entry.focus();
    entry.scrollIntoView({ block: "center" });
  }

  select(line) {
    const lines = this.editor.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1);
    this.editor.focus();
    this.editor.setSelectionRange(start, start + lines[line - 1].length);
    this.editor.scrollTop = ((line - 4) * this.editor.scrollHeight) / lines.length;
  }

  async create() {
    this.creating.disabled = true;
    try {
      const job = await post("/jobs", JSON.stringify(this.data));
      sessionStorage.removeItem(DRAFT);
      go(`/jobs/${job.id}`);
    } catch (error) {
      await this.showRefusal(error);
      this.problems.scrollIntoView({ block: "nearest" });
    }
    this.creating.disabled = false;
  }
}

const entryOf = (field) =>
  field?.querySelector(":scope > .entry, :scope > .body > .line > .entry");

// A button that looks like a link, because it leads to a place of this page.
const linkTo = (text, act) => h("button", { type: "button", class: "link", onclick: act }, text);
