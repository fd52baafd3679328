// What was kept of teachers, and how close it is to them.

import { get } from "./api.js";
import { bytes, facts, fill, h, number, percent, table } from "./elements.js";

const READ_MS = 10_000; // the server reads the disk for it

export function cachesPage() {
  const list = h("div");
  async function refresh() {
    const { data } = await get("/caches");
    const rows = data.map((cache) => [
      h("a", { href: `#/caches/${cache.fingerprint}` }, h("code", {}, cache.fingerprint.slice(0, 12))),
      cache.teacher, number(cache.tokens), bytes(cache.bytes), number(cache.bytes_per_token, 3),
      cache.complete ? "complete" : "not sealed",
    ]);
    const heads = ["Fingerprint", "Teacher", "Tokens", "Size", "Bytes per token", "State"];
    fill(list, rows.length ? table("Caches", heads, rows) : h("p", {}, "Nothing has been captured yet."));
  }
  return { element: h("div", {}, h("h1", {}, "Caches"), list), refresh, every: READ_MS };
}

export function cachePage(_, fingerprint) {
  const element = h("div");
  async function refresh() {
    const cache = await get(`/caches/${fingerprint}`);
    fill(element, page(cache));
    return !cache.complete;
  }
  return { element, refresh, every: READ_MS };
}

function page(cache) {
  const heads = ["Temperature", "Positions", "Kept mass", "KL, nats", "Bias, z", "Gold error", "Same best token", "Entropy error"];
  const rows = cache.fidelity.map((row) => [
    number(row.temperature), number(row.positions), percent(row.kept_mass, 1), number(row.kl, 3), number(row.bias_z, 3),
    percent(row.gold_error, 2), percent(row.top1_agreement, 1), number(row.entropy_error, 2),
  ]);
  return [
    h("h1", {}, "Cache ", h("code", {}, cache.fingerprint.slice(0, 12))),
    facts([
      ["Fingerprint", h("code", {}, cache.fingerprint)], ["Teacher", cache.teacher], ["Tokens", number(cache.tokens)],
      ["Size", bytes(cache.bytes)], ["Bytes per token", number(cache.bytes_per_token, 3)],
      ["State", cache.complete ? "complete" : "not sealed yet"],
    ]),
    rows.length ? h("section", {}, h("h2", {}, "Fidelity to the live teacher"), table("Fidelity", heads, rows)) : null,
    cache.identity ? h("details", {}, h("summary", {}, "What it was made from"), h("pre", {}, JSON.stringify(cache.identity, null, 2))) : null,
  ];
}
