// The page of a new job. What it needs, the form and a reader of YAML, is loaded when it is opened.

import { h } from "./elements.js";

export function newPage() {
  const element = h("div", { class: "new-job" },
    h("h1", {}, "New job"), h("p", {}, "Loading the fields of a job."));
  const refresh = async () => {
    const { fillPage } = await import("./form/page.js");
    await fillPage(element);
    return false;
  };
  return { title: "New job", element, refresh };
}
