// The page of single tokens: a part of the held-out text, coloured by how far the student is from
// its teacher, or by another number. A token opens the distributions that it was drawn from. With
// two jobs, whose texts must be the same, the page also shows the difference of their students.
//
// /tokens?jobs=ID or ID,ID; &colour= a name of COLOURS. The numbers are the artifact tokens.json.

import { Refused, get, getText } from "./api.js";
import { distributions } from "./distributions.js";
import { borderOf, fill, h, itemAfter, levelOf, number } from "./elements.js";
import { newest } from "./jobs.js";
import { go, keepInAddress, query, to } from "./paths.js";

export const FILE = "tokens.json";
// The version of the file that this page reads.
const FORMAT = 1;
// Jobs that can be chosen.
const LISTED_JOBS = 50;
// A value from the edge on has the next darker level.
const NEAR = [0.05, 0.1, 0.2, 0.5, 1, 2];
const FAR = [0.5, 1, 2, 3, 4, 6];

// What colours the text: `of` returns a column of values in nats, or null where it is not known.
const COLOURS = [
  { name: "kl", title: "KL(teacher || student)", edges: NEAR, of: ([job]) => job.kl },
  {
    name: "difference", title: "Difference of the students", edges: NEAR,
    of: ([one, other]) => other && subtract(distance(one), distance(other)),
  },
  { name: "teacher", title: "Entropy of the teacher", edges: FAR, of: ([job]) => job.models.teacher?.entropy },
  { name: "student", title: "Entropy of the student", edges: FAR, of: ([job]) => job.models.student.entropy },
  { name: "loss", title: "Loss of the student", edges: FAR, of: ([job]) => losses(job) },
];

const losses = ({ models }) => models.student.said.map((value) => value && -value);
// How far a student is from its teacher, or from the text where the teacher was not there.
const distance = (job) => job.kl ?? losses(job);
const subtract = (ours, theirs) => ours.map((value, at) => value - theirs[at]);

export function tokensPage() {
  const ids = (query().get("jobs") ?? "").split(",").filter(Boolean).slice(0, 2);
  const choice = h("div");
  const body = h("div");
  const element = h("div", {}, h("h1", {}, "Tokens"), choice, body);

  async function refresh() {
    const [listed] = await newest(LISTED_JOBS, { status: "succeeded" });
    const named = await Promise.all(ids.map((id) => get(`/jobs/${id}`)));
    const known = [...named, ...listed.filter((job) => !ids.includes(job.id))];
    fill(choice, chooser(known.filter((job) => job.kind !== "precompute"), ids));
    fill(body, ids.length ? await textOf(named) : introduce(known.length));
    return false;
  }
  return { title: "Tokens", element, refresh };
}

/** What the page shows once a job is chosen. */
function introduce(jobs) {
  return h("p", {}, jobs
    ? "Choose a job. Its held-out text is coloured token by token: how far the student is from its "
      + "teacher. Click a token to see both predictions."
    : "No training has succeeded yet. The held-out text of one is shown here, coloured by how far "
      + "its student is from the teacher.");
}

/** The two lists of jobs; a choice opens the page anew. */
function chooser(jobs, ids) {
  const open = () => go(`/tokens?jobs=${lists.map(({ value }) => value).filter(Boolean)}`);
  const list = (at, name, none) => {
    const select = h("select", { onchange: open, "aria-label": name },
      h("option", { value: "" }, none),
      jobs.map((job) => h("option", { value: job.id }, `${job.name} (${job.id.slice(-6)})`)));
    select.value = ids[at] ?? "";
    return select;
  };
  const lists = [list(0, "Job", "choose a job"), list(1, "Compared with", "no other job")];
  return h("p", { class: "choices" },
    h("label", {}, "Job ", lists[0]), h("label", {}, "compared with ", lists[1]));
}

/** The coloured text of one or two jobs, or why it cannot be shown. */
async function textOf(jobs) {
  const found = await Promise.all(jobs.map(read));
  const lacking = jobs.find((job, at) => found[at] === null);
  if (lacking) {
    return h("p", {}, "The job ", link(lacking), " has no scored tokens. They are written at the ",
      "end of a training, unless evaluation.continuations is 0.");
  }
  const [one, other] = found;
  const newer = found.find(({ format }) => format !== FORMAT);
  if (newer) return h("p", { class: "error" }, `This page cannot read format ${newer.format}.`);
  const texts = found.map(({ sequences }) => JSON.stringify(sequences.map(({ ids }) => ids)));
  if (other && texts[0] !== texts[1]) {
    return h("p", { class: "error" },
      "The two jobs were not measured on the same tokens, so they cannot be compared here.");
  }
  return new TokenText(jobs, found).root;
}

