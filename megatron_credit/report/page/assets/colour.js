// Colours of numbers: blue above zero, orange below (the pair that most colour-blind people tell
// apart), or one hue that deepens with the size. Text on them is black or white, whichever reads.

const DIVERGING = {
  light: { zero: [255, 255, 255], high: [22, 92, 168], low: [201, 88, 12] },
  dark: { zero: [28, 31, 37], high: [92, 170, 255], low: [255, 148, 60] },
};
const SEQUENTIAL = {
  light: { zero: [255, 255, 255], high: [86, 52, 148] },
  dark: { zero: [28, 31, 37], high: [196, 160, 255] },
};
const SIGNED = new Set(["advantage"]);
const CLIPPED_SHARE = 0.98;

// The scale of a series over several rollouts: the same for all that are shown together.
function makeScale(name, arrays) {
  const known = arrays
    .flatMap((array) => Array.from(array))
    .filter((value) => !Number.isNaN(value));
  const signed =
    SIGNED.has(name) || (known.some((value) => value > 0) && known.some((value) => value < 0));
  const sizes = known.map(Math.abs).sort((a, b) => a - b);
  const largest = sizes.at(-1) ?? 0;
  const usual = SIGNED.has(name)
    ? largest
    : (sizes[Math.floor((sizes.length - 1) * CLIPPED_SHARE)] ?? 0);
  const end = usual || largest;
  return {
    name,
    signed,
    end,
    clipped: largest > end,
    negative: !signed && known.some((value) => value < 0),
    empty: known.length === 0,
  };
}

// Position of a value on its scale, from -1 to 1.
function onScale(scale, value) {
  if (Number.isNaN(value) || scale.end === 0) return 0;
  const place = Math.max(-1, Math.min(1, value / scale.end));
  return scale.signed ? place : Math.abs(place);
}

function colourAt(scale, place) {
  const { zero, high, low } = (scale.signed ? DIVERGING : SEQUENTIAL)[isDark() ? "dark" : "light"];
  const end = place < 0 ? low : high;
  return zero.map((from, channel) => Math.round(from + (end[channel] - from) * Math.abs(place)));
}

function css(colour) {
  return `rgb(${colour.join(", ")})`;
}

function luminance(colour) {
  const [red, green, blue] = colour.map((value) =>
    value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// Black and white are equally far (in WCAG's contrast) from luminance 0.179.
function inkOn(colour) {
  return luminance(colour) > 0.179 ? "#000" : "#fff";
}

function paint(node, scale, value) {
  const colour = colourAt(scale, onScale(scale, value));
  const blank = Number.isNaN(value) || onScale(scale, value) === 0;
  node.style.backgroundColor = blank ? "" : css(colour);
  node.style.color = blank ? "" : inkOn(colour);
}

function legend(scale) {
  if (scale.empty)
    return make(
      "div",
      { class: "legend" },
      make("span", { class: "muted" }, "no values in this group"),
    );
  const bar = make("span", { class: "legend-bar", "aria-hidden": "true" });
  const stops = [];
  for (let at = 0; at <= 10; at++)
    stops.push(css(colourAt(scale, scale.signed ? at / 5 - 1 : at / 10)));
  bar.style.backgroundImage = `linear-gradient(90deg, ${stops.join(", ")})`;
  const [low, high] = legendEnds(scale);
  return make(
    "div",
    { class: "legend" },
    make("span", { class: "number" }, low),
    bar,
    make("span", { class: "number" }, high),
  );
}

// The numbers at both ends of the bar; values beyond a clipped end have its colour.
function legendEnds(scale) {
  const below = scale.clipped ? "\u2264 " : "";
  const above = scale.clipped ? "\u2265 " : "";
  if (scale.signed) return [below + brief(-scale.end), above + brief(scale.end)];
  return ["0", scale.negative ? below + brief(-scale.end) : above + brief(scale.end)];
}

const SERIES_LABELS = {
  advantage: "advantage",
  gap: "log-prob gap",
  logprob: "engine log-prob",
  policy_logprob: "policy log-prob",
};

function seriesLabel(name) {
  return SERIES_LABELS[name] ?? name.replaceAll("_", " ");
}
