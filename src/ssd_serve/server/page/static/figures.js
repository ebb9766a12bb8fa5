// Figures of the last answer, and of the server now.

import { html, useState } from "./vendor/preact-htm.js";
import { get } from "./api.js";
import { Bars, Figure, Problem, number, percent, useEvery } from "./ui.js";

const LAYOUTS = { async: "drafter on its own device", sync: "drafts on the target's device", off: "no draft model; lookups may draft" };

// Seconds of a trace by kind of work.
export function shares(rounds) {
  const sum = (of) => rounds.reduce((total, round) => total + of(round), 0);
  const forward = sum((round) => round.forward_ms);
  const waited = sum((round) => round.waited_ms);
  return { forward, waited, rest: Math.max(0, sum((round) => round.end_ms - round.start_ms) - forward - waited) };
}

function Waits({ rounds }) {
  const { forward, waited, rest } = shares(rounds);
  const all = forward + waited + rest || 1;
  const row = (label, value, kind) => ({ label, value, kind, of: all, shown: `${number(value)} ms, ${percent(value / all)}` });
  return html`<${Bars} caption="Time of the rounds" rows=${[row("Forwards", forward), row("Waiting for drafts", waited, "hatched"), row("Rest", rest, "muted")]} />`;
}

function Last({ answer }) {
  const { metrics, timings } = answer;
  const rounds = answer.trace.filter((round) => !round.cut).slice(1); // the first ends the prompt
  const sizes = (metrics.acceptance_histogram ?? []).map((value, accepted) => ({ label: `${accepted + 1}`, value }));
  const depths = (metrics.acceptance_by_depth ?? []).map((value, at) => ({ label: `${at + 1}`, value, of: 1, shown: percent(value) }));
  const sources = Object.entries(metrics.sources ?? {}).map(([label, each]) => ({
    label, value: each.num_accepted_draft_tokens, of: Math.max(1, each.num_draft_tokens),
    shown: `${number(each.num_accepted_draft_tokens)} of ${number(each.num_draft_tokens)}`,
  }));
  return html`<section aria-labelledby="last-title"><h3 id="last-title">Last answer</h3>
    <dl class="cards">
      <${Figure} label="Tokens a second" value=${number(timings?.predicted_per_second)} />
      <${Figure} label="Tokens a round" value=${number(metrics.mean_acceptance_length, 2)} hint="1 without drafts" />
      <${Figure} label="Draft tokens accepted" value=${number(metrics.num_accepted_draft_tokens)} hint=${`of ${number(metrics.num_draft_tokens)} verified`} />
      <${Figure} label="First token" value=${`${number(timings?.first_token_ms)} ms`} hint=${`${number(timings?.prompt_n)} prompt tokens`} />
    </dl>
    <div class="columns">
      ${sizes.length > 0 && html`<${Bars} caption="Rounds by their number of tokens" rows=${sizes} />`}
      ${depths.length > 0 && html`<${Bars} caption="Acceptance by depth" rows=${depths} />`}
      ${sources.length > 0 && html`<${Bars} caption="Accepted draft tokens by source" rows=${sources} />`}
      ${rounds.length > 0 && html`<${Waits} rounds=${rounds} />`}
    </div>
  </section>`;
}

function Now({ load }) {
  const round = load.speculation;
  return html`<section aria-labelledby="now-title"><h3 id="now-title">The server now</h3>
    <dl class="cards">
      <${Figure} label="Requests in flight" value=${number(load.server_load)} />
      ${round && html`<${Figure} label="Layout" value=${round.layout} hint=${LAYOUTS[round.layout]} />
        <${Figure} label="Draft tokens of the last round" value=${number(round.nodes)} />
        <${Figure} label="Wait of the last round" value=${`${number(1000 * round.waited_s, 1)} ms`} />`}
    </dl>
    ${round && html`<p>Why the last round did what it did: <strong>${round.why}</strong>.</p>`}
    ${load.machine_busy && html`<p class="warning">Other programs take ${number(load.other_cores, 1)} cores that the target needs.</p>`}
  </section>`;
}

export function Figures({ active, answer }) {
  const [load, setLoad] = useState(null);
  const [problem, setProblem] = useState("");
  useEvery(1000, active, async () => {
    try {
      setLoad(await get("load"));
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  });
  return html`<div class="wide">
    <div class="intro"><h2>Figures</h2><p>What speculation gave the last answer, and what the server does now.</p></div>
    <${Problem} text=${problem} />
    ${load && html`<${Now} load=${load} />`}
    ${answer?.metrics ? html`<${Last} answer=${answer} />` : html`<p class="empty">No answer yet: ask something in <a href="#chat">Chat</a>.</p>`}
  </div>`;
}
