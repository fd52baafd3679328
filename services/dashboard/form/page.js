// The page of a new job: a form and the job's YAML beside it, the server's verdict, and the job as
// commands. The YAML is the truth: the form shows what stands in it, and changes it in place.

import { Refused, askForKey, get, post } from "../api.js";
import { h } from "../elements.js";
import { go, query } from "../paths.js";
import { makeForm, nearest } from "./form.js";
import { dottedOf, pathOf, pointerOf } from "./pointers.js";
import { examplesOf, fieldAt, formOfValue, jobSection, withoutDefaults } from "./schema.js";
import { fieldOf, planOf, problemsOf } from "./verdict.js";
import { waysBox } from "./ways.js";
import { change, isObject, locate, read, write } from "./yaml_text.js";

/** The pause after a change before the server is asked, in milliseconds. */
const CHECK_MS = 700;
/** The pause before it is asked again after it refused to answer. */
const AGAIN_MS = 10_000;
const DRAFT = "potstill-draft";
const MADE_ANEW = {
  comments: "The layout of the YAML was rewritten for this change; its comments stay.",
  data: "The YAML was rewritten for this change; its comments are lost.",
};

/**
 * Fill the page: load the schema, the templates and the job to begin with, and show them.
 *
 * Return the function to call when the page is left: it ends the questions to the server.
 */
export async function fillPage(element) {
  const from = query().get("from");
  const [openapi, { data: templates }, origin] = await Promise.all([
    get("/openapi.json"), get("/templates"), from && get(`/jobs/${from}`),
  ]);
  const job = jobSection(openapi);
  const examples = examplesOf(openapi)
    .map(({ name, title, value }) => ({ name: `example: ${name}`, title, text: write(value) }));
  const texts = [...templates, ...examples];
  const page = new NewJob(job, texts, from);
  const draft = from ? null : sessionStorage.getItem(DRAFT);
  element.className = "new-job";
  element.replaceChildren(...page.elements);
  if (origin) page.begin(write(withoutDefaults(origin.config, job)), true);
  else page.begin(draft ?? texts.find(({ name }) => name === "distill").text, draft !== null);
  return () => page.close();
}

class NewJob {
  constructor(job, texts, from) {
    Object.assign(this, { job, texts, from, data: {}, began: "" });
    Object.assign(this, { timer: null, asking: false, isLeft: false });
    const usual = new Set(texts.flatMap(({ text }) => pointersIn(read(text).data)));
    this.form = makeForm(job, {
      change: (path, value) => this.changeField(path, value),
      refresh: () => this.form.show(this.data),
      isUsual: (path) => usual.has(pointerOf(path)) || usual.has(pointerOf([...path, ""])),
    });
    this.ways = waysBox();
    this.elements = this.makeElements();
  }

  makeElements() {
    this.editor = h("textarea", {
      rows: 24, spellcheck: "false", wrap: "off", "aria-label": "The job, as YAML",
      "aria-describedby": "yaml-problem", oninput: () => this.readEditor(),
    });
    this.unreadable = h("p", { id: "yaml-problem", class: "error" });
    this.note = h("p", { class: "quiet", role: "status" });
    this.state = h("p", { class: "state", role: "status" });
    this.verdict = h("div", { class: "verdict" });
    this.problems = h("div", { class: "problems" });
    this.first = h("button", { type: "button", class: "link", hidden: true }, "Show");
    const create = { type: "button", class: "main", onclick: () => this.create() };
    this.creating = h("button", create, "Create");
    const toYaml = { type: "button", class: "link to-yaml", onclick: () => this.editor.focus() };
    const template = h("select", { id: "template", onchange: () => this.choose(template) },
      h("option", { value: "" }, "Start with …"),
      this.texts.map(({ name, title }) => h("option", { value: name }, `${name}: ${title}`)));
    const words = h("input", {
      id: "find", type: "search", placeholder: "name or words of its description",
      oninput: () => this.form.find(words.value.trim().toLowerCase()),
    });
    return [
      h("h1", {}, this.from ? "Copy of another job" : "New job"),
      h("div", { class: "choices" },
        h("label", { for: "template" }, "Template ", template),
        h("label", { for: "find" }, "Find a field ", words)),
      h("div", { class: "act" },
        this.state, this.first, h("button", toYaml, "YAML"), this.creating),
      this.problems,
      h("div", { class: "columns" },
        this.form.element,
        h("div", { class: "side" },
          this.editor, this.unreadable, this.note, this.verdict, this.ways.element)),
    ];
  }

