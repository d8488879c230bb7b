"use strict";
// One page, no build: live picture, conversation, what the memory holds, cameras.

const $ = (id) => document.getElementById(id);
const MEMORY_MS = 3000, STREAMS_MS = 5000, FRAME_MS = 500, RETRY_MS = 2000, HAPPENED = 50;
const TILES = 160, NEWEST = 40, TURNS = 50, LAST = 8, SEEN = 3;  // frames of the strip, the newest among them; turns kept; turns that a question brings along; frames of evidence
const IDEAS = {
  demo: ["how many objects are there now?", "which shape came first?", "what left last?"],
  other: ["What do you see?", "What happened just now?", "Who came in?"],
};
const state = { stream: null, streams: [], watts: null, memory: null, chosen: null, turns: {}, answering: null, speed: {}, key: sessionStorage.getItem("key") || "" };

async function api(path, options = {}) {
  const { key } = state, headers = { ...(options.headers || {}), "x-api-key": key || "none" };  // a proxy may use Authorization
  if (options.body) headers["content-type"] = "application/json";
  let response;
  try { response = await fetch(`.${path}`, { ...options, headers }); } catch (error) { if (error.name !== "AbortError") offline(true); throw error; }
  offline(false);
  if (response.status === 401) { if (key === state.key) askForKey(); throw new Error(key ? "The key is wrong." : "This server requires a key."); }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message || `${response.status} ${response.statusText}`);
  }
  return response;
}

const json = async (path, options) => (await api(path, options)).json();
const send = (path, method, body) => api(path, { method, body: body && JSON.stringify(body) });

function offline(is) {
  if ($("offline").hidden === !is) return;
  $("offline").hidden = !is;
  if (!is) watch();
}

function askForKey() {
  tell($("key-problem"), state.key ? "The key is wrong." : "");
  if (!$("login").open) $("login").showModal();
}

function tell(node, text) { if (node.textContent !== text) node.textContent = text; }  // a screen reader reads changes alone

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const timers = {};
function toast(id, text) {
  tell($(id), text);
  clearTimeout(timers[id]);
  timers[id] = setTimeout(() => tell($(id), ""), 8000);
}
function problem(error) { if (!(error instanceof TypeError && !$("offline").hidden)) toast("problem", error.message || String(error)); }

function clock(iso) { return new Date(iso).toLocaleTimeString(); }
function duration(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}
function since(iso) { return `${duration(Math.max(0, (Date.now() - new Date(iso)) / 1000))} ago`; }
const percent = (fraction) => `${fraction > 0 && fraction < 0.005 ? "<1" : Math.round(100 * fraction)} %`;

// streams

const stream = () => state.streams.find((each) => each.id === state.stream);

async function refreshStreams() {
  const { data, watts } = await json("/v1/streams");
  state.streams = data;
  state.watts = watts;
  if (!data.some((each) => each.id === state.stream)) choose(data[0]?.id ?? null);
  showStreams();
}

const called = (id) => state.streams.find((each) => each.id === id)?.name || id;  // for people

function showStreams() {
  redraw($("streams"), state.streams.map((each) => [each.id, each.state, each.id === state.stream, called(each.id)]), ([name, how, current, text]) => {
    const button = element("button");
    button.append(element("span", undefined, `dot ${how}`), text);
    if (how !== "running") button.append(element("span", `, ${how}`, "unseen"));
    if (current) button.setAttribute("aria-current", "true");
    button.dataset.key = name;
    button.onclick = () => { choose(name); showStreams(); };
    return button;
  });
  $("cameras").closest("section").hidden = !state.streams.length;
  redraw($("cameras"), state.streams.map(({ id, source, state, problem, policy, budget, name }) => [id, source, state, problem, policy, budget, name]), cameraItem);
  showState();
  showFigures();
}

function redraw(parent, values, made) {  // only where something changed, and the focus stays
  const shown = JSON.stringify(values);
  if (parent.dataset.shown === shown) return;
  parent.dataset.shown = shown;
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...values.map(made));
  if (key !== undefined) (parent.querySelector(`[data-key="${CSS.escape(key)}"]`) || parent.querySelector("button"))?.focus();
}

function choose(name) {
  if (state.stream === name) return;
  state.stream = name;
  state.memory = null;
  showFrame(null);
  showMemory();
  showTalk();
  showState();
  watch();
  listen();
  refreshMemory().catch(problem);
}

