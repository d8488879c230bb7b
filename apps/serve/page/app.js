"use strict";
// One page, no build: live picture, conversation, what the memory holds, cameras.

const $ = (id) => document.getElementById(id);
const state = { stream: null, streams: [], turns: {}, answering: null, key: sessionStorage.getItem("key") || "" };
const MEMORY_MS = 3000, STREAMS_MS = 5000, FRAME_MS = 500;

async function api(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (state.key) headers.authorization = `Bearer ${state.key}`;
  if (options.body) headers["content-type"] = "application/json";
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) { askForKey(); throw new Error(state.key ? "This is not the server's key." : "This server asks for its key."); }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message || `${response.status} ${response.statusText}`);
  }
  return response;
}

function askForKey() {
  $("key-problem").textContent = state.key ? "This is not the server's key." : "";
  if (!$("login").open) $("login").showModal();
}

function tell(node, text) { if (node.textContent !== text) node.textContent = text; }  // a screen reader reads changes alone

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

let problemTimer = 0;
function problem(error) {
  $("problem").textContent = error.message || String(error);
  clearTimeout(problemTimer);
  problemTimer = setTimeout(() => { $("problem").textContent = ""; }, 8000);
}

function ago(iso) {
  if (!iso) return "";
  const at = new Date(iso), seconds = Math.max(0, (Date.now() - at) / 1000);
  const words = seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
  return `${at.toLocaleTimeString()} (${words})`;
}

// streams

async function refreshStreams() {
  const { data } = await (await api("/v1/streams")).json();
  state.streams = data;
  if (!data.some((each) => each.id === state.stream)) choose(data[0]?.id ?? null);
  const nav = $("streams");
  if (nav.dataset.names !== data.map((each) => each.id).join(" ") + state.stream) {
    const inside = nav.contains(document.activeElement);
    nav.dataset.names = data.map((each) => each.id).join(" ") + state.stream;
    nav.replaceChildren(...data.map((each) => {
      const button = element("button", each.id);
      if (each.id === state.stream) button.setAttribute("aria-current", "true");
      button.onclick = () => { choose(each.id); refreshStreams().catch(problem); };
      return button;
    }));
    if (inside) nav.querySelector("[aria-current]")?.focus();
  }
  showCameras();
  showFigures();
}

function choose(name) {
  if (state.stream === name) return;
  state.stream = name;
  $("frames").replaceChildren();
  $("held").textContent = "";
  showTalk();
  watch();
  refreshMemory();
}

function showCameras() {
  const shown = JSON.stringify(state.streams.map(({ id, source, state, problem }) => [id, source, state, problem]));
  if ($("cameras").dataset.shown === shown) return;
  $("cameras").dataset.shown = shown;
  const focused = document.activeElement?.dataset.does;
  $("cameras").replaceChildren(...state.streams.map((each) => {
    const item = element("li");
    item.append(element("span", each.id, "name"), element("span", each.source, "dim"));
    item.append(element("span", each.problem ? `${each.state}: ${each.problem}` : each.state));
    const pause = element("button", each.state === "paused" ? "Resume" : "Pause");
    pause.onclick = () => change(each.id, "PATCH", { state: each.state === "paused" ? "running" : "paused" });
    const remove = element("button", "Remove");
    remove.onclick = () => { if (confirm(`Stop watching ${each.id}?`)) change(each.id, "DELETE"); };
    for (const button of [pause, remove]) button.setAttribute("aria-label", `${button.textContent} ${each.id}`);
    pause.dataset.does = `pause ${each.id}`;
    remove.dataset.does = `remove ${each.id}`;
    const buttons = element("span", undefined, "buttons");
    buttons.append(pause, remove);
    item.append(buttons);
    return item;
  }));
  if (focused) $("cameras").querySelector(`[data-does="${focused}"]`)?.focus();
}

async function change(name, method, body) {
  try {
    await api(`/v1/streams/${name}`, { method, body: body && JSON.stringify(body) });
    await refreshStreams();
  } catch (error) { problem(error); }
}

function showFigures() {
  const stream = state.streams.find((each) => each.id === state.stream);
  tell($("state"), stream ? (stream.problem ? `${stream.state}: ${stream.problem}` : stream.state) : "no camera");
  const stats = stream?.stats;
  const rows = !stats ? [] : [
    ["frames a second", stats.fps.toFixed(1)], ["frames", stats.frames.toLocaleString()],
    ["memory", `${stats.cache_tokens} of ${stream.budget} tokens, ${(stats.cache_bytes / 1e6).toFixed(1)} MB`],
    ["appended", `${Math.round(100 * stats.appended)} %`], ["policy", stream.policy],
    ["process", `${Math.round(stats.rss_bytes / 1e6)} MB`],
    ...(stats.dropped ? [["dropped", stats.dropped.toLocaleString()]] : []),
  ];
  $("figures").replaceChildren(...rows.map(([name, value]) => {
    const row = element("div");
    row.append(element("dt", name), element("dd", value));
    return row;
  }));
}

// live picture: MJPEG where no key is asked for, else frames over fetch

let live = 0;
function watch() {
  const turn = ++live, image = $("live"), name = state.stream;
  image.removeAttribute("src");
  if (!name) return;
  image.alt = `Newest frame of ${name}`;
  if (!state.key) { image.onerror = () => { if (turn === live) frames(turn, name); }; image.src = `/v1/streams/${name}/mjpeg`; return; }
  frames(turn, name);
}

async function frames(turn, name) {
  const image = $("live");
  image.onerror = null;
  while (turn === live) {
    try {
      const blob = await (await api(`/v1/streams/${name}/frame.jpg`)).blob();
      const before = image.src;
      image.src = URL.createObjectURL(blob);
      if (before.startsWith("blob:")) URL.revokeObjectURL(before);
    } catch { /* the state says why */ }
    await new Promise((done) => setTimeout(done, document.hidden ? 4 * FRAME_MS : FRAME_MS));
  }
}

