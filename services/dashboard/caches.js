// The pages of the caches: the list, and one cache with its fidelity.

import { get } from "./api.js";
import { bytes, facts, fill, h, number, percent, table } from "./elements.js";
import { to } from "./paths.js";

// The server reads the disk for every request, so the pages ask less often.
const READ_MS = 10_000;
const LIST_TITLES = ["Fingerprint", "Teacher", "Tokens", "Size", "Bytes per token", "State"];
const FIDELITY_TITLES = [
  "Temperature", "Positions", "Kept mass", "KL, nats", "Bias, z", "Gold error", "Same best token",
  "Entropy error",
];

export function cachesPage() {
  const list = h("div");
  async function refresh() {
    const { data } = await get("/caches");
    const rows = data.map((cache) => [
      h("a", { href: to(`/caches/${cache.fingerprint}`) },
        h("code", {}, cache.fingerprint.slice(0, 12))),
      cache.teacher,
      number(cache.tokens),
      bytes(cache.bytes),
      number(cache.bytes_per_token, 3),
      cache.complete ? "complete" : "not sealed",
    ]);
    const empty = h("p", {}, "There are no caches yet.");
    fill(list, rows.length ? table("Caches", LIST_TITLES, rows) : empty);
  }
  const element = h("div", {}, h("h1", {}, "Caches"), list);
  return { title: "Caches", element, refresh, every: READ_MS };
}

export function cachePage(_, fingerprint) {
  const element = h("div");
  async function refresh() {
    const cache = await get(`/caches/${fingerprint}`);
    fill(element, page(cache));
    return !cache.complete;
  }
  return { title: `Cache ${fingerprint.slice(0, 12)}`, element, refresh, every: READ_MS };
}

function page(cache) {
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
    h("h1", {}, "Cache ", h("code", {}, cache.fingerprint.slice(0, 12))),
    facts([
      ["Fingerprint", h("code", {}, cache.fingerprint)],
      ["Teacher", cache.teacher],
      ["Tokens", number(cache.tokens)],
      ["Size", bytes(cache.bytes)],
      ["Bytes per token", number(cache.bytes_per_token, 3)],
      ["State", cache.complete ? "complete" : "not sealed yet"],
    ]),
    cache.overruled && h("p", { role: "alert" },
      `The records differ from the teacher, and ${cache.overruled.field} accepted them: `,
      `${cache.overruled.problems.join("; ")}. `,
      `The teacher's own noise was ${number(cache.overruled.noise, 3)} nats.`),
    rows.length > 0 && h("section", {},
      h("h2", {}, "Fidelity to the live teacher"),
      table("Fidelity", FIDELITY_TITLES, rows)),
    cache.identity && h("details", {},
      h("summary", {}, "Inputs of the capture"),
      h("pre", {}, JSON.stringify(cache.identity, null, 2))),
  ];
}
