// The page of a new job. What it needs, the form and a reader of YAML, is loaded when it is opened.

import { h } from "./elements.js";

export function newPage() {
  const element = h("div", {}, h("h1", {}, "New job"), h("p", {}, "Loading the fields of a job."));
  let close = () => {};
  let isLeft = false;
  async function refresh() {
    const { fillPage } = await import("./form/page.js");
    close = await fillPage(element);
    if (isLeft) close();
    return false;
  }
  const leave = () => {
    isLeft = true;
    close();
  };
  return { title: "New job", element, refresh, close: leave };
}
