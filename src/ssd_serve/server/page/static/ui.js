// Small parts that all views use.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

export const number = (value, digits = 0) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export function percent(value) {
  if (!Number.isFinite(value)) return "–";
  if (value > 0 && value < 0.005) return "< 1 %";
  return value < 1 && value > 0.995 ? "> 99 %" : `${Math.round(100 * value)} %`;
}

// A token's text with its blanks made visible.
export const visible = (text) =>
  text === null ? "hidden" : text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(empty)";

export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Pages without TLS have no clipboard of their own.
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function CopyButton({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const click = async () => {
    await copy(typeof text === "function" ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="quiet" aria-live="polite" onClick=${click}>${done ? "Copied" : label}</button>`;
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span class="label">${label}</span>${children}
    ${hint && html`<span class="hint">${hint}</span>`}</label>`;
}

export function Numeric({ label, value, onInput, min, max, step, placeholder, hint }) {
  return html`<${Field} label=${label} hint=${hint}>
    <input type="number" value=${value} min=${min} max=${max} step=${step} placeholder=${placeholder}
      onInput=${(event) => onInput(event.target.value)} />
  </${Field}>`;
}

export const Problem = ({ text }) => (text ? html`<p class="problem" role="alert">${text}</p>` : null);

export function Figure({ label, value, hint }) {
  return html`<div class="figure"><dt>${label}</dt><dd>${value}${hint && html`<span>${hint}</span>`}</dd></div>`;
}

// Rows of labelled bars; a table, so that the values can be read without the picture.
export function Bars({ caption, rows, unit = "" }) {
  const most = Math.max(...rows.map((row) => row.value), 1e-9);
  return html`<table class="bars"><caption>${caption}</caption><tbody>
    ${rows.map((row) => html`<tr key=${row.label}>
      <th scope="row">${row.label}</th>
      <td><div class="bar"><div class=${row.kind ?? ""} style=${{ width: `${(100 * row.value) / (row.of ?? most)}%` }}></div></div></td>
      <td class="value">${row.shown ?? number(row.value)}${unit}</td>
    </tr>`)}
  </tbody></table>`;
}

export function useWidth(initial = 640) {
  const element = useRef(null);
  const [width, setWidth] = useState(initial);
  useLayoutEffect(() => {
    if (!element.current) return undefined;
    const watch = new ResizeObserver(([entry]) => setWidth(Math.max(240, Math.floor(entry.contentRect.width))));
    watch.observe(element.current);
    return () => watch.disconnect();
  }, []);
  return [element, width];
}

export function useEvery(milliseconds, active, work) {
  useEffect(() => {
    if (!active) return undefined;
    work();
    const timer = setInterval(() => document.hidden || work(), milliseconds);
    return () => clearInterval(timer);
  }, [active]);
}
