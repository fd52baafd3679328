// The pages of the operator: health, storage and keys. They only show; `kd` changes things.

import { get } from "./api.js";
import { bytes, duration, facts, fill, h, number, percent, table, time } from "./elements.js";
import { to } from "./paths.js";

// The server reads sizes of all files for the storage page.
const STORAGE_MS = 60_000;
const HEALTH_MS = 5000;
const KEYS_MS = 30_000;
const PAGES = [["health", "Health"], ["storage", "Storage"], ["keys", "Keys"]];

/** Make a page of one answer of the API, without an end: `draw` returns its elements. */
export function answerPage(path, title, every, draw) {
  const box = h("div");
  const element = h("div", {}, h("h1", {}, title), box);
  return { title, element, refresh: async () => fill(box, await draw(await get(path))), every };
}

function page(...args) {
  const made = answerPage(...args);
  const links = PAGES.map(([name, text]) => h("a", { href: to(`/${name}`) }, text));
  made.element.prepend(h("nav", { class: "pages", "aria-label": "Service" }, links));
  return made;
}

// ---------------------------------------------------------------------- health

export const healthPage = () => page("/health", "Health", HEALTH_MS, (found) => {
  const { redis, disk, queues, jobs } = found;
  const seconds = (value) => `${number(value, 2)} s`;
  const limit = redis.memory_limit_bytes ? ` of ${bytes(redis.memory_limit_bytes)}` : "";
  return [
    found.problems.length
      ? h("div", { class: "error", role: "alert" }, found.problems.map((text) => h("p", {}, text)))
      : h("p", { class: "good" }, "Nothing is wrong."),
    h("h2", {}, "Server"),
    facts([
      ["Version", found.version],
      ["Python", found.python],
      ["Format of the records", String(found.record_format)],
      ["Host", found.host],
      ["Reconciler", found.reconciler_age_seconds == null
        ? "has not run" : `ran ${duration(found.reconciler_age_seconds)} ago`],
      ["Workers", Object.entries(found.worker_versions)
        .map(([version, count]) => `${count} of version ${version}`).join(", ") || "none"],
    ]),
    h("h2", {}, "Job store"),
    facts([
      ["Version", redis.version],
      ["Answers in", `${number(1000 * redis.answer_seconds, 2)} ms`],
      ["Clock", Math.abs(redis.clock_ahead_seconds) < 0.1
        ? "the same as the server's" : `${seconds(redis.clock_ahead_seconds)} ahead of the server`],
      ["Runs for", duration(redis.uptime_seconds)],
      ["Clients", number(redis.clients)],
      ["Memory", `${bytes(redis.memory_bytes)}${limit}`],
      ["Append-only file", redis.persistent ? "yes" : "no"],
    ]),
    h("h2", {}, "Disk"), space(disk),
    h("h2", {}, "Queues"),
    table("Queues", ["Stage", "Waiting", "Workers"],
      queues.map(({ stage, waiting, workers }) => [stage, String(waiting), String(workers)])),
    h("h2", {}, "Jobs"),
    table("Jobs", ["Status", "Jobs"], Object.entries(jobs).filter(([, count]) => count > 0)
      .map(([status, count]) => [
        h("a", { href: to(`/jobs?status=${status}`) }, status), count.toLocaleString("en")])),
  ];
});

function space({ total_bytes: total, free_bytes: free, floor_bytes: floor }) {
  const used = (total - free) / total;
  return h("p", {},
    h("progress", { class: "space", max: 1, value: used, "aria-label": `${percent(used)} used` }),
    ` ${bytes(free)} of ${bytes(total)} are free. `,
    floor > 0 && h("span", { class: "quiet" }, `No job is accepted below ${bytes(floor)}.`));
}

// ---------------------------------------------------------------------- storage

