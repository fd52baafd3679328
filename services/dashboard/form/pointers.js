// JSON pointers (RFC 6901) of fields, such as /data/train/0, and paths of keys and indices.

export const pointerOf = (path) =>
  path.map((key) => `/${String(key).replaceAll("~", "~0").replaceAll("/", "~1")}`).join("");

const keysOf = (pointer) => pointer.split("/").slice(1)
  .map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"));

export const pathOf = (pointer) =>
  keysOf(pointer).map((key) => (/^\d+$/.test(key) ? Number(key) : key));

/** The name of a field in words: data.train.0. */
export const dottedOf = (pointer) => keysOf(pointer).join(".");