function showState() {
  const now = stream(), running = now?.state === "running", gone = !now ? "" : running ? "" : now.problem || "";
  redraw($("state"), now ? [[now.state, gone]] : [["no camera", ""]], ([how, why]) => {
    const line = element("span", why ? `${how}: ${why}` : how);
    line.prepend(element("span", undefined, `dot ${how}`));
    return line;
  });
  $("live").classList.toggle("stale", Boolean(now) && !running);
  tell($("stage-note"), state.chosen !== null ? "" : !now ? "No camera yet. Add one to begin." : !now.stats && running ? "Waiting for the first frame…" : running ? "" : words(now));
  $("question").disabled = $("send").disabled = !now;
  $("change-memory").hidden = !now;
}

function words({ state, problem }) {
  const said = { paused: "Paused. You can still ask about what it has seen.", initialising: "Connecting…", ended: "The recording has ended. You can still ask about it." }[state];
  return said || `${state[0].toUpperCase()}${state.slice(1)}${problem ? `: ${problem}` : "…"}`;
}

function cameraItem([name, source, how, why, policy, budget]) {
  const item = element("li"), title = element("span", called(name), "name"), about = element("span", undefined, "about"), buttons = element("span", undefined, "buttons");
  title.prepend(element("span", undefined, `dot ${how}`));
  about.append(`${source} · `, element("span", how, how === "failed" ? "bad" : ""), budget === undefined ? "" : ` · ${policy}, ${budget.toLocaleString()} tokens`);
  if (why) about.append(element("br"), element("span", why, "bad"));
  const add = (text, what, act) => {
    const button = element("button", text);
    button.type = "button";
    button.setAttribute("aria-label", `${text.replace("…", "")} ${called(name)}`);
    button.dataset.key = `${what} ${name}`;
    button.onclick = act;
    buttons.append(button);
  };
  add(how === "paused" ? "Resume" : "Pause", "pause", () => change(name, { state: how === "paused" ? "running" : "paused" }));
  add("Memory…", "memory", () => openSwitch(name));
  add("Remove…", "remove", () => { tell($("remove-title"), `Remove ${called(name)}?`); $("remove").dataset.name = name; $("remove").showModal(); });
  item.append(title, about, buttons);
  return item;
}

async function change(name, body) {
  try {
    await send(`/v1/streams/${name}`, "PATCH", body);
    await refreshStreams();
  } catch (error) { problem(error); }
}

function showFigures() {
  const now = stream(), stats = now?.stats, speed = state.speed[state.stream] || {};
  const rows = !stats ? [] : [
    ["frames per second", stats.fps.toFixed(1)],
    ["first token", speed.ttft_ms ? `${Math.round(speed.ttft_ms)} ms` : "–"],
    ["tokens per second", speed.tpot_ms ? (1000 / speed.tpot_ms).toFixed(speed.tpot_ms < 100 ? 0 : 1) : "–"],
    ["KV cache, fixed", `${(stats.cache_bytes / 1e6).toFixed(1)} MB`],
    ["patches encoded", percent(stats.encoded)],
    ["tokens appended", percent(stats.appended)],
    ["process", `${Math.round(stats.rss_bytes / 1e6)} MB`],
    ["frames watched", stats.frames.toLocaleString()],
    ...(stats.dropped ? [["frames dropped", stats.dropped.toLocaleString()]] : []),
    ...(state.watts === null ? [] : [["power", `${state.watts.toFixed(1)} W`]]),
  ];
  const list = $("figures");
  if (list.children.length !== rows.length) list.replaceChildren(...rows.map(() => { const row = element("div"); row.append(element("dt"), element("dd")); return row; }));
  rows.forEach(([name, value], place) => { tell(list.children[place].firstChild, name); tell(list.children[place].lastChild, value); });
}

// events of the stream that is shown, over fetch: EventSource can send no key

