// Figures of the last answer, and of the server now.

import { html, useState } from "./vendor/preact-htm.js";
import { counters, get } from "./api.js";
import { Bars, Figure, Problem, number, percent, useEvery } from "./ui.js";

const WINDOW = 10; // seconds, of one sample each
const DEPTHS = 16; // deeper ones are counted together
const LAYOUTS = { async: "drafter on its own device", sync: "drafts on the target's device", off: "plain decoding; lookups may draft" };

// Seconds of a trace by kind of work.
export function shares(rounds) {
  const sum = (of) => rounds.reduce((total, round) => total + of(round), 0);
  const forward = sum((round) => round.forward_ms);
  const waited = sum((round) => round.waited_ms);
  return { forward, waited, rest: Math.max(0, sum((round) => round.end_ms - round.start_ms) - forward - waited) };
}

function Waits({ forward, waited, rest }) {
  const all = forward + waited + rest || 1;
  const row = (label, value, kind) => ({ label, value, kind, of: all, shown: `${number(value)} ms, ${percent(value / all)}` });
  return html`<${Bars} caption="Time of the rounds" rows=${[row("Forwards", forward), row("Waiting for drafts", waited, "hatched"), row("Rest", rest, "muted")]} />`;
}

const bySource = (label, drafted, accepted) => ({ label, value: accepted, of: Math.max(1, drafted), shown: `${number(accepted)} of ${number(drafted)}` });

// What the counters of the server gained over the samples; without rounds since the first sample: all since the start.
export function gained(samples) {
  const [first, last] = [samples[0], samples.at(-1)];
  const live = last.spec_decode_num_drafts > first.spec_decode_num_drafts;
  const of = (name) => (last[name] ?? 0) - (live ? first[name] ?? 0 : 0);
  const labels = (name) => Object.keys(last).filter((key) => key.startsWith(`${name} `)).map((key) => key.slice(name.length + 1));
  return { live, of, labels, seconds: (last.at - first.at) / 1000 };
}

function Live({ samples }) {
  const { live, of, labels, seconds } = gained(samples);
  const [rounds, drafted, accepted] = ["drafts", "draft_tokens", "accepted_tokens"].map((name) => of(`spec_decode_num_${name}`));
  const depths = labels("spec_decode_num_drafts_per_pos").map((at) => [Number(at), of(`spec_decode_num_drafts_per_pos ${at}`), of(`spec_decode_num_accepted_tokens_per_pos ${at}`)])
    .filter(([, tried]) => tried > 0).map(([at, tried, taken]) => ({ label: at < DEPTHS ? `${at + 1}` : `> ${DEPTHS}`, value: taken / tried, of: 1, shown: percent(taken / tried) }));
  const sources = labels("spec_decode_source_draft_tokens").map((name) => bySource(name, of(`spec_decode_source_draft_tokens ${name}`), of(`spec_decode_source_accepted_tokens ${name}`)));
  const [forward, waited, rest] = ["forward", "wait", "host"].map((name) => 1000 * of(`engine_${name}_seconds`));
  return html`<section aria-labelledby="live-title"><h3 id="live-title">All requests, ${live ? `last ${number(seconds)} seconds` : "since the server started"}</h3>
    ${!live && html`<p class="note">Nothing is decoded now. While requests run, these are figures of the last ${number(WINDOW)} seconds.</p>`}
    <dl class="cards">
      ${live && html`<${Figure} label="Tokens a second" value=${number(of("spec_decode_num_emitted_tokens") / seconds)} />`}
      <${Figure} label="Tokens a round" value=${rounds ? number(1 + accepted / rounds, 2) : "–"} hint="1 without drafts" />
      <${Figure} label="Draft tokens accepted" value=${number(accepted)} hint=${`of ${number(drafted)} verified`} />
      <${Figure} label="Rounds" value=${number(rounds)} />
    </dl>
    <div class="columns">
      ${depths.length > 0 && html`<${Bars} caption="Acceptance by depth" rows=${depths} />`}
      ${drafted > 0 && html`<${Bars} caption="Accepted draft tokens by source" rows=${sources} />`}
      ${rounds > 0 && html`<${Waits} ...${{ forward, waited, rest }} />`}
    </div>
  </section>`;
}

function Last({ answer }) {
  const { metrics, timings } = answer;
  const rounds = answer.trace.filter((round) => !round.cut).slice(1); // the first ends the prompt
  const sizes = (metrics.acceptance_histogram ?? []).map((value, accepted) => ({ label: `${accepted + 1}`, value }));
  const depths = (metrics.acceptance_by_depth ?? []).map((value, at) => ({ label: `${at + 1}`, value, of: 1, shown: percent(value) }));
  const sources = Object.entries(metrics.sources ?? {}).map(([label, each]) => bySource(label, each.num_draft_tokens, each.num_accepted_draft_tokens));
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
      ${rounds.length > 0 && html`<${Waits} ...${shares(rounds)} />`}
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
  const [samples, setSamples] = useState([]);
  const [problem, setProblem] = useState("");
  useEvery(1000, active, async () => {
    try {
      setLoad(await get("load"));
      const found = await counters();
      // Without the model's counters there is no engine yet; counters that fall are those of another engine.
      setSamples((some) => {
        if (found?.spec_decode_num_drafts === undefined) return [];
        const kept = found.spec_decode_num_drafts < some.at(-1)?.spec_decode_num_drafts ? [] : some.slice(-WINDOW);
        return [...kept, { ...found, at: performance.now() }];
      });
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  });
  return html`<div class="wide">
    <div class="intro"><h2>Figures</h2><p>What the server does now, and what speculation gives all requests and gave the last answer.</p></div>
    <${Problem} text=${problem} />
    ${load && html`<${Now} load=${load} />`}
    ${samples.length > 0 && html`<${Live} samples=${samples} />`}
    ${load && !samples.length && html`<p class="note">Figures of all requests are those of /metrics, which this tab cannot read.</p>`}
    ${answer?.metrics ? html`<${Last} answer=${answer} />` : html`<p class="empty">No answer yet: ask something in <a href="#chat">Chat</a>.</p>`}
  </div>`;
}
