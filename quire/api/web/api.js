// Requests to this server, with the key that the user entered.

export const ROOT = new URL("..", import.meta.url);
const KEY = `quire:${ROOT.pathname}:key`, ADMIN_KEY = `quire:${ROOT.pathname}:admin-key`;

/** An error response of the server. code: of its body, or "" if it has none. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const read = (name) => { try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; } };
const write = (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* blocked */ } };

export const keys = {
  get api() { return read(KEY); },
  set api(value) { write(KEY, value); },
  get admin() { return read(ADMIN_KEY); },
  set admin(value) { write(ADMIN_KEY, value); },
};

/** Send a request; return the response, or throw ApiError. */
export async function send(path, { method = "GET", body = null, signal = null, admin = false } = {}) {
  const key = (admin && keys.admin) || keys.api, headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== null) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method, headers, signal, body: body === null ? null : JSON.stringify(body),
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "");
  }
  if (response.ok) return response;
  const { error = {} } = await response.json().catch(() => ({}));
  throw new ApiError(error.message || `The server answered ${response.status}.`, response.status, error.code ?? "");
}

/** Yield the JSON of each event of a stream. Throws ApiError at an error event or a cut stream. */
export async function* events(path, body, signal) {
  const response = await send(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError("The connection was closed before the answer was complete.", 0, "");
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue; // a comment: the request waits
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0, event.error.code ?? "");
      yield event;
    }
  }
}