let listening = null;
async function listen() {
  listening?.abort();
  const name = state.stream, mine = listening = new AbortController();
  for (let first = true; name && !mine.signal.aborted; first = false) {
    try {
      const response = await api(`/v1/streams/${name}/events`, { signal: mine.signal });
      if (!first) watch();
      for await (const { event, data } of events(response)) heard(name, event, JSON.parse(data));
    } catch { /* the state, or the line about the server, says why */ }
    if (!mine.signal.aborted) await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function heard(name, event, data) {
  const found = state.streams.find((each) => each.id === name);
  if (!found) return;
  if (event === "stats") {
    found.stats = data;
    if (!["paused", "failed"].includes(found.state)) Object.assign(found, { state: data.source_state, problem: data.source_problem ?? null });
  } else if (event === "state") { Object.assign(found, data); }
  else if (event === "answer") { if (data.ttft_ms) state.speed[name] = data; }
  else if (event === "watch") { refreshWatches().catch(problem); }
  else if (event === "journal") { refreshHappened().catch(problem); }
  else if (event === "notice" && found.state === "running") { toast("news", data.text); }  // else the state says it
  showStreams();
}

// watches: repeated questions

async function refreshWatches() {
  if (document.hidden) return;
  const { data } = await json("/v1/watches");
  $("watches-empty").hidden = Boolean(data.length);
  redraw($("watches"), data.map(({ id, question, cameras }) => [id, question, cameras.map(({ camera, state: how, answer, paused, opened }) => [called(camera), paused ? "paused" : how, answer, how === "open" ? opened : null])]), watchItem);
}

let searched = "";  // words; empty: what happened meanwhile
async function refreshHappened() {  // when watches were open and what the journal says, the newest first
  if (document.hidden) return;
  const search = searched, wanted = search ? { search, since: "3650d" } : { since: "8h" };
  const { data } = await json(`/v1/digest?${new URLSearchParams({ ...wanted, limit: HAPPENED })}`);
  if (search !== searched) return;
  if (data.length) $("happened-card").hidden = false;
  tell($("happened-when"), `${data.length ? "" : "Nothing "}${search ? `matching “${search}”` : "in the last 8 hours"}`);
  redraw($("happened"), data.reverse().map(({ event, time, opened, camera, question, text, seconds, evidence }) => [
    event === "line" ? time : opened, called(camera), event === "line" ? text : `${question} ${seconds === null ? "still open" : `for ${duration(seconds)}`}`,
    evidence.find(({ jpeg_url: url }) => url)]), happenedItem);
}

function happenedItem([at, camera, text, seen]) {
  const item = element("li"), canvas = element("canvas"), today = new Date(at).toDateString() === new Date().toDateString();
  item.append(element("span", today ? clock(at) : `${new Date(at).toLocaleDateString()} ${clock(at)}`, "name"), element("span", `${camera}: ${text}`, "about"));
  if (seen) picture({ thumbnail_url: seen.jpeg_url }, (image) => {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `What ${camera} showed then`);
    boxed(canvas, image, seen.box);
    item.append(canvas);
  });
  return item;
}

function watchItem([name, question, cameras]) {
  const item = element("li"), title = element("span", question, "name"), about = element("span", undefined, "about"), buttons = element("span", undefined, "buttons");
  const paused = cameras.length > 0 && cameras.every(([, how]) => how === "paused");
  title.prepend(element("span", undefined, `dot ${cameras.some(([, how]) => how === "open") ? "open" : ""}`));
  tell(about, cameras.map(([camera, how, answer, opened]) => `${camera}: ${how}${opened ? ` since ${clock(opened)}` : ""}${answer && answer !== (how === "open" ? "yes" : "no") ? `, ${answer}` : ""}`).join(" · ") || "not on any camera");
  const add = (text, act) => {
    const button = element("button", text);
    button.type = "button";
    button.setAttribute("aria-label", `${text} watch: ${question}`);
    button.dataset.key = `${text === "Remove" ? "remove" : "pause"} ${name}`;
    button.onclick = () => act().then(refreshWatches).catch(problem);
    buttons.append(button);
  };
  add(paused ? "Resume" : "Pause", () => send(`/v1/watches/${name}`, "PATCH", { state: paused ? "running" : "paused" }));
  add("Remove", () => send(`/v1/watches/${name}`, "DELETE"));
  item.append(title, about, buttons);
  return item;
}

// live picture: MJPEG where no key is asked for, else frames over fetch; nothing while nobody looks

let live = 0;
function watch() {
  const turn = ++live, image = $("live"), name = state.stream;
  image.onerror = null;
  image.removeAttribute("src");
  if (!name || document.hidden) return;
  image.alt = `Newest frame of ${called(name)}`;
  image.onload = () => { image.classList.toggle("small", image.naturalWidth < 160); if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src); };
  if (state.key) { frames(turn, name); return; }
  image.onerror = () => { if (turn === live) frames(turn, name); };
  image.src = `./v1/streams/${name}/mjpeg`;
}

async function frames(turn, name) {
  $("live").onerror = null;
  while (turn === live) {
    try {
      const blob = await (await api(`/v1/streams/${name}/frame.jpg`)).blob();
      if (turn !== live) break;
      URL.revokeObjectURL($("live").src);  // the one before may not have been shown yet
      $("live").src = URL.createObjectURL(blob);
    } catch { /* the state says why */ }
    await new Promise((done) => setTimeout(done, FRAME_MS));
  }
}

