// The page of all caches.

import { bytes, h, number, table, time } from "./elements.js";
import { answerPage, nameOf } from "./operator.js";
import { to } from "./paths.js";

// The server reads the disk for every request, so the page asks less often.
const READ_MS = 10_000;
const LIST_TITLES = [
  "Fingerprint", "Teacher", "Text", "Made by", "Profile", "Tokens", "Size", "Bytes per token", "Sealed",
];

export const cachesPage = () => answerPage("/caches", "Caches", READ_MS, ({ data }) => {
  if (!data.length) return h("p", {}, "There are no caches yet.");
  return table("Caches", LIST_TITLES, data.map((cache) => [
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
  ]));
});
