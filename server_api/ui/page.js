// Everything that came from a session, a model or a server is put into the page as text, never as HTML.
const $ = (id) => document.getElementById(id);
const KEY = "fednl-api-key";
const LONG = 20_000;
const MODES = {
  complete: ["Complete", "Some text to go on from", "reads the text and goes on"],
  chat: ["Send", "Something to say", "reads a message and answers"],
  read: ["Learn", "Something to learn", "learns the text, says nothing"],
};
// `seen` are the points of turns by version, `live` those of the turn that runs; a point is [token, nats, tokens].
const state = { id: null, session: null, seen: new Map(), known: [], cuts: [], live: [], running: null, visit: 0 };

function element(name, text, ...classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes.length) made.className = classes.join(" ");
  return made;
}

function number(value, digits = 2) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function bytes(count) {
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : `${(count / 1e6).toFixed(2)} MB`;
}

// One dialog for all questions: resolves to what was typed, "" for a plain yes, null for no.
function ask(title, text, yes, input) {
  const dialog = $("dialog");
  $("dialog-title").textContent = title;
  $("dialog-text").textContent = text;
  $("dialog-yes").textContent = yes;
  $("dialog-label").hidden = !input;
  $("dialog-name").textContent = title;
  Object.assign($("dialog-input"), { value: "", type: "text", pattern: ".*", required: Boolean(input), ...input });
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes" ? (input ? $("dialog-input").value.trim() : "") : null);
    }, { once: true });
  });
}

function askName(title, text, yes) {
  return ask(title, text, yes, { pattern: "[A-Za-z0-9][A-Za-z0-9_.:\\-]{0,127}", title: "letters, digits and _.:-" });
}

let asking = null;
function askKey() {
  asking ??= ask("This server has a key", "It stays in this tab and goes to this server only.", "Use it", { type: "password" })
    .then((key) => {
      asking = null;
      if (key) sessionStorage.setItem(KEY, key);
      return key;
    });
  return asking;
}

// A response that is no refusal; asks for the key where one is missing.
async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(options.body && { "content-type": "application/json" }), ...(key && { "x-api-key": key }) };
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    $("leave").hidden = !key;
    if (response.status === 401 && (await askKey())) continue;
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    throw new Error(body.error?.message ?? `The server answered ${response.status}.`);
  }
}

async function json(path, method = "GET", body = undefined) {
  return (await call(path, { method, body: body && JSON.stringify(body) })).json();
}

const path = (...parts) => ["/v1/sessions", ...parts.map(encodeURIComponent)].join("/");

