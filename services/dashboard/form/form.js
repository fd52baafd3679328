// The form of a job: a part for each of its sections, and one for the fields outside of sections.

import { h } from "../elements.js";
import { sectionBody } from "./controls.js";
import { pointerOf } from "./pointers.js";
import { isOptional, seedOf } from "./schema.js";
import { isObject } from "./yaml_text.js";

/**
 * Make the form of a job: {element, show(data), find(words), showProblems(placed),
 * reveal(pointer)}.
 *
 * `context` has change(path, value), refresh() and isUsual(path), as controls.js describes.
 */
export function makeForm(job, context) {
  const isPart = ({ forms }) => forms[0].type === "section";
  const rest = { ...job, fields: job.fields.filter((field) => !isPart(field)) };
  const parts = [generalPart(rest, context),
    ...job.fields.filter(isPart).map((field) => sectionPart(field, context))];
  const nothing = h("p", { hidden: true }, "No field has these words.");
  const element = h("fieldset", { class: "parts" },
    h("legend", { class: "hidden" }, "The job's fields"),
    parts.map((part) => part.element), nothing);

  const show = (data) => parts.forEach((part) => part.show(data));
  const find = (words) => {
    nothing.hidden = parts.map((part) => part.find(words)).some(Boolean);
  };
  return { element, show, find,
    showProblems: (placed) => showProblems(element, placed),
    reveal: (pointer) => reveal(element, pointer) };
}

/** A part that can be closed; it is open at first if the job has something in it. */
function makePart({ title, description, path, control, isGiven, body }) {
  const count = h("span", { class: "quiet" });
  const element = h("details", { class: "part", "data-part": title },
    h("summary", {}, h("h2", {}, title), count),
    description && h("p", { class: "quiet" }, description),
    h("p", { class: "problem error" }),
    control && h("label", {}, "This section is ", control), body.element);
  if (path.length) {
    element.dataset.path = pointerOf(path);
    element.id = `field${pointerOf(path)}`;
  }
  let before = null;
  const show = (data) => {
    const given = isGiven(data);
    count.textContent = given ? `${given} given` : "";
    if (given && !before) element.open = true;
    before = given;
    body.show(data);
  };
  const find = (words) => {
    const found = body.find(words);
    element.hidden = !found;
    if (words !== "") element.open = found;
    else element.open = Boolean(before);
    return found;
  };
  return { element, show, find };
}

function generalPart(section, context) {
  const body = sectionBody(section, [], context);
  return makePart({
    title: "job", path: [], body,
    isGiven: (data) => section.fields.filter(({ name }) => data[name] != null).length,
  });
}

function sectionPart(field, context) {
  const path = [field.name];
  const [{ section }] = field.forms;
  const optional = isOptional(field);
  const inner = sectionBody(section, path, context);
  const heldOf = (data) => (isObject(data[field.name]) ? data[field.name] : {});
  const toggle = optional && h("select", {
    "data-kind": pointerOf(path), class: "kind",
    onchange: () => context.change(path, toggle.value ? seedOf(field.forms[0]) : undefined),
  }, h("option", { value: "" }, "not given"), h("option", { value: "0" }, "given"));
  const body = {
    element: inner.element,
    find: (words) => `${field.name} ${field.description}`.toLowerCase().includes(words)
      ? (inner.find(""), true) : inner.find(words),
    show: (data) => {
      const isThere = data[field.name] != null;
      if (toggle) toggle.value = isThere ? "0" : "";
      // A required section is there to be filled; its fields make it.
      inner.show(heldOf(data));
    },
  };
  return makePart({
    title: field.name, description: field.description, path, body, control: toggle,
    isGiven: (data) => Object.keys(heldOf(data)).length,
  });
}

// ------------------------------------------------------------------ problems

const at = (form, pointer) => form.querySelector(`[data-path="${CSS.escape(pointer)}"]`);

/** Show each problem, {pointer, text}, at its field; others than these are no longer shown. */
function showProblems(form, placed) {
  const texts = new Map();
  for (const { pointer, text } of placed) {
    texts.set(pointer, [...(texts.get(pointer) ?? []), text]);
  }
  for (const element of form.querySelectorAll("[data-path]")) {
    const text = texts.get(element.dataset.path)?.join(" ") ?? "";
    const slot = element.querySelector(":scope > .problem");
    if (slot.textContent !== text) slot.textContent = text;
    const entry = element.querySelector(":scope > .entry, :scope > .body > .line > .entry");
    if (text) entry?.setAttribute("aria-invalid", "true");
    else entry?.removeAttribute("aria-invalid");
  }
}

/** Return the pointer of the field that a problem is about, or of the nearest section around it. */
export function nearest(form, pointer) {
  let found = pointer;
  while (found && !at(form, found)) found = found.slice(0, found.lastIndexOf("/"));
  return found;
}

/** Open what is around a field, and go to it. */
function reveal(form, pointer) {
  const element = at(form, pointer);
  for (let outer = element; outer && outer !== form; outer = outer.parentElement) {
    if (outer.tagName === "DETAILS") outer.open = true;
    outer.hidden = false;
  }
  const entry = element.querySelector(":scope > .entry, :scope > .body > .line > .entry")
    ?? element.querySelector(":scope > .line > .kind, :scope > summary") ?? element;
  entry.focus();
  entry.scrollIntoView({ block: "center" });
}