// conversation

const items = new WeakMap();  // turn -> its list item

function turnsOf(name) {
  state.turns[name] ??= JSON.parse(sessionStorage.getItem(`turns/${name}`) || "[]");
  return state.turns[name];
}

function showTalk() {
  const turns = state.stream ? turnsOf(state.stream) : [];
  $("talk").hidden = !turns.length;
  $("talk-empty").hidden = Boolean(turns.length);
  $("turns").replaceChildren(...turns.map((turn) => items.get(turn) || talkItem(turn)));
  $("talk").scrollTop = $("talk").scrollHeight;
  const ideas = stream()?.model === "demo" ? IDEAS.demo : IDEAS.other;
  redraw($("ideas"), state.stream ? ideas : [], (text) => {
    const item = element("li"), button = element("button", text);
    button.type = "button";
    button.onclick = () => { ask(text); $("question").focus(); };
    item.append(button);
    return item;
  });
}

function talkItem(turn) {
  const item = element("li");
  item.append(element("p", turn.question, "q"), element("p", turn.answer, "a"), element("p", turn.note, "note"), element("div", undefined, "seen"));
  items.set(turn, item);
  showEvidence(turn);
  return item;
}

function showEvidence(turn) {  // the frames that the answer was read from; each is found in the memory
  const place = items.get(turn).lastChild;
  if (turn.fits === false) { tell(place, "A guess: the demo model knows only its own world. Start edgevlm serve with --model to ask a real one."); return; }
  if (turn.held === false) { tell(place, "The frames with the answer are no longer in memory."); return; }
  const moments = turn.evidence || [], strong = moments.filter(({ weight }) => !(weight < moments[0].weight / 4));
  redraw(place, strong, ({ frame, time, box, jpeg_url: url }) => {
    const button = element("button"), canvas = element("canvas");
    button.type = "button";
    button.append(canvas, element("span", "Seen ", "unseen"), time ? clock(time) : `frame ${frame}`);
    button.onclick = () => find(frame);
    picture({ thumbnail_url: url }, (image) => boxed(canvas, image, box));
    return button;
  });
}

function boxed(canvas, image, box) {  // a picture with what was looked at framed
  const paint = canvas.getContext("2d"), [left, top, right, bottom] = box || [];
  [canvas.width, canvas.height] = [160, Math.round(160 * image.naturalHeight / image.naturalWidth)];
  paint.imageSmoothingEnabled = image.naturalWidth >= 80;
  paint.drawImage(image, 0, 0, canvas.width, canvas.height);
  paint.strokeStyle = "#ffb347";
  paint.lineWidth = 4;
  if (box) paint.strokeRect(left * canvas.width, top * canvas.height, (right - left) * canvas.width, (bottom - top) * canvas.height);
}

function evidence() {  // frames that the newest answer was read from
  const last = state.stream && turnsOf(state.stream).at(-1);
  return new Set(last?.held === false ? [] : (last?.evidence || []).map(({ frame }) => frame));
}

function find(frame) {
  const found = state.memory?.frames.find((each) => each.frame === frame);
  if (!found) { toast("news", frame > (state.memory?.frames.at(-1)?.frame ?? -1) ? "That frame is still waiting for its chunk." : "That frame has no tokens in memory."); return; }
  showFrame(found);
  showMemory();
  $("frames").querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest", inline: "center" });
}

function showTurn(turn) {
  const item = items.get(turn), list = $("talk"), atEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 40;
  tell(item.children[1], turn.answer);
  tell(item.children[2], turn.note);
  showEvidence(turn);
  if (atEnd && item.isConnected) list.scrollTop = list.scrollHeight;
}

