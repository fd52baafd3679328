// The page of one cache: what it holds, whether it is sound, its records, and who uses it.
//
// /caches/FINGERPRINT; ?sequence=N&record=M shows the records there.

import { attemptWith, get, post } from "./api.js";
import { recordBrowser } from "./cache_records.js";
import { sampleSection } from "./cache_sample.js";
import { shardSection } from "./cache_shards.js";
import { ENDED, bytes, chip, copyButton, facts, fill, h, number, percent, table, time } from "./elements.js";
import { nameOf } from "./operator.js";
import { to } from "./paths.js";
import { wordsOf } from "./words.js";

// The server reads the disk for every request, so the page asks less often while no check is open.
const READ_MS = 10_000;
const OPEN_MS = 2000;
const FIDELITY_TITLES = [
  "Temperature", "Positions", "Kept mass", "KL, nats", "Bias, z", "Gold error", "Same best token",
  "Entropy error",
];
const CHECKS = [
  {
    kind: "verify", title: "Bytes", button: "Verify every byte",
    about: "Reads every byte of the cache and compares it with its digest.",
    sound: "No byte has changed since the cache was sealed.",
    none: "No job has verified it yet.",
  },
  {
    kind: "fidelity", title: "Fidelity", button: "Compare with the teacher",
    about: "Loads the teacher and compares some records with it. The cache keeps the result.",
    sound: "The records match the teacher.",
    none: "No job has compared it since the capture.",
  },
];

export function cachePage(redraw, fingerprint) {
  const path = `/caches/${fingerprint}`;
  const head = h("div");
  const checks = h("section", { "aria-labelledby": "checks" });
  const refused = h("p", { class: "error breaks", role: "alert", hidden: true });
  const users = h("div");
  const records = recordBrowser(path);
  const sample = sampleSection(path);
  const shards = shardSection(path, records.open);
  // Only a sealed cache has records to show, and can be checked or exported.
  const exporting = exportSection();
  const sealed = [sample.root, checks, records.root, exporting.root];
  const element = h("div", {},
    head, sample.root, shards.root, refused, checks, records.root, users, exporting.root);
  let every = READ_MS;
  let loaded = false;

  const attempt = attemptWith(refused);
  const start = (kind) => attempt(() => post(`${path}/${kind}`)).then(redraw);

  async function refresh() {
    const [cache, usage] = await Promise.all([get(path), get(`${path}/usage`)]);
    every = CHECKS.some(({ kind }) => isOpen(usage[kind])) ? OPEN_MS : READ_MS;
    fill(head, headOf(cache, usage));
    fill(checks, checksOf(cache, usage, start));
    fill(users, usersOf(usage), identityOf(cache));
    if (cache.complete) exporting.show(cache);
    for (const box of sealed) box.hidden = !cache.complete;
    // The states of a sealed cache change only with a check, or when it is captured anew.
    const { verify } = usage;
    await shards.refresh(cache.complete && `${cache.created} ${verify?.job} ${verify?.status}`);
    if (!cache.complete || loaded) return;
    loaded = true;
    await Promise.all([sample.load(), records.load()]);
  }
  return {
    title: `Cache ${fingerprint.slice(0, 12)}`, element, refresh,
    get every() { return every; },
  };
}

const isOpen = (check) => Boolean(check) && !ENDED.includes(check.status);

function headOf(cache, usage) {
  const { overruled } = cache;
  return [
    h("div", { class: "title" },
      h("h1", {}, "Cache ", h("code", {}, cache.fingerprint.slice(0, 12))),
      h("span", { class: `chip ${cache.complete ? "succeeded" : "running"}` },
        cache.complete ? "sealed" : "not sealed")),
    facts([
      ["Fingerprint", h("code", {}, cache.fingerprint)],
      ["Teacher", cache.teacher],
      ["Text", cache.text],
      ["Made by", cache.made_by && nameOf({ name: cache.made_by })],
      ["Profile", cache.profile],
      ["Threshold", cache.threshold ? number(cache.threshold) : null],
      ["Tokens", number(cache.tokens)],
      ["Sequences", cache.sequences
        && `${number(cache.sequences)} of ${number(cache.sequence_length)} tokens`],
      ["Size", bytes(cache.bytes)],
      ["Bytes per token", number(cache.bytes_per_token, 3)],
      ["Sealed", time(cache.created)],
      ["Last read by a run", time(usage.last_used) ?? "never"],
    ]),
    !cache.complete && cache.problem && h("p", { class: "breaks" }, cache.problem),
    overruled && h("p", { role: "alert" },
      `The records differ from the teacher, and ${overruled.field} accepted them: `,
      `${overruled.problems.join("; ")}. `,
      `The teacher's own noise was ${number(overruled.noise, 3)} nats.`),
  ];
}

