// The events of a job as they happen: server-sent events, read with fetch, which can send the key.

import { keyHeaders } from "./api.js";
import { to } from "./paths.js";

const AGAIN_MS = 1000;

/**
 * Call `seen` for each event of a job from now on, until the returned function is called or the
 * job has ended. A broken stream is opened again after the last event that came; `seen` is called
 * for each opening too, because what came before it may not be known.
 */
export function follow(id, seen) {
  const stopping = new AbortController();
  read(id, seen, stopping.signal);
  return () => stopping.abort();
}

async function read(id, seen, signal) {
  let last = null;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...keyHeaders() };
      if (last !== null) headers["Last-Event-ID"] = last;
      const path = `/jobs/${id}/events/stream?new_only=true`;
      const answer = await fetch(to(path), { headers, signal });
      if (!answer.ok) return; // the page's own requests say why
      seen();
      for await (const event of parse(answer.body)) {
        last = event.id ?? last;
        seen();
      }
      return; // the job has ended
    } catch {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Yield {id} of each event of a stream. */
async function* parse(body) {
  let text = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const events = (text + part).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const fields = new Map(event.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (fields.has("data")) yield { id: fields.get("id") };
    }
  }
}