async function ask(question) {
  if (state.answering || !state.stream) return;
  const name = state.stream, turns = turnsOf(name), turn = { question, answer: "", note: "" };
  const messages = turns.filter((each) => each.answer).slice(-LAST).flatMap((each) => [
    { role: "user", content: each.question }, { role: "assistant", content: each.answer }]);
  messages.push({ role: "user", content: question });
  turns.push(turn);
  turns.splice(0, turns.length - TURNS);
  remember(name);
  showTalk();
  items.get(turn).setAttribute("aria-busy", "true");  // a screen reader reads the whole answer once it is there
  const controller = state.answering = new AbortController();
  const inside = document.activeElement === $("send");
  $("stop").hidden = false;
  $("send").hidden = true;
  if (inside) $("stop").focus();
  try {
    const response = await api("/v1/chat/completions", { method: "POST", signal: controller.signal, body: JSON.stringify({ model: name, stream: true, messages }) });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      turn.answer += chunk.choices[0]?.delta?.content || "";
      if (chunk.edgevlm) Object.assign(turn, { evidence: chunk.edgevlm.evidence?.slice(0, SEEN), held: chunk.edgevlm.evidence_held, fits: chunk.edgevlm.model_fits_source });
      if (chunk.edgevlm) turn.note = [chunk.edgevlm.time && `as of ${clock(chunk.edgevlm.time)}`, chunk.edgevlm.ttft_ms && `first token after ${Math.round(chunk.edgevlm.ttft_ms)} ms`].filter(Boolean).join(" · ");
      showTurn(turn);
    }
  } catch (error) {
    turn.note = error.name === "AbortError" ? "stopped" : error.message;
    showTurn(turn);
  }
  items.get(turn).removeAttribute("aria-busy");
  state.answering = null;
  if (document.activeElement === $("stop")) $("question").focus();
  $("stop").hidden = true;
  $("send").hidden = false;
  remember(name);
  refreshMemory().catch(problem);
}

function remember(name) {
  sessionStorage.setItem(`turns/${name}`, JSON.stringify(state.turns[name].map((each) => ({ ...each, note: each.note || "not finished" }))));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = "message";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) { yield { event, data: line.slice(5).trim() }; event = "message"; }
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

// memory: a map of all that was watched, and a strip of the frames of which something is held, kept patches lit

async function refreshMemory() {
  const name = state.stream;
  if (!name || document.hidden) return;
  const memory = await json(`/v1/streams/${name}/memory`);
  if (name !== state.stream) return;
  state.memory = memory;
  showMemory();
}

function showMemory() {
  const memory = state.memory, list = $("frames"), none = !memory?.frames.length;
  $("memory-empty").hidden = !none;
  $("map-box").hidden = none;
  if (none) { list.replaceChildren(); $("held").replaceChildren(); return; }
  const { frames, frames_watched: watched, frames_waiting: waiting, tokens, budget, policy } = memory, oldest = frames[0];
  $("held").replaceChildren(element("b", `${frames.length.toLocaleString()} of ${watched.toLocaleString()} frames`), ` in ${tokens.toLocaleString()} of ${budget.toLocaleString()} tokens`,
    oldest.time ? `, the oldest from ${since(oldest.time)}` : "", waiting ? `, ${waiting} waiting` : "", ` · ${policy}`);
  showMap(memory);
  const atEnd = list.scrollLeft + list.clientWidth >= list.scrollWidth - 8;
  const known = new Map([...list.children].map((item) => [Number(item.dataset.frame), item]));
  const seen = evidence(), shown = thinned(frames).map((each) => frameItem(each, memory.grid, known.get(each.frame), seen.has(each.frame)));
  shown.forEach((item, place) => { if (list.children[place] !== item) list.insertBefore(item, list.children[place] || null); });
  while (list.children.length > shown.length) list.lastChild.remove();
  if (atEnd && state.chosen === null) list.scrollLeft = list.scrollWidth;
  rove();
  if (state.chosen !== null) {
    const found = frames.find((each) => each.frame === state.chosen);
    if (found) showFrame(found); else { showFrame(null); toast("news", "That frame has just been forgotten."); }
  }
}

function thinned(frames) {  // of too many the newest, and before them the best remembered of each part of the time; the same ones as time goes on
  const older = frames.slice(0, -NEWEST), wanted = evidence().add(state.chosen), best = new Map();
  let width = 1;
  const part = ({ frame }) => Math.floor(frame / width);
  while (new Set(older.map(part)).size > TILES - NEWEST) width *= 2;
  for (const each of older) {
    const other = best.get(part(each));
    if (!other || (each.fraction > other.fraction && !wanted.has(other.frame)) || wanted.has(each.frame)) best.set(part(each), each);
  }
  return [...best.values(), ...frames.slice(-NEWEST)];
}

