// Markdown as elements: nothing that a model writes is ever read as HTML.

import { html, useMemo } from "./vendor/preact-htm.js";
import { lexer } from "./vendor/marked.js";
import { CopyButton } from "./ui.js";

const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": " " };
const plain = (text) => text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);

function address(href) {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const several = (tokens) => (tokens ?? []).map(element);

function link(token, children) {
  const href = address(token.href);
  return href ? html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${children}</a>` : html`<span>${children}</span>`;
}

function Code({ token }) {
  return html`<div class="code"><div class="code-head"><span>${token.lang || "text"}</span><${CopyButton} text=${token.text} /></div>
    <pre tabindex="0"><code>${token.text}</code></pre></div>`;
}

function Table({ token }) {
  const row = (cells, kind) => cells.map((cell) => html`<${kind} scope=${kind === "th" ? "col" : null}>${several(cell.tokens)}</${kind}>`);
  return html`<div class="scroll" tabindex="0"><table><thead><tr>${row(token.header, "th")}</tr></thead>
    <tbody>${token.rows.map((cells) => html`<tr>${row(cells, "td")}</tr>`)}</tbody></table></div>`;
}

function List({ token }) {
  const kind = token.ordered ? "ol" : "ul";
  return html`<${kind} start=${token.ordered ? token.start : null}>${token.items.map((item) => html`<li>${several(item.tokens)}</li>`)}</${kind}>`;
}

function element(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "code":
      return html`<${Code} token=${token} />`;
    case "heading":
      return html`<p class="heading" role="heading" aria-level=${Math.min(6, token.depth + 2)}>${several(token.tokens)}</p>`;
    case "hr":
      return html`<hr />`;
    case "blockquote":
      return html`<blockquote>${several(token.tokens)}</blockquote>`;
    case "list":
      return html`<${List} token=${token} />`;
    case "table":
      return html`<${Table} token=${token} />`;
    case "paragraph":
      return html`<p>${several(token.tokens)}</p>`;
    case "strong":
      return html`<strong>${several(token.tokens)}</strong>`;
    case "em":
      return html`<em>${several(token.tokens)}</em>`;
    case "del":
      return html`<del>${several(token.tokens)}</del>`;
    case "codespan":
      return html`<code>${plain(token.text)}</code>`;
    case "br":
      return html`<br />`;
    case "link":
      return link(token, several(token.tokens));
    case "image":
      return link(token, token.text || token.href);
    case "text":
      return token.tokens ? several(token.tokens) : plain(token.text);
    default: // HTML and what this page does not know is shown as it was written
      return token.raw;
  }
}

export function Markdown({ text }) {
  return useMemo(() => html`<div class="markdown">${several(lexer(text, { gfm: true, breaks: false }))}</div>`, [text]);
}