export const storagePage = () => page("/storage", "Storage", STORAGE_MS, async (found) => [
  space(found.disk),
  found.caches_disk && space(found.caches_disk),
  table("Kinds", ["Kind", "Number", "Bytes"],
    found.kinds.map(({ kind, items, bytes: size }) => [kind, items.toLocaleString("en"), bytes(size)])),
  h("h2", {}, "Teams"),
  teamTable((await get("/quota")).data),
  h("h2", {}, "What kd gc would remove"),
  h("p", {}, found.removable_items
    ? `${found.removable_items.toLocaleString("en")} things, ${bytes(found.removable_bytes)}. `
    : "Nothing. ",
  found.nightly_hour == null ? "" : `The service removes it itself between ${found.nightly_hour}:00 and ${found.nightly_hour}:59 UTC.`),
  found.removable.length > 0 && itemTable("What kd gc would remove", found.removable, false),
  h("h2", {}, "What stays because something needs it"),
  h("p", {}, found.protected_items
    ? `${found.protected_items.toLocaleString("en")} things are older than their rule.` : "Nothing that is needed is older than its rule."),
  found.protected.length > 0 && itemTable("What stays", found.protected, true),
  h("h2", {}, "Rules"),
  table("Rules", ["Kind", "Removed after", "Kept"], found.rules.map(({ kind, after_days: days, keep }) => [
    kind, `${number(days)} days`, keep == null ? "" : `the newest ${keep}`])),
  h("p", { class: "quiet" }, "The settings whose names begin with KD_RETAIN are the rules; other kinds stay. ",
    h("code", {}, "kd gc"), " lists, asks and removes."),
  ...found.kinds.filter(({ largest }) => largest.length).map(({ kind, largest }) =>
    h("details", {}, h("summary", {}, `The largest ${kind}`),
      table(`The largest ${kind}`, ["Name", "Bytes", "Needed by"],
        largest.map((item) => [nameOf(item), bytes(item.bytes), item.kept_by])))),
]);

function teamTable(teams) {
  const used = (quota, show) =>
    `${show(quota.used)}${quota.limit == null ? "" : ` of ${show(quota.limit)}`}`;
  return table("Teams", ["Team", "Disk", "Caches", "Runs", "Files", "Device time today", "Waits"],
    teams.map((team) => [
      team.team, used(team.bytes, bytes), bytes(team.disk.caches), bytes(team.disk.runs),
      bytes(team.disk.files), used(team.device_seconds, duration), team.reason,
    ]));
}

function itemTable(title, items, needed) {
  const titles = ["Kind", "Name", "Bytes", "Why", ...(needed ? ["Needed by"] : [])];
  return table(title, titles, items.map((item) => [
    item.kind, nameOf(item), bytes(item.bytes), item.reason, ...(needed ? [item.kept_by] : [])]));
}

/** A name, with a link to its page if it has one. */
export function nameOf({ kind, name }) {
  if (kind === "caches") return h("a", { href: to(`/caches/${name}`) }, h("code", {}, name.slice(0, 12)));
  if (/^job_[0-9a-z]{26}$/.test(name)) return h("a", { href: to(`/jobs/${name}`) }, h("code", {}, name));
  return h("code", {}, name);
}

// ---------------------------------------------------------------------- keys

const KEY_TITLES = ["Owner", "Team", "Rights", "Id", "Made", "Last used", "Expires"];

export const keysPage = () => page("/keys", "Keys", KEYS_MS, ({ required, data }) => {
  if (!required) {
    return h("p", {}, "Requests need no key, and only this machine can send them. ",
      h("code", {}, "kd keys new NAME"), " makes one, and KD_API_KEYS_FILE asks for it.");
  }
  const rows = data.map((key) => [
    key.name, key.team, key.scopes.join(", "), h("code", {}, key.id), time(key.created_at),
    time(key.last_used_at) ?? h("span", { class: "quiet" }, "never"),
    key.expired ? h("span", { class: "error" }, "expired ", time(key.expires_at))
      : time(key.expires_at) ?? h("span", { class: "quiet" }, "never"),
  ]);
  return [
    table("Keys", KEY_TITLES, rows),
    h("p", { class: "quiet" }, h("code", {}, "kd keys revoke ID"), " revokes a key. A key is shown only once, when it is made."),
  ];
});