function showMap({ frames, frames_watched: watched, frames_waiting: waiting, grid: [rows, columns] }) {
  const canvas = $("map"), patches = rows * columns, width = Math.max(64, canvas.parentNode.clientWidth >> 1);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== patches) canvas.height = patches;
  const paint = canvas.getContext("2d"), pixels = paint.createImageData(width, patches);
  for (const { frame, patches: digits } of frames) {
    const from = Math.floor(frame * width / watched), to = Math.max(from + 1, Math.floor((frame + 1) * width / watched));
    for (let y = 0; y < patches; y++) {
      const fraction = parseInt(digits[y], 16) / 15, alpha = Math.round(60 + 195 * fraction);
      for (let at = 4 * (y * width + from); fraction && at < 4 * (y * width + to); at += 4)
        if (alpha > pixels.data[at + 3]) pixels.data.set([255, 130 + 50 * fraction, 40 + 30 * fraction, alpha], at);
    }
  }
  paint.putImageData(pixels, 0, 0);
  paint.fillStyle = "#6b6358";
  for (let x = Math.floor((watched - waiting) * width / watched); x < width; x += 3) paint.fillRect(x, 0, 1, patches);
  paint.fillStyle = "#6db3ff";
  for (const frame of evidence()) paint.fillRect(Math.floor((frame + 0.5) * width / watched) - 1, 0, 2, Math.max(1, patches / 8));
  if (state.chosen !== null) {
    paint.fillStyle = "#fff";
    paint.fillRect(Math.floor((state.chosen + 0.5) * width / watched), 0, 1, patches);
  }
  const first = frames.find((each) => each.frame === 0 && each.time);
  tell($("map-from"), first ? clock(first.time) : "first frame");
  canvas.setAttribute("aria-label", `How much of each of the ${watched.toLocaleString()} frames is remembered, from the first to now. The list below shows the same frames.`);
}

function frameItem(frame, grid, item, seen) {
  if (!item) {
    item = element("div");
    item.setAttribute("role", "option");
    item.dataset.frame = frame.frame;
    item.tabIndex = -1;
    const line = element("div", undefined, "dim");
    line.append(element("span"), element("span", undefined, "fraction"));
    item.append(element("canvas"), element("div"), line);
    picture(frame, (image) => { item.image = image; item.patches = ""; lightTile(item, grid); });
  }
  item.digits = frame.patches;
  lightTile(item, grid);
  tell(item.children[1], frame.time ? clock(frame.time) : `frame ${frame.frame}`);
  tell(item.children[2].firstChild, frame.time ? since(frame.time) : "");
  tell(item.children[2].lastChild, percent(frame.fraction));
  item.setAttribute("aria-label", `${frame.time ? `${clock(frame.time)}, ${since(frame.time)}` : `frame ${frame.frame}`}, ${percent(frame.fraction)} remembered${seen ? ", the last answer was read from it" : ""}`);
  item.classList.toggle("evidence", seen);
  item.setAttribute("aria-selected", String(frame.frame === state.chosen));
  return item;
}

function picture({ thumbnail_url: url }, then) {
  if (!url) return;
  const image = new Image();
  image.onload = () => { image.onload = null; if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src); then(image); };
  if (state.key) api(url).then((response) => response.blob()).then((blob) => { image.src = URL.createObjectURL(blob); }).catch(() => {});
  else image.src = url;
}

function lightTile(item, grid) {
  if (item.patches === item.digits) return;
  item.patches = item.digits;
  light(item.firstChild, item.image, grid, item.digits, 240);
}

function light(canvas, image, [rows, columns], digits, width) {  // forgotten patches grey and dark, kept ones lit, with an edge
  const height = Math.round(width * (image ? image.naturalHeight / image.naturalWidth : rows / columns)), paint = canvas.getContext("2d");
  canvas.width = width;
  canvas.height = height;
  const lit = (row, column) => row >= 0 && column >= 0 && row < rows && column < columns ? parseInt(digits[row * columns + column], 16) / 15 : 0;
  const box = (row, column) => [column * width / columns, row * height / rows, width / columns, height / rows];
  paint.imageSmoothingEnabled = !image || image.naturalWidth >= width / 2;
  if (image) {
    paint.drawImage(image, 0, 0, width, height);
    paint.globalCompositeOperation = "saturation";
    paint.fillStyle = "#808080";
    paint.fillRect(0, 0, width, height);
    paint.globalCompositeOperation = "source-over";
  }
  paint.fillStyle = "rgba(8, 7, 6, .78)";
  paint.fillRect(0, 0, width, height);
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
    const fraction = lit(row, column), [x, y, w, h] = box(row, column);
    if (!fraction) continue;
    paint.globalAlpha = 0.15 + 0.85 * fraction;
    if (image) paint.drawImage(image, x * image.naturalWidth / width, y * image.naturalHeight / height, w * image.naturalWidth / width, h * image.naturalHeight / height, x, y, w, h);
    paint.globalCompositeOperation = "screen";
    paint.globalAlpha = (image ? 0.12 : 0.6) * fraction;
    paint.fillStyle = "#ffa733";
    paint.fillRect(x, y, w, h);
    paint.globalCompositeOperation = "source-over";
  }
  paint.globalAlpha = 0.9;
  paint.strokeStyle = "#ffb347";
  paint.lineWidth = Math.max(1, width / 160);
  paint.beginPath();
  for (let row = 0; row <= rows; row++) for (let column = 0; column <= columns; column++) {
    const own = lit(row, column) >= 0.5, [x, y, w, h] = box(row, column);
    if (own !== lit(row - 1, column) >= 0.5 && column < columns) { paint.moveTo(x, y); paint.lineTo(x + w, y); }
    if (own !== lit(row, column - 1) >= 0.5 && row < rows) { paint.moveTo(x, y); paint.lineTo(x, y + h); }
  }
  paint.stroke();
  paint.globalAlpha = 1;
}

