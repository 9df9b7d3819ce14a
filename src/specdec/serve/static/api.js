// The server's routes, as this page uses them. Addresses are relative, so a path before them does not matter.

/** An error as the API tells it. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    const details = [error.code ?? error.type, error.param && `field ${error.param}`, status && `HTTP ${status}`];
    this.details = details.filter(Boolean).join(", ");
    this.status = status;
  }
}

/** The served model: id, context, precision, drafters. */
export async function servedModel(key) {
  const response = await checked(await fetch("v1/models", { headers: authorization(key) }));
  return (await response.json()).data[0];
}

/** The frames of a streamed chat answer, each as soon as it is there. */
export async function* chat(body, key, signal) {
  const response = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization(key) },
      body: JSON.stringify(body),
      signal,
    }),
  );
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const frame = JSON.parse(data);
    if (frame.error) throw new ApiError(null, frame.error);
    yield frame;
  }
  throw new ApiError(null, { message: "The connection ended before the answer did." });
}

/** A gauge out of /metrics, the mean of its replicas; null where the server has none of that name, or cannot say yet. */
export async function gauge(name) {
  const response = await fetch("metrics");
  if (!response.ok) return null;
  const lines = (await response.text()).split("\n").filter((text) => text.startsWith(`${name} `) || text.startsWith(`${name}{`));
  const values = lines.map((text) => Number(text.slice(text.lastIndexOf(" ") + 1))).filter(Number.isFinite);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const text = await response.text();
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = undefined; // somebody between this page and the server answered
  }
  throw new ApiError(response.status, error ?? { message: text || response.statusText });
}

/** The data of server-sent events; the server writes each as one line and an empty one. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
