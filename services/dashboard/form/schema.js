// The fields of a job, as the JSON schema in the API's OpenAPI document describes them.
//
// A section is {title, description, fields}; a field {name, description, required, standard,
// forms}; `standard` is its default, {} for a section that is always there. A form is one kind of
// value: {type, label, choices?, section?, item?, bounds?}, and its type one of text, number,
// integer, boolean, choice, plain (any of these four), section, list and map.

import { change, isObject } from "./yaml.js";

/** Return the section of a whole job, and the examples of the API: {job, examples}. */
export function readSchema(openapi) {
  const body = openapi.paths["/jobs"].post.requestBody.content["application/json"];
  const examples = Object.entries(body.examples ?? {})
    .map(([name, { summary, value }]) =>
      ({ name: `example: ${name}`, title: summary, text: change("", [], value) }));
  return { job: sectionOf(body.schema, openapi.components.schemas), examples };
}

function sectionOf(reference, definitions) {
  const { title, description, properties, required = [] } = definitions[reference.$ref.split("/").at(-1)];
  const fields = Object.entries(properties)
    .map(([name, field]) => fieldOf(name, field, required.includes(name), definitions));
  // "LearnedTemperature" becomes "learned temperature".
  return { title: title.replace(/(?<=[a-z])(?=[A-Z])/g, " ").toLowerCase(), description, fields };
}

function fieldOf(name, schema, required, definitions) {
  const forms = formsOf(schema, definitions);
  const description = schema.description ?? forms[0].section?.description ?? "";
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
  const itemOf = (inner) => fieldOf("", inner, true, definitions);
  if (schema.$ref) {
    const section = sectionOf(schema, definitions);
    return { type: "section", label: section.title, section };
  }
  const choices = schema.enum ?? (schema.const === undefined ? null : [schema.const]);
  if (choices) return { type: "choice", label: "one of a list", choices };
  if (schema.type === "array") return { type: "list", label: "list", item: itemOf(schema.items) };
  if (schema.type === "object") {
    const values = schema.additionalProperties || Object.values(schema.patternProperties)[0];
    return { type: "map", label: "names and values", item: itemOf(values) };
  }
  const type = schema.type === "string" ? "text" : schema.type;
  const label = { integer: "whole number", boolean: "yes or no" }[type] ?? type;
  return { type, label, bounds: boundsOf(schema) };
}

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
const boundsOf = (schema) => Object.entries(BOUNDS)
  .filter(([key]) => schema[key] !== undefined)
  .map(([key, sign]) => `${sign} ${schema[key].toLocaleString("en", { maximumFractionDigits: 20 })}`)
  .join(", ");

/** Whether a field holds nothing until it is given: its section is absent without its key. */
export const isOptional = ({ standard, forms }) =>
  forms[0].type === "section" && standard === undefined;

const FITS = {
  section: isObject, map: isObject, list: Array.isArray,
  choice: (value, { choices }) => choices.includes(value),
  number: (value) => typeof value === "number", integer: (value) => typeof value === "number",
  boolean: (value) => typeof value === "boolean", text: (value) => typeof value === "string",
  plain: (value) => value !== null && typeof value !== "object",
};

/** The kind of value that `value` is, or was meant to be; the first where nothing tells. */
export function formOfValue(forms, value) {
  const fitting = forms.filter((form) => FITS[form.type](value, form));
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