  // ---------------------------------------------------------------- the text and the form

  /** Show a text; `check` asks the server about it at once, else it waits for the first change. */
  begin(text, check) {
    this.began = text;
    this.editor.value = text;
    this.showText();
    if (check) this.plan();
    else this.state.textContent = "Fill in the empty fields, or start with an example.";
  }

  choose(select) {
    const found = this.texts.find(({ name }) => name === select.value);
    select.value = "";
    if (!found) return;
    const edited = this.editor.value !== this.began;
    if (edited && !confirm(`Replace what you wrote by "${found.name}"?`)) return;
    this.begin(found.text, found.name.startsWith("example"));
    sessionStorage.removeItem(DRAFT);
    this.showProblems([]);
    this.verdict.replaceChildren();
  }

  readEditor() {
    this.note.textContent = "";
    this.afterChange();
  }

  afterChange() {
    sessionStorage.setItem(DRAFT, this.editor.value);
    if (this.showText()) this.planSoon();
  }

  /** Read the text and show it in the form; whether it could be read. */
  showText() {
    const { data, problem } = read(this.editor.value);
    const found = problem ?? (data == null || isObject(data)
      ? null : { message: "a job is a mapping of keys to values", line: 1 });
    this.form.element.disabled = found !== null;
    this.creating.disabled = found !== null;
    this.unreadable.textContent = found === null ? ""
      : `Line ${found.line}: ${found.message}. The form waits until the YAML can be read.`;
    if (found !== null) {
      clearTimeout(this.timer);
      this.data = null;
      this.state.textContent = "The YAML cannot be read.";
      this.ways.show(null);
      return false;
    }
    this.data = data ?? {};
    this.form.show(this.data);
    this.ways.show({ text: this.editor.value, data: this.data });
    return true;
  }

  changeField(path, value) {
    const [place, put] = this.placeOf(path, value);
    const order = (at) => this.fieldsAt(at).map(({ name }) => name);
    const isOptional = (at) => this.isOptional(at);
    const { text, kept } = change(this.editor.value, place, put, order, isOptional);
    replaceText(this.editor, text);
    this.note.textContent = MADE_ANEW[kept] ?? "";
    this.afterChange();
  }

  /** A list may be given as its only item: then a change of that item is one of the list. */
  placeOf(path, value) {
    for (const [depth, key] of path.entries()) {
      const outer = path.slice(0, depth);
      const held = outer.reduce((data, each) => data?.[each], this.data);
      if (!Number.isInteger(key) || Array.isArray(held)) continue;
      const rest = path.slice(depth + 1);
      if (key === 0 && held != null) {
        return [[...outer, ...rest], value === undefined && rest.length === 0 ? [] : value];
      }
      return [outer, [...(held == null ? [] : [held]), value]];
    }
    return [path, value];
  }

  fieldsAt(path) {
    if (path.length === 0) return this.job.fields;
    const held = path.reduce((data, key) => data?.[key], this.data);
    const forms = fieldAt(this.job, path, this.data)?.forms;
    return (forms && formOfValue(forms, held).section?.fields) ?? [];
  }

  isOptional(path) {
    const field = fieldAt(this.job, path, this.data);
    return !(field && isObject(field.standard));
  }

  // ---------------------------------------------------------------- the server's verdict

  planSoon() {
    this.state.textContent = "Checking …";
    this.planAfter(CHECK_MS);
  }