function showFrame(frame) {  // of the memory, large, in place of the live picture; null: the live picture
  const before = state.chosen;
  state.chosen = frame?.frame ?? null;
  $("past").hidden = $("layers").hidden = $("to-live").hidden = !frame;
  $("live").hidden = Boolean(frame);
  $("state").hidden = Boolean(frame);
  tell($("stage-title"), !frame ? "Live" : frame.time ? `${clock(frame.time)}, ${since(frame.time)}` : `Frame ${frame.frame}`);
  for (const item of $("frames").children) item.setAttribute("aria-selected", String(Number(item.dataset.frame) === state.chosen));
  rove();
  showState();
  if (before !== state.chosen && state.memory?.frames.length) showMap(state.memory);
  if (!frame) return;
  const { layer_groups: groups, grid } = state.memory, canvas = $("past");
  canvas.setAttribute("aria-label", `The frame. The ${percent(frame.fraction)} still in memory is lit`);
  $("layers").replaceChildren(element("span", `${percent(frame.fraction)} remembered`), ...groups.map(([first, last], place) => {
    const span = element("span", first === last ? `layer ${first + 1}` : `layers ${first + 1}–${last + 1}`), bar = element("meter");
    bar.value = frame.layer_fractions[place];
    bar.setAttribute("aria-label", `${span.textContent}: ${percent(bar.value)}`);
    span.append(bar);
    return span;
  }));
  if (before === frame.frame && canvas.dataset.patches === frame.patches) return;
  canvas.dataset.patches = frame.patches;
  const image = [...$("frames").children].find((item) => Number(item.dataset.frame) === frame.frame)?.image;
  const draw = (image) => { if (state.chosen === frame.frame) light(canvas, image, grid, frame.patches, 960); };
  if (image) draw(image); else { draw(undefined); picture(frame, draw); }
}

function rove() {  // one frame of the strip is in the tab order
  const list = $("frames"), stop = list.querySelector('[aria-selected="true"]') || (list.contains(document.activeElement) ? document.activeElement : list.lastChild);
  for (const item of list.children) item.tabIndex = item === stop ? 0 : -1;
}

// wiring

$("frames").onclick = (event) => {
  const item = event.target.closest("[role=option]");
  if (!item) return;
  item.focus({ preventScroll: true });
  showFrame(state.memory.frames.find((each) => each.frame === Number(item.dataset.frame)) || null);
};
$("frames").onkeydown = (event) => {
  const item = event.target.closest("[role=option]"), list = $("frames");
  const to = { ArrowLeft: item?.previousSibling, ArrowRight: item?.nextSibling, Home: list.firstChild, End: list.lastChild, Enter: item, " ": item }[event.key];
  if (event.key === "Escape") { showFrame(null); return; }
  if (!to) return;
  event.preventDefault();
  to.click();
  to.scrollIntoView({ block: "nearest", inline: "nearest" });
};
$("map").onclick = (event) => {
  const { frames, frames_watched: watched } = state.memory, wanted = event.offsetX / $("map").clientWidth * watched;
  const miss = ({ frame, fraction }) => Math.abs(frame - wanted) - fraction * watched / 50;  // a finger is not that exact: of near ones the best remembered
  find(frames.reduce((best, each) => miss(each) < miss(best) ? each : best).frame);
};
$("to-live").onclick = () => { showFrame(null); $("question").focus(); };

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || !state.stream || state.answering) return;
  $("question").value = "";
  ask(question);
};
$("stop").onclick = () => state.answering?.abort();