// ---------------------------------------------------------------------- checks

function checksOf(cache, usage, start) {
  const rows = cache.fidelity.map((row) => [
    number(row.temperature),
    number(row.positions),
    percent(row.kept_mass, 1),
    number(row.kl, 3),
    number(row.bias_z, 3),
    percent(row.gold_error, 2),
    percent(row.top1_agreement, 1),
    number(row.entropy_error, 2),
  ]);
  return [
    h("h2", { id: "checks" }, "Checks"),
    h("div", { class: "checks" }, CHECKS.map((each) => checkOf(each, usage[each.kind], start))),
    rows.length > 0 && h("h3", {}, "Fidelity to the live teacher, as stored in the cache"),
    rows.length > 0 && panned("Fidelity", table("Fidelity", FIDELITY_TITLES, rows)),
    wordsOf("fidelity", "gold", "head", "kept mass", "nats", "seal", "tail", "z"),
  ];
}

function checkOf({ kind, title, button, about, sound, none }, last, start) {
  const open = isOpen(last);
  return h("div", { class: "check" },
    h("h3", {}, title),
    h("p", { class: "quiet" }, about),
    last === null ? h("p", {}, none) : resultOf(last, sound),
    h("button", { type: "button", disabled: open, onclick: () => start(kind) }, button));
}

/** What a check has found, when, and by which job. */
function resultOf({ job, status, at, problems, outdated }, sound) {
  const link = h("a", { href: to(`/jobs/${job}`) }, "job ", h("code", {}, job.slice(-6)));
  const says = status === "succeeded" ? sound : null;
  return h("div", {},
    h("p", {}, chip(status), " ", time(at), " by ", link,
      outdated && h("span", { class: "quiet" }, ", before the cache was sealed again")),
    says && h("p", { class: "good" }, says),
    problems.length > 0 && h("ul", { class: "error breaks" }, problems.map((line) => h("li", {}, line))));
}

// ---------------------------------------------------------------------- who uses it

function usersOf({ jobs, trials, kept_by: keptBy }) {
  const rows = jobs.map((job) => [
    chip(job.status),
    h("a", { href: to(`/jobs/${job.id}`) }, job.name),
    job.kind,
    job.student ? "yes" : "",
    time(job.created_at),
  ]);
  const titles = ["Status", "Job", "Kind", "Student", "Created"];
  return [
    h("h2", {}, "Used by"),
    rows.length ? panned("Jobs", table("Jobs", titles, rows))
      : h("p", {}, "No job that you may see has made or read it."),
    trials > 0 && h("p", {}, `${number(trials)} trials of searches have read it too.`),
    keptBy.length === 0
      ? h("p", {}, "Nothing holds it: ", h("code", {}, "kd gc"), " may remove it once it is old.")
      : h("p", {}, h("code", {}, "kd gc"), " keeps it, because of:"),
    keptBy.length > 0 && h("ul", { class: "breaks" }, keptBy.map((line) => h("li", {}, line))),
  ];
}

function identityOf(cache) {
  return cache.identity && h("details", {},
    h("summary", {}, "Inputs of the capture"),
    h("pre", { tabindex: 0 }, JSON.stringify(cache.identity, null, 2)));
}

/** A table that scrolls sideways, as a region that the keyboard can scroll. */
function panned(name, box) {
  box.tabIndex = 0;
  box.role = "region";
  box.ariaLabel = name;
  return box;
}

// ---------------------------------------------------------------------- export

function exportSection() {
  const rows = h("div");
  const said = h("p", { "aria-live": "polite", class: "quiet" });
  const root = h("section", { "aria-labelledby": "export" },
    h("h2", { id: "export" }, "Export"),
    h("p", { class: "quiet" }, "Run these where the cache is, in an environment with Potstill."),
    rows, said);
  const rowOf = ([title, command]) => h("div", { class: "command" },
    h("p", {}, title),
    h("pre", { tabindex: 0, "aria-label": title }, command),
    copyButton(() => command, said, `Copy: ${title}`));
  return { root, show: (cache) => fill(rows, commandsOf(cache).map(rowOf)) };
}

function commandsOf({ fingerprint, threshold }) {
  const short = fingerprint.slice(0, 12);
  const sampled = threshold > 0; // other profiles have none
  return [
    ["As Parquet, which can be imported again without loss",
      `kd cache export ${short} --format parquet --out records`],
    [sampled ? "For DistillKit, without the sampled tail" : "For DistillKit",
      `kd cache export ${short} --format distillkit ${sampled ? "--lossy " : ""}--out records`],
    ["To the Hugging Face hub", `kd push ${short} OWNER/NAME`],
  ];
}
