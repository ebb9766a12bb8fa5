// Inside an answer: where each token came from, the tree of each round, and who worked when.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { Timeline } from "./timeline.js";
import { Tree } from "./tree.js";
import { number, percent, visible } from "./ui.js";

const MARKS = 4;

// The text's tokens with their round and, for draft tokens, their node.
export function tokensOf(trace) {
  return trace.filter((round) => !round.cut).flatMap((round, index) => [
    ...round.accepted.map((at) => ({ round: index, node: round.nodes[at], text: round.nodes[at].text, id: round.nodes[at].token })),
    { round: index, node: null, text: round.bonus.text, id: round.bonus.token },
  ]);
}

export function sourcesOf(tokens) {
  return [...new Set(tokens.flatMap((token) => (token.node ? [token.node.sources.join(" + ") || "unknown"] : [])))];
}

const sourceOf = (node) => node.sources.join(" + ") || "unknown";
const markOf = (node, sources) => (node ? `source-${sources.indexOf(sourceOf(node)) % MARKS}` : "target");

function facts(token) {
  if (!token) return [];
  const { node } = token;
  const origin = node
    ? [["Origin", "accepted draft token"], ["Source", sourceOf(node)], ["Probability", node.logprob === null ? "unknown" : percent(Math.exp(node.logprob))],
      ["Rank", node.rank === null ? "unknown" : node.rank + 1], ["Depth", node.depth]]
    : [["Origin", "target's own choice (bonus token)"]];
  return [["Token", html`<code>${visible(token.text)}</code>`], ["Id", token.id], ["Round", token.round + 1], ...origin];
}

function Legend({ sources }) {
  return html`<ul class="legend" aria-label="Legend">
    <li><span class="token target">plain</span> target</li>
    ${sources.map((source, index) => html`<li><span class=${`token source-${index % MARKS}`}>marked</span> draft token of ${source}</li>`)}
  </ul>`;
}

function TokenStrip({ tokens, sources, round, chosen, choose }) {
  const strip = useRef(null);
  const go = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.min(tokens.length - 1, Math.max(0, chosen + step));
    choose(next, true);
    strip.current.children[next].focus();
  };
  return html`<div class="strip" ref=${strip} role="group" aria-label="Tokens of the answer; arrow keys move" onKeyDown=${go}>
    ${tokens.map((token, index) => html`<button type="button" key=${index} tabindex=${index === chosen ? 0 : -1}
      class=${`token ${markOf(token.node, sources)} ${token.round === round ? "of-round" : ""}`} aria-pressed=${index === chosen}
      aria-label=${`${token.text.trim() || visible(token.text)}, ${token.node ? `draft token of ${sourceOf(token.node)}` : "target"}`}
      onMouseEnter=${() => choose(index, false)} onFocus=${() => choose(index, false)} onClick=${() => choose(index, true)}>${visible(token.text)}</button>`)}
  </div>`;
}

function describe(round, index) {
  const words = round.accepted.map((at) => `“${visible(round.nodes[at].text)}”`).join(", ");
  const verified = round.nodes.length + round.nodes_left_out;
  const nodes = verified === 0 ? "No draft token was verified" : `${verified} draft token${verified > 1 ? "s were" : " was"} verified, ${round.accepted.length} accepted${words && ` (${words})`}`;
  return `Round ${index + 1}: ${nodes}; the bonus token is “${visible(round.bonus.text)}”.`;
}

function NodeTable({ round }) {
  const accepted = new Set(round.accepted);
  return html`<details><summary>Nodes as a table</summary><div class="scroll" tabindex="0"><table>
    <thead><tr>${["Node", "Token", "Below", "Depth", "Source", "Probability", "Rank", "Accepted"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${round.nodes.map((node, index) => html`<tr>
      <th scope="row">${index + 1}</th><td><code>${visible(node.text)}</code></td><td>${node.parent < 0 ? "root" : node.parent + 1}</td><td>${node.depth}</td>
      <td>${sourceOf(node)}</td><td>${node.logprob === null ? "–" : percent(Math.exp(node.logprob))}</td><td>${node.rank === null ? "–" : node.rank + 1}</td><td>${accepted.has(index) ? "yes" : "no"}</td>
    </tr>`)}</tbody></table></div></details>`;
}

function Rounds({ rounds, sources, index, setIndex }) {
  const round = rounds[index];
  return html`<section aria-labelledby="tree-title">
    <h3 id="tree-title">Tree of a round</h3>
    <div class="slider">
      <button type="button" class="chip" disabled=${index === 0} onClick=${() => setIndex(index - 1)}>Previous</button>
      <label><span class="sr">Round</span><input type="range" min="1" max=${rounds.length} value=${index + 1}
        aria-valuetext=${`round ${index + 1} of ${rounds.length}`} onInput=${(event) => setIndex(Number(event.target.value) - 1)} /></label>
      <button type="button" class="chip" disabled=${index === rounds.length - 1} onClick=${() => setIndex(index + 1)}>Next</button>
      <output>${index + 1} of ${rounds.length}</output>
    </div>
    <p id="tree-text">${describe(round, index)}${round.nodes_left_out > 0 ? ` ${round.nodes_left_out} of them are not shown.` : ""}</p>
    <${Tree} round=${round} mark=${(node) => markOf(node, sources)} />
    ${round.nodes.length > 0 && html`<${NodeTable} round=${round} />`}
    <h3>Target and drafter</h3>
    <${Timeline} rounds=${rounds} index=${index} />
  </section>`;
}

export function Inside({ answer }) {
  const [chosen, setChosen] = useState(0);
  const [index, setIndex] = useState(0);
  const trace = answer?.trace ?? [];
  const rounds = useMemo(() => trace.filter((round) => !round.cut), [answer]);
  const tokens = useMemo(() => tokensOf(trace), [answer]);
  const sources = useMemo(() => sourcesOf(tokens), [tokens]);
  useEffect(() => {
    const best = rounds.reduce((found, round, at) => (round.accepted.length > rounds[found].accepted.length ? at : found), 0);
    setIndex(best);
    setChosen(Math.max(0, tokens.findIndex((token) => token.round === best)));
  }, [answer]);
  if (!rounds.length) {
    return html`<div class="wide empty"><h2>Nothing traced yet</h2><p>Ask something in <a href="#chat">Chat</a>, or run a <a href="#race">Race</a>: the rounds of that answer are shown here.</p></div>`;
  }
  const shown = Math.min(index, rounds.length - 1);
  const choose = (at, jump) => {
    setChosen(at);
    if (jump) setIndex(tokens[at].round);
  };
  const drafted = tokens.filter((token) => token.node).length;
  return html`<div class="wide">
    <div class="intro"><h2>Inside the last answer</h2>
      <p>${number(rounds.length)} rounds gave ${number(tokens.length)} tokens, ${number(drafted)} of which had been drafted. Select a token to see its round.
      ${trace.some((round) => round.cut) ? " The trace was cut: later rounds are not shown." : ""}</p></div>
    <div class="inside-grid">
      <section aria-labelledby="strip-title"><h3 id="strip-title">Tokens by origin</h3>
        <${Legend} sources=${sources} />
        <${TokenStrip} ...${{ tokens, sources, chosen, choose }} round=${shown} /></section>
      <aside aria-label="Selected token"><dl class="facts">${facts(tokens[Math.min(chosen, tokens.length - 1)]).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></aside>
    </div>
    <${Rounds} ...${{ rounds, sources, setIndex }} index=${shown} />
  </div>`;
}
