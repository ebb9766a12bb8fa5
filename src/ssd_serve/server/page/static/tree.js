// A round's tree as SVG: the committed path in the first row, rejected nodes below it.

import { html } from "./vendor/preact-htm.js";
import { percent, visible } from "./ui.js";

const COLUMN = 116;
const ROW = 50;
const WIDTH = 92;
const HEIGHT = 38;
const LETTERS = 10;

// Nodes with column and row; -1 is the root, "bonus" the target's token at the end of the accepted path.
export function layout(round) {
  const last = round.accepted.at(-1) ?? -1;
  const accepted = new Set(round.accepted);
  const below = new Map([[-1, []], ["bonus", []]]);
  round.nodes.forEach((node, index) => {
    below.set(index, []);
    below.get(node.parent).push(index);
  });
  below.get(last).unshift("bonus");
  for (const children of below.values()) children.sort((one, other) => accepted.has(other) - accepted.has(one));
  const places = new Map();
  let rows = 0;
  const place = (node, column, row) => {
    places.set(node, { column, row });
    below.get(node).forEach((child, rank) => place(child, column + 1, rank === 0 ? row : (rows += 1)));
  };
  place(-1, 0, 0);
  return { places, below, columns: 1 + Math.max(...[...places.values()].map((each) => each.column)), rows: rows + 1 };
}

const short = (text) => {
  const shown = visible(text);
  return shown.length > LETTERS ? `${shown.slice(0, LETTERS - 1)}…` : shown;
};

function Node({ kind, x, y, text, note, title }) {
  return html`<g class=${`node ${kind}`} transform=${`translate(${x} ${y})`}>
    <title>${title}</title>
    <rect width=${WIDTH} height=${HEIGHT} rx="7" />
    <text x=${WIDTH / 2} y="16" text-anchor="middle">${text}</text>
    <text class="node-note" x=${WIDTH / 2} y="30" text-anchor="middle">${note}</text>
  </g>`;
}

export function Tree({ round, mark }) {
  const { places, below, columns, rows } = layout(round);
  const accepted = new Set(round.accepted);
  const at = (node) => ({ x: 2 + places.get(node).column * COLUMN, y: 2 + places.get(node).row * ROW });
  const edges = [...below].flatMap(([above, children]) => children.map((child) => {
    const from = at(above);
    const to = at(child);
    const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
    const kind = accepted.has(child) || child === "bonus" ? "edge on-path" : "edge";
    return html`<path class=${kind} d=${`M${x1} ${y1} H${(x1 + x2) / 2} V${y2} H${x2}`} />`;
  }));
  const node = (index) => {
    const each = round.nodes[index];
    const state = accepted.has(index) ? `accepted ${mark(each)}` : "rejected";
    const estimate = each.logprob === null ? "" : percent(Math.exp(each.logprob));
    const rank = each.rank === null ? "" : `rank ${each.rank + 1}`;
    const title = `${visible(each.text)}: ${accepted.has(index) ? "accepted" : "rejected"}, ${each.sources.join(" + ") || "unknown source"}, ${estimate}, ${rank}, depth ${each.depth}`;
    return html`<${Node} kind=${state} ...${at(index)} text=${short(each.text)} note=${[estimate, rank].filter(Boolean).join(", ")} title=${title} />`;
  };
  const width = columns * COLUMN - COLUMN + WIDTH + 4;
  const height = rows * ROW - ROW + HEIGHT + 4;
  return html`<figure class="picture scroll" tabindex="0" aria-label="Tree of the round; scrolls sideways">
    <svg class="tree" role="img" aria-labelledby="tree-text" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
      ${edges}
      <${Node} kind="root" ...${at(-1)} text="root" note=${`${round.context} tokens`} title="The last token before this round" />
      ${round.nodes.map((_, index) => node(index))}
      <${Node} kind="bonus" ...${at("bonus")} text=${short(round.bonus.text)} note="bonus" title="The target's own token" />
    </svg>
  </figure>`;
}
