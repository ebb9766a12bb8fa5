// The race: one prompt and seed, decoded without and with draft tokens, then replayed side by side on one clock.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { ask, get } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Field, Numeric, Problem, number } from "./ui.js";

const LANES = [
  { mode: "off", title: "Plain decoding", note: "one token for each forward of the target" },
  { mode: "auto", title: "Speculative decoding", note: "draft tokens, verified by the same target" },
];
const WATCH_MS = 500;
const SHOW_MS = 150; // drawing takes cores that a server on the same machine needs
const SPEEDS = [["1", "true speed"], ["0.5", "half speed"], ["0.25", "quarter speed"]];

// The tokens and characters that had arrived after some seconds.
export function arrivedAt(answer, at) {
  let found = { tokens: 0, characters: 0 };
  for (const each of answer.arrivals) {
    if (each.at > at) break;
    found = each;
  }
  return found;
}

export function identical(one, other) {
  let same = 0;
  while (same < one.ids.length && one.ids[same] === other.ids[same]) same += 1;
  return { same, of: Math.max(one.ids.length, other.ids.length) };
}

async function watched(work) {
  let busy = null;
  const look = async (own) => {
    try {
      const load = await get("load");
      if (load.server_load > own) busy = "Other requests ran on this server during the race, so both times are too long and the ratio may be wrong.";
      else if (load.machine_busy) busy ??= `Other programs used ${number(load.other_cores, 1)} cores of the server during the race, so the ratio may be wrong.`;
    } catch { /* the race itself reports a server that does not answer */ }
  };
  await look(0);
  const timer = setInterval(() => look(1), WATCH_MS);
  try {
    await work();
  } finally {
    clearInterval(timer);
  }
  return busy;
}

function Lane({ lane, answer, clock, running }) {
  const now = answer && arrivedAt(answer, clock ?? Infinity);
  const at = answer ? Math.min(clock ?? answer.seconds, answer.seconds) : 0;
  const done = answer && !answer.running && at >= answer.seconds;
  const text = useRef(null);
  useEffect(() => { text.current.scrollTop = text.current.scrollHeight; }, [now?.characters]);
  return html`<section class=${`lane ${lane.mode}`} aria-label=${lane.title}>
    <header><h3>${lane.title}</h3><span class="note">${running ? "is measured" : done ? "done" : lane.note}</span></header>
    <p class="rate"><strong>${at > 0 && now.tokens ? number(now.tokens / at) : "–"}</strong> tokens/s</p>
    <div class="progress" aria-hidden="true"><div style=${{ width: answer && !answer.running ? `${(100 * now.tokens) / Math.max(1, answer.ids.length)}%` : "0%" }}></div></div>
    <p class="counts">${number(now?.tokens ?? 0)} tokens<span>${answer ? `${number(at, 2)} s` : ""}</span></p>
    <pre class="race-text" ref=${text} tabindex="0" aria-label=${`Text of ${lane.title}`}>${answer ? answer.text.slice(0, now.characters) : ""}</pre>
  </section>`;
}

