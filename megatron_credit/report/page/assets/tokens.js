// The tokens of one rollout as elements, with the borders of its attempts, steps and segments.

const SPAN_KINDS = ["attempt", "step", "segment"];

// pane: {row, pieces, masks, details, ...}; the elements are painted by `paintTokens`.
function makeTokens(pane) {
  const marks = borderMarks(pane.details.spans);
  const nodes = [];
  pane.tokenNodes = pane.pieces.map((piece, at) => {
    nodes.push(...(marks.get(at) ?? []));
    const node = tokenNode(piece, at, pane.mask[at]);
    nodes.push(node);
    return node;
  });
  if (!pane.pieces.length) nodes.push(make("span", { class: "muted" }, "an empty response"));
  const label = `Response tokens of sample ${pane.row.sample}; arrow keys move between tokens`;
  return make("div", { class: "tokens", role: "group", "aria-label": label }, ...nodes);
}

function tokenNode(piece, at, sampled) {
  const classes = ["token", sampled ? "" : "masked", piece.known ? "" : "unknown"]
    .filter(Boolean)
    .join(" ");
  const node = make(
    "span",
    { class: classes, "data-at": at, tabindex: at === 0 ? "0" : "-1" },
    ...visible(piece.text),
  );
  if (piece.part) node.append(make("span", { class: "part" }, PART_MARK));
  return node;
}

// Line breaks get a sign of their own, because they carry credit like other tokens.
function visible(text) {
  return text
    .split(/(\n|\t)/)
    .filter(Boolean)
    .map((part) => {
      if (part === "\n") return make("span", { class: "break" }, "\u21b5\n");
      return part === "\t" ? make("span", { class: "break" }, "\u21e5\t") : part;
    });
}

// Elements to put before each token: a chip where a span starts, an end mark where none follows.
function borderMarks(spans) {
  const marks = new Map();
  const put = (at, node) => marks.set(at, [...(marks.get(at) ?? []), node]);
  for (const kind of SPAN_KINDS.filter((name) => spans[name])) {
    const starts = new Set(spans[kind].map(([start]) => start));
    for (const [number, [start, end, score]] of spans[kind].entries()) {
      if (!starts.has(end))
        put(end, make("span", { class: `border ${kind} end`, "aria-hidden": "true" }));
      put(
        start,
        make(
          "span",
          { class: `border ${kind}` },
          `${kind} ${number + 1}`,
          score === null ? "" : make("b", null, brief(score)),
        ),
      );
    }
  }
  return marks;
}

function paintTokens(pane, scale) {
  const values = pane.series[scale.name];
  for (const [at, node] of pane.tokenNodes.entries())
    paint(node, scale, pane.mask[at] && values ? values[at] : NaN);
  paintStrip(pane, values, scale);
}

// The whole response as one row of colours; a click goes to the place.
function makeStrip(pane) {
  const strip = make("canvas", {
    class: "strip",
    height: "1",
    width: Math.max(1, pane.pieces.length),
    "aria-hidden": "true",
    title: "the whole response; click to go there",
  });
  strip.addEventListener("click", (event) => {
    const at = Math.floor((event.offsetX / strip.clientWidth) * pane.pieces.length);
    pane.tokenNodes[at]?.scrollIntoView({ block: "center" });
    pane.tokenNodes[at]?.focus({ preventScroll: true });
  });
  return strip;
}

function paintStrip(pane, values, scale) {
  const { strip } = pane;
  const context = strip.getContext("2d");
  const picture = context.createImageData(strip.width, 1);
  for (let at = 0; at < pane.pieces.length; at++) {
    const place = pane.mask[at] && values ? onScale(scale, values[at]) : 0;
    picture.data.set([...colourAt(scale, place), 255], at * 4);
  }
  context.putImageData(picture, 0, 0);
}
