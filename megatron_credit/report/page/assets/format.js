// Small helpers that make elements and write numbers. Text always goes in as text, never as HTML.

function make(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function makeSvg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== null)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const NOTHING = "\u2013";

// A number to read at a glance.
function brief(value) {
  if (typeof value !== "number" || Number.isNaN(value)) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return minus(value.toExponential(2));
  return minus(String(Number(value.toPrecision(4))));
}

// The number as it stands in metrics.jsonl, to the last digit.
function exact(value) {
  if (typeof value === "string") return value;
  const tiny = value !== 0 && Math.abs(value) < 1e-4;
  return minus(tiny ? value.toExponential() : String(value));
}

function minus(text) {
  return text.replace(/-/g, "\u2212");
}

function counted(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

const OUTCOME_SIGNS = {
  right: "\u2713",
  wrong: "\u2717",
  unparsed: "?",
  timeout: "\u29d6",
  error: "!",
  none: "\u2013",
};

function outcomeBadge(outcome) {
  const sign = make(
    "span",
    { class: "sign", "aria-hidden": "true" },
    OUTCOME_SIGNS[outcome] ?? "\u2022",
  );
  return make(
    "span",
    { class: `outcome ${outcome in OUTCOME_SIGNS ? outcome : "none"}` },
    sign,
    outcome,
  );
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