// The events of a streamed answer; one that tells of an error ends it.
async function* events(route, body, signal) {
  const response = await call(route, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "small error" : "small";
}

function guarded(action) {
  return async (event) => {
    event?.preventDefault();
    try {
      await action(event);
    } catch (error) {
      say(error.message, true);
    }
  };
}

// Sessions

async function listSessions() {
  const { data } = await json("/v1/sessions?limit=200");
  const current = data.find((session) => session.id === state.id);
  $("list").replaceChildren(...data.sort((a, b) => b.used - a.used).map((session) => {
    const item = element("li"), button = element("button");
    button.append(element("span", session.id), element("span", `${session.tokens_seen} tokens`, "small"));
    button.setAttribute("aria-current", String(session === current));
    button.addEventListener("click", guarded(() => open(session.id)));
    item.append(button);
    return item;
  }));
  return data;
}

async function open(id) {
  state.running?.abort();
  state.id = id;
  state.visit += 1;
  Object.assign(state, { session: null, seen: new Map(), known: [], cuts: [], live: [] });
  $("talk").replaceChildren();
  say("");
  await refresh();
  await listSessions();
}

async function refresh() {
  const { id, visit } = state;
  if (id === null) {
    $("name").textContent = "No session yet";
    $("facts").textContent = "Make one, give it something to read, and watch it learn.";
    $("badges").replaceChildren();
    $("actions").hidden = true;
    $("updates").replaceChildren();
    draw();
    return;
  }
  const session = await json(path(id));
  const log = await updatesOf(id, session.version);
  if (visit !== state.visit) return;
  state.session = session;
  showSession(session);
  showUpdates(session, log);
  recall(session, log);
  draw();
}

// The last updates of a session: as many as a page holds.
async function updatesOf(id, version) {
  const { data } = await json(`${path(id, "updates")}?limit=200&after=${Math.max(-1, version - 200)}`);
  return data;
}

function showSession(session) {
  $("name").textContent = session.id;
  $("facts").textContent =
    `version ${session.version} · ${session.tokens_seen} tokens read · ${bytes(session.state_bytes)} of memory, always`;
  const badges = [session.persisted ? "kept on disk" : "in memory only"];
  if (session.frozen) badges.push("frozen");
  $("badges").replaceChildren(...badges.map((text) => element("span", text, "badge")));
  $("actions").hidden = false;
  $("undo").disabled = session.version === 0;
  $("freeze").setAttribute("aria-pressed", String(session.frozen));
}

function showUpdates(session, log) {
  const kept = new Map(session.versions.map((version) => [version.version, version]));
  const largest = Math.max(1e-9, ...log.map((update) => update.update_norm));
  $("updates").replaceChildren(...log.toReversed().map((update) => {
    const row = element("tr"), back = element("td");
    if (kept.has(update.version) && update.version !== session.version) {
      const button = element("button", "go back", "quiet");
      button.setAttribute("aria-label", `Go back to version ${update.version}`);
      button.addEventListener("click", guarded(() => rollBack({ version: update.version })));
      back.append(button);
    }
    const name = kept.get(update.version)?.name;
    row.append(element("td", name ? `${update.version} (${name})` : String(update.version)), ...told(update, largest), back);
    return row;
  }));
}

// The cells that tell what an update did.
function told(update, largest) {
  if (update.kind !== "turn") {
    const cell = element("td", `${update.kind}${update.tokens ? `, ${update.tokens} tokens` : ""}`, "kind");
    cell.colSpan = 3;
    return [cell];
  }
  const change = element("td", number(update.update_norm)), bar = element("span", undefined, "bar");
  bar.style.width = `${(100 * update.update_norm) / largest}%`;
  change.append(bar);
  return [element("td", String(update.tokens)), element("td", number(update.surprise)), change];
}

async function rollBack(body) {
  const session = await json(path(state.id, "rollback"), "POST", body);
  await refresh();
  await listSessions();
  say(`Back at ${session.tokens_seen} tokens.`);
}

async function fork() {
  const id = await askName("Fork this session", "The copy goes on from here; this session stays as it is.", "Fork");
  if (!id) return;
  await json(path(state.id, "fork"), "POST", { id });
  await open(id);
}

async function create() {
  const id = await askName("New session", "Its name:", "Make it");
  if (!id) return;
  await json("/v1/sessions", "POST", { id });
  await open(id);
  $("prompt").focus();
}

async function freeze() {
  await json(path(state.id), "PATCH", { frozen: !state.session.frozen });
  await refresh();
}

async function forget() {
  const text = `${state.id} and all that was kept of it will be gone for good.`;
  if ((await ask("Forget this session?", text, "Forget it")) === null) return;
  await json(path(state.id), "DELETE");
  const rest = (await listSessions())[0];
  await open(rest ? rest.id : null);
}

async function save() {
  const file = await (await call(path(state.id, "export"))).blob();
  const link = element("a");
  link.href = URL.createObjectURL(file);
  link.download = `${state.id}.safetensors`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Turns

class Turn {
  constructor(mode, text) {
    this.text = text;
    this.length = Array.from(text).length;
    this.root = element("article", undefined, "turn");
    this.body = element("div", undefined, "text");
    this.read = element("span", text, mode === "chat" ? "said" : "read");
    this.answer = element("span", "", "answer");
    this.told = element("p", "", "small", "told");
    this.written = [];
    this.body.append(this.read, mode === "chat" ? "\n\n" : "", this.answer);
    this.root.append(this.body, this.told);
    this.place = Number(state.session?.tokens_seen ?? 0);
    $("talk").append(this.root);
    this.root.scrollIntoView({ block: "nearest" });
    this.follow();
  }

  // A piece of a completion that echoes its prompt: tokens of the prompt are shaded by their surprise.
  echo(choice) {
    const { token_logprobs: logprobs, text_offset: offsets } = choice.logprobs ?? { token_logprobs: [], text_offset: [] };
    const known = this.written.length;
    this.written.push(...Array.from(choice.text));
    if (known === 0) this.read.replaceChildren();
    const prompt = logprobs.map((_, i) => i).filter((i) => offsets[i] < this.length);
    prompt.forEach((i, n) => {
      const end = prompt[n + 1] === undefined ? Math.min(this.length, Math.max(this.written.length, offsets[i])) : offsets[prompt[n + 1]];
      const surprise = logprobs[i] === null ? null : -logprobs[i];
      this.shade(this.written.slice(Math.min(offsets[i], end), end).join(""), surprise);
    });
    this.answer.textContent = this.written.slice(this.length).join("");
    this.follow();
  }

  // Keep the end of the talk in sight.
  follow() {
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  shade(text, surprise) {
    const token = element("span", text, "token");
    if (surprise !== null) {
      token.style.backgroundColor = `rgba(var(--warm), ${Math.min(0.45, surprise / 22).toFixed(3)})`;
      token.title = `${number(surprise)} nats`;
      state.live.push([this.place, surprise, 1]);
    }
    this.place += 1;
    this.read.append(token);
  }

  finish(session) {
    if (session.learned) {
      this.root.dataset.version = session.version;
      state.seen.set(session.version, state.live);
    }
    const told = [`surprise ${number(session.surprise)}`];
    told.push(session.learned ? `learnt ${number(session.update_norm)}, now version ${session.version}` : "nothing kept");
    this.told.textContent = told.join(" · ");
    this.follow();
  }

  fail(error) {
    this.told.textContent = error;
    this.told.classList.add("error");
    this.root.classList.add("undone");
  }
}

const sampling = () => ({ max_tokens: Number($("max").value), temperature: Number($("temperature").value) });

async function complete(turn, signal, more = sampling()) {
  const body = { prompt: turn.text, session_id: state.id, session_mode: "append", stream: true, echo: true, logprobs: 0, learn: $("learn").checked, ...more };
  for await (const event of events("/v1/completions", body, signal)) {
    turn.echo(event.choices[0]);
    if (event.session) turn.finish(event.session);
    draw();
  }
}

async function chat(turn, signal) {
  const messages = [{ role: "user", content: turn.text }];
  const body = { messages, session_id: state.id, session_mode: "append", stream: true, learn: $("learn").checked, ...sampling() };
  for await (const event of events("/v1/chat/completions", body, signal)) {
    turn.answer.textContent += event.choices[0].delta.content ?? "";
    turn.follow();
    if (event.session) turn.finish(event.session);
  }
}

// A short text is told token by token, a long one only piece by piece.
async function read(turn, signal) {
  if (turn.length < LONG || !$("learn").checked) {
    await complete(turn, signal, { max_tokens: 0 });
    return;
  }
  let before = 0;
  for await (const event of events(path(state.id, "ingest"), { text: turn.text, stream: true }, signal)) {
    if (event.object === "session.ingest") {
      turn.finish(event.session);
    } else {
      say(`${event.processed} of ${event.total} tokens`);
      if (event.surprise !== null) state.live.push([turn.place + before, event.surprise, event.processed - before]);
      before = event.processed;
    }
    draw();
  }
}

async function run() {
  const text = $("prompt").value, mode = document.querySelector("[name=mode]:checked").value;
  if (state.running || (!text && mode !== "complete")) return;
  if (state.id === null) {
    const made = await json("/v1/sessions", "POST", { id: `page-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}` });
    await open(made.id);
  }
  const turn = new Turn(mode, text), visit = state.visit, stop = new AbortController();
  state.running = stop;
  $("stop").hidden = false;
  $("go").disabled = true;
  say("…");
  Object.assign(state, { live: [], cuts: [...state.cuts, turn.place] });
  try {
    await { complete, chat, read }[mode](turn, stop.signal);
    $("prompt").value = "";
    say("");
  } catch (error) {
    turn.fail(stop.signal.aborted ? "Stopped; the session is as it was before." : error.message);
    say(stop.signal.aborted ? "" : "The session is as it was before.", true);
  } finally {
    Object.assign(state, { running: null, live: [] });
    $("stop").hidden = true;
    $("go").disabled = false;
  }
  if (visit !== state.visit) return;
  await refresh();
  await listSessions();
}

// The page

function chooseMode() {
  const [verb, placeholder, hint] = MODES[document.querySelector("[name=mode]:checked").value];
  $("go").textContent = verb;
  $("prompt").placeholder = placeholder;
  $("hint").textContent = hint;
}

async function start() {
  for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", chooseMode);
  chooseMode();
  draw();
  $("ask").addEventListener("submit", guarded(run));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => state.running?.abort());
  $("file").addEventListener("change", guarded(async () => {
    const [file] = $("file").files;
    if (file) $("prompt").value = await file.text();
    $("file").value = "";
  }));
  for (const [id, action] of Object.entries({ fork, freeze, forget, save, new: create })) $(id).addEventListener("click", guarded(action));
  $("undo").addEventListener("click", guarded(() => rollBack({})));
  $("leave").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.reload();
  });
  await guarded(async () => {
    const model = (await json("/v1/models")).data[0];
    $("model").textContent = [model.id, model.meta.n_params && `${(model.meta.n_params / 1e6).toFixed(1)} M parameters`, `${bytes(model.meta.state_bytes)} a session`].filter(Boolean).join(" · ");
    const [newest] = await listSessions();
    if (newest) await open(newest.id);
  })();
}

start();
