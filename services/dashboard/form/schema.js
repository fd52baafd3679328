// The fields of a job, as the JSON schema in the API's OpenAPI document describes them.

/**
 * Return the section of a whole job.
 *
 * A section is {title, description, fields}; a field {name, description, required, standard,
 * forms}; `standard` is its default, {} for a section that is always there. A form is one kind of
 * value: {type, label, choices?, section?, item?, bounds?, pattern?}, and its type one of text,
 * number, integer, boolean, choice, plain (any of these four), section, list and map.
 */
export function jobSection(openapi) {
  const body = openapi.paths["/jobs"].post.requestBody.content["application/json"];
  return sectionOf(body.schema, openapi.components.schemas);
}

/** Return the example bodies of the API: [{name, title, value}]. */
export function examplesOf(openapi) {
  const body = openapi.paths["/jobs"].post.requestBody.content["application/json"];
  return Object.entries(body.examples ?? {})
    .map(([name, { summary, value }]) => ({ name, title: summary, value }));
}

const nameOf = (schema) => schema.$ref.split("/").at(-1);

function sectionOf(reference, definitions) {
  const { title, description, properties, required = [] } = definitions[nameOf(reference)];
  const fields = Object.entries(properties)
    .map(([name, field]) => fieldOf(name, field, required.includes(name), definitions));
  return { title: wordsOf(title), description, fields };
}

function fieldOf(name, schema, required, definitions) {
  const forms = formsOf(schema, definitions);
  const [first] = forms;
  const description = schema.description ?? first.section?.description ?? "";
  return { name, description, required, standard: schema.default, forms };
}

/** The kinds of value that a schema allows, without null, which means the default. */
function formsOf(schema, definitions) {
  const kinds = alternativesOf(schema).map((each) => formOf(each, definitions));
  const loose = kinds.filter(({ type }) => ["text", "number", "integer", "boolean"].includes(type));
  if (loose.length < 2) return kinds;
  const label = loose.map((each) => each.label).join(", ");
  return [{ type: "plain", label }, ...kinds.filter((each) => !loose.includes(each))];
}

function alternativesOf(schema) {
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.flatMap(alternativesOf);
  return schema.type === "null" ? [] : [schema];
}

function formOf(schema, definitions) {
  if (schema.$ref) {
    const section = sectionOf(schema, definitions);
    return { type: "section", label: section.title, section };
  }
  if (schema.enum) {
    return { type: "choice", label: "one of a list", choices: schema.enum };
  }
  if (schema.const !== undefined) {
    return { type: "choice", label: "one of a list", choices: [schema.const] };
  }
  if (schema.type === "array") {
    return { type: "list", label: "list", item: itemOf(schema.items, definitions) };
  }
  if (schema.type === "object") {
    const values = schema.additionalProperties || Object.values(schema.patternProperties)[0];
    return { type: "map", label: "names and values", item: itemOf(values, definitions) };
  }
  const type = schema.type === "string" ? "text" : schema.type;
  const label = { text: "text", integer: "whole number", boolean: "yes or no" }[type] ?? type;
  return { type, label, bounds: boundsOf(schema), pattern: schema.pattern };
}

const itemOf = (schema, definitions) => fieldOf("", schema, true, definitions);

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };

const boundsOf = (schema) => Object.entries(BOUNDS)
  .filter(([key]) => schema[key] !== undefined)
  .map(([key, sign]) => `${sign} ${boundText(schema[key])}`)
  .join(", ");

const boundText = (bound) => bound.toLocaleString("en", { maximumFractionDigits: 20 });

/** "LearnedTemperature" as words: "learned temperature". */
const wordsOf = (title) => title.replace(/(?<=[a-z])(?=[A-Z])/g, " ").toLowerCase();

/** Whether a field holds nothing until it is given: its section is absent without its key. */
export const isOptional = ({ standard, forms }) =>
  forms[0].type === "section" && standard === undefined;

function isSection(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

const FITS = {
  section: isSection, map: isSection, list: Array.isArray,
  choice: (value, { choices }) => choices.includes(value),
  number: (value) => typeof value === "number", integer: (value) => typeof value === "number",
  boolean: (value) => typeof value === "boolean", text: (value) => typeof value === "string",
  plain: (value) => value !== null && typeof value !== "object",
};

/** Whether a value is of a kind. */
export const fits = (form, value) => FITS[form.type](value, form);

/** The kind of value that `value` is, or was meant to be; the first where nothing tells. */
export function formOfValue(forms, value) {
  const fitting = forms.filter((form) => fits(form, value));
  if (fitting.length < 2) return fitting[0] ?? forms[0];
  // Of several sections the one that has most of the keys, then most of the required ones.
  const scoreOf = ({ section }) => section.fields
    .reduce((sum, { name, required }) => sum + (name in value ? (required ? 3 : 1) : 0), 0);
  return fitting.reduce((best, each) => (scoreOf(each) > scoreOf(best) ? each : best));
}

/** What a value of a kind begins with: a section has the first choice of what it requires. */
export function seedOf({ type, section, choices }) {
  if (type === "list") return [];
  if (type === "choice") return choices[0];
  if (type !== "section") return type === "map" ? {} : undefined;
  const chosen = section.fields
    .filter(({ required, forms }) => required && forms[0].type === "choice")
    .map(({ name, forms }) => [name, forms[0].choices[0]]);
  return Object.fromEntries(chosen);
}

/** Find the field at a path of keys and indices, for a job with this data; null if none is. */
export function fieldAt(section, path, data) {
  let field = null;
  let held = data;
  let forms = [{ type: "section", section }];
  for (const key of path) {
    const form = formOfValue(forms, held);
    if (form.type === "section") field = form.section.fields.find(({ name }) => name === key);
    else field = form.item;
    if (!field) return null;
    held = held?.[key];
    forms = field.forms;
  }
  return field;
}

/** The job without what equals its defaults, and without sections that are then empty. */
export function withoutDefaults(data, section) {
  const kept = section.fields
    .filter(({ name }) => data[name] !== undefined && data[name] !== null)
    .map((field) => [field, leanOf(data[field.name], field)])
    .filter(([field, value]) => field.required
      || JSON.stringify(value) !== JSON.stringify(field.standard));
  return Object.fromEntries(kept.map(([{ name }, value]) => [name, value]));
}

function leanOf(value, { forms }) {
  const form = formOfValue(forms, value);
  if (form.type === "section" && isSection(value)) return withoutDefaults(value, form.section);
  if (form.type === "list" && Array.isArray(value)) {
    return value.map((each) => leanOf(each, form.item));
  }
  if (form.type !== "map" || !isSection(value)) return value;
  const entries = Object.entries(value).map(([key, each]) => [key, leanOf(each, form.item)]);
  return Object.fromEntries(entries);
}