  planAfter(milliseconds) {
    clearTimeout(this.timer);
    if (!this.isLeft) this.timer = setTimeout(() => this.plan(), milliseconds);
  }

  close() {
    this.isLeft = true;
    clearTimeout(this.timer);
  }

  /** Ask for the plan of the job; one question at a time, and again if it changed meanwhile. */
  async plan() {
    if (this.asking || this.data === null) return;
    this.asking = true;
    const body = JSON.stringify(this.data);
    try {
      const plan = await post("/jobs/validate", body);
      if (this.isStill(body)) this.showPlan(plan);
    } catch (error) {
      if (this.isStill(body) && !this.isLeft) await this.showRefusal(error);
    }
    this.asking = false;
    if (this.data !== null && !this.isStill(body)) this.planSoon();
  }

  isStill(body) {
    return this.data !== null && JSON.stringify(this.data) === body;
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
      this.planSoon();
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
    const form = this.form.element;
    const isField = (pointer) => nearest(form, pointer) === pointer;
    const isSection = (pointer) => isField(pointer)
      && form.querySelector(`[data-path="${CSS.escape(pointer)}"] [data-path]`) !== null;
    const placed = problems.map((problem) => {
      const field = problem.pointer === null ? "" : fieldOf(problem, isField, isSection);
      return { ...problem, field, shown: nearest(form, field) };
    });
    this.form.showProblems(placed.map(({ shown, text }) => ({ pointer: shown, text })));
    const count = placed.length === 1 ? "1 problem" : `${placed.length} problems`;
    if (placed.length) this.state.textContent = count;
    const [first] = placed.filter(({ shown }) => shown);
    this.first.hidden = !first;
    this.first.onclick = () => this.form.reveal(first.shown);
    this.problems.replaceChildren(...(placed.length === 0 ? [] : [
      h("h2", { class: "hidden" }, count),
      h("ul", {}, placed.map((problem) => h("li", {}, this.linksOf(problem), ` ${problem.text}`))),
    ]));
  }

  linksOf({ field, shown, pointer }) {
    const stay = (act) => (event) => {
      event.preventDefault();
      event.stopPropagation();
      act();
    };
    const place = pointer && this.lineOf(pointer);
    const toField = { href: `#field${shown}`, onclick: stay(() => this.form.reveal(shown)) };
    return [
      shown ? h("a", toField, dottedOf(field)) : field && h("code", {}, dottedOf(field)),
      place && h("button", { type: "button", class: "link", onclick: () => this.select(place) },
        `line ${place.line}`),
    ].filter(Boolean).flatMap((each) => [each, " "]);
  }

  /** The place in the YAML of a pointer, or of the nearest section around it. */
  lineOf(pointer) {
    const path = pathOf(pointer);
    while (path.length) {
      const place = locate(this.editor.value, path);
      if (place) return place;
      path.pop();
    }
    return null;
  }

  select({ start, end, line }) {
    this.editor.focus();
    this.editor.setSelectionRange(start, end);
    const height = this.editor.scrollHeight / this.editor.value.split("\n").length;
    this.editor.scrollTop = (line - 4) * height;
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

/** The pointers of all fields in data. */
function pointersIn(data, path = []) {
  if (data === null || typeof data !== "object") return [pointerOf(path)];
  const inner = Object.entries(data).flatMap(([key, value]) => pointersIn(value, [...path, key]));
  return [pointerOf(path), ...inner];
}

/** Replace the text of an editor; only what differs, so that its cursor and scrolling stay. */
function replaceText(editor, text) {
  const old = editor.value;
  let start = 0;
  while (start < old.length && old[start] === text[start]) start += 1;
  let end = 0;
  const most = Math.min(old.length, text.length) - start;
  while (end < most && old.at(-1 - end) === text.at(-1 - end)) end += 1;
  editor.setRangeText(text.slice(start, text.length - end), start, old.length - end, "preserve");
}