$("watch-form").onsubmit = async (event) => {
  event.preventDefault();
  tell($("watch-problem"), "");
  try {
    await send("/v1/watches", "POST", { question: $("watched").value.trim() });
    $("watched").value = "";
    await refreshWatches();
  } catch (error) { tell($("watch-problem"), error.message); }
};

$("search-form").onsubmit = (event) => {
  event.preventDefault();
  searched = $("search").value.trim();
  refreshHappened().catch(problem);
};
$("search").oninput = () => { if (!$("search").value && searched) $("search-form").requestSubmit(); };

for (const id of ["add", "switch", "remove"]) $(`${id}-cancel`).onclick = () => $(id).close();
$("add-camera").onclick = () => { $("add-form").reset(); $("tested").replaceChildren(); tell($("add-problem"), ""); $("add").showModal(); };
function givenSource() {
  const login = { username: $("username").value, password: $("password").value };
  return { source: $("source").value.trim(), ...(login.username || login.password ? login : {}) };
}
$("test").onclick = async () => {
  const given = givenSource(), result = $("tested");
  if (!given.source) { $("source").reportValidity(); return; }
  $("test").disabled = true;
  tell($("add-problem"), "");
  result.replaceChildren("Opening the source…");
  try {
    const seen = await (await send("/v1/streams/test", "POST", given)).json(), image = element("img");
    image.alt = "What the camera shows";
    image.src = `data:image/jpeg;base64,${seen.jpeg}`;
    result.replaceChildren(image, `It works: ${seen.width} × ${seen.height}${seen.fps ? `, ${seen.fps} frames per second` : ""}, first frame after ${Math.round(seen.first_frame_ms)} ms.`);
  } catch (error) { result.replaceChildren(); tell($("add-problem"), error.message); }
  $("test").disabled = false;
};
$("add-form").onsubmit = async (event) => {
  event.preventDefault();
  const id = $("name").value.trim();
  try {
    const added = await (await send("/v1/streams", "POST", { id, ...givenSource() })).json();
    $("add").close();
    await refreshStreams();
    choose(added.id);
    showStreams();
  } catch (error) { tell($("add-problem"), error.message); }
};

async function openSwitch(name) {
  const now = state.streams.find((each) => each.id === name);
  try {
    const { data } = await json("/v1/policies"), list = $("policy");
    list.replaceChildren(...data.map(({ id }) => element("option", id)));
    list.value = now.policy;
    list.onchange = () => tell($("idea"), data.find(({ id }) => id === list.value)?.idea || "");
    list.onchange();
    $("budget").value = now.budget;
    tell($("switch-title"), `Memory of ${called(name)}`);
    tell($("switch-warning"), `${called(name)} forgets what it has seen and starts with an empty memory. After a server restart, it continues with its configured memory.`);
    tell($("switch-problem"), "");
    $("switch").dataset.name = name;
    $("switch").showModal();
  } catch (error) { problem(error); }
}
$("change-memory").onclick = () => openSwitch(state.stream);
$("switch-form").onsubmit = async (event) => {
  event.preventDefault();
  const name = $("switch").dataset.name;
  try {
    await send(`/v1/streams/${name}`, "PATCH", { policy: $("policy").value, budget: $("budget").value.trim() });
    $("switch").close();
    showFrame(null);
    await refreshStreams();
    await refreshMemory();
  } catch (error) { tell($("switch-problem"), error.message); }
};
$("remove-form").onsubmit = async (event) => {
  event.preventDefault();
  $("remove").close();
  try {
    await send(`/v1/streams/${$("remove").dataset.name}`, "DELETE");
    await refreshStreams();
  } catch (error) { problem(error); }
};
$("login-form").onsubmit = () => {
  state.key = $("key").value.trim();
  sessionStorage.setItem("key", state.key);
  watch();
  listen();
  refreshStreams().then(refreshMemory).catch(problem);
};

async function every(milliseconds, work) {
  while (true) {
    await work().catch(problem);
    await new Promise((done) => setTimeout(done, milliseconds));
  }
}
addEventListener("pagehide", () => Object.keys(state.turns).forEach(remember));
document.addEventListener("visibilitychange", () => {
  watch();
  if (document.hidden) listening?.abort(); else { listen(); refreshMemory().catch(problem); }
});
showState();
every(STREAMS_MS, refreshStreams);
every(MEMORY_MS, refreshMemory);
every(STREAMS_MS, () => refreshWatches().then(refreshHappened));
