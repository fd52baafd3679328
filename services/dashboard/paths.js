// Addresses of the dashboard. A proxy may serve it below a prefix, so no address begins at "/".

const BASE = new URL("../", import.meta.url).pathname;

/** Return the address of a path of the service, such as "/jobs". */
export const to = (path) => BASE + path.replace(/^\//, "");

/** Return the path of the page that is shown, such as "/jobs". */
export const here = () => `/${location.pathname.slice(BASE.length)}`;

/** Return the values of the address after "?". */
export const query = () => new URLSearchParams(location.search);

/** Put values into the address of this page; empty ones are left out of it. */
export function keepInAddress(values) {
  const known = query();
  for (const [name, value] of Object.entries(values)) {
    if (value) known.set(name, value);
    else known.delete(name);
  }
  const text = known.toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
}

/** Go to another page. */
export function go(path) {
  history.pushState(null, "", to(path));
  dispatchEvent(new PopStateEvent("popstate"));
}