function median(values) {
  const sorted = values.toSorted((one, other) => one - other);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Of the last race, with the median ratio of all that had its values.
function verdict([plain, drafted], ratios) {
  const ratio = median(ratios);
  const tokens = identical(plain, drafted);
  const all = tokens.same === tokens.of;
  return {
    ratio, tokens, all,
    text: ratio >= 1.05 ? "as fast with draft tokens" : ratio > 0.95 ? "as fast: draft tokens gave next to nothing here" : "as fast: draft tokens cost more than they gave here",
  };
}

function Verdict({ answers, ratios, busy, onInside }) {
  const [plain, drafted] = answers;
  const { ratio, tokens, all, text } = verdict(answers, ratios);
  return html`<div class="verdict">
    <p class="ratio"><strong>${number(ratio, 2)}×</strong> ${text}</p>
    <p><strong>${number(tokens.same)} of ${number(tokens.of)}</strong> tokens are identical${all ? "" : ", up to the first difference"}.
      <span class="note"> ${all ? "Draft tokens never change the text." : "In 16-bit weights rounding can change a choice; the documentation has the rates."}</span></p>
    <p class="note">${ratios.length === 1 ? "This is one run of each: race again for a median." : `The ratio is the median of ${ratios.length} races: ${ratios.map((each) => number(each, 2)).join(", ")}.`}${" "}
      The last took ${number(plain.seconds, 2)} s and ${number(drafted.seconds, 2)} s from sending the request to the last token, as this browser saw them.</p>
    ${busy && html`<p class="warning" role="alert">${busy}</p>`}
    <button type="button" class="quiet" onClick=${onInside}>Look inside the drafted answer</button>
  </div>`;
}

function Form({ values, setValues, running, again, onStart, onStop }) {
  const set = (name) => (value) => setValues({ ...values, [name]: value });
  const choose = (example) => setValues({ ...values, prompt: example.prompt, max_tokens: example.max_tokens });
  const submit = (event) => { event.preventDefault(); onStart(); };
  return html`<form class="race-form" onSubmit=${submit}>
    <div class="row" role="group" aria-label="Examples">
      ${EXAMPLES.map((each) => html`<button type="button" class="chip" aria-pressed=${values.prompt === each.prompt} disabled=${running} onClick=${() => choose(each)}>${each.title}</button>`)}
    </div>
    <${Field} label="Prompt"><textarea rows="6" value=${values.prompt} disabled=${running} onInput=${(event) => set("prompt")(event.target.value)}></textarea></${Field}>
    <div class="row end">
      <${Numeric} label="Max tokens" value=${values.max_tokens} min="1" step="1" onInput=${set("max_tokens")} />
      <${Numeric} label="Temperature" value=${values.temperature} min="0" max="2" step="0.1" onInput=${set("temperature")} />
      <${Numeric} label="Seed" value=${values.seed} min="0" step="1" onInput=${set("seed")} />
      ${running
        ? html`<button type="button" class="primary" onClick=${onStop}>Stop<kbd>Esc</kbd></button>`
        : html`<button type="submit" class="primary" disabled=${!values.prompt.trim()}>${again ? "Race again" : "Start the race"}</button>`}
    </div>
  </form>`;
}

export function Race({ last, onAnswer, onRace, onInside }) {
  const [values, setValues] = useState({ prompt: EXAMPLES[0].prompt, max_tokens: EXAMPLES[0].max_tokens, temperature: "0.2", seed: "7" });
  const [answers, setAnswers] = useState([null, null]);
  const [phase, setPhase] = useState("idle"); // idle, 0 or 1 while a lane is measured, replay, done
  const [clock, setClock] = useState(null);
  const [speed, setSpeed] = useState("1");
  const [runs, setRuns] = useState({ of: "", ratios: [] });
  const [problem, setProblem] = useState("");
  const [said, setSaid] = useState("");
  const abort = useRef(null);
  const running = phase === 0 || phase === 1;
  const of = JSON.stringify(values);
  const before = runs.of === of ? runs.ratios : []; // of races with the same values

  const start = async () => {
    abort.current = new AbortController();
    const { signal } = abort.current;
    const found = [null, null];
    setProblem(""); setSaid(""); setClock(null); setAnswers([null, null]);
    const { prompt, ...parameters } = values;
    const messages = [{ role: "user", content: prompt }];
    const run = async (options, given = parameters) => {
      const answer = await ask(messages, given, { signal, ...options });
      if (answer.stopped) throw new DOMException("stopped", "AbortError");
      if (answer.error) throw new Error(answer.error);
      return answer;
    };
    try {
      setPhase(0);
      const busy = await watched(async () => {
        // Both find the prompt in the cache: it is read once before.
        await run({ mode: "off" }, { ...parameters, max_tokens: 1 });
        for (const index of before.length % 2 ? [1, 0] : [0, 1]) {
          setPhase(index);
          let latest = null;
          const timer = setInterval(() => setAnswers(found.with(index, { ...latest })), SHOW_MS);
          try {
            found[index] = await run({ mode: LANES[index].mode, changed: (answer) => { latest = answer; } });
          } finally {
            clearInterval(timer);
          }
        }
      });
      setRuns({ of, ratios: [...before, found[0].seconds / found[1].seconds] });
      onAnswer(found[1]);
      onRace({ answers: found, busy });
      setAnswers(found);
      replay(found);
    } catch (error) {
      setPhase("idle"); setAnswers([null, null]);
      if (error.name !== "AbortError") setProblem(error.message);
    }
  };
  const replay = (found) => {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      finish(found);
      return;
    }
    setPhase("replay"); setClock(0);
  };
  const finish = (found) => {
    setPhase("done"); setClock(null);
    const { ratio, tokens, text } = verdict(found, [found[0].seconds / found[1].seconds]);
    setSaid(`${number(ratio, 2)} times ${text}. ${tokens.same} of ${tokens.of} tokens are identical.`);
  };
  useEffect(() => {
    if (phase !== "replay") return undefined;
    const began = performance.now();
    const over = Math.max(...answers.map((answer) => answer.seconds));
    let frame = 0;
    const tick = () => {
      const at = (Number(speed) * (performance.now() - began)) / 1000;
      if (at >= over) finish(answers);
      else { setClock(at); frame = requestAnimationFrame(tick); }
    };
    frame = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(frame);
  }, [phase, speed]);

  return html`<div class="wide" onKeyDown=${(event) => running && event.key === "Escape" && abort.current.abort()}>
    <div class="intro"><h2>The same text, sooner</h2>
      <p>One prompt and one seed are decoded twice, one after the other, and then replayed side by side with the times at which each token arrived. Races of the same values take turns in which mode begins.</p></div>
    <${Form} ...${{ values, setValues, running }} again=${before.length > 0} onStart=${start} onStop=${() => abort.current.abort()} />
    <${Problem} text=${problem} />
    ${(answers[0] || running) && html`<div class="lanes">
      ${LANES.map((lane, index) => html`<${Lane} key=${lane.mode} lane=${lane} answer=${answers[index]} clock=${clock}
        running=${phase === index} />`)}
    </div>`}
    ${phase === "done" && html`<${Verdict} answers=${answers} ratios=${runs.ratios} busy=${last?.busy} onInside=${onInside} />`}
    ${(phase === "done" || phase === "replay") && html`<div class="row">
      <button type="button" class="quiet" onClick=${() => { setPhase("replay"); setClock(0); }} disabled=${phase === "replay"}>Replay</button>
      <label class="inline">at <select value=${speed} disabled=${phase === "replay"} onChange=${(event) => setSpeed(event.target.value)}>
        ${SPEEDS.map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select></label>
    </div>`}
    <p class="sr" role="status">${said}</p>
  </div>`;
}