// conversation

function turnsOf(name) {
  state.turns[name] ??= JSON.parse(sessionStorage.getItem(`turns/${name}`) || "[]");
  return state.turns[name];
}

function showTalk() {
  $("talk").replaceChildren(...(state.stream ? turnsOf(state.stream) : []).map(talkItem));
  $("talk").scrollTop = $("talk").scrollHeight;
}

function talkItem(turn) {
  const item = element("li");
  item.append(element("div", turn.question, "q"), element("div", turn.answer, "a"), element("div", turn.note || "", "dim"));
  return item;
}

async function ask(question) {
  const name = state.stream, turns = turnsOf(name), turn = { question, answer: "", note: "" };
  const messages = turns.filter((each) => each.answer).slice(-8).flatMap((each) => [
    { role: "user", content: each.question }, { role: "assistant", content: each.answer }]);
  messages.push({ role: "user", content: question });
  turns.push(turn);
  remember(name);
  const item = talkItem(turn);
  $("talk").append(item);
  const controller = new AbortController();
  state.answering = controller;
  $("stop").hidden = false;
  try {
    const response = await api("/v1/chat/completions", { method: "POST", signal: controller.signal, body: JSON.stringify({ model: name, stream: true, messages }) });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      turn.answer += chunk.choices[0]?.delta?.content || "";
      if (chunk.edgevlm) turn.note = [ago(chunk.edgevlm.time), chunk.edgevlm.ttft_ms !== undefined ? `first token after ${Math.round(chunk.edgevlm.ttft_ms)} ms` : ""].filter(Boolean).join(" · ");
      item.querySelector(".a").textContent = turn.answer;
      item.querySelector(".dim").textContent = turn.note;
      $("talk").scrollTop = $("talk").scrollHeight;
    }
  } catch (error) {
    turn.note = error.name === "AbortError" ? "stopped" : error.message;
    item.querySelector(".dim").textContent = turn.note;
  }
  state.answering = null;
  $("stop").hidden = true;
  remember(name);
  refreshMemory();
}

function remember(name) {
  const turns = state.turns[name].slice(-50).map((each) => ({ ...each, note: each.note || "not finished" }));
  sessionStorage.setItem(`turns/${name}`, JSON.stringify(turns));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// memory: a time line of thumbnails, kept patches lit

async function refreshMemory() {
  const name = state.stream;
  if (!name || document.hidden) return;
  try {
    const memory = await (await api(`/v1/streams/${name}/memory`)).json();
    if (name !== state.stream) return;
    $("held").textContent = `${memory.policy} holds ${memory.tokens} of ${memory.budget} tokens, of ${memory.frames.length} of ${memory.frames_watched.toLocaleString()} frames. Lit patches are in memory, the percentage is their share.`;
    const list = $("frames"), atEnd = list.scrollLeft + list.clientWidth >= list.scrollWidth - 8;
    const shown = new Map([...list.children].map((item) => [Number(item.dataset.frame), item]));
    list.replaceChildren(...memory.frames.filter((each) => each.thumbnail_url).map((each) => frameItem(each, memory.grid, shown.get(each.frame))));
    if (atEnd) list.scrollLeft = list.scrollWidth;
  } catch (error) { if (state.stream === name) problem(error); }
}

function frameItem(frame, [rows, columns], item) {
  if (!item) {
    item = element("li");
    item.dataset.frame = frame.frame;
    const picture = element("div", undefined, "picture"), image = element("img");
    image.alt = "";
    if (state.key) api(frame.thumbnail_url).then((response) => response.blob()).then((blob) => { image.src = URL.createObjectURL(blob); image.onload = () => URL.revokeObjectURL(image.src); }).catch(() => {});
    else image.src = frame.thumbnail_url;
    picture.append(image, element("canvas"));
    item.append(picture, element("div", ""), element("div", "", "dim"));
  }
  const canvas = item.querySelector("canvas");
  canvas.width = columns; canvas.height = rows;
  canvas.style.imageRendering = "pixelated";
  const paint = canvas.getContext("2d");
  paint.clearRect(0, 0, columns, rows);
  [...frame.patches].forEach((digit, place) => {
    paint.fillStyle = `rgba(0, 0, 0, ${0.85 * (1 - parseInt(digit, 16) / 15)})`;
    paint.fillRect(place % columns, Math.floor(place / columns), 1, 1);
  });
  const [at, since] = ago(frame.time).split(" (");
  tell(item.children[1], at);
  tell(item.children[2], `${(since || "").slice(0, -1)} · ${Math.round(100 * frame.share)} %`);
  return item;
}

// wiring

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || !state.stream || state.answering) return;
  $("question").value = "";
  ask(question);
};
$("stop").onclick = () => state.answering?.abort();
$("add").onsubmit = async (event) => {
  event.preventDefault();
  try {
    await api("/v1/streams", { method: "POST", body: JSON.stringify({ id: $("id").value.trim(), source: $("source").value.trim() }) });
    event.target.reset();
    await refreshStreams();
  } catch (error) { problem(error); }
};
$("login-form").onsubmit = () => {
  state.key = $("key").value.trim();
  sessionStorage.setItem("key", state.key);
  watch();
  refreshStreams().catch(problem);
};

async function every(milliseconds, work) {
  while (true) {
    await work().catch(problem);
    await new Promise((done) => setTimeout(done, milliseconds));
  }
}
addEventListener("pagehide", () => Object.keys(state.turns).forEach(remember));
every(STREAMS_MS, refreshStreams);
every(MEMORY_MS, refreshMemory);
