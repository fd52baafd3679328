// What the models expected in the place of one token: their most probable tokens side by side.

import { facts, h, number, percent, shareBar, table, visible } from "./elements.js";

// Tokens before the chosen one that are shown with it.
const CONTEXT = 12;

/** The distributions of the token number `at` of all scored ones; `found` are files tokens.json. */
export function distributions(jobs, found, at) {
  // The second job lists tokens of its own.
  const texts = Object.assign({}, ...found.map((file) => file.texts));
  const { id, before } = locate(found[0], at);
  const models = modelsOf(jobs, found).map((model) => ({ ...model, row: rowOf(model, at) }));
  const listed = [...new Set(models.flatMap(({ row }) => row.ids))];
  const shares = models.map(({ row }) => new Map(row.ids.map((each, k) => [each, row.shares[k]])));
  const rows = listed.map((each) => [
    nameOf(texts[each], each === id),
    ...shares.map((known) => share(known.get(each))),
  ]);
  const titles = models.map(({ title }) => title);
  const kls = found.filter(({ kl }) => kl);
  return [
    h("p", { class: "context" }, h("span", { class: "quiet" }, before), h("strong", {}, texts[id])),
    table("At this token", ["Number", ...titles], numbersOf(models.map(({ row }) => row))),
    kls.length > 0 && facts(kls.map(({ kl }, place) => [
      kls.length > 1 ? `KL to student ${place + 1}` : "KL(teacher || student)",
      `${number(kl[at], 3) ?? "infinite"} nats`,
    ])),
    table("Most probable tokens", ["Token", ...titles], rows),
  ];
}

/** The rows of the numbers of each model. */
const numbersOf = (rows) => [
  ["Rank of the text's token", ...rows.map(({ rank }) => number(rank))],
  ["Its probability", ...rows.map(({ said }) => percent(said, 2))],
  ["Entropy, nats", ...rows.map(({ entropy }) => number(entropy, 3))],
  ["Beyond those below", ...rows.map(({ tail }) => percent(tail, 1))],
];

/** The teacher and the students, with the titles of their columns. */
function modelsOf(jobs, found) {
  const students = found.map(({ models }, place) => ({
    title: found.length > 1 ? `Student ${place + 1}: ${jobs[place].name}` : "Student",
    columns: models.student,
  }));
  const { teacher } = found[0].models;
  return teacher ? [{ title: "Teacher", columns: teacher }, ...students] : students;
}

function rowOf({ columns }, at) {
  const shares = columns.top_logprobs[at].map((value) => (value === null ? 0 : Math.exp(value)));
  return {
    ids: columns.top_ids[at],
    shares,
    tail: Math.max(1 - shares.reduce((sum, each) => sum + each, 0), 0),
    said: columns.said[at] === null ? 0 : Math.exp(columns.said[at]),
    rank: columns.rank[at],
    entropy: columns.entropy[at],
  };
}

/** The id of the token number `at` of all scored ones, and the text before it. */
function locate({ sequences, texts }, at) {
  let left = at;
  for (const { ids, scored } of sequences) {
    if (left < scored.length) {
      const place = scored[left];
      const before = ids.slice(Math.max(place - CONTEXT, 0), place).map((each) => texts[each]);
      return { id: ids[place], before: before.join("") };
    }
    left -= scored.length;
  }
  throw new RangeError(`There are fewer than ${at + 1} scored tokens.`);
}

/** A token with its spaces visible; the one that the text has is marked. */
function nameOf(text, said) {
  const shown = h("code", {}, visible(text));
  return said ? [shown, " ", h("strong", {}, "in the text")] : shown;
}

function share(value) {
  if (value === undefined) return h("span", { class: "quiet" }, "below");
  return shareBar(value, percent(value, 1));
}