const link = (job) => h("a", { href: to(`/jobs/${job.id}`) }, job.name);

async function read(job) {
  try {
    return JSON.parse(await getText(`/jobs/${job.id}/artifacts/${FILE}`));
  } catch (error) {
    if (error instanceof Refused && error.status === 404) return null;
    throw error;
  }
}

/** The text with its colours, the scale of these, and the distributions of the chosen token. */
class TokenText {
  constructor(jobs, found) {
    Object.assign(this, { jobs, found });
    this.colours = COLOURS.filter((colour) => colour.of(found));
    const names = this.colours.map(({ name }) => name);
    const first = found.length > 1 ? "difference" : names[0];
    const wanted = query().get("colour");
    this.select = h("select", { onchange: () => this.recolour() },
      this.colours.map(({ name, title }) => h("option", { value: name }, title)));
    this.select.value = names.includes(wanted) ? wanted : first;
    this.scale = h("p", { class: "scale" });
    this.panel = h("section", {
      class: "distributions", "aria-label": "Distributions", "aria-live": "polite", tabindex: 0,
    }, h("p", {}, "Choose a token to see what the models predicted at its place."));
    this.tokens = []; // the elements of the scored tokens, in the order of the columns
    const text = h("div", { class: "text", role: "group", "aria-label": "Held-out text" },
      found[0].sequences.flatMap((sequence) => this.sequence(sequence)));
    text.addEventListener("click", ({ target }) => this.open(this.tokens.indexOf(target)));
    text.addEventListener("keydown", (event) => this.move(event));
    if (this.tokens.length) this.tokens[0].tabIndex = 0;
    this.root = h("div", {},
      this.remarks(),
      h("p", { class: "choices" }, h("label", {}, "Colour ", this.select)), this.scale,
      h("div", { class: "tokens" }, text, this.panel));
    this.recolour();
  }

  remarks() {
    const { held_out: heldOut, without_teacher: reason, models } = this.found[0];
    const none = reason ?? "the job has none, or could not load it";
    return [
      h("p", {}, "Students of ", this.jobs.flatMap((job, at) => [at ? " and " : "", link(job)]),
        `. ${number(this.tokens.length)} tokens at temperature 1.`,
        heldOut ? "" : " The job holds out no text: these tokens are from the training text."),
      !models.teacher && h("p", {}, `The teacher was not measured: ${none}.`),
    ];
  }

  sequence({ number: place, ids, starts, scored }) {
    const { texts } = this.found[0];
    const known = new Set(scored);
    const begins = new Set(starts.filter((each) => each > 0));
    const words = ids.flatMap((id, at) => {
      const shown = texts[id].replaceAll("\n", "↵\n");
      const border = begins.has(at) ? [borderOf()] : [];
      if (!known.has(at)) return [...border, h("span", { class: "quiet" }, shown)];
      const token = h("span", { role: "button", tabindex: -1, "aria-pressed": "false" }, shown);
      // A token without visible text needs a name of its own.
      if (!shown.trim()) token.setAttribute("aria-label", "space");
      this.tokens.push(token);
      return [...border, token];
    });
    return [h("h2", {}, `Sequence ${place + 1}`), h("p", {}, words)];
  }

  recolour() {
    const colour = this.colours.find(({ name }) => name === this.select.value);
    const values = colour.of(this.found);
    keepInAddress({ colour: colour.name });
    for (const [at, token] of this.tokens.entries()) {
      token.className = levelOf(values[at], colour.edges);
      token.title = `${colour.title}: ${number(values[at], 3) ?? "unknown"} nats`;
    }
    const signs = colour.name === "difference" ? ["-", ""] : [""];
    const swatch = (value) => h("span", { class: levelOf(value, colour.edges) }, value);
    fill(this.scale, signs.flatMap((sign) => colour.edges.map((edge) =>
      swatch(Number(sign + edge)))), "nats or more",
    colour.name === "difference" && h("i", {}, `blue: ${this.jobs[0].name} is nearer`));
  }

  open(at) {
    if (at < 0) return;
    for (const token of this.tokens) {
      token.tabIndex = -1;
      token.setAttribute("aria-pressed", "false");
    }
    this.tokens[at].tabIndex = 0;
    this.tokens[at].setAttribute("aria-pressed", "true");
    fill(this.panel, distributions(this.jobs, this.found, at));
  }

  /** One token is in the order of the Tab key; the arrows move from it to the others. */
  move(event) {
    const at = this.tokens.indexOf(document.activeElement);
    if (at < 0) return;
    const next = itemAfter(event.key, at, this.tokens.length, 10);
    if (next !== null) {
      this.tokens[next].focus();
      this.open(next);
    } else if (event.key === "Enter" || event.key === " ") this.open(at);
    else return;
    event.preventDefault();
  }
}
