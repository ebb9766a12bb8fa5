// The chat: a conversation, its parameters, and the same request for other clients.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { SNIPPETS, ask, chatBody } from "./api.js";
import { Markdown } from "./markdown.js";
import { CopyButton, Field, Numeric, Problem, number } from "./ui.js";

const USUAL_TOKENS = 512;
const QUESTIONS = ["What is the capital of Japan?", "Write a Python function that reverses a string.", "Name five uses of a paper clip."];
const START = { temperature: "", top_p: "", max_tokens: "", seed: "" };

function conversation(system, turns) {
  const messages = turns
    .filter((turn) => turn.role === "user" || turn.answer.text)
    .map((turn) => ({ role: turn.role, content: turn.role === "user" ? turn.text : turn.answer.text }));
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

function summary(answer) {
  const speculation = answer.metrics;
  const parts = [`${number(answer.ids.length)} tokens`];
  const rate = answer.timings?.predicted_per_second;
  if (rate) parts.push(`${number(rate)} tokens/s`);
  if (speculation?.mean_acceptance_length) parts.push(`${number(speculation.mean_acceptance_length, 2)} tokens a round`);
  if (speculation?.num_draft_tokens) {
    parts.push(`${number(speculation.num_accepted_draft_tokens)} of ${number(speculation.num_draft_tokens)} draft tokens accepted`);
  }
  if (answer.finish === "length") parts.push("ended at max tokens");
  if (answer.stopped) parts.push("stopped");
  return parts.join(", ");
}

function Answer({ answer, last, onAgain, onInside }) {
  return html`<article class="turn answer" aria-label="Answer" aria-busy=${answer.running}>
    ${answer.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><p>${answer.reasoning}</p></details>`}
    <${Markdown} text=${answer.text} />
    ${answer.running && !answer.ids.length && answer.progress && html`<p class="note">Reading the prompt: ${number(answer.progress.processed)} of ${number(answer.progress.total)} tokens</p>`}
    ${answer.running && html`<span class="cursor" aria-hidden="true"></span>`}
    <${Problem} text=${answer.error} />
    ${!answer.running && html`<footer>
      ${answer.ids.length > 0 && html`<span class="note">${summary(answer)}</span>`}
      <span class="actions">
        ${answer.text && html`<${CopyButton} text=${answer.text} />`}
        ${last && html`<button type="button" class="quiet" onClick=${onAgain}>Regenerate</button>`}
        ${answer.trace.length > 0 && html`<button type="button" class="quiet" onClick=${onInside}>Look inside</button>`}
      </span>
    </footer>`}
  </article>`;
}

function Parameters({ system, setSystem, values, setValues, defaults, most }) {
  const set = (name) => (value) => setValues({ ...values, [name]: value });
  const usual = (name, otherwise) => String(defaults?.[name] ?? otherwise);
  return html`<div class="parameters">
    <${Field} label="System prompt">
      <textarea rows="3" value=${system} placeholder="none" onInput=${(event) => setSystem(event.target.value)}></textarea>
    </${Field}>
    <div class="row">
      <${Numeric} label="Temperature" value=${values.temperature} min="0" max="2" step="0.1" placeholder=${usual("temperature", 1)} onInput=${set("temperature")} />
      <${Numeric} label="Top p" value=${values.top_p} min="0.01" max="1" step="0.05" placeholder=${usual("top_p", 1)} onInput=${set("top_p")} />
      <${Numeric} label="Max tokens" value=${values.max_tokens} min="1" step="1" placeholder=${most} onInput=${set("max_tokens")} />
      <${Numeric} label="Seed" value=${values.seed} min="0" step="1" placeholder="random" onInput=${set("seed")} />
    </div>
  </div>`;
}

function Code({ body }) {
  const [kind, setKind] = useState("curl");
  const text = SNIPPETS[kind](body);
  return html`<div class="snippets">
    <div class="row" role="group" aria-label="Language">
      ${Object.keys(SNIPPETS).map((name) => html`<button type="button" class="chip" aria-pressed=${name === kind} onClick=${() => setKind(name)}>${name}</button>`)}
      <${CopyButton} text=${text} label=${`Copy as ${kind}`} />
    </div>
    <pre tabindex="0" aria-label="Request as code"><code>${text}</code></pre>
  </div>`;
}

export function Chat({ active, card, onAnswer, onInside }) {
  const [turns, setTurns] = useState([]);
  const [draft, setDraft] = useState("");
  const [system, setSystem] = useState("");
  const [values, setValues] = useState(START);
  const [spoken, setSpoken] = useState("");
  const abort = useRef(null);
  const input = useRef(null);
  const end = useRef(null);
  const frame = useRef(0);
  const running = turns.some((turn) => turn.answer?.running);

  useEffect(() => {
    const key = (event) => active && event.key === "Escape" && abort.current?.abort();
    window.addEventListener("keydown", key);
    return () => window.removeEventListener("keydown", key);
  }, [active]);
  useEffect(() => { if (active) input.current?.focus({ preventScroll: true }); }, []);
  useLayoutEffect(() => {
    if (active && running && nearEnd()) end.current?.scrollIntoView({ block: "end" });
  }, [turns]);

  const most = Math.min(USUAL_TOKENS, Math.floor((card?.max_model_len ?? Infinity) / 2));
  const given = { ...values, max_tokens: values.max_tokens || most };
  const run = async (asked) => {
    abort.current = new AbortController();
    setSpoken("");
    const show = (answer) => {
      cancelAnimationFrame(frame.current);
      const update = () => setTurns([...asked, { role: "assistant", answer: { ...answer } }]);
      if (answer.running) frame.current = requestAnimationFrame(update);
      else update();
    };
    const answer = await ask(conversation(system, asked), given, { signal: abort.current.signal, changed: show });
    setSpoken(answer.error ? "" : `Answer ${answer.stopped ? "stopped" : "complete"}: ${summary(answer)}`);
    onAnswer(answer);
    input.current?.focus({ preventScroll: true });
  };
  const submit = (event) => {
    event?.preventDefault();
    if (running || !draft.trim()) return;
    setDraft("");
    run([...turns, { role: "user", text: draft }]);
    requestAnimationFrame(() => end.current?.scrollIntoView({ block: "end" }));
  };
  const again = () => run(turns.slice(0, -1));
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const next = conversation(system, draft.trim() ? [...turns, { role: "user", text: draft }] : turns);
  const body = { model: card?.id, ...chatBody(next.length ? next : [{ role: "user", content: "Hello" }], given) };

  return html`<div class="chat">
    <div class="turns" role="log" aria-label="Conversation" aria-live="off">
      ${turns.length === 0 && html`<div class="empty"><h2>Ask the model</h2>
        <p>Every answer is traced: <em>Look inside</em> shows which of its tokens were drafted, and <em>Figures</em> what that gave.</p>
        <div class="row" role="group" aria-label="Questions to begin with">${QUESTIONS.map((text) => html`<button type="button" class="chip" onClick=${() => run([{ role: "user", text }])}>${text}</button>`)}</div>
        <a href="#race">See plain and speculative decoding race</a></div>`}
      ${turns.map((turn, index) => turn.role === "user"
        ? html`<article class="turn question" aria-label="Question"><p>${turn.text}</p></article>`
        : html`<${Answer} answer=${turn.answer} last=${index === turns.length - 1} onAgain=${again}
            onInside=${() => { onAnswer(turn.answer); onInside(); }} />`)}
      <div ref=${end} class="end"></div>
    </div>
    <form class="composer" onSubmit=${submit}>
      <label class="sr" for="draft">Message</label>
      <textarea id="draft" ref=${input} rows="2" value=${draft} placeholder="Ask something" aria-describedby="keys"
        onInput=${(event) => setDraft(event.target.value)} onKeyDown=${key}></textarea>
      ${running
        ? html`<button type="button" class="primary" onClick=${() => abort.current.abort()}>Stop<kbd>Esc</kbd></button>`
        : html`<button type="submit" class="primary" disabled=${!draft.trim()}>Send<kbd>Enter</kbd></button>`}
      <span id="keys" class="sr">Enter sends, Shift+Enter begins a line, Escape stops.</span>
      <div class="drawers">
        <details><summary>Parameters</summary><${Parameters} ...${{ system, setSystem, values, setValues }} defaults=${card?.default_sampling_params} most=${most} /></details>
        <details><summary>As code</summary><${Code} body=${body} /></details>
        ${turns.length > 0 && !running && html`<button type="button" class="quiet" onClick=${() => setTurns([])}>New chat</button>`}
      </div>
    </form>
    <p class="sr" role="status">${spoken}</p>
  </div>`;
}

const nearEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 160;
