// The frame of the page: tabs, the API key, and the answer that the views share.

import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { get, hasKey, keepKey } from "./api.js";
import { Chat } from "./chat.js";
import { Figures } from "./figures.js";
import { Inside } from "./inside.js";
import { Race } from "./race.js";
import { Problem } from "./ui.js";

const VIEWS = ["chat", "race", "inside", "figures"];
const TITLES = { chat: "Chat", race: "Race", inside: "Inside", figures: "Figures" };
const viewOf = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");

function Tabs({ view, choose }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const edge = { Home: 0, End: VIEWS.length - 1 }[event.key];
    if (step === undefined && edge === undefined) return;
    event.preventDefault();
    const next = VIEWS[edge ?? (VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length];
    choose(next);
    document.getElementById(`tab-${next}`).focus();
  };
  return html`<div role="tablist" aria-label="Views" class="tabs" onKeyDown=${move}>
    ${VIEWS.map((name) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-controls=${`view-${name}`}
      aria-selected=${name === view} tabindex=${name === view ? 0 : -1} onClick=${() => choose(name)}>${TITLES[name]}</button>`)}
  </div>`;
}

function KeyDialog({ open, wrong, onKey }) {
  const dialog = useRef(null);
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
    if (!open) dialog.current.close();
  }, [open]);
  const submit = (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim();
    if (key) onKey(key);
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="key-title">API key</h2>
      <p>This server needs a key. It stays in this tab, and is gone when the tab is closed.</p>
      <label class="field"><span class="label">Key</span><input name="key" type="password" autocomplete="off" required /></label>
      <${Problem} text=${wrong && "The server does not know this key."} />
      <button class="primary">Use this key</button>
    </form>
  </dialog>`;
}

function App() {
  const [view, setView] = useState(viewOf());
  const [card, setCard] = useState(null);
  const [problem, setProblem] = useState("");
  const [key, setKey] = useState({ open: false, wrong: false });
  const [answer, setAnswer] = useState(null);
  const [race, setRace] = useState(null);
  const choose = (name) => { history.replaceState(null, "", `#${name}`); setView(name); };

  const load = async () => {
    try {
      const found = (await get("v1/models")).data[0];
      setCard(found);
      setProblem("");
      setKey({ open: false, wrong: false });
      if (found.max_model_len === null) setTimeout(load, 1500); // the model is being loaded
    } catch (error) {
      if (error.status !== 401) setProblem(error.message);
    }
  };
  useEffect(() => {
    const needed = () => setKey({ open: true, wrong: hasKey() });
    const moved = () => setView(viewOf());
    window.addEventListener("key-needed", needed);
    window.addEventListener("hashchange", moved);
    load();
    return () => { window.removeEventListener("key-needed", needed); window.removeEventListener("hashchange", moved); };
  }, []);
  const entered = (value) => { keepKey(value); load(); };
  const panel = (name, content) => html`<section role="tabpanel" id=${`view-${name}`} aria-labelledby=${`tab-${name}`}
    hidden=${name !== view} class=${`${name}-view`}>${content}</section>`;
  const inside = () => choose("inside");

  return html`
    <header class="top">
      <h1>ssd-serve</h1>
      <p class="model">${card && html`<span>${card.id}</span><span class="draft">${card.max_model_len === null ? "is being loaded" : `draft: ${card.draft || "none"}`}</span>`}</p>
      <${Tabs} view=${view} choose=${choose} />
    </header>
    <main>
      <${Problem} text=${problem} />
      ${panel("chat", html`<${Chat} active=${view === "chat" && !key.open} card=${card} onAnswer=${setAnswer} onInside=${inside} />`)}
      ${panel("race", html`<${Race} last=${race} onAnswer=${setAnswer} onRace=${setRace} onInside=${inside} />`)}
      ${panel("inside", html`<${Inside} answer=${answer} />`)}
      ${panel("figures", html`<${Figures} active=${view === "figures"} answer=${answer} />`)}
    </main>
    <${KeyDialog} open=${key.open} wrong=${key.wrong} onKey=${entered} />`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
