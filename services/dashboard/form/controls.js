// The inputs of a job's fields, made from their description (schema.js) and the values of the job.
//
// What a user changes goes to `change(path, value)` of the context, where undefined is a field that
// is not given; `valueAt(path)` of it is what the job then holds. Each field's element has its JSON
// pointer in data-path. A change of one value draws nothing anew, so that the input is not lost.

import { h } from "../elements.js";
import { formOfValue, isOptional, seedOf } from "./schema.js";
import { pointerOf } from "./verdict.js";
import { isObject, numberText } from "./yaml.js";

// A section with more fields than this shows only those first that are required or given.
const FEW = 9;

const isGiven = (value) => value !== undefined && value !== null;

/** The fields of a section: the first ones, and the others behind a summary. */
export function sectionBody({ fields }, path, value, context) {
  const held = isObject(value) ? value : {};
  const isFirst = ({ name, required, forms }) => fields.length <= FEW || required
    || isGiven(held[name]) || (path.length === 0 && forms[0].type === "section");
  const inner = { ...context, empty: undefined };
  const elementsOf = (some) => some
    .map((field) => fieldBox(field, [...path, field.name], held[field.name], inner, field.name));
  const others = fields.filter((field) => !isFirst(field));
  return h("div", { class: "fields" }, elementsOf(fields.filter(isFirst)),
    others.length > 0 && h("details", { class: "more", id: `more${pointerOf(path)}` },
      h("summary", {}, `${others.length} more fields`),
      h("div", { class: "fields" }, elementsOf(others))));
}

/** A field with its description; `title` is its name, or its number in a list. */
function fieldBox(field, path, value, context, title) {
  const pointer = pointerOf(path);
  const id = `field${pointer}`;
  const notes = [
    h("p", { id: `${id}-problem`, class: "problem error" }),
    h("p", { id: `${id}-help`, class: "help" }, field.description),
  ];
  const [form] = field.forms;
  if (field.forms.length > 1 || ["section", "list", "map"].includes(form.type)) {
    const isPart = path.length === 1;
    return h("details", {
      class: isPart ? "field part" : "field group", "data-path": pointer, id, tabindex: -1,
      open: isGiven(value) || field.required,
    }, h("summary", {}, h(isPart ? "h2" : "span", {}, title)), notes,
    groupOf(field, path, value, context, title));
  }
  const about = { id, "aria-describedby": `${id}-problem ${id}-help` };
  return h("div", { class: "field", "data-path": pointer },
    h("label", { for: id }, title),
    form.bounds && h("span", { class: "bounds" }, form.bounds),
    entryOf(field, form, path, value, context, about), notes);
}

// ------------------------------------------------------------------ one value

/** Make the input of one value; `about` are its id and its descriptions, or its label. */
function entryOf(field, form, path, value, context, about) {
  const standard = isGiven(field.standard) && typeof field.standard !== "object"
    ? `default: ${shownOf(field.standard)}` : "";
  const empty = field.required ? "required" : standard;
  const give = (given) => context.change(path, given === "" ? context.empty : given);
  if (!["choice", "boolean"].includes(form.type)) {
    const input = h("input", {
      ...about, class: "entry", spellcheck: "false", autocomplete: "off", placeholder: empty,
      inputmode: form.type === "number" ? "decimal" : null,
      oninput: () => give(valueOf(input.value, form.type)), value: shownOf(value),
    });
    return input;
  }
  const choices = form.choices ?? [true, false];
  // A value that the field may not have is shown, so that it can be seen and changed.
  const texts = new Set(["", ...choices.map(String), shownOf(value)]);
  const select = h("select", {
    ...about, class: "entry",
    onchange: () => give(choices.find((each) => String(each) === select.value) ?? select.value),
  }, [...texts].map((text) => h("option", { value: text }, text || empty || "not given")));
  select.value = shownOf(value);
  return select;
}

function shownOf(value) {
  if (typeof value === "number") return numberText(value);
  return typeof value === "object" && value ? JSON.stringify(value) : String(value ?? "");
}

/** The value of a typed text; a text where a number belongs stays one, such as 16GiB. */
function valueOf(text, type) {
  if (type === "text" || text.trim() === "") return text;
  if (type === "plain" && ["true", "false"].includes(text)) return text === "true";
  return Number.isFinite(Number(text)) ? Number(text) : text;
}

// ------------------------------------------------------------------ several values, or kinds

/** The inputs of a field that is a section, a list or a map, or one of several kinds. */
function groupOf(field, path, value, context, title) {
  const optional = isOptional(field) && !field.required;
  let form = optional && !isGiven(value) ? null : formOfValue(field.forms, value);
  const box = h("div", { class: "body" });
  const draw = (held) => box.replaceChildren(
    ...(form ? [bodyOf(field, form, path, held, context, title, draw)] : []));
  draw(value);
  const kinds = field.forms.map(({ label }, at) => [at, field.forms.length > 1 ? label : "given"]);
  if (optional) kinds.unshift(["", "not given"]);
  if (kinds.length < 2) return [box];
  const select = h("select", {
    "aria-label": `Kind of ${path.join(".")}`, "data-kind": pointerOf(path), class: "kind",
    onchange: () => {
      form = field.forms[select.value] ?? null;
      const seed = form ? seedOf(form) ?? context.empty : undefined;
      context.change(path, seed);
      draw(seed);
    },
  }, kinds.map(([at, text]) => h("option", { value: at }, text)));
  select.value = form ? field.forms.indexOf(form) : "";
  return [h("p", { class: "line" }, select), box];
}

function bodyOf(field, form, path, value, context, title, draw) {
  if (form.type === "section") return sectionBody(form.section, path, value, context);
  if (["list", "map"].includes(form.type)) return membersOf(form, path, value, context, title, draw);
  const label = { "aria-label": `${title}: ${form.label}` };
  return h("div", { class: "line" }, entryOf(field, form, path, value, context, label),
    form.bounds && h("span", { class: "bounds" }, form.bounds));
}

/** The members of a list, or of a map, which needs a name for each. */
function membersOf({ type, item }, path, value, context, title, draw) {
  const isMap = type === "map";
  // A list may be given as its only item.
  const held = isMap || Array.isArray(value) || !isGiven(value) ? value ?? [] : [value];
  const members = new Map(isMap ? Object.entries(held) : held.entries());
  const put = (key, each) => {
    context.change([...path, key], each);
    draw(context.valueAt(path));
  };
  const rows = [...members].map(([key, each]) => {
    const label = isMap ? key : `${title} ${key + 1}`;
    const remove = { type: "button", class: "link", "aria-label": `Remove ${label}` };
    return h("li", {},
      fieldBox(item, [...path, key], each, { ...context, empty: "" }, label),
      h("button", { ...remove, onclick: () => put(key, undefined) }, "Remove"));
  });
  const name = isMap && h("input", {
    "aria-label": `New name in ${title}`, placeholder: "name", autocomplete: "off",
    spellcheck: "false", onkeydown: (event) => event.key === "Enter" && add(),
  });
  const add = () => {
    const key = isMap ? name.value.trim() : members.size;
    if (key === "" || members.has(key)) return name.focus();
    put(key, seedOf(item.forms[0]) ?? "");
    return document.getElementById(`field${pointerOf([...path, key])}`).focus();
  };
  return h("div", {}, h("ul", {}, rows),
    h("p", { class: "line" }, name, h("button", { type: "button", onclick: add }, `Add to ${title}`)));
}
