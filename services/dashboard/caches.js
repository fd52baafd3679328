// The page of all caches.

import { get } from "./api.js";
import { bytes, fill, h, number, table, time } from "./elements.js";
import { nameOf } from "./operator.js";
import { to } from "./paths.js";

// The server reads the disk for every request, so the pages ask less often.
const READ_MS = 10_000;
const LIST_TITLES = [
  "Fingerprint", "Teacher", "Text", "Made by", "Profile", "Tokens", "Size", "Bytes per token", "Sealed",
];

export function cachesPage() {
  const list = h("div");
  async function refresh() {
    const { data } = await get("/caches");
    const rows = data.map((cache) => [
      h("a", { href: to(`/caches/${cache.fingerprint}`) },
        h("code", {}, cache.fingerprint.slice(0, 12))),
      cache.teacher,
      cache.text && h("span", { class: "wrapped" }, cache.text),
      cache.made_by && nameOf({ name: cache.made_by }),
      cache.profile,
      number(cache.tokens),
      bytes(cache.bytes),
      number(cache.bytes_per_token, 3),
      cache.complete ? time(cache.created) : cache.problem || "not yet",
    ]);
    const empty = h("p", {}, "There are no caches yet.");
    fill(list, rows.length ? table("Caches", LIST_TITLES, rows) : empty);
  }
  const element = h("div", {}, h("h1", {}, "Caches"), list);
  return { title: "Caches", element, refresh, every: READ_MS };
}
