// Who worked when: forwards and waits of the target, and growth that arrived from the drafter.

import { html } from "./vendor/preact-htm.js";
import { number, useWidth } from "./ui.js";

const ROUNDS = 8;
const LABEL = 60;
const TARGET_Y = 14;
const DRAFTER_Y = 62;
const BAR = 26;
const AXIS_Y = 106;

const ticksOf = (from, to, most) => {
  const raw = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
};

function Target({ round, x, current }) {
  const width = (from, to) => Math.max(1, x(to) - x(from));
  const forwardEnd = round.forward_start_ms + round.forward_ms;
  const waitStart = Math.max(round.start_ms, round.forward_start_ms - round.waited_ms);
  return html`<g class=${current ? "current" : ""}>
    <rect class="host" x=${x(round.start_ms)} y=${TARGET_Y + 6} width=${width(round.start_ms, round.end_ms)} height=${BAR - 12} />
    ${round.waited_ms > 0 && html`<rect class="wait" x=${x(waitStart)} y=${TARGET_Y} width=${width(waitStart, round.forward_start_ms)} height=${BAR} />`}
    <rect class="forward" x=${x(round.forward_start_ms)} y=${TARGET_Y} width=${width(round.forward_start_ms, forwardEnd)} height=${BAR} rx="2">
      <title>${`forward: ${number(round.forward_ms, 1)} ms`}</title></rect>
  </g>`;
}

export function Timeline({ rounds, index }) {
  const [element, width] = useWidth();
  const first = Math.max(0, Math.min(index - ROUNDS / 2, rounds.length - ROUNDS));
  const shown = rounds.slice(first, first + ROUNDS);
  const from = shown[0].start_ms;
  const to = Math.max(...shown.map((round) => round.end_ms));
  const x = (at) => LABEL + ((at - from) / Math.max(1e-6, to - from)) * (width - LABEL - 8);
  const growth = shown.flatMap((round) => round.growth).filter((each) => each.at_ms >= from && each.at_ms <= to);
  const current = rounds[index];
  const words = `Rounds ${first + 1} to ${first + shown.length}. The forward of round ${index + 1} took ${number(current.forward_ms, 1)} ms of ${number(current.end_ms - current.start_ms, 1)} ms,
    after ${number(current.waited_ms, 1)} ms of waiting for draft tokens. Growth arrived ${growth.length} times in all these rounds.`;
  return html`<figure class="picture" ref=${element}>
    <svg class="timeline" role="img" aria-labelledby="timeline-text" width=${width} height="132" viewBox=${`0 0 ${width} 132`}>
      <rect class="now" x=${x(current.start_ms)} y="2" width=${Math.max(2, x(current.end_ms) - x(current.start_ms))} height=${AXIS_Y - 2} />
      <text class="lane-name" x="0" y=${TARGET_Y + 17}>Target</text>
      <text class="lane-name" x="0" y=${DRAFTER_Y + 17}>Drafter</text>
      ${shown.map((round, at) => html`<${Target} round=${round} x=${x} current=${first + at === index} />`)}
      <line class="axis" x1=${LABEL} x2=${width - 8} y1=${DRAFTER_Y + BAR / 2} y2=${DRAFTER_Y + BAR / 2} />
      ${growth.map((each) => html`<circle class="growth" cx=${x(each.at_ms)} cy=${DRAFTER_Y + BAR / 2} r=${Math.min(9, 2.5 + Math.sqrt(each.expansions))}>
        <title>${`${each.expansions} expansions of ${each.source} at ${number(each.at_ms, 1)} ms`}</title></circle>`)}
      <line class="axis" x1=${LABEL} x2=${width - 8} y1=${AXIS_Y} y2=${AXIS_Y} />
      ${ticksOf(from, to, Math.max(2, width / 110)).map((at) => html`<g><line class="axis" x1=${x(at)} x2=${x(at)} y1=${AXIS_Y} y2=${AXIS_Y + 5} />
        <text class="tick" x=${x(at)} y=${AXIS_Y + 19} text-anchor="middle">${number(at)} ms</text></g>`)}
    </svg>
    <ul class="legend"><li><span class="key forward"></span>forward</li><li><span class="key wait"></span>waiting for drafts</li>
      <li><span class="key host"></span>rest of the round</li><li><span class="key growth"></span>growth that arrived</li></ul>
    <figcaption id="timeline-text">${words}</figcaption>
  </figure>`;
}
